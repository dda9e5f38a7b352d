"""The first step on published weights is that of transformers' own classes on the same records: ids, labels, pixels,
loss, logits of every sample and gradients of every parameter, with packed rows and with padded ones."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from packed import Noted, build, gradients
from real_parts import PRETRAINED, Theirs, whole_model
from reference import TOLERANCE, open_steps
from small import make_config
from torch.nn import functional
from transformers import AutoConfig, LlavaForConditionalGeneration

from llava_fsdp.config import Config
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.model.weights.weight_names import ours

EVERYTHING = "model.train=[projector,language,vision]"
ROWS = {"packed": ["tokens_per_micro_batch=256"], "padded": ["pack=false"]}
NO_GRADIENT = ".k_proj.bias"
"""One number added to every key changes no attention weight: the true gradient is 0."""
CLOSE_GRADIENTS = 1e-4
"""Of the norm of a parameter's gradient: fp32 through 30 blocks."""
CLOSE_BF16 = 2e-2
"""bf16 has three digits. transformers rounds norms to it, and this project computes them in fp32."""


@dataclass
class Step:
    """A first step: its loss, logits of each sample (all its positions) and gradients by this project's names."""

    loss: float
    logits: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def step_of_transformers(model: LlavaForConditionalGeneration, samples: list[Theirs], rows: int) -> Step:
    """One sample at a time, without padding.

    Args:
        rows: size of the language model's own vocabulary.
    """
    count = sum(int((sample.labels[1:] != IGNORE).sum()) for sample in samples)
    total, logits = 0.0, {}
    for sample in samples:
        found = model(input_ids=sample.ids[None], pixel_values=sample.pixels).logits[0, :, :rows]
        loss = functional.cross_entropy(found[:-1], sample.labels[1:], reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
        logits[sample.id] = found.detach()
    found_gradients = {ours(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(total, logits, found_gradients)


def step_of_ours(cfg: Config) -> Step:
    state = build(cfg)
    noted = Noted(state.loader.steps)
    step = state.loader.steps.prepare(0)
    total, logits = 0.0, {}
    for micro, ids in zip(step.micro_batches, noted.ids, strict=True):
        on_device = state.loader.to_device(micro)
        everywhere = replace(on_device, label_positions=torch.arange(micro.input_ids.numel()))
        with torch.no_grad():
            found = state.model(**everywhere.inputs, return_logits=True)
        lengths = micro.lengths or [micro.input_ids.shape[1]] * len(ids)
        logits |= dict(zip(ids, found.split(lengths), strict=True))
        loss = micro.scale * state.model(**on_device.inputs)
        loss.backward()
        total += float(loss.detach())
    return Step(total, logits, gradients(state))


def vocabulary(parts: Path) -> int:
    return AutoConfig.from_pretrained(parts / "language").vocab_size


@pytest.fixture(scope="module")
def run(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory):
    """Configurations of the whole models, all of whose parameters train."""
    folder = tmp_path_factory.mktemp("run")
    return lambda *values: make_config(parts, dataset, folder, *PRETRAINED, EVERYTHING, *values)


@pytest.fixture(scope="module")
def wanted(run, parts: Path, theirs: dict[str, Theirs]) -> Step:
    """transformers' step on the records that the first step draws."""
    steps = open_steps(run())
    drawn = [theirs[steps.records[number].id] for number in steps.sampler.samples(0)]
    assert {0, 1, 2} == {0 if one.pixels is None else len(one.pixels) for one in drawn}, "records of every kind"
    return step_of_transformers(whole_model(run()).requires_grad_(True), drawn, vocabulary(parts))


def test_every_record_is_read_as_transformers_reads_it(run, parts: Path, theirs: dict[str, Theirs]) -> None:
    """Ids, labels, and pixels to the last digits of fp32."""
    steps = open_steps(run())
    image_id = vocabulary(parts)
    assert len(steps.records) == len(theirs) == 40
    for number in range(len(theirs)):
        sample, tiles = steps.read_row(number)
        expected = theirs[steps.records[number].id]
        ids = torch.from_numpy(sample.input_ids)
        assert torch.equal(torch.where(ids == IMAGE_ID, image_id, ids), expected.ids)
        assert torch.equal(torch.from_numpy(sample.labels), expected.labels)
        assert bool(tiles) == (expected.pixels is not None)
        if expected.pixels is not None:
            table = torch.from_numpy(steps.image_reader.preprocessor.pixel_table())
            pixels = normalize(torch.cat([torch.from_numpy(tile) for tile in tiles]), table)
            torch.testing.assert_close(pixels, expected.pixels, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_loss_logits_and_every_gradient_are_those_of_transformers(rows: str, run, wanted: Step) -> None:
    got = step_of_ours(run(*ROWS[rows]))
    assert got.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert got.logits.keys() == wanted.logits.keys()
    for name, logits in wanted.logits.items():
        torch.testing.assert_close(got.logits[name][: len(logits)], logits, rtol=1e-4, atol=1e-3)
    assert got.gradients.keys() == wanted.gradients.keys() and len(got.gradients) > 400
    for name, gradient in got.gradients.items():
        if not name.endswith(NO_GRADIENT):
            expected = wanted.gradients[name][: len(gradient)]
            assert (gradient - expected).norm() <= CLOSE_GRADIENTS * expected.norm(), name


@torch.no_grad()
def test_the_first_loss_in_bf16(short: Path, dataset: Path, theirs: dict[str, Theirs], tmp_path: Path) -> None:
    """Beside transformers in bf16, and in fp32. On the first 4 blocks: a CPU without bf16 instructions is slow."""
    state = build(make_config(short, dataset, tmp_path, *PRETRAINED, "precision=bf16", "global_batch_size=3"))
    noted = Noted(state.loader.steps)
    micros = map(state.loader.to_device, state.loader.steps.prepare(0).micro_batches)
    got = sum(float(micro.scale * state.model(**micro.inputs)) for micro in micros)
    drawn = [theirs[name] for row in noted.ids for name in row]
    model = whole_model(make_config(short, dataset, tmp_path, *PRETRAINED))
    count = sum(int((sample.labels[1:] != IGNORE).sum()) for sample in drawn)

    def of_transformers(dtype: torch.dtype) -> float:
        model.to(dtype)
        total = 0.0
        for sample in drawn:
            pixels = None if sample.pixels is None else sample.pixels.to(dtype)
            logits = model(input_ids=sample.ids[None], pixel_values=pixels).logits[0, :-1, : vocabulary(short)]
            total += float(functional.cross_entropy(logits.float(), sample.labels[1:], reduction="sum"))
        return total / count

    exact, rounded = of_transformers(torch.float32), of_transformers(torch.bfloat16)
    assert got == pytest.approx(rounded, rel=CLOSE_BF16) and got == pytest.approx(exact, rel=CLOSE_BF16)
    assert got != exact, "nothing was rounded"
