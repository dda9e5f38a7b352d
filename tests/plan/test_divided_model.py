"""What is planned for ranks that compute layers together, against real steps and against a dry run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from live import measure_step
from small import make_config
from test_plan import of_parts, printed
from tiers import slow_after
from transformers import AutoConfig

from llava_fsdp.config import OffloadMode
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.plan.memory.micro_batches import MicroBatches, MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Planner, peak
from llava_fsdp.plan.time.hardware import machine_for
from llava_fsdp.plan.time.step_time import Volume
from llava_fsdp.train.setup.dry_run import measure

CLOSE = 0.05
"""Share of the most bytes alive."""
CLOSE_LORA = 0.08
"""With adapters, whose gradients and those of their layers meet in two tensors that are not counted."""
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "vocab_size": 611, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
LORA = "model.lora.enabled=true", "model.lora.r=4"
CASES = [
    # kind, ranks, ranks per layer, sharding, activation checkpointing, more
    ("llama", 2, 2, "zero3", "full", ()),
    ("llama", 2, 2, "zero0", "none", ()),
    ("llama", 4, 2, "zero3", "none", ()),
    ("qwen3", 4, 2, "zero2", "full", ()),
    ("phi3", 2, 2, "zero3", "full", ()),
    ("llama", 4, 4, "zero1", "selective", ()),
    ("llama", 4, 2, "zero2", "full", LORA),
]


@pytest.fixture
def model(parts: Path, tmp_path: Path) -> Any:
    def of_kind(kind: str) -> Path:
        shutil.copytree(parts, tmp_path / "parts")
        AutoConfig.for_model(kind, **SIZES).save_pretrained(tmp_path / "parts" / "language")
        return tmp_path / "parts"

    return of_kind


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "ranks", "tensor", "sharding", "mode", "more"), slow_after(0, CASES))
def test_worst_moment_is_that_of_real_steps(
    kind: str, ranks: int, tensor: int, sharding: str, mode: str, more: tuple[str, ...], model: Any, dataset: Path,
    pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", "pack=true", "global_batch_size=24"
    own = f"parallel.tensor={tensor}", "tokens_per_micro_batch=300"
    cfg = make_config(model(kind), dataset, tmp_path / "run", *words, *own, *more)
    for rank, (most, micros) in enumerate(pools[ranks].run(measure_step, cfg)):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE_LORA if more else CLOSE), (
            rank,
            planned.peak_moment,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode", "more"), [
    ("llama", "full", LORA), ("llama", "none", ()), ("llama", "full", ()), ("llama", "selective", ()),
    ("qwen3", "full", ()), ("phi3", "full", ()),
])  # fmt: skip
def test_a_dry_run_moves_what_the_arithmetic_says(
    kind: str, mode: str, more: tuple[str, ...], model: Any, dataset: Path, tmp_path: Path
) -> None:
    """Bytes of a step on imagined ranks that shard nothing, against those of the planner. The others are of three
    numbers, the loss and the norms of gradients in two kinds of meshes."""
    words = "pack=true", "tokens_per_micro_batch=256", "global_batch_size=4", f"activation_checkpointing={mode}"
    more = *more, "sharding=zero3", "format=json", "parallel.tensor=2", "dry_run=2"
    cfg = make_config(model(kind), dataset, tmp_path / "run", *words, *more)
    with distributed(cfg) as world:
        report = measure(cfg, world)
    micro, count = report["micro_batch"], report["micro_batches"]
    planner = Planner(cfg, machine_for("cpu", 2))
    own = MicroBatchSizes(1, micro["positions"], 1, micro["tiles"], micro["labels"], micro["image_tokens"])
    choice = Choice(cfg.sharding.strategy, cfg.activation_checkpointing, OffloadMode.none)
    wanted = planner.with_layers(Volume(), choice, MicroBatches([own] * count), planner.groups(choice)[0])
    calls, sent = (sum(kind[key] for kind in report["collectives"].values()) for key in ("calls", "sent"))
    assert calls == wanted.sums + 3 and 0 <= sent - wanted.tensor < 200


@pytest.mark.slow
def test_a_plan_divides_layers(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    keys = *of_parts(model("llama")), "gpus=4", "gpu=h100", "data.max_length=256", "compile=false"
    one, two = (printed(capsys, *keys, f"parallel.tensor={tensor}") for tensor in (1, 2))
    assert one["rows"] and two["rows"]
