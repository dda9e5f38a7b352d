"""A checkpoint that is loaded and saved again holds the same bits, whatever kinds of parallelism the ranks use."""

from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from mixtures import mixture_parts
from small import changed_parts, make_config
from steps import begin
from test_adapters import LORA
from tiers import slow_after

from llava_fsdp.checkpoint.reader import SavedTensor
from llava_fsdp.checkpoint.verify import Checkpoint, newest_alone
from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.resume import resume
from llava_fsdp.train.events.save_and_stop import open_saver

SETTINGS = ("global_batch_size=8", "pack=true", "tokens_per_micro_batch=256", "max_steps=4", "checkpoint.every=2")
MODEL = [
    (4, "sharding=zero3 parallel.pipeline=2 parallel.tensor=2"),
    (2, "sharding=zero2 parallel.tensor=2"),
    (2, "sharding=zero0 parallel.pipeline=2 parallel.schedule=interleaved"),
    (4, "sharding=hybrid sharding.shard_size=2"),
    (2, "sharding=zero1 parallel.context=2"),
    (3, "sharding=zero3"),
]
BACK = (1, "sharding=zero2")
MIXTURE = [
    (2, "sharding=zero3 parallel.expert=2"),
    (4, "sharding=zero2 parallel.pipeline=2 parallel.expert=2"),
    (4, "sharding=hybrid parallel.tensor=2 parallel.expert=2"),
    (3, "sharding=zero3"),
    (4, "sharding=zero0 parallel.expert=4"),
    (4, "sharding=zero3 parallel.pipeline=2 parallel.tensor=2 parallel.expert=2"),
]
COLUMNS = [
    (4, "sharding=zero3 parallel.expert=2"),
    (8, "sharding=hybrid sharding.shard_size=4"),
    (2, "sharding=zero2 parallel.expert=2"),
    (3, "sharding=zero3"),
    (8, "sharding=zero1 parallel.pipeline=2"),
]
"""Two experts with int8 moments. The layouts shard some weights along dimension 1 and others along dimension 0."""
CASES = {
    "first of the model": MODEL[:1],
    "model": [*MODEL, BACK],
    "adapters": [*MODEL, BACK],
    "mixture": [*MIXTURE, BACK],
    "columns": [*COLUMNS, BACK],
}


def saved_again(world: World, cfg: Config) -> None:
    """Load the checkpoint that `checkpoint.resume` names, and save it into the run's folder."""
    state = begin(world, cfg)
    Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
    saver = open_saver(state, cfg, resume(state, cfg))
    saver.save()
    saver.close()


def bits(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Every tensor of a checkpoint, weights and moments."""
    found = {}
    for key, entry in checkpoint.manifest.tensors.items():
        values = SavedTensor(checkpoint.folder, key, entry).rows(0, entry.rows)
        found[key] = str(entry.shape).encode() + values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", slow_after(1, list(CASES)))
def test_bits_are_the_same_on_any_layout(
    kind: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """From one rank through the layouts, each of which loads what the one before has saved."""
    settings = (*SETTINGS, *{"adapters": LORA, "columns": ("precision.moment_dtype=int8",)}.get(kind, ()))
    if kind in ("mixture", "columns"):
        sizes = (2, 128) if kind == "columns" else (4,)
        small = mixture_parts("qwen3_moe", parts, tmp_path / "mixture", *sizes)
        model = changed_parts(small, tmp_path / "deep", {"num_hidden_layers": 4})
    else:
        sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 52}
        model = changed_parts(parts, tmp_path / "deep", {**sizes, "num_hidden_layers": 5, "vocab_size": 611})
    train.train(make_config(model, dataset, tmp_path / "first", *settings, "max_steps=2"))
    first = before = newest_alone(tmp_path / "first" / FOLDER)
    assert first is not None and before is not None
    expected = bits(first)
    assert any(key.endswith("exp_avg_sq") for key in expected)
    for number, (size, layout) in enumerate(CASES[kind]):
        own = tmp_path / f"{number}"
        cfg = make_config(model, dataset, own, *settings, *layout.split(), f"checkpoint.resume={before.folder}")
        if size == 1:
            saved_again(single_world(), cfg)
        else:
            pools[size].run(saved_again, cfg)
        before = newest_alone(own / FOLDER)
        assert before is not None and before.facts["step"] == 2
        assert bits(before) == expected, layout
