"""The loss of every source of a dataset, beside the loss of the step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, alone, single_world
from small import Configure, make_config
from steps import begin, held_masters, run_steps

from llava_fsdp.config import LossConfig, LossKernel, Normalize
from llava_fsdp.data.batching.batch import SkippedSample, StepFacts
from llava_fsdp.model.loss import Labels, LossCollector, choose_loss
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.events.reporting.metrics import metrics_row
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.sums.source_sums import SourceSums

SEVERAL = ("data.path=null", "optim.clip=1", "micro_batch_size=3", "loss.chunk_tokens=7")


def sources(dataset: Path) -> list[str]:
    return [f"++data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "text", "captions")]


def run(world: World, parts: Path, dataset: Path, output: Path, *overrides: str) -> dict[str, Any]:
    """Two steps: rows of metrics, and the weights."""
    cfg = make_config(parts, dataset, output, "max_steps=2", *overrides)
    state = begin(world, cfg)
    rows = [metrics_row(result) for result in run_steps(state, cfg)]
    return {"rows": rows, "weights": held_masters(state)}


@pytest.fixture(scope="module")
def asked(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of three sources on one rank."""
    return run(single_world(), parts, dataset, tmp_path_factory.mktemp("asked"), *sources(dataset), *SEVERAL)


def test_the_parts_are_the_whole(asked: dict[str, Any]) -> None:
    """Weighted by their label tokens, sources add up to the step."""
    rows = asked["rows"]
    for row in rows:
        own = row["sources"]
        assert list(own) == ["mixed", "text", "captions"]
        assert sum(s["label_tokens"] for s in own.values()) == row["label_tokens"]
        whole = sum(s["loss"] * s["label_tokens"] for s in own.values() if s["label_tokens"]) / row["label_tokens"]
        assert whole == pytest.approx(row["loss"], rel=1e-6)
    assert len({s["loss"] for s in rows[0]["sources"].values()}) == 3
    json.dumps(rows)


def test_every_record_is_of_the_file_that_it_lies_in(configure: Configure, dataset: Path) -> None:
    cfg = configure(*sources(dataset), *SEVERAL)
    steps = build_state(cfg, alone(cfg)).loader.steps
    numbers = range(len(steps.records))
    found = [steps.sources[source] for source in steps.sources_of([*numbers])]
    assert found == [Path(steps.records[number].file).stem for number in numbers] and len(set(found)) == 3


def test_asking_changes_no_bit(
    asked: dict[str, Any], parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llava_fsdp.train.sums.source_sums.SourceSums.collector", lambda self: None)
    silent = run(single_world(), parts, dataset, tmp_path, *sources(dataset), *SEVERAL)
    assert [r["loss"] for r in asked["rows"]] == [r["loss"] for r in silent["rows"]]
    assert [r["grad_norm"] for r in asked["rows"]] == [r["grad_norm"] for r in silent["rows"]]
    assert all(torch.equal(asked["weights"][name], silent["weights"][name]) for name in asked["weights"])


@pytest.mark.ranks
def test_on_any_number_of_ranks(
    asked: dict[str, Any], parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    for found in pools[2].run(run, parts, dataset, tmp_path, *sources(dataset), *SEVERAL, "sharding=zero3"):
        for row, expected in zip(found["rows"], asked["rows"], strict=True):
            for name, own in row["sources"].items():
                assert own["label_tokens"] == expected["sources"][name]["label_tokens"]
                assert own["loss"] == pytest.approx(expected["sources"][name]["loss"], rel=1e-5)


def test_one_source_is_the_loss(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody asks for more."""
    monkeypatch.setattr(
        "llava_fsdp.train.sums.source_sums.LossCollector",
        lambda: pytest.fail("a single source needs no losses of labels"),
    )
    for row in run(single_world(), parts, dataset, tmp_path)["rows"]:
        assert row["sources"] == {"mixed": {"loss": row["loss"], "label_tokens": row["label_tokens"]}}


@pytest.mark.parametrize("labels", [{"a": 0}, {"a": 0, "b": 4}])
def test_a_source_without_labels_has_no_loss(labels: dict[str, int]) -> None:
    facts = StepFacts(step=0, label_tokens=4, tokens=9, samples=1, images=0, truncated=0, source_labels=labels)
    sums = SourceSums(facts, torch.device("cpu"))
    found = sums.means(0.0, sums.sum_over_ranks().tolist())
    assert found == {name: 0.0 if own else None for name, own in labels.items()}


def test_samples_that_turn_out_broken_are_in_no_source(configure: Configure, dataset: Path) -> None:
    cfg = configure(*SEVERAL, *sources(dataset), "data.bad_records=skip")
    steps = build_state(cfg, alone(cfg)).loader.steps
    number = steps.sampler.samples(0)[0]
    whole, lacks = steps.facts(0, steps.sampler.samples(0)), steps.facts(0, [number])
    assert sum(lacks.source_labels.values()) == lacks.label_tokens > 0
    rest = whole.without([SkippedSample(number, "r", "image_missing", "", lacks)])
    assert sum(rest.source_labels.values()) == rest.label_tokens == whole.label_tokens - lacks.label_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("differentiate", [True, False])
def test_kernels_tell_each_label(dtype: torch.dtype, differentiate: bool) -> None:
    """Of fp16 too, whose chunks run again in the backward pass: each label is told once."""
    torch.manual_seed(0)
    hidden = torch.randn(11, 8).to(dtype).requires_grad_(differentiate)
    weight = torch.randn(30, 8).to(dtype).requires_grad_(differentiate)
    ids = torch.randint(0, 30, (11,))
    loss = choose_loss(LossConfig(normalize=Normalize.step, chunk_tokens=4, kernel=LossKernel.chunked), dtype)
    collector = LossCollector()
    total = loss(hidden, weight, Labels(ids), collector=collector)
    if differentiate:
        total.backward()
    logits = torch.nn.functional.linear(hidden.detach(), weight.detach()).float()
    expected = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    assert torch.equal(torch.cat(collector.chunks), expected) and not torch.cat(collector.chunks).requires_grad
    assert torch.equal(total.detach(), loss(hidden, weight, Labels(ids)).detach())


def test_a_kernel_that_knows_the_sum_alone(parts: Path, dataset: Path, tmp_path: Path) -> None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    rows = run(single_world(), parts, dataset, tmp_path, *sources(dataset), *SEVERAL, "loss.kernel=torch")["rows"]
    assert all(s["loss"] is None and s["label_tokens"] >= 0 for r in rows for s in r["sources"].values())
    assert all(r["loss"] > 0 for r in rows)
