"""Predicted seconds of a step: what FSDP2 copies, the heaviest rank, and steps that were measured or worked out."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import command_config, config_of

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    DType,
    MasterDType,
    OffloadMode,
    PlanConfig,
    PrecisionConfig,
    Strategy,
)
from llava_fsdp.data.batching.packing import pack_step
from llava_fsdp.model.flops import Flops
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.plan.memory.micro_batches import MicroBatches
from llava_fsdp.plan.planner import Choice, Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import GPUS, Basis, machine_named
from llava_fsdp.plan.time.heaviest_rank import heaviest_over_mean, likely_lengths
from llava_fsdp.plan.time.step_time import StepWork, Volume, added_bytes, copied_bytes, sample_flops, step_time
from llava_fsdp.plan.workload import Samples, packed_row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BLOCK = Weight(shape=(100,), trainable=True, whole=False, fp32=False, unit="block 0")
ROOT = replace(BLOCK, unit="")
EIGHT = RankCounts(8, 8, 8)
NONE = ActivationCheckpointingConfig(mode=ActivationCheckpointing.none, budget=None)
FLOPS = Flops(token=4e10, pair=8e5, label=8e8, vision=4e11)
LLAVA = Samples(tokens=830.0, tiles=0.94, labels=180.0, spread=215.0, source="", tile_tokens=576.0)


def in_dtypes(param: DType, reduce: DType, master: MasterDType = MasterDType.fp32) -> PrecisionConfig:
    return replace(config_of([]).precision, param_dtype=param, reduce_dtype=reduce, master_dtype=master)


MIXED, PURE = in_dtypes(DType.bf16, DType.fp32), in_dtypes(DType.bf16, DType.bf16, MasterDType.bf16)
FP32 = in_dtypes(DType.fp32, DType.fp32)


@pytest.mark.parametrize(
    ("strategy", "precision", "weight", "counts", "wanted"),
    [
        # read and write of two gathers, read of a bf16 gradient and write of an fp32 one, in every micro-batch
        (Strategy.FULL_SHARD, MIXED, BLOCK, EIGHT, {1: 4 + 4 + 6, 3: 3 * 14}),
        (Strategy.HYBRID_SHARD, MIXED, BLOCK, RankCounts(8, 4, 4), {1: 14, 3: 3 * 14}),
        (Strategy.FULL_SHARD, MIXED, ROOT, EIGHT, {1: 4 + 6, 3: 3 * 10}),  # the root's weights stay gathered
        (Strategy.SHARD_GRAD_OP, MIXED, BLOCK, EIGHT, {1: 4 + 6, 3: 3 * 10}),
        (Strategy._HYBRID_SHARD_ZERO2, MIXED, BLOCK, RankCounts(8, 4, 4), {1: 4 + 6, 3: 3 * 10}),
        # one gather; the first gradient is cast, two are added to it in fp32, and the sum is copied
        (Strategy.SHARD_OPTIMIZER, MIXED, BLOCK, EIGHT, {1: 4 + 6, 3: 4 + 6 + 2 * 1.4 * 10 + 8}),
        # nothing is sharded: fp32 weights are cast, then copied, once
        (Strategy.NO_SHARD, MIXED, BLOCK, EIGHT, {1: 6 + 4 + 6, 3: 6 + 4 + 6 + 2 * 1.4 * 10 + 8}),
        (Strategy.FULL_SHARD, PURE, BLOCK, EIGHT, {1: 4 + 4 + 4, 3: 3 * 12}),
        (Strategy.SHARD_OPTIMIZER, PURE, BLOCK, EIGHT, {1: 4 + 4, 3: 4 + 2 * 6 + 4}),
        (Strategy.NO_SHARD, FP32, BLOCK, EIGHT, {1: 8 + 8, 3: 8 + 2 * 12 + 8}),
        (Strategy.FULL_SHARD, MIXED, replace(BLOCK, trainable=False), EIGHT, {1: 8, 3: 24}),
        (Strategy.FULL_SHARD, MIXED, replace(BLOCK, trainable=False, whole=True), EIGHT, {1: 0, 3: 0}),
        (Strategy.SHARD_GRAD_OP, MIXED, replace(BLOCK, trainable=False), EIGHT, {1: 0, 3: 0}),
        (Strategy.FULL_SHARD, MIXED, replace(BLOCK, fp32=True), EIGHT, {1: 8 + 8, 3: 3 * 16}),  # norms
    ],
)
def test_bytes_that_fsdp_copies(
    strategy: Strategy, precision: PrecisionConfig, weight: Weight, counts: RankCounts, wanted: dict[int, float]
) -> None:
    for micro_batches, each in wanted.items():
        found = copied_bytes([weight], strategy, precision, counts, micro_batches)
        assert found == pytest.approx(100 * each), micro_batches


@pytest.mark.parametrize(("groups", "count"), [(8, 128), (64, 128), (64, 1024)])
def test_the_heaviest_rank_is_that_of_real_packing(groups: int, count: int) -> None:
    """Real lengths are drawn; the estimate knows their mean and spread only."""
    cfg = replace(config_of([]), global_batch_size=count, pack=True)
    cfg.data.max_length = 2048
    dice = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(5):
        logarithms = torch.randn(count, generator=dice) * 0.25 + 6.69
        lengths = [min(2048, int(n)) for n in logarithms.exp()]
        work = [FLOPS.of(n, n**2, LLAVA.labels, LLAVA.tiles) for n in lengths]
        packed = pack_step(lengths, [round(w / 1e6) for w in work], groups, 8960)
        loads = [sum(work[i] for micro in rank for i in micro) for rank in packed]
        ratios.append(max(loads) * groups / sum(loads))
    found = heaviest_over_mean(cfg, LLAVA, FLOPS, groups)
    assert found == pytest.approx(statistics.mean(ratios), rel=0.04)
    assert (found > 1.1) == (count / groups == 2), "few samples cannot be evened out"


def test_ranks_without_samples_make_others_the_heaviest() -> None:
    cfg = replace(config_of([]), global_batch_size=4)
    assert heaviest_over_mean(cfg, replace(LLAVA, spread=0.0), FLOPS, 8) == pytest.approx(2.0)
    assert heaviest_over_mean(cfg, replace(LLAVA, spread=0.0), FLOPS, 4) == pytest.approx(1.0)


def test_padded_rows_are_dealt_by_length() -> None:
    """The first rank gets the longest of each micro-batch."""
    cfg = replace(config_of([]), global_batch_size=8, pack=False, tokens_per_micro_batch=None, micro_batch_size=2)
    flops, lengths = Flops(1.0, 0.0, 0.0, 0.0), likely_lengths(LLAVA, 8, cfg.data.sample_tokens)
    first = lengths[7] + lengths[6] + lengths[3] + lengths[2]
    assert heaviest_over_mean(cfg, LLAVA, flops, 2) == pytest.approx(first / (sum(lengths) / 2))


def test_likely_lengths_have_the_mean_and_spread() -> None:
    lengths = likely_lengths(LLAVA, 4000, 1 << 20)
    assert statistics.mean(lengths) == pytest.approx(830, rel=0.01)
    assert statistics.pstdev(lengths) == pytest.approx(215, rel=0.02)
    assert max(likely_lengths(LLAVA, 4000, 1000)) == 1000


def planner_of(gpu: str, stage: str) -> Planner:
    cfg = command_config(PlanConfig, "plan", "model=llava_v1_5_7b", f"stage={stage}", "precision=bf16")
    return Planner(cfg, machine_named(gpu, 8))


@pytest.mark.slow
def test_seconds_of_a_7b_on_h100s() -> None:
    """Within 10 % of seconds that were worked out by hand from the H200's measured kernels (docs/decisions.md)."""
    planner = planner_of("h100", "finetune")
    for ranks, samples, tokens, micro_batches, zero3, zero2 in (
        (8, 128, 8960, 2, 1.10, 1.07),
        (64, 1024, 8960, 2, 1.15, 1.11),
        (64, 128, 2304, 1, 0.28, 0.23),
    ):
        planner.cfg = replace(planner.cfg, global_batch_size=samples)
        micros = MicroBatches([packed_row(planner.samples, tokens, 1)] * micro_batches)
        for strategy, wanted in ((Strategy.FULL_SHARD, zero3), (Strategy.SHARD_GRAD_OP, zero2)):
            found = planner.seconds(Choice(strategy, NONE, OffloadMode.none), RankCounts(ranks, 8, 8), micros)
            assert found == pytest.approx(wanted, rel=0.1), (ranks, samples, strategy)


