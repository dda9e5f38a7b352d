"""What is planned for ranks that process a row together, against real steps and against a dry run."""

from pathlib import Path

import pytest
from harness import RankPool
from live import measure_step
from small import make_config, with_heads
from tiers import slow_after

from llava_fsdp.plan.planner import peak

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
