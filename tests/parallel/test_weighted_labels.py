"""Labels with weights: a step's loss is the sum of weight x loss, divided by the sum of the weights, over all ranks and
micro-batches; a weight of 0 is no label."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import CPU, RankPool, single_world
from reference import EXPORTED, Outcome, assert_near, outcome, plain_loop, train_on, vocabulary
from small import make_config, with_heads
from steps import begin, run_steps, traces
from test_build import FITS

from llava_fsdp.config import FULL_WEIGHT, Config, Normalize
from llava_fsdp.data.batching.batch import SkippedSample, Step
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train

BATCH = ("global_batch_size=13", "max_steps=2", "optim.warmup_ratio=0", "sharding=zero3")
FEW = [("packed", 2, ())]
MANY = [
    ("padded", 1, ("pack=false", "micro_batch_size=13")),
    ("two", 1, ("pack=false", "micro_batch_size=7")),
    ("padded", 2, ("pack=false", "micro_batch_size=7")),
    ("packed", 4, ()),
    ("rows", 2, ("tokens_per_micro_batch=256",)),
    ("context", 2, ("parallel.context=2", "tokens_per_micro_batch=256")),
    ("tensor", 2, ("parallel.tensor=2",)),
    ("pipeline", 2, ("parallel.pipeline=2",)),
]


def write(dataset: Path, folder: Path, name: str, **changes: Any) -> Path:
    """The records of the dataset. Every third answer has a weight, and others have weights of characters. No record is
    without labels. `changes`: other values of keys, or functions of the value that is there."""
    rows = json.loads((dataset / "mixed.json").read_text())
    answers = [
        (turn, len(row["conversations"])) for row in rows for turn in row["conversations"] if turn["from"] == "gpt"
    ]
    for number, (turn, turns) in enumerate(answers):
        if number % 3 == 0:
            turn["weight"] = (0.5, 0.0, 0.013)[number // 3 % 3] if turns > 2 else 0.013
        elif number % 4 == 1:
            middle = len(turn["value"]) // 2
            turn["train_detail"] = [{"begin_offset": 1, "end_offset": middle, "train": (0.25, False)[number // 4 % 2]}]
        for key, value in changes.items():
            turn.pop("train_detail", None)
            turn[key] = value(turn.get(key, 1)) if callable(value) else value
    path = folder / name
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with heads that two ranks can share."""
    return with_heads(parts, tmp_path_factory.mktemp("heads"), 4, 2)


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The records, and the outcome of a plain loop over them."""
    folder = tmp_path_factory.mktemp("weighted")
    records = f"data.path={write(dataset, folder, 'a.json')}"
    train.train(make_config(model, dataset, folder, records, *BATCH, "max_steps=1", "optim.lr=0", *EXPORTED))
    cfg = make_config(model, dataset, folder / "none", records, *BATCH)
    return folder / "a.json", plain_loop(cfg, folder / "export")


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "size", "keys"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in MANY)])
def test_training_is_that_of_a_plain_loop(
    name: str, size: int, keys: tuple[str, ...], reference: tuple[Path, Outcome], model: Path, dataset: Path,
    tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    records, wanted = reference
    cfg = make_config(model, dataset, tmp_path, f"data.path={records}", *BATCH, *keys, *EXPORTED)
    got = outcome(train_on(size, cfg, pools, timeout=600))
    assert_near(got, wanted, vocabulary(cfg), name)


def steps(cfg: Config, parts: Path) -> Steps:
    return build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps


def test_weights_of_0_and_1_are_absent_labels_to_the_bit(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The index has no column for them, a micro-batch no weights, and `ignore` learns all answers. Nothing depends on
    the order in which weights are summed."""
    words = f"data.path={tmp_path / 'a.json'}", *BATCH, "max_steps=1"
    write(dataset, tmp_path, "a.json", weight=lambda own: 0.0 if own == 0.5 else 1.0)
    found, other = (
        make_config(parts, dataset, tmp_path / how, *words, f"data.index={tmp_path / how}", f"data.weights={how}")
        for how in ("use", "ignore")
    )
    own, ignored = steps(found, parts), steps(other, parts)
    assert own.records.weights is None and own.records.labels.sum() < ignored.records.labels.sum()
    (micro,) = own[0].micro_batches
    assert "label_weights" not in micro.inputs and micro.scale == 1 / own[0].facts.label_tokens
    (losses, norms, masters), (others, _, _) = traces(single_world(), [found, other])
    assert losses != others
    rows = json.loads((tmp_path / "a.json").read_text())
    for turn in (turn for row in rows for turn in row["conversations"]):
        if turn.pop("weight", 1) == 0:
            turn["loss"] = False
    (tmp_path / "b.json").write_text(json.dumps(rows))
    plain = make_config(parts, dataset, tmp_path / "three", *words, f"data.path={tmp_path / 'b.json'}")
    ((again, same, weights),) = traces(single_world(), [plain])
    assert (again, same) == (losses, norms) and all(torch.equal(weights[name], masters[name]) for name in masters)


