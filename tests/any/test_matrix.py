"""Trainings of each family of several steps, over the rows of the table of ZeRO strategies and on several numbers of
ranks, against a plain loop over transformers' own class."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from reference import train_on, trained
from steps import run_steps
from tiers import any_but, slow_after
from transformers import AutoModelForImageTextToText, GenerationConfig
from whole_loop import OwnRun, PlainRun, begun, difference, plain_run, run_alone, weights_of
from whole_models import IGNORE, WHOLE, Example, WholeModel, example_of

from llava_fsdp.config import Config
from llava_fsdp.model.whole.answers import Generation
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.final_export import export
from llava_fsdp.train.main import settle_auto

Whole = Callable[[str], WholeModel]
TOLERANCE = 1e-5
STEPS, LENGTH = 5, 6
"""Numbers of steps of a training, and of generated tokens."""
SIZES = [{"zero2": 2, "zero3": 4, "hybrid": 4}, {"zero2": 4, "zero3": 2, "hybrid": 4}]
"""{strategy: its number of ranks}, one of these for each family in turn."""
CONTINUED = [
    [("zero2", 2), ("hybrid", 4)],
    [("zero3", 4), ("zero2", 2)],
    [("zero3", 2), ("hybrid", 4)],
    [("zero2", 4), ("zero3", 2)],
    [("hybrid", 4), ("zero3", 1)],
]
"""Strategy and number of ranks of a run that is stopped, and of the one that continues it; one of these lists for each
family in turn."""
ADAM = ["optim.lr=1e-3", "optim.projector_lr=null", "optim.vision_lr=null", "optim.eps=1e-4"]
"""With a smaller epsilon, rounding errors decide the steps of weights whose gradients are nearly 0."""
ADAPTERS = [
    "model.train=[vision,projector,language]", "model.lora.r=4", "model.lora.alpha=8", "model.lora.dropout=0",
]  # fmt: skip
KINDS = {
    "full": ("finetune_task", []),
    "lora": ("finetune_task_lora", ADAPTERS),
    "qlora": ("finetune_task_qlora", ADAPTERS),
}


def settings(model: WholeModel, kind: str, to: Path, *more: str) -> Config:
    """Steps of 4 of 8 records."""
    stage, own = KINDS[kind]
    common = (
        *ADAM,
        "data.template=auto",
        "global_batch_size=4",
        "optim.schedule=constant",
        "optim.warmup_ratio=0",
        f"max_steps={STEPS}",
    )
    return model.config(to, *own, *common, *more, records="eight", stage=stage)


def on_ranks(strategy: str, size: int) -> list[str]:
    shards = 2 if strategy == "hybrid" else "null"
    return [f"sharding={strategy}", f"sharding.shard_size={shards}", f"micro_batch_size={4 // size}"]


Runs = Callable[[str, str], tuple[OwnRun, PlainRun]]


@pytest.fixture(scope="module")
def runs(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run of a family and a kind of training in one process, and the plain loop: made when first asked for."""

    @cache
    def run(name: str, kind: str) -> tuple[OwnRun, PlainRun]:
        model = whole(name)
        cfg = settings(model, kind, tmp_path_factory.mktemp("alone"))
        alone = run_alone(cfg)
        return alone, plain_run(model, cfg, alone, "eight")

    return run


def assert_equal(losses: list[float], weights: dict[str, torch.Tensor], expected: PlainRun) -> None:
    assert losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert difference(weights, expected.weights, expected.without_gradient) < TOLERANCE


@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
@pytest.mark.parametrize("kind", slow_after(2, ["full", "qlora", "lora"]))
def test_steps_of_adamw_are_those_of_a_plain_loop(name: str, kind: str, runs: Runs) -> None:
    alone, expected = runs(name, kind)
    assert difference(alone.first, expected.weights, ()) > 100 * TOLERANCE, "nothing was trained"
    assert bool(alone.quantized) is (kind == "qlora")
    assert_equal(alone.losses, alone.weights, expected)


