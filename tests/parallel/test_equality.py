"""Every strategy, on any number of ranks and with any micro-batches, trains as a plain loop does."""

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from harness import RankPool
from reference import (
    EXPORTED,
    TOLERANCE,
    Outcome,
    assert_near,
    difference,
    outcome,
    plain_loop,
    train_on,
    vocabulary,
)
from small import Configure, make_config

from llava_fsdp.data.batching.packing import num_micro_batches
from llava_fsdp.train import main as train

SHARDED = ["zero0", "zero1", "zero2", "zero3"]
HYBRID = ["hybrid", "hybrid2"]
SAMPLES = 16  # a step: every number of ranks and of micro-batches here divides it
BATCH = f"global_batch_size={SAMPLES}"

VARIANTS = {
    "pretrain": ("pretrain", []),
    "finetune": ("finetune", []),
    "finetune-tower": ("finetune", ["model.train=[projector,language,vision]"]),
    "last-blocks": ("finetune", ["model.train=[language:-2]"]),
    "middle-block": ("finetune", ["model.train=[language:1:2]"]),
    "blocks-of-both": ("finetune", ["model.train=[projector,vision:-1,language:2]"]),
    "muon": ("finetune", ["optim=muon", "model.train=[projector,language,vision]"]),
    "tower-blocks": ("finetune", ["model.train=[vision:1]"]),
}


References = Callable[[str], tuple[Outcome, Outcome]]


@pytest.fixture(scope="module")
def references(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """By variant: the plain loop's outcome, and the weights everything starts from."""

    @functools.cache
    def reference(name: str) -> tuple[Outcome, Outcome]:
        stage, overrides = VARIANTS[name]
        folder = tmp_path_factory.mktemp(name)
        start = make_config(
            parts, dataset, folder, "max_steps=1", "optim.lr=0", BATCH, *EXPORTED, *overrides, stage=stage
        )  # the first step's learning rate is 0 too: this only writes the weights that a run starts from
        train.train(start)
        cfg = make_config(parts, dataset, folder / "none", BATCH, *overrides, stage=stage)
        return plain_loop(cfg, folder / "export"), outcome(folder)

    return reference


CASES = [(s, w) for s in SHARDED for w in (1, 2, 4)] + [(s, 4) for s in HYBRID]
FEW_CASES = [(s, 2) for s in SHARDED] + [("zero2", 1), ("hybrid", 4)]
FAST_CASES = [("zero3", 2), ("hybrid", 4)]
COVERING = [*FEW_CASES, ("zero3", 4), ("hybrid2", 4)]

ALL = (1, 2, 4)
BLOCKS = ("last-blocks", "middle-block", "blocks-of-both", "tower-blocks")
OF_BLOCKS = [("zero3", 1), *((s, w) for s in ("zero2", "zero3") for w in (2, 4)), ("zero1", 2), ("hybrid", 4)]
TABLES = [
    pytest.param("finetune", (2,), FAST_CASES, id="finetune"),
    *(pytest.param(name, (1, 2), OF_BLOCKS, id=f"{name}-all", marks=pytest.mark.slow) for name in BLOCKS),
    pytest.param("muon", (2,), FAST_CASES, id="muon"),
    pytest.param("muon", (1, 2), CASES, id="muon-all", marks=pytest.mark.slow),
    pytest.param("finetune", (2,), COVERING, id="finetune-covering", marks=pytest.mark.slow),
    pytest.param("pretrain", (2,), FEW_CASES, id="pretrain", marks=pytest.mark.slow),
    pytest.param("finetune-tower", (2,), CASES, id="finetune-tower", marks=pytest.mark.slow),
    pytest.param("finetune", ALL, CASES, id="finetune-all", marks=pytest.mark.slow),
    pytest.param("pretrain", ALL, CASES, id="pretrain-all", marks=pytest.mark.slow),
    pytest.param("finetune-tower", ALL, CASES, id="finetune-tower-all", marks=pytest.mark.slow),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "accumulations", "cases"), TABLES)
def test_table_equals_plain_loop(
    variant: str, accumulations: tuple[int, ...], cases: list[tuple[str, int]],
    references: References, configure: Configure, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Losses and weights of six strategies x 1/2/4 ranks x accumulation x checkpointing, against the plain loop.

    Where the order of sums is the same (strategies that differ only in when weights are gathered; checkpointing
    on or off), they are equal to the bit.
    """
    stage, overrides = VARIANTS[variant]
    reference, start = references(variant)
    by_order_of_sums: dict[object, Outcome] = {}
    for (strategy, size), accumulation in product(cases, accumulations):
        # both settings of checkpointing meet every strategy, number of ranks and accumulation over a slow table
        both = (SHARDED + HYBRID).index(strategy) % 2 == accumulation % 2
        modes = ("none", "full") if both else ("full",)
        for checkpointing in modes[:1] if cases is FAST_CASES else modes:
            which = f"{strategy}-{size}-{accumulation}-{checkpointing}"
            cfg = configure(
                f"sharding={strategy}", f"sharding.shard_size={2 if strategy in HYBRID else 'null'}",
                f"activation_checkpointing={checkpointing}", BATCH, "pack=false",
                f"micro_batch_size={SAMPLES // (size * accumulation)}", *EXPORTED, *overrides, to=which, stage=stage,
            )  # fmt: skip
            assert num_micro_batches(SAMPLES, size, cfg.micro_batch_size) == accumulation
            got = outcome(train_on(size, cfg, pools))
            assert_near(got, reference, vocabulary(cfg), which)
            assert difference(got.weights, start.weights, vocabulary(cfg)) > 100 * TOLERANCE, "nothing was trained"
            key = (order_of_sums(strategy, size, accumulation), accumulation)
            first = by_order_of_sums.setdefault(key, got)
            assert first.losses == got.losses, which
            assert all(torch.equal(first.weights[n], got.weights[n]) for n in got.weights), which
    assert len(by_order_of_sums) >= (
        1 if variant in BLOCKS else 2 if cases is FAST_CASES else 4 if cases is FEW_CASES else 5
    )


def order_of_sums(strategy: str, size: int, accumulation: int) -> object:
    """Names runs that add the same numbers in the same order."""
    if size == 1:
        return 1
    if strategy in HYBRID:
        return size, "shards, then replicas"
    if strategy == "zero0":
        return size, "all-reduce"
    if strategy == "zero1" and accumulation > 1:
        return size, "micro-batches, then ranks"
    return size, "ranks, then micro-batches"
