"""Adapters train on any row of the ZeRO table, on any number of ranks, as a plain loop with peft's own does."""

import json
from pathlib import Path

import pytest
import torch
from harness import RankPool
from reference import EXPORTED, TOLERANCE, Adapters, Outcome, difference, plain_loop, run_ranks, trained_weights
from saves import interrupted
from small import make_config

from llava_fsdp.config import Config
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.pretrained import find_parts
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


def first_values(cfg: Config) -> dict[str, torch.Tensor]:
    """What trains, as it begins."""
    found = find_parts(cfg.model)
    model = build_llava(found, cfg.model, torch.float32)
    sources = find_weights(model, found, cfg.model, None, cfg.seed)
    return {n: sources[n].rows(0, sources[n].shape[0]) for n, p in model.named_parameters() if p.requires_grad}


def settings(parts: Path, dataset: Path, folder: Path, variant: str, *more: str) -> Config:
    given = (f"global_batch_size={SAMPLES}", *LORA, *VARIANTS[variant], "export.enabled=false", *more)
    return make_config(parts, dataset, folder, *given)


def run(cfg: Config, size: int, pools: dict[int, RankPool]) -> Outcome:
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg)
    folder = Path(cfg.output_dir)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], trained_weights(folder))


def assert_same(got: Outcome, reference: Outcome, wanted: dict[str, torch.Tensor], which: str) -> None:
    """A run's curve, and what it trained."""
    assert got.losses == pytest.approx(reference.losses, rel=TOLERANCE), which
    assert got.grad_norms == pytest.approx(reference.grad_norms, rel=TOLERANCE), which
    assert difference(got.weights, wanted, EVERY_ROW) < TOLERANCE, which


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "cases"),
    [
        pytest.param("lora", SOME, id="lora"),
        pytest.param("tower", [("zero3", 2)], id="tower", marks=pytest.mark.slow),
        pytest.param("frozen-projector", [("zero3", 2)], id="frozen-projector"),
        *[pytest.param(v, ALL, id=f"{v}-all", marks=pytest.mark.slow) for v in VARIANTS],
    ],
)
def test_adapters_train_as_a_plain_loop_does(
    variant: str,
    cases: list[tuple[str, int]],
    start: Path,
    parts: Path,
    dataset: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Losses, norms and final adapters, dropout included, packed and padded, with and without recomputation."""
    plain = settings(parts, dataset, tmp_path / "plain", variant)
    first = first_values(plain)
    reference = plain_loop(plain, start, Adapters(first))
    wanted = {name: reference.weights[name] for name in first}
    assert difference(wanted, first, EVERY_ROW) > 100 * TOLERANCE, "nothing was trained"
    for number, (strategy, size) in enumerate(cases):
        packed, activation_checkpointing = number % 2 == 0, ("none", "full")[number // 2 % 2]
        folder = tmp_path / f"{strategy}-{size}"
        cfg = settings(
            parts, dataset, folder, variant, f"sharding={strategy}",
            f"activation_checkpointing={activation_checkpointing}",
            f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", f"pack={str(packed).lower()}",
            f"micro_batch_size={SAMPLES // size // 2}",
        )  # fmt: skip
        assert_same(run(cfg, size, pools), reference, wanted, folder.name)


@pytest.mark.ranks
def test_a_run_of_adapters_continues_on_another_number_of_ranks(
    parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Two ranks that stop half way and four that go on come to what one process comes to; dropout is on."""
    steps = ("max_steps=6", "checkpoint.every=2", "checkpoint.keep=9")
    whole = run(settings(parts, dataset, tmp_path / "whole", "lora", *steps), 1, pools)
    run(settings(parts, dataset, tmp_path / "two", "lora", *steps, "sharding=zero3", "micro_batch_size=8"), 2, pools)
    folder = interrupted(tmp_path / "two", tmp_path / "four", 2)
    got = run(settings(parts, dataset, folder, "lora", *steps, "sharding=zero2", "micro_batch_size=4"), 4, pools)
    assert got.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert difference(got.weights, whole.weights, EVERY_ROW) < TOLERANCE