def trained_on_a_rank(world: World, cfg: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and on the first rank the weights that train."""
    state = begun(world, cfg)
    losses = [result.loss for result in run_steps(state, cfg)]
    found = weights_of(state)
    return losses, found if world.is_first else {}


@pytest.mark.ranks
@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
@pytest.mark.parametrize("strategy", slow_after(2, SIZES[0]))
def test_ranks_train_as_a_plain_loop_does(
    name: str, strategy: str, whole: Whole, runs: Runs, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    _, expected = runs(name, "full")
    size = SIZES[WHOLE.index(name) % len(SIZES)][strategy]
    cfg = settings(whole(name), "full", tmp_path, *on_ranks(strategy, size))
    losses, weights = pools[size].run(trained_on_a_rank, cfg)[0]
    assert_equal(losses, weights, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("name", any_but([], WHOLE))
def test_a_stopped_run_continues_on_another_number_of_ranks(
    name: str, whole: Whole, runs: Runs, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """All weights, adapters, and adapters over a quantized base, for one family after the other."""
    kind = [*KINDS][WHOLE.index(name) % 3]
    for (strategy, size), steps in zip(CONTINUED[WHOLE.index(name) % len(CONTINUED)], (2, STEPS), strict=True):
        cfg = settings(whole(name), kind, tmp_path, *on_ranks(strategy, size), f"max_steps={steps}")
        train_on(size, cfg, pools)
    found = trained(tmp_path)
    assert_equal(found.losses, found.weights, runs(name, kind)[1])


@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
def test_an_export_is_the_trained_model_for_transformers(name: str, whole: Whole, tmp_path: Path) -> None:
    """All weights or adapters, for one family after the other: logits of all labels, and greedy answers."""
    model, kind = whole(name), [*KINDS][WHOLE.index(name) % 2]
    rows = ("pack=false", "micro_batch_size=1", "global_batch_size=8", "max_steps=2", "export.dtype=fp32")
    cfg = settle_auto(settings(model, kind, tmp_path, *rows, "export.enabled=true"), single_world())
    state = begun(single_world(), cfg)
    run_steps(state, cfg)
    exported: Any = AutoModelForImageTextToText.from_pretrained(export(state, cfg, True), dtype=torch.float32)
    exported.generation_config = GenerationConfig()
    state.model.eval()
    examples = [example_of(model, record) for record in model.records("eight")]
    (step, *_) = agreed_steps(state.loader, 0)
    seen = set()
    # In float32 the rounding of a class may be larger than the bound: 2e-4 with linear attention. The grouped product
    # of experts takes no float64.
    dtype = torch.float32 if any("experts" in key for key, _ in exported.named_parameters()) else torch.float64
    state.model.to(dtype)
    state.model.compute_dtype = dtype
    exported.to(dtype)
    for micro in step.micro_batches:
        inputs = cast(state.loader.to_device(micro).inputs, dtype)
        row = inputs["input_ids"][0]  # a blank image in the second row may be longer
        (number,) = (n for n, own in enumerate(examples) if torch.equal(row[: len(own.ids)], own.ids))
        with torch.no_grad():
            own = state.model(**inputs, return_logits=True)
            theirs = exported(**cast(examples[number].inputs, dtype), use_cache=False).logits
            theirs = theirs[0, inputs["label_positions"]]
        assert float((own - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())
        seen.add(number)
    assert len(step.micro_batches) == len(seen) == len(examples) == 8
    state.model.float()
    state.model.compute_dtype = torch.float32
    exported.float()
    for number in (0, 1, 3):  # all images are in the first question
        example = examples[number]
        assert greedy_tokens(state.model, example) == tokens_of_class(exported, example)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Inputs of a forward pass with their floating point values in another dtype."""
    if isinstance(inputs, dict):
        return {name: cast(value, dtype) for name, value in inputs.items()}
    return inputs.to(dtype) if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() else inputs


def greedy_tokens(model: Any, example: Example) -> list[int]:
    """The tokens that a model in training generates after the beginning of an example up to its first label."""
    prompt, images = prompt_of(example)
    tokens: list[int] = []

    def push(chosen: torch.Tensor) -> bool:
        tokens.append(int(chosen))
        return len(tokens) < LENGTH

    generation = Generation(torch.ones_like(prompt, dtype=torch.bool), LENGTH, lambda logits: logits.argmax(-1), push)
    with torch.no_grad():
        model(prompt, None, images, torch.zeros_like(prompt), prompt.new_zeros(0), generation=generation)
    return tokens


def tokens_of_class(exported: Any, example: Example) -> list[int]:
    prompt, images = prompt_of(example)
    made = exported.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH, do_sample=False, **images
    )
    return made[0, prompt.shape[1] :].tolist()


def prompt_of(example: Example) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The token ids up to an example's first label, and the other inputs, of which the class reads the images."""
    length, first = len(example.ids), int((example.labels != IGNORE).nonzero()[0])
    others = {name: value for name, value in example.inputs.items() if name not in ("input_ids", "attention_mask")}
    cut = {name: value[:, :first] if value.shape == (1, length) else value for name, value in others.items()}
    return example.inputs["input_ids"][:, :first], cut
