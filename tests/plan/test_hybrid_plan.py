"""Memory and communication of trainings with several kinds of parallelism at once, planned and measured."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from live import measure_step
from mixtures import mixture_parts
from small import changed_parts, make_config
from test_expert_plan import measure_equal_loads
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.data.synthetic import fullest
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.context.share_rows import context_of
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.plan.planner import PlanRow, peak
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.dry_run import measure, planned_memory_of

CLOSE = 0.05
"""Share of the most bytes alive."""
DENSE = [
    ("zero3", "full", ("pipeline=2", "tensor=2")),
    ("zero2", "none", ("pipeline=2", "tensor=2")),
    ("hybrid", "selective", ("pipeline=2", "tensor=2")),
    ("zero1", "full", ("pipeline=4", "tensor=2")),
    ("zero0", "none", ("pipeline=2", "tensor=2", "schedule=interleaved")),
    ("zero3", "full", ("pipeline=2", "context=2")),
    ("zero2", "full", ("pipeline=2", "tensor=2", "context=2")),
    ("hybrid2", "none", ("tensor=2", "context=2")),
]
MIXTURES = [
    ("zero3", "full", ("pipeline=2", "expert=2")),
    ("zero2", "none", ("pipeline=2", "expert=2")),
    ("hybrid", "full", ("pipeline=2", "expert=2")),
    ("zero1", "none", ("pipeline=2", "expert=4")),
    ("zero3", "full", ("tensor=2", "expert=2")),
    ("zero2", "none", ("tensor=2", "expert=4")),
    ("hybrid", "full", ("pipeline=2", "tensor=2", "expert=2")),
    ("zero0", "none", ("tensor=2", "expert=2")),
    ("zero3", "full", ("expert=2", "context=2")),
]
SIZES = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
SIZES |= {"hidden_size": 128, "intermediate_size": 312}


def configure(
    strategy: str, mode: str, kinds: tuple[str, ...], is_mixture: bool, parts: Path, dataset: Path, folder: Path,
    *more: str,
) -> Config:  # fmt: skip
    model = changed_parts(parts, folder / "deep", {**SIZES, "vocab_size": 611, "pad_token_id": 2})
    model = mixture_parts("qwen3_moe", parts, folder / "parts", 8) if is_mixture else model
    model = changed_parts(model, folder / "changed", {"num_hidden_layers": 6}) if is_mixture else model
    return make_config(
        model, dataset, folder / "run", f"sharding={strategy}", f"activation_checkpointing={mode}", "pack=true",
        f"sharding.shard_size={2 if strategy.startswith('hybrid') else 'null'}", "global_batch_size=32",
        "tokens_per_micro_batch=256", *(f"parallel.{kind}" for kind in kinds), *more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("is_mixture", "strategy", "mode", "kinds"), [*((False, *c) for c in DENSE), *((True, *c) for c in MIXTURES[:-1])]
)
def test_the_worst_moment_is_that_of_real_steps(
    is_mixture: bool, strategy: str, mode: str, kinds: tuple[str, ...], wide_parts: Path, dataset: Path,
    pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    cfg = configure(strategy, mode, kinds, is_mixture, wide_parts, dataset, tmp_path, "precision=fp32")
    measured = pools[8].run(measure_equal_loads if is_mixture else measure_step, cfg, timeout=300)
    for rank, (most, micros) in enumerate(measured):
        planned = peak(cfg, 8, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)


def dry_run(cfg: Config) -> tuple[dict[str, Any], PlanRow]:
    with distributed(cfg) as world:
        report = measure(cfg, world)
        model = build_model(cfg, find_parts(cfg.model), world.device)
        context = context_of(RankLayout(cfg.parallel, world.size), world.rank, model.parts.language)
        cut = context.cut if context is not None else None
        return report, planned_memory_of(cfg, world, fullest(cfg, shape_of(model), cut))


@pytest.mark.parametrize(
    ("is_mixture", "strategy", "mode", "kinds"),
    slow_after(0, [*((False, *c) for c in DENSE), *((True, *c) for c in MIXTURES)]),
)
def test_a_dry_run_sends_and_holds_what_is_planned(
    is_mixture: bool, strategy: str, mode: str, kinds: tuple[str, ...], wide_parts: Path, dataset: Path, tmp_path: Path
) -> None:
    more = "dry_run=8", "format=json"
    cfg = configure(strategy, mode, kinds, is_mixture, wide_parts, dataset, tmp_path, *more)
    # DTensor's caches name the groups of an earlier dry run of the same process
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        report, planned = process.submit(dry_run, cfg).result()
    assert all(own["measured"] == own["planned"] for own in report["bytes"].values()), report["bytes"]
    moved = dict(report["collectives"])
    assert moved.pop("receive", {"bytes": 0})["bytes"] == planned.sent.pipeline
    few = 4000  # losses, norms and counts
    sent = sum(own["sent"] for kind, own in moved.items() if kind != "send")
    wanted = planned.sent.total - planned.sent.pipeline
    assert wanted <= sent * (1 + 1e-4) and sent <= wanted * (1 + 1e-4) + few
