"""Plans of trainings whose layers are divided among groups of ranks (`parallel.pipeline`)."""

from pathlib import Path
from typing import Any

import pytest
from harness import RankPool
from live import describe, measure_step
from small import changed_parts, make_config
from steps import begin
from tiers import slow_after

from llava_fsdp.config import Config, ParallelConfig, PipelineSchedule
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.pipeline.pipeline import passes_of
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import peak
from llava_fsdp.train.pipeline_step import run_pipeline
from llava_fsdp.train.setup.dry_run import measure
from llava_fsdp.train.sums.expert_sums import ExpertSums
from llava_fsdp.train.sums.source_sums import SourceSums

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
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)


def moved_in_step(world: World, cfg: Config) -> tuple[dict[str, int], list[MicroBatchSizes]]:
    """Bytes that a rank sends (and of messages those that it receives) in the passes of a step, and the step's
    micro-batches. The schedule's first step exchanges empty messages, too, so that the second one is counted."""
    state = begin(world, cfg)
    assert state.pipeline is not None
    for _ in range(2):
        step = state.loader.steps.prepare(0)
        sources, experts = SourceSums(step.facts, world.device), ExpertSums(None, step.facts, 0.0, world.device)
        with CollectiveBytes() as counter:
            run_pipeline(state, state.pipeline, step, 1.0, sources, experts)
    sent = {kind: own["bytes" if kind == "receive" else "sent"] for kind, own in counter.moved.items()}
    return sent, [describe(micro, world.rank) for micro in step.micro_batches]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sharding", "schedule"), [("zero3", "1f1b"), ("zero2", "interleaved"), ("hybrid", "1f1b"), ("zero1", "1f1b")]
)
def test_bytes_are_those_of_real_collectives(
    sharding: str, schedule: str, wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    parts = changed_parts(wide_parts, tmp_path / "parts", {"num_hidden_layers": 5})
    cfg = make_config(
        parts, dataset, tmp_path / "run", f"sharding={sharding}", "pack=true", "global_batch_size=24",
        f"sharding.shard_size={2 if sharding == 'hybrid' else 'null'}", "parallel.pipeline=2",
        f"parallel.schedule={schedule}", "tokens_per_micro_batch=256",
    )  # fmt: skip
    received = planned = 0.0
    for rank, (moved, micros) in enumerate(pools[4].run(moved_in_step, cfg)):
        sent = peak(cfg, 4, "cpu", micros, rank).sent
        assert moved["all_gather"] + moved["reduce_scatter"] == sent.sharded
        assert moved["all_reduce"] == sent.replicated
        received, planned = received + moved["receive"], planned + sent.pipeline
    assert received == planned > 0


@pytest.mark.slow
def test_a_dry_run_is_that_of_the_first_group(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    from llava_fsdp.parallel.ranks.mesh import distributed

    cfg = make_config(
        wide_parts, dataset, tmp_path, "sharding=zero3", "pack=true", "tokens_per_micro_batch=256",
        "global_batch_size=16", "parallel.pipeline=2", "dry_run=4",
    )  # fmt: skip
    with distributed(cfg) as world:
        report = measure(cfg, world)
    assert report["micro_batches"] == 4
    for name, own in report["bytes"].items():
        assert own["measured"] == pytest.approx(own["planned"], rel=0.01), name
    assert report["collectives"]["receive"]["calls"] == 4, "a gradient of each micro-batch"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_order_of_passes(schedule: str) -> None:
    """Each pass once, forward before backward, and no more micro-batches under way than stages behind."""
    parallel = ParallelConfig(pipeline=3, schedule=PipelineSchedule[schedule])
    for index in range(3):
        order = passes_of(parallel, index, 6)
        stages = range(index, parallel.num_stages, 3)
        places = {(one.stage, one.is_forward, one.micro_batch): place for place, one in enumerate(order)}
        assert len(order) == len(places) == 2 * 6 * len(stages)
        assert all(places[s, True, n] < places[s, False, n] for s in stages for n in range(6))
        if schedule == "1f1b":
            under_way = [sum(1 if one.is_forward else -1 for one in order[: place + 1]) for place in range(len(order))]
            assert max(under_way) == 3 - index


def parameter_bytes(world: World, cfg: Config) -> tuple[int, Any]:
    """Bytes of the parameters that this rank holds between steps, and what rank 0 says of them in the run's folder."""
    state = begin(world, cfg)
    return sum(local(p).nbytes for p in state.model.parameters()), state.about.get("at_rest")


@pytest.mark.ranks
def test_a_rank_with_stages_of_its_own_holds_shards_and_no_copies(
    parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """FSDP gathers the weights in bf16, also on a single rank."""
    words = "precision=bf16", "sharding=zero3", "pack=true", "parallel.pipeline=2", "tokens_per_micro_batch=256"
    cfg = make_config(parts, dataset, tmp_path / "run", *words)
    held, about = zip(*pools[2].run(parameter_bytes, cfg), strict=True)
    for rank, found in enumerate(held):
        assert peak(cfg, 2, "cpu", [MicroBatchSizes(1, 256, 2, 1, 9, 4)] * 2, rank).at_rest["parameters"] == found
    assert about[0]["parameters"] == max(held)
