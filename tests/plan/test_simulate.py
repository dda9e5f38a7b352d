"""The simulated worst moment against all tensors that are alive in real steps, with collectives and the update."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness import RankPool, single_world
from live import measure_step
from small import make_config

from llava_fsdp.config import Config, QuantizeConfig, Quantizer
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import peak

CLOSE = 4e-3
"""Share of the most bytes alive. The plan leaves out scalars and indices, some thousand bytes of megabytes."""

Case = tuple[int, str, str, str, str]
CASES: list[Case] = [
    # ranks, sharding, precision, activation checkpointing, micro-batches
    (1, "zero3", "bf16", "none", "micro_batch_size=12"),
    (1, "zero3", "bf16_pure", "full", "micro_batch_size=3"),
    (2, "zero0", "bf16", "full", "micro_batch_size=3"),
    (2, "zero1", "fp32", "none", "micro_batch_size=3"),
    (2, "zero2", "bf16", "selective", "micro_batch_size=12"),
    (4, "zero3", "bf16", "full", "micro_batch_size=12"),
    (4, "hybrid", "bf16", "selective", "micro_batch_size=3"),
    (4, "hybrid2", "bf16_pure", "none", "micro_batch_size=3"),
]


def configure(parts: Path, dataset: Path, output: Path, case: Case, stage: str = "finetune") -> Config:
    ranks, sharding, precision, activation_checkpointing, more = case
    words = [f"sharding={sharding}", f"precision={precision}", f"activation_checkpointing={activation_checkpointing}"]
    words += ["pack=false"] * more.startswith("micro") + ["sharding.shard_size=2"] * sharding.startswith("hybrid")
    size = f"global_batch_size={12 * min(ranks, 2)}"
    return make_config(parts, dataset, output, *words, *more.split(), size, stage=stage)


def measured(cfg: Config, ranks: int, pools: dict[int, RankPool]) -> list[tuple[int, list[MicroBatchSizes]]]:
    return [measure_step(single_world(), cfg)] if ranks == 1 else pools[ranks].run(measure_step, cfg)[:2]


def check(cfg: Config, ranks: int, pools: dict[int, RankPool]) -> None:
    for rank, (most, micros) in enumerate(measured(cfg, ranks, pools)):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(most, rel=CLOSE), (rank, planned.peak_moment)


FAST = [(CASES[n], "finetune") for n in (5,)]
SUMS: list[Case] = [
    (1, "zero3", "bf16", "full", f"micro_batch_size={size} precision.linear=fp32_sums") for size in (3, 12)
]
FAST += [(SUMS[0], "finetune")]
BLOCKS: list[Case] = [
    (1, "zero3", "bf16", "none", "micro_batch_size=3 model.train=[language:-2]"),
    (2, "zero3", "bf16", "full", "micro_batch_size=3 model.train=[language:-1]"),
    (2, "zero2", "bf16", "none", "micro_batch_size=6 model.train=[language:1:2]"),
    (4, "zero3", "bf16", "none", "micro_batch_size=12 model.train=[projector,language:-1,vision:-1]"),
    (4, "hybrid", "bf16", "full", "micro_batch_size=3 model.train=[vision:-1]"),
]
SLOW = [(case, stage) for case in CASES for stage in ("pretrain", "finetune")]
SLOW += [(case, "finetune") for case in [*BLOCKS, SUMS[1]]]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "stage"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in FAST)]
)
def test_worst_moment_is_that_of_real_steps(
    case: Case, stage: str, wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    check(configure(wide_parts, dataset, tmp_path, case, stage), case[0], pools)


SCALARS = 64
"""Bytes."""
QUANTIZED: list[tuple[Case, Quantizer]] = [
    ((1, "zero3", "bf16", "none", "micro_batch_size=12"), Quantizer.nf4),
    ((2, "zero3", "bf16", "full", "micro_batch_size=3"), Quantizer.nf4),
    ((2, "zero2", "bf16", "selective", "micro_batch_size=3"), Quantizer.int8),
    ((4, "hybrid", "fp16", "none", "micro_batch_size=3"), Quantizer.nf4),
    ((4, "zero3", "bf16", "none", "micro_batch_size=3"), Quantizer.int8),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "mode"), [QUANTIZED[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in QUANTIZED[1:])]
)
@pytest.mark.parametrize("stage", ["finetune_qlora", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_a_packed_base_saves_what_is_planned(
    stage: str, case: Case, mode: Quantizer, wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """But for a few scalars: its bits, what they are unpacked with, and one unpacked weight while a product runs."""
    ranks, results = case[0], []
    for quantizer in (mode, Quantizer.none):
        cfg = configure(wide_parts, dataset, tmp_path, case, stage)
        lora = replace(cfg.model.lora, r=4) if cfg.model.lora.enabled else cfg.model.lora
        cfg.model = replace(cfg.model, lora=lora, quantize=QuantizeConfig(mode=quantizer))
        steps = measured(cfg, ranks, pools)
        results.append([(most, peak(cfg, ranks, "cpu", micros, r)) for r, (most, micros) in enumerate(steps)])
    for (quantized, planned), (full, planned_full) in zip(*results, strict=True):
        saved = planned_full.bytes["total"] - planned.bytes["total"]
        assert saved > 0 and full - quantized == pytest.approx(saved, abs=SCALARS), planned.peak_moment


@pytest.mark.slow
@pytest.mark.ranks
def test_packed_rows(wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    case = 2, "zero3", "bf16", "selective", "tokens_per_micro_batch=256"
    check(configure(wide_parts, dataset, tmp_path, case), 2, pools)


UNITS = [
    ("zero3", "full", "sharding.blocks_per_unit=2 sharding.prefetch=1"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("zero3", "full", "sharding.prefetch=2"),
            ("zero3", "none", "sharding.blocks_per_unit=2"),
            ("zero2", "full", "sharding.blocks_per_unit=2"),
            ("zero1", "none", "sharding.blocks_per_unit=3 sharding.prefetch=2"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("sharding", "mode", "more"), UNITS)
def test_larger_units_and_units_ahead_take_what_they_take(
    sharding: str, mode: str, more: str, wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    case = 2, sharding, "bf16", mode, "micro_batch_size=6"
    plain = configure(wide_parts, dataset, tmp_path, case)
    cfg = configure(wide_parts, dataset, tmp_path, (*case[:4], f"{case[4]} {more}"))
    check(cfg, 2, pools)
    more_bytes = peak(cfg, 2, "cpu").bytes["gathered"] - peak(plain, 2, "cpu").bytes["gathered"]
    assert more_bytes > 0 or (sharding, mode) != ("zero3", "full")  # else the worst moment has little gathered


@pytest.mark.slow
@pytest.mark.ranks
def test_each_reduction_at_the_same_time_takes_what_is_planned(
    wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """To the byte, on two ranks with three blocks: one more input of a reduce-scatter is alive at the worst moment."""
    found = []
    for count in (1, 2, 3):
        case = 2, "zero3", "bf16", "full", f"micro_batch_size=6 sharding.reductions={count}"
        cfg = configure(wide_parts, dataset, tmp_path, case)
        steps = measured(cfg, 2, pools)
        found.append([(most, peak(cfg, 2, "cpu", micros, r).bytes["total"]) for r, (most, micros) in enumerate(steps)])
    for one, two, three in zip(*found, strict=True):
        assert one[0] < two[0] < three[0] and one[0] == pytest.approx(one[1], rel=CLOSE)
        assert (two[0] - one[0], three[0] - one[0]) == (two[1] - one[1], three[1] - one[1])


def test_worst_moment_is_no_sum_of_worst_moments(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Logits are gone when the first block's backward runs; gradients of shards come after it."""
    case = 4, "zero3", "bf16", "full", "tokens_per_micro_batch=2048"
    row = peak(configure(wide_parts, dataset, tmp_path, case), 4, "cpu")
    assert row.peak_moment.startswith("backward of language_model.layers.")
    assert row.bytes["logits"] == 0 and row.bytes["gradients"] < row.at_rest["gradients"]
    assert row.bytes["total"] == sum(size for name, size in row.bytes.items() if name != "total")
