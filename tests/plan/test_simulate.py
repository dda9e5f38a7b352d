"""The ledger against all tensors that are alive in real steps: forward, backward, collectives and update."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness import RankPool, single_world
from live import measure_step
from small import make_config

from llava_fsdp.config import Config, QuantizeConfig, Quantizer
from llava_fsdp.plan.planner import peak

CLOSE = 4e-3
"""Of the most bytes alive. What is left are scalars and numbers that name places: some thousand bytes, of megabytes."""

CASES = [
    # ranks, sharding, precision, activation checkpointing, more
    (1, "zero3", "bf16", "none", "micro_batch_size=12"),
    (1, "zero3", "bf16_pure", "full", "micro_batch_size=3"),
    (2, "zero0", "bf16", "full", "micro_batch_size=3"),
    (2, "zero1", "fp32", "none", "micro_batch_size=3"),
    (2, "zero2", "bf16", "selective", "micro_batch_size=12"),
    (4, "zero3", "bf16", "full", "micro_batch_size=12"),
    (4, "hybrid", "bf16", "selective", "micro_batch_size=3"),
    (4, "hybrid2", "bf16_pure", "none", "micro_batch_size=3"),
]


def configure(
    parts: Path,
    dataset: Path,
    output: Path,
    ranks: int,
    row: str,
    precision: str,
    activation_checkpointing: str,
    more: str,
    stage: str,
) -> Config:
    return make_config(
        parts,
        dataset,
        output,
        f"sharding={row}",
        f"precision={precision}",
        f"activation_checkpointing={activation_checkpointing}",
        more,
        *(["pack=false"] if more.startswith("micro") else []),
        *(["sharding.shard_size=2"] if row.startswith("hybrid") else []),
        f"global_batch_size={12 * min(ranks, 2)}",
        stage=stage,
    )


def check(cfg: Config, ranks: int, pools: dict[int, RankPool]) -> None:
    found = [measure_step(single_world(), cfg)] if ranks == 1 else pools[ranks].run(measure_step, cfg)
    for rank, (measured, micros) in enumerate(found[:2]):
        planned = peak(cfg, ranks, "cpu", micros, rank)
        assert planned.bytes["total"] == pytest.approx(measured, rel=CLOSE), (rank, planned.moment)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}")
def test_worst_moment_is_that_of_real_steps(
    case: tuple[int, str, str, str, str], wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    check(configure(wide_parts, dataset, tmp_path, *case, stage="finetune"), case[0], pools)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}")
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_worst_moment_is_that_of_real_steps_everywhere(
    stage: str, case: tuple[int, str, str, str, str], wide_parts: Path, dataset: Path, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    check(configure(wide_parts, dataset, tmp_path, *case, stage=stage), case[0], pools)


SCALARS = 64
"""Bytes."""
PACKED = [
    (1, "zero3", "bf16", "none", "micro_batch_size=12", "nf4"),
    (2, "zero3", "bf16", "full", "micro_batch_size=3", "nf4"),
    (2, "zero2", "bf16", "selective", "micro_batch_size=3", "int8"),
    (4, "hybrid", "fp16", "none", "micro_batch_size=3", "nf4"),
    (4, "zero3", "bf16", "none", "micro_batch_size=3", "int8"),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [PACKED[0], *(pytest.param(c, marks=pytest.mark.slow) for c in PACKED)])
@pytest.mark.parametrize("stage", ["finetune_qlora", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_a_packed_base_saves_what_is_planned(
    stage: str, case: tuple[int, str, str, str, str, str], wide_parts: Path, dataset: Path, pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Its bits, what they are unpacked with, and one unpacked weight while a product runs, but for a few scalars."""
    *own, mode = case
    found = {}
    for quantizer in (Quantizer(mode), Quantizer.none):
        cfg = configure(wide_parts, dataset, tmp_path, *own, stage=stage)
        lora = replace(cfg.model.lora, r=4) if cfg.model.lora.enabled else cfg.model.lora
        cfg.model = replace(cfg.model, lora=lora, quantize=QuantizeConfig(mode=quantizer))
        ranks = [measure_step(single_world(), cfg)] if own[0] == 1 else pools[own[0]].run(measure_step, cfg)
        found[quantizer] = [(m, peak(cfg, own[0], "cpu", micros, r)) for r, (m, micros) in enumerate(ranks[:2])]
    for (packed, planned), (full, planned_full) in zip(*found.values(), strict=True):
        saved = planned_full.bytes["total"] - planned.bytes["total"]
        assert saved > 0 and full - packed == pytest.approx(saved, abs=SCALARS), planned.moment


@pytest.mark.ranks
def test_packed_rows(wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    cfg = configure(
        wide_parts, dataset, tmp_path, 2, "zero3", "bf16", "selective", "tokens_per_micro_batch=256", "finetune"
    )
    check(cfg, 2, pools)


UNITS = [
    ("zero3", "full", "sharding.prefetch=2"),
    ("zero3", "none", "sharding.blocks_per_unit=2"),
    ("zero2", "full", "sharding.blocks_per_unit=2"),
    ("zero3", "full", "sharding.blocks_per_unit=2 sharding.prefetch=1"),
    ("zero1", "none", "sharding.blocks_per_unit=3 sharding.prefetch=2"),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [UNITS[3], *(pytest.param(c, marks=pytest.mark.slow) for c in UNITS if c != UNITS[3])])
def test_larger_units_and_units_ahead_take_what_they_take(
    case: tuple[str, str, str], wide_parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    row, activation_checkpointing, more = case
    common = [
        f"sharding={row}",
        f"activation_checkpointing={activation_checkpointing}",
        "precision=bf16",
        "pack=false",
        "global_batch_size=24",
    ]
    cfg = make_config(wide_parts, dataset, tmp_path, *common, "micro_batch_size=6", *more.split())
    check(cfg, 2, pools)
    plain = make_config(wide_parts, dataset, tmp_path, *common, "micro_batch_size=6")
    more_bytes = peak(cfg, 2, "cpu").bytes["gathered"] - peak(plain, 2, "cpu").bytes["gathered"]
    assert more_bytes > 0 or (row, activation_checkpointing) != (
        "zero3",
        "full",
    )  # else the worst moment has little gathered


def test_worst_moment_is_no_sum_of_worst_moments(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Logits are gone when the first block's backward runs, gradients of shards are not there before."""
    cfg = configure(
        wide_parts, dataset, tmp_path, 4, "zero3", "bf16", "full", "tokens_per_micro_batch=2048", "finetune"
    )
    row = peak(cfg, 4, "cpu")
    assert row.moment.startswith("backward of language_model.layers.")
    assert row.bytes["logits"] == 0 and row.bytes["gradients"] < row.at_rest["gradients"]
    assert row.bytes["total"] == sum(size for name, size in row.bytes.items() if name != "total")
