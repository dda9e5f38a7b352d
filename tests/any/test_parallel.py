"""Whole models with compiled blocks, shared experts, divided layers and shared rows, against a plain loop over
transformers' own class, one sample at a time, in one process."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from loaders import agreed_steps
from reference import train_on, trained
from test_matrix import STEPS, TOLERANCE, assert_equal, settings, trained_on_a_rank
from tiers import any_but
from transformers import AutoModelForImageTextToText
from whole_loop import OwnRun, PlainRun, begun, difference, plain_run, run_alone
from whole_models import WholeModel

from llava_fsdp.parallel.compile import Compilations
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.loop import train_step

Whole = Callable[[str], WholeModel]
ODD = 263
"""Tokens of a rank's part of a row: rows have several samples, and few end where a rank's part ends."""


def together(context: int = 1, **kinds: int) -> list[str]:
    return [
        "sharding=zero3",
        f"parallel.context={context}",
        f"tokens_per_micro_batch={ODD}",
        f"data.max_length={ODD}",
        *(f"parallel.{kind}={number}" for kind, number in kinds.items()),
    ]


LAYOUTS = [
    ("gemma3", 2, together(context=2)),
    *((name, 2, together(context=2)) for name in ("idefics3", "qwen2_5_vl", "qwen3_vl", "mistral3", "kimi_k25")),
    ("qwen2_5_vl", 4, [*together(context=2), "sharding=hybrid", "sharding.shard_size=2"]),
    ("gemma3", 4, [*together(context=2), "activation_checkpointing=full"]),
    *((name, 2, together(tensor=2)) for name in ("gemma3", "idefics3", "qwen2_5_vl", "paddleocr_vl", "glm4v")),
    ("idefics3", 4, [*together(tensor=2), "sharding=zero2", "activation_checkpointing=full"]),
    *((name, 2, together(expert=2)) for name in ("aria", "qwen3_vl_moe", "glm4v_moe", "kimi_k25")),
    ("aria", 4, [*together(expert=2, tensor=2), "sharding=zero2"]),
    ("qwen3_vl_moe", 4, [*together(expert=2, context=2), "activation_checkpointing=full"]),
]
"""A family, a number of ranks, and how they divide the work."""
EXPERTS = ("aria", "qwen3_vl_moe", "glm4v_moe", "kimi_k25")
Runs = Callable[[str], tuple[OwnRun, PlainRun]]


@pytest.fixture(scope="module")
def runs(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run of a family in one process, and the plain loop: made when first asked for."""

    @cache
    def run(name: str) -> tuple[OwnRun, PlainRun]:
        model = whole(name)
        cfg = settings(model, "full", tmp_path_factory.mktemp("alone"))
        alone = run_alone(cfg)
        return alone, plain_run(model, cfg, alone, "eight")

    return run


@pytest.mark.any
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "size", "layout"), LAYOUTS, ids=lambda value: "" if isinstance(value, list) else None)
def test_ranks_that_divide_a_model_train_as_a_plain_loop_does(
    name: str, size: int, layout: list[str], whole: Whole, runs: Runs, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    cfg = settings(whole(name), "full", tmp_path, *layout)
    losses, weights = pools[size].run(trained_on_a_rank, cfg, timeout=600)[0]
    assert_equal(losses, weights, runs(name)[1])


WAYS = {
    "gemma3": (together(context=2), together(tensor=2)),
    "qwen2_5_vl": (together(tensor=2), together(context=2)),
    "aria": (together(expert=2), together(context=2)),
}


@pytest.mark.any
@pytest.mark.ranks
@pytest.mark.parametrize("name", WAYS)
def test_a_stopped_run_continues_in_another_layout_and_is_exported(
    name: str, whole: Whole, runs: Runs, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    first, second = WAYS[name]
    exported = "export.enabled=true", "export.dtype=fp32"
    for layout in ([*first, "max_steps=2"], [*second, *exported]):
        train_on(2, settings(whole(name), "full", tmp_path, *layout), pools, timeout=600)
    found, expected = trained(tmp_path), runs(name)[1]
    assert_equal(found.losses, found.weights, expected)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32)
    weights = {name: own for name, own in model.named_parameters() if name in expected.weights}
    assert difference(weights, expected.weights, expected.without_gradient) < TOLERANCE


@pytest.mark.any
@pytest.mark.ranks
@pytest.mark.parametrize("layout", [together(context=2), together(tensor=2)], ids=["context", "tensor"])
def test_adapters_drop_the_values_that_one_process_drops(
    layout: list[str], whole: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    more = "model.train=[projector,language]", "model.lora.dropout=0.3"
    model = whole("qwen2_5_vl")
    alone = run_alone(settings(model, "lora", tmp_path / "alone", *more))
    without = run_alone(settings(model, "lora", tmp_path / "without", *more[:1]))
    losses, weights = pools[2].run(trained_on_a_rank, settings(model, "lora", tmp_path, *more, *layout))[0]
    assert alone.losses != pytest.approx(without.losses, rel=1e-3)
    assert losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert difference(weights, alone.weights, ()) < TOLERANCE


NUMBERS = ("loss", "grad_norm", "balance_loss", "expert_load_max", "experts_idle")


def numbers_of(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[row[key] for key in NUMBERS] for row in rows]


@pytest.mark.any
@pytest.mark.ranks
@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_balance_experts_as_one_process_does(
    name: str, whole: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """The blank sample of a rank without images does not count."""
    found = {}
    for size, layout in ((1, ["pack=false"]), (2, together(expert=2))):
        cfg = settings(whole(name), "full", tmp_path / f"{size}", *layout, "model.balance_loss=0.5")
        found[size] = numbers_of(train_on(size, cfg, pools, timeout=600))
    plain = settings(whole(name), "full", tmp_path / "without", "pack=false")
    without = numbers_of(train_on(1, plain, pools))
    assert without[0][0] == pytest.approx(found[1][0][0]) and without[1][0] != pytest.approx(found[1][1][0], rel=1e-4)
    for own, alone in zip(found[2], found[1], strict=True):
        assert own == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.parametrize("name", any_but([], ["gemma3", "qwen2_5_vl", "qwen3_vl", "aria", "idefics3"]))
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_compute_the_same_and_compile_nothing_anew(
    name: str, mode: str, whole: Whole, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one to four samples of many lengths. The graphs run as they are, without Inductor."""
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    monkeypatch.setattr(Compilations.__init__, "__defaults__", (aot_eager,))
    more = "compile=true", f"activation_checkpointing={mode}", "micro_batch_size=3"
    cfg = settings(whole(name), "full", tmp_path, *more)
    state = begun(World(0, 1, 0, 1, torch.device("cpu")), cfg)
    assert state.compilations is not None
    losses, graphs = [], []
    for step in agreed_steps(state.loader):
        losses.append(train_step(state, step, cfg, 0.0).loss)
        graphs.append(state.compilations.total)
    assert graphs[0] > 0 and graphs == [graphs[0]] * STEPS
    assert losses == pytest.approx(runs(name)[1].losses, rel=TOLERANCE)
