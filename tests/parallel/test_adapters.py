"""Adapters train with every strategy, on any number of ranks, as a plain loop with peft's adapters does."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness import RankPool
from reference import (
    EXPORTED,
    TOLERANCE,
    Adapters,
    Outcome,
    assert_near,
    difference,
    first_values,
    plain_loop,
    train_on,
    trained_weights,
)  # fmt: skip
from saves import interrupted
from small import Configure, make_config

from llava_fsdp.config import Config
from llava_fsdp.train import main as train

SAMPLES = 16
LORA = ["model.lora.enabled=true", "model.lora.r=4", "model.lora.alpha=8", "optim.lr=3e-3"]
EVERY_ROW = 1 << 20
HYBRID = ("hybrid", "hybrid2")
VARIANTS: dict[str, list[str]] = {
    "lora": ["model.lora.dropout=0.1"],
    "tower": ["model.lora.dropout=0.1", "model.lora.bias=all", "model.train=[projector,language,vision]"],
    "tower-lora-only": ["model.lora.dropout=0", "model.lora.bias=lora_only", "model.train=[language,vision]"],
    "dora": ["model.lora.dropout=0.1", "model.lora.use_dora=true", "model.lora.use_rslora=true"],
    "frozen-projector": ["model.lora.dropout=0", "model.train=[language]"],
}
ALL = [(s, w) for s in ("zero0", "zero1", "zero2", "zero3") for w in (1, 2, 4)] + [(s, 4) for s in HYBRID]
SOME = [("zero2", 2), ("zero3", 2), ("hybrid", 4)]


@pytest.fixture(scope="module")
def start(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that every run starts from, for transformers."""
    folder = tmp_path_factory.mktemp("start")
    train.train(make_config(parts, dataset, folder, "max_steps=1", "optim.lr=0", *EXPORTED))
    return folder / "export"


def settings(configure: Configure, variant: str, folder: str, *more: str) -> Config:
    given = (f"global_batch_size={SAMPLES}", *LORA, *VARIANTS[variant], "export.enabled=false", *more)
    return configure(*given, to=folder)


def run(cfg: Config, size: int, pools: dict[int, RankPool]) -> Outcome:
    folder = train_on(size, cfg, pools)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], trained_weights(folder))


def assert_plain_loop(
    settings: Callable[..., Config], start: Path, cases: list[tuple[str, int]], pools: dict[int, RankPool]
) -> None:
    """Runs of all cases, packed and padded, with and without activation checkpointing, against one plain loop.

    Args:
        settings: makes a configuration from the name of its folder and more overrides.
        start: the weights that every run starts from, for transformers.
    """
    plain = settings("plain")
    first = first_values(plain)
    reference = plain_loop(plain, start, Adapters(first) if plain.model.lora.enabled else None)
    reference.weights = {name: reference.weights[name] for name in first}
    assert difference(reference.weights, first, EVERY_ROW) > 100 * TOLERANCE, "nothing was trained"
    for number, (strategy, size) in enumerate(cases):
        cfg = settings(
            f"{strategy}-{size}", f"sharding={strategy}", f"activation_checkpointing={('full', 'none')[number % 2]}",
            f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", f"pack={str(number % 4 < 2).lower()}",
            f"micro_batch_size={SAMPLES // size // 2}",
        )  # fmt: skip
        assert_near(run(cfg, size, pools), reference, EVERY_ROW, f"{strategy}-{size}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "cases"),
    [
        pytest.param("lora", [("zero3", 2)], id="lora", marks=pytest.mark.slow),
        pytest.param("lora", SOME, id="lora-some", marks=pytest.mark.slow),
        pytest.param("tower", [("zero3", 2)], id="tower", marks=pytest.mark.slow),
        pytest.param("frozen-projector", [("zero3", 2)], id="frozen-projector", marks=pytest.mark.slow),
        *[pytest.param(v, ALL, id=f"{v}-all", marks=pytest.mark.slow) for v in VARIANTS],
    ],
)
def test_adapters_train_as_a_plain_loop_does(
    variant: str, cases: list[tuple[str, int]], start: Path, configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Losses, norms and final adapters, with dropout."""
    assert_plain_loop(partial(settings, configure, variant), start, cases, pools)


def assert_continues(settings: Callable[..., Config], steps: int, folder: Path, pools: dict[int, RankPool]) -> Config:
    """Two ranks that stop half way and four that continue end as one process does; the configuration of the four."""
    more = (f"max_steps={steps}", "checkpoint.every=2", "checkpoint.keep=9")
    whole = run(settings("whole", *more), 1, pools)
    run(settings("two", *more, "sharding=zero3", "micro_batch_size=8"), 2, pools)
    interrupted(folder / "two", folder / "four", 2)
    cfg = settings("four", *more, "sharding=zero2", "micro_batch_size=4")
    got = run(cfg, 4, pools)
    assert got.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert difference(got.weights, whole.weights, EVERY_ROW) < TOLERANCE
    return cfg


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_of_adapters_continues_on_another_number_of_ranks(
    configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    assert_continues(partial(settings, configure, "lora"), 6, tmp_path, pools)