def test_sums_of_weights_are_whole_numbers(
    reference: tuple[Path, Outcome], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = make_config(parts, dataset, tmp_path, f"data.path={reference[0]}", *BATCH)
    own = steps(cfg, parts)
    assert own.records.weights is not None and own.records.weights.dtype == np.int64
    singles: list[int] = []
    for number in own.sampler.samples(0):
        sample, _ = own.read_row(number)
        weights = np.full(len(sample.labels), FULL_WEIGHT) if sample.weights is None else sample.weights
        singles += weights[1:][sample.labels[1:] != IGNORE].tolist()
    facts = own.facts(0, own.sampler.samples(0))
    assert (
        facts.weight == sum(singles) == sum(reversed(singles)) and 0 < facts.weight < facts.label_tokens * FULL_WEIGHT
    )
    assert facts.scale == FULL_WEIGHT / facts.weight


def test_sources_and_validations_have_the_same_mean(
    reference: tuple[Path, Outcome], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Of two sources, the losses by source and their weights give the loss of the step. A validation of the same
    records has this loss, too."""
    write(dataset, tmp_path, "b.json", weight=0.25)
    count = len(json.loads(reference[0].read_text()))
    sources = [f"+data.sources.a.path={reference[0]}", f"+data.sources.b.path={tmp_path / 'b.json'}", "data.path=null"]
    held_out = ["val.every=1", "val.answers=0", f"+val.sources.a.path={reference[0]}",
                f"+val.sources.b.path={tmp_path / 'b.json'}"]  # fmt: skip
    words = [
        *sources,
        f"data.index={tmp_path / 'index'}",
        f"global_batch_size={2 * count}",
        "max_steps=1",
        "optim.lr=0",
    ]
    cfg = make_config(parts, dataset, tmp_path / "run", *words, *held_out)
    state = begin(single_world(), cfg)
    ((result,), facts) = run_steps(state, cfg), state.loader.steps.facts(0, list(range(2 * count)))
    assert facts.source_weights is not None and facts.source_weights["b"] * 4 == facts.source_labels["b"] * FULL_WEIGHT
    found = sum((result.source_losses[name] or 0) * weight for name, weight in facts.source_weights.items())
    assert found / facts.weight == pytest.approx(result.loss, rel=1e-5)
    train.train(cfg)
    (row,) = map(json.loads, (tmp_path / "run" / "validation.jsonl").read_text().splitlines())
    assert row["loss"] == pytest.approx(result.loss, rel=1e-5) and row["label_tokens"] == facts.label_tokens
    assert {n: own["loss"] for n, own in row["sources"].items()} == pytest.approx(result.source_losses, rel=1e-5)


def test_a_kernel_without_losses_of_single_labels_is_refused(
    reference: tuple[Path, Outcome], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    words = f"data.path={reference[0]}", "loss.kernel=torch"
    with pytest.raises(ConfigError) as caught:
        steps(make_config(parts, dataset, tmp_path, *words), parts)
    assert "loss.kernel=torch" in str(caught.value)
    assert steps(make_config(parts, dataset, tmp_path, *words, "data.weights=ignore"), parts)


def test_a_mean_of_means_and_a_step_without_a_sample_have_their_weights(
    reference: tuple[Path, Outcome], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """With `loss.normalize=micro_batch` each micro-batch divides by its own weights."""
    words = f"data.path={reference[0]}", *BATCH, "pack=false", "micro_batch_size=5"
    own = steps(make_config(parts, dataset, tmp_path, *words, "loss.normalize=micro_batch"), parts)
    micros = own[0].micro_batches
    assert len(micros) == 3 and any(len(micro.label_weights) for micro in micros)
    for micro in micros:
        weights = micro.label_weights if len(micro.label_weights) else torch.full_like(micro.label_ids, FULL_WEIGHT)
        assert micro.scale == FULL_WEIGHT / (int(weights.sum()) * 3)
    numbers = own.sampler.samples(0)
    facts, out = own.facts(0, numbers), max(numbers, key=lambda n: int(own.records.labels[n]))
    left = Step(facts, micros).without([SkippedSample(out, "", "", "", own.facts(0, [out]))], Normalize.step)
    assert own.records.weights is not None and left.facts.weight == facts.weight - own.records.weights[out]
    assert {micro.scale for micro in left.micro_batches} == {FULL_WEIGHT / left.facts.weight}