def measured_rows() -> list[dict[str, Any]]:
    """Rows of results of one H200: steps of LLaVA-1.5-7B in bf16, in which no block is recomputed or all are."""
    rows = []
    for path in sorted(RESULTS.glob("*cuda*.json")):
        report = json.loads(path.read_text())
        for row in (*report.get("rows", ()), *report.get("ways", ())):
            if row.get("activation_checkpointing") not in ("none", "full") or "flops" not in row:
                continue
            if "fp8" in row.get("name", "") or "int8" in row.get("name", ""):
                continue
            count = row["micro_batches"] if isinstance(row["micro_batches"], int) else row["micro_batches"][0]
            # the first result was made when torch's own kernel added gradients, in 24.5 ms (its note)
            rows.append({**row, "count": count, "is_first": path.name.startswith("planner-7b")})
    return rows


@pytest.mark.slow
def test_seconds_that_were_measured_on_an_h200() -> None:
    machine = machine_named("h200", 1)
    planners = {stage: planner_of("h200", stage) for stage in ("finetune", "pretrain")}
    rows = measured_rows()
    assert len(rows) == 8
    for row in rows:
        planner, count = planners[row.get("stage", "finetune")], row["count"]
        trained, precision = planner.trainable, planner.cfg.precision
        again = sample_flops(planner.recomputing_flops, planner.samples) / sample_flops(planner.flops, planner.samples)
        predicted = []
        for flops in row["flops"][-len(row["seconds"]) :]:
            work = StepWork(
                flops=flops,
                recomputed=flops * (again - 1) * (row["activation_checkpointing"] == "full"),
                copied=added_bytes(precision, count) * trained,
                local=trained,
                micro_batches=count,
            )
            slower = (count - 1) * (0.0245 - 10 * trained / (0.8 * 4800e9)) * row["is_first"]
            predicted.append(step_time(machine, precision, work, Volume(), OffloadMode.none).seconds + slower)
        assert statistics.mean(predicted) == pytest.approx(statistics.mean(row["seconds"]), rel=0.03), row


def test_one_chip_has_one_efficiency() -> None:
    """An H100 and an H200 differ in memory alone; the table says which was measured."""
    assert GPUS["h200"].basis is Basis.measured and GPUS["h100"].basis is Basis.carried
    assert GPUS["h100"].efficiency == GPUS["h200"].efficiency
    for gpu in GPUS.values():
        if gpu.basis is Basis.carried:
            others = [other for other in GPUS.values() if other.bf16 == gpu.bf16 and other.basis is Basis.measured]
            assert [other.efficiency for other in others] == [gpu.efficiency]
