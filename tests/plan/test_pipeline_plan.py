"""Plans of trainings whose layers are divided among groups of ranks (`parallel.pipeline`)."""

import json
from pathlib import Path

import pytest
from harness import RankPool
from live import measure_step
from small import changed_parts, make_config
from tiers import slow_after

from llava_fsdp.plan.planner import peak

CLOSE = 0.05
"""Share of the most bytes alive."""
CASES = [
    # ranks, groups of ranks, schedule, sharding, activation checkpointing
    (2, 2, "1f1b", "zero3", "none"),
    (4, 2, "1f1b", "zero3", "full"),
    (4, 2, "1f1b", "zero2", "none"),
    (4, 2, "interleaved", "zero3", "none"),
    (4, 4, "1f1b", "zero1", "full"),
    (4, 2, "1f1b", "hybrid", "selective"),
    (4, 2, "interleaved", "zero0", "full"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "pipeline", "schedule", "sharding", "mode"), slow_after(0, CASES))
def test_worst_moment_is_that_of_real_steps(
    ranks: int, pipeline: int, schedule: str, sharding: str, mode: str, wide_parts: Path, dataset: Path,
    pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    words = f"sharding={sharding}", f"activation_checkpointing={mode}", "pack=true", "global_batch_size=24"
    own = f"parallel.pipeline={pipeline}", f"parallel.schedule={schedule}", "tokens_per_micro_batch=256"
    size = ["sharding.shard_size=2"] * sharding.startswith("hybrid")
    parts = changed_parts(wide_parts, tmp_path / "parts", {"num_hidden_layers": 6})
    cfg = make_config(parts, dataset, tmp_path / "run", *words, *own, *size)
    for rank, (most, micros) in enumerate(pools[ranks].run(measure_step, cfg)):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        print(rank, planned.bytes, most, planned.moment)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.moment)
