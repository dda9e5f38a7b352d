"""What is planned for ranks that process a row together, against real steps and against a dry run."""

from pathlib import Path

import pytest
from harness import RankPool
from live import measure_step
from small import make_config, with_heads
from test_plan import of_parts, printed
from tiers import slow_after

from llava_fsdp.config import ContextHow
from llava_fsdp.distributed.mesh import distributed
from llava_fsdp.model.pretrained import find_parts
from llava_fsdp.plan.auto import with_each_context
from llava_fsdp.plan.longest import MOST_TOKENS
from llava_fsdp.plan.planner import peak
from llava_fsdp.plan.step_time import context_volume
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.dry_run import measure

CLOSE = 0.05
"""Share of the most bytes alive."""
CASES = [
    # ranks, ranks a row, how, sharding, activation checkpointing, tokens of a rank
    (2, 2, "ulysses", "zero3", "full", 256),
    (2, 2, "gather", "zero3", "full", 256),
    (2, 2, "ulysses", "zero2", "none", 300),
    (2, 2, "gather", "zero1", "none", 150),
    (2, 2, "ulysses", "zero0", "selective", 128),
    (4, 2, "ulysses", "hybrid", "full", 256),
    (4, 2, "gather", "hybrid2", "none", 256),
    (4, 4, "gather", "zero3", "none", 128),
    (4, 4, "gather", "zero2", "full", 64),
    (4, 2, "ulysses", "zero3", "selective", 200),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "context", "how", "sharding", "mode", "tokens"), slow_after(0, CASES))
def test_worst_moment_is_that_of_real_steps(
    ranks: int, context: int, how: str, sharding: str, mode: str, tokens: int, wide_parts: Path, dataset: Path,
    pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", "pack=true", "global_batch_size=24"
    own = f"parallel.context={context}", f"parallel.context_how={how}", f"tokens_per_micro_batch={tokens}"
    size = ["sharding.shard_size=2"] * sharding.startswith("hybrid")
    parts = with_heads(wide_parts, tmp_path / "parts", 10, 5)
    cfg = make_config(parts, dataset, tmp_path / "run", *words, *own, *size)
    for rank, (most, micros) in enumerate(pools[ranks].run(measure_step, cfg)):
        assert all(micro.context == context for micro in micros)
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.moment)


def test_auto_tries_the_numbers_that_are_possible(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Six heads, eight or twelve ranks, and a row that one rank has no room for."""
    words = "parallel=auto", "pack=true", "tokens_per_micro_batch=128", "data.max_length=256"

    def tried(world_size: int, *more: str) -> list[int]:
        cfg = make_config(parts, dataset, tmp_path, *words, *more)
        language = find_parts(cfg.model).language
        return [own.parallel.num_context for own in with_each_context(cfg, world_size, language)]

    assert tried(8) == [2, 4, 8]
    assert tried(12, "parallel.context_how=ulysses") == [2, 3, 6]
    with pytest.raises(ConfigError, match="tokens_per_micro_batch"):
        tried(1)
    with pytest.raises(ConfigError, match="3 does not divide the 8"):
        tried(8, "parallel.context=3")
    with pytest.raises(ConfigError, match="does not divide them"):
        tried(8, "parallel.context=4", "parallel.context_how=ulysses")


def test_a_plan_names_the_number_that_it_chose(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Odd lengths of a part are planned as well."""
    keys = *of_parts(parts), "gpus=4", "gpu=h100", "parallel=auto", "parallel.context_how=gather"
    found = printed(capsys, *keys, "data.max_length=257", "tokens_per_micro_batch=131")
    assert {row["context"] for row in found["rows"]} == {2}
    command = found["recommended"]["command"].split()
    assert "parallel.context=2" in command and "parallel.context_how=gather" in command
    assert not any(word.startswith("parallel=") for word in command)


@pytest.mark.slow
def test_two_ranks_a_row_train_longer_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "longest.html"
    keys = "model=llava_v1_5_7b", "stage=finetune", "gpus=2", "gpu=h100"
    found = printed(capsys, *keys, "longest=true", f"page={page}")
    tokens = {(point["gpus"], point["context"]): point["tokens"] for point in found["longest"]}
    assert tokens.keys() == {(1, 1), (2, 1), (2, 2)} and tokens[1, 1] < tokens[2, 1] < tokens[2, 2] < MOST_TOKENS
    assert page.read_text().count("<path class='line") == 2


@pytest.mark.parametrize("how", ["ulysses", "gather"])
def test_a_dry_run_exchanges_what_the_arithmetic_says(how: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Bytes of attention in a step on imagined ranks, against those of the planner."""
    words = "pack=true", "tokens_per_micro_batch=150", f"parallel.context_how={how}", "global_batch_size=4"
    more = *words, "data.max_length=256", "activation_checkpointing=none", "sharding=zero0", "format=json"
    cfg = make_config(parts, dataset, tmp_path, *more, "parallel.context=2", "dry_run=2")
    with distributed(cfg) as world:
        report = measure(cfg, world)
    language, own = find_parts(cfg.model).language, report["micro_batch"]["positions"] * report["micro_batches"]
    moved, count = context_volume(ContextHow(how), 2, language, 4, own, 0.0)
    kinds = ("all_to_all",) if how == "ulysses" else ("all_gather", "reduce_scatter")
    sent = sum(report["collectives"][kind]["sent"] for kind in kinds)
    calls = sum(report["collectives"][kind]["calls"] for kind in kinds)
    assert (sent, calls) == (moved, count * report["micro_batches"])
