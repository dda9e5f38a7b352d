"""Training on pairs of a chosen and a rejected answer (stage=prefer, stage=prefer_lora)."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from mixtures import mixture_parts
from pair_data import IMAGE_TOKEN, PlainPairs, Weights, class_of, of_adapters, write_pairs
from small import command_config, make_config
from steps import begin
from transformers import LlavaForConditionalGeneration

from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.config import Config, EvaluateConfig, PairForm, PairReference, PrefConfig
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.evaluate.main import evaluate
from llava_fsdp.evaluate.pairs import evaluate_pairs
from llava_fsdp.evaluate.read_questions import records_by_turns
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.run_dir import HELD_OUT_PAIR_REFERENCE, PAIR_REFERENCE
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import run_micro_batches, train_step
from llava_fsdp.train.setup import pair_reference
from llava_fsdp.train.setup.pair_reference import StoredReference, open_references
from llava_fsdp.train.state import PairNumbers
from llava_fsdp.train.sums.expert_sums import ExpertSums
from llava_fsdp.train.sums.pair_step import PairStep
from llava_fsdp.train.sums.pair_sums import ALL, numbers_by_source
from llava_fsdp.train.sums.source_sums import SourceSums, sum_over_ranks

COMMON = (
    "data.template=v1", "model.checkpoint=null", "global_batch_size=7", "micro_batch_size=2", "loss.chunk_tokens=5",
    "optim.lr=3e-2", "max_steps=3",
)  # fmt: skip
ADAPTERS = ("stage=prefer_lora", "model.lora.r=5", "model.lora.alpha=10")
WHOLE = ("stage=prefer", "pref.reference=none", "optim.lr=3e-3")
FORMS = {
    "DPO": PrefConfig(beta=0.5),
    # With beta=0.5 margins come near log(9), where this loss is least: its gradient is then the small difference of
    # large numbers, and float32 cannot give it within 1e-5.
    "conservative DPO": PrefConfig(beta=0.1, label_smoothing=0.1),
    "robust DPO": PrefConfig(form=PairForm.robust, label_smoothing=0.2),
    "SLiC": PrefConfig(form=PairForm.hinge, beta=0.3),
    "IPO": PrefConfig(form=PairForm.ipo, per_token=True),
    "SimPO": PrefConfig(beta=2.5, gamma=1.0, per_token=True, reference=PairReference.none),
    "MPO": PrefConfig(weight=0.8, sft_weight=1.0),
}
"""Published losses by their names. MPO is without its third part (BCO)."""
Found = dict[str, tuple[float, Weights, dict[str, PairNumbers | None]]]


def full(value: Any) -> torch.Tensor:
    """A copy of the whole tensor of shards. Collective."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def last_step(world: World, cfg: Config, forms: dict[str, PrefConfig]) -> tuple[Weights, list[int], Found]:
    """Train all steps but the last. The weights then, the records of the last step, and by the name of a form the loss
    of this step, its gradients and what is reported of it."""
    state = begin(world, cfg)
    if cfg.pair_reference is PairReference.stored:
        open_references(state, cfg, False, lambda: None)
        state.model.train()
    *steps, step = agreed_steps(state.loader)
    for own in steps:
        train_step(state, own, cfg, 0.0)
    weights = {name: full(parameter) for name, parameter in state.model.named_parameters()}
    found: Found = {}
    for name, pref in forms.items():
        state.optimizer.zero_grad()
        device, names = state.loader.device, list(step.facts.source_labels)
        pairs = PairStep(replace(cfg, pref=pref), device, state.pair_reference)
        sums = SourceSums(step.facts, device), ExpertSums(None, step.facts, 0.0, device)
        loss = sum_over_ranks(run_micro_batches(state, step, 1.0, *sums, pairs))
        values = sum_over_ranks(pairs.sums.values).flatten().tolist()
        gradients = {n: full(p.grad) for n, p in state.model.named_parameters() if p.grad is not None}
        found[name] = float(loss), gradients, numbers_by_source(values, names)
    return weights, state.loader.steps.sampler.samples(step.facts.step), found


def first_weights(world: World, cfg: Config) -> Weights:
    """All weights as training begins."""
    return {name: full(parameter) for name, parameter in begin(world, cfg).model.named_parameters()}


def assert_plain(cfg: Config, weights: Weights, numbers: list[int], found: Found, forms: dict[str, PrefConfig]) -> None:
    """Losses and every gradient are those of transformers' class, within 1e-5 of the largest of their parameter."""
    steps = begin(single_world(), cfg).loader.steps
    model, reference = class_of(cfg, weights), class_of(cfg, first_weights(single_world(), cfg))
    for name, pref in forms.items():
        has_none = pref.reference is PairReference.none
        plain = PlainPairs(cfg, steps, model, None if has_none else reference)
        wanted, gradients = plain.step(numbers, pref)
        loss, own, reported = found[name]
        assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6), (
            name
        )  # SLiC's is the small difference of large numbers
        all_pairs = reported[ALL]
        assert all_pairs is not None and all_pairs.pairs == len(numbers)
        assert all_pairs.loss == pytest.approx(loss, rel=1e-5), name
        if cfg.model.lora.enabled:
            gradients = of_adapters(gradients, weights, cfg)
        assert set(own) <= set(gradients) and own
        for key, gradient in own.items():
            worst = (gradient - gradients[key]).abs().max() / (gradients[key].abs().max() + 1e-3)
            assert float(worst) < 1e-5, f"{name}: {key}"


HYBRID = "sharding=hybrid", "sharding.shard_size=2"
ONCE = "data.prompt_once=true"
LAYOUTS = [
    pytest.param(1, ("sharding=zero3",), id="1"),
    pytest.param(1, ("sharding=zero3", ONCE), id="1-once"),
    pytest.param(2, ("sharding=zero3",), id="2"),
    pytest.param(2, ("sharding=zero3", ONCE), id="2-once", marks=pytest.mark.slow),
    pytest.param(2, ("sharding=zero2",), id="2-zero2", marks=pytest.mark.slow),
    pytest.param(4, ("sharding=zero3",), id="4", marks=pytest.mark.slow),
    pytest.param(4, HYBRID, id="4-hybrid", marks=pytest.mark.slow),
    pytest.param(4, (*HYBRID, ONCE), id="4-hybrid-once", marks=pytest.mark.slow),
]
"""Number of ranks and their sharding. Fewer ranks than micro-batches of a step: gradients add up. With ONCE both
answers of a pair attend to one copy of their prompt."""


@pytest.fixture(scope="module")
def pairs(dataset: Path) -> Path:
    return write_pairs(dataset)


@pytest.mark.parametrize(("size", "keys"), LAYOUTS)
def test_losses_and_gradients_of_pairs_are_those_of_a_plain_loop(
    size: int,
    keys: tuple[str, ...],
    parts: Path,
    dataset: Path,
    pairs: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Adapters, with the model without them as the reference, and packed rows."""
    alone = f"data.path={pairs}", *ADAPTERS, *COMMON
    cfg = make_config(parts, dataset, tmp_path, *alone, *keys)
    forms = FORMS if size == 1 else {name: FORMS[name] for name in ("DPO", "IPO", "MPO")}
    run = [last_step(single_world(), cfg, forms)] if size == 1 else pools[size].run(last_step, cfg, forms)
    assert_plain(make_config(parts, dataset, tmp_path, *alone), *run[0], forms)


@pytest.mark.parametrize(("size", "keys"), LAYOUTS)
def test_a_model_that_trains_whole_has_a_stored_reference(
    size: int,
    keys: tuple[str, ...],
    parts: Path,
    dataset: Path,
    pairs: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    alone = f"data.path={pairs}", *COMMON, "stage=prefer", "optim.lr=3e-3", "micro_batch_size=1"
    cfg = make_config(parts, dataset, tmp_path, *alone, *keys)
    forms = {"DPO": replace(FORMS["DPO"], reference=PairReference.stored)}
    run = [last_step(single_world(), cfg, forms)] if size == 1 else pools[size].run(last_step, cfg, forms)
    assert_plain(make_config(parts, dataset, tmp_path, *alone), *run[0], forms)


@pytest.mark.parametrize(
    ("size", "keys"),
    [
        pytest.param(1, ("sharding=zero3",), id="1"),
        pytest.param(1, ("sharding=zero3", ONCE), id="1-once", marks=pytest.mark.slow),
        pytest.param(2, ("sharding=zero3", "parallel.expert=2"), id="2"),
        pytest.param(4, ("sharding=zero2", "parallel.expert=2"), id="4", marks=pytest.mark.slow),
    ],
)
def test_pairs_of_a_mixture_of_experts(
    size: int,
    keys: tuple[str, ...],
    parts: Path,
    dataset: Path,
    pairs: Path,
    pools: dict[int, RankPool],
    tmp_path: Path,
) -> None:
    """Both answers choose their experts, and ranks may share these."""
    mixture = mixture_parts("qwen3_moe", parts, tmp_path / "mixture", experts=4)
    alone = f"data.path={pairs}", *COMMON, "stage=prefer", "optim.lr=3e-3", "micro_batch_size=1", "model.balance_loss=0"
    cfg = make_config(mixture, dataset, tmp_path, *alone, *keys)
    forms = {"DPO": replace(FORMS["DPO"], reference=PairReference.stored), "SimPO": FORMS["SimPO"]}
    run = [last_step(single_world(), cfg, forms)] if size == 1 else pools[size].run(last_step, cfg, forms)
    assert_plain(make_config(mixture, dataset, tmp_path, *alone), *run[0], forms)


def test_a_stored_reference_continues_where_it_was_interrupted_and_refuses_other_weights(
    parts: Path, dataset: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(parts, dataset, tmp_path, f"data.path={pairs}", *COMMON, "stage=prefer")
    state, path = begin(single_world(), cfg), tmp_path / PAIR_REFERENCE

    def opened(resumed: bool = False, progress: Callable[[], None] = lambda: None) -> torch.Tensor:
        open_references(state, cfg, resumed, progress)
        assert state.pair_reference is not None
        return state.pair_reference

    whole = opened()
    monkeypatch.setattr(pair_reference, "SAVE_EVERY", 1)
    path.unlink()
    calls: list[int] = []

    def fail_at_third() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(progress=fail_at_third)
    begun = StoredReference.read(path)
    assert begun is not None and begun.done == 2 and int(begun.table.isnan().all(1).sum()) == 22 - 14
    calls.clear()
    found = opened(progress=partial(calls.append, 0))
    assert torch.equal(found, whole) and len(calls) == 2 and found.isfinite().all()
    calls.clear()
    replace(begun, batches="others").write(path)  # as after a change of global_batch_size
    found = opened(progress=partial(calls.append, 0))
    assert torch.equal(found, whole) and len(calls) == 4
    again = opened(resumed=True)
    assert torch.equal(again, whole), "a run that continues reads it"
    state.run = "another"
    with pytest.raises(CheckpointError):
        opened(resumed=True)
    state.start_digest = "other weights"
    with pytest.raises(CheckpointError):
        opened()


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_continues_at_its_next_pair_with_the_same_reference(
    parts: Path, dataset: Path, pairs: Path, tmp_path: Path
) -> None:
    keys = "stage=prefer", "optim.lr=3e-3", "optim.schedule=constant", "optim.warmup_ratio=0"
    common = f"data.path={pairs}", *COMMON, *keys
    train.train(make_config(parts, dataset, tmp_path / "whole", *common))
    for steps in (2, 3):
        train.train(make_config(parts, dataset, tmp_path / "parts", *common, f"max_steps={steps}"))
    whole, found = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    compared = "step", "loss", "grad_norm", "pairs", "accuracy", "margin", "reward_chosen", "logp_rejected"
    assert [[row[key] for key in compared] for row in found] == [[row[key] for key in compared] for row in whole]
    (tmp_path / "parts" / PAIR_REFERENCE).unlink()
    with pytest.raises(CheckpointError):
        train.train(make_config(parts, dataset, tmp_path / "parts", *common, "max_steps=4"))


@pytest.mark.parametrize(
    "keys",
    [("stage=prefer", "optim.lr=3e-3"), *(pytest.param(keys, marks=pytest.mark.slow) for keys in (WHOLE, ADAPTERS))],
)
def test_a_validation_finds_of_pairs_what_a_step_does(
    keys: tuple[str, ...], parts: Path, dataset: Path, pairs: Path, tmp_path: Path
) -> None:
    """With each kind of reference: after the first step it has the losses with which the second begins."""
    more = "global_batch_size=22", "max_steps=2", "val.every=1", f"val.path={pairs}", "val.answers=0"
    constant = "optim.schedule=constant", "optim.warmup_ratio=0"
    train.train(make_config(parts, dataset, tmp_path, f"data.path={pairs}", *COMMON, *keys, *more, *constant))
    (_, step), (row, _) = rows_of(tmp_path), rows_of(tmp_path, "validation.jsonl")
    assert row["pairs"] == step["pairs"] == 22 and step["margin"] != 0
    for key in ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected"):
        assert row[key] == pytest.approx(step[key], rel=1e-5, abs=1e-6), key
        assert row["sources"]["pairs"][key] == row[key]
        assert step["sources"]["pairs"][key] == pytest.approx(step[key], rel=1e-6, abs=1e-7)


def test_a_run_that_continues_needs_the_reference_of_its_held_out_pairs(
    parts: Path, dataset: Path, pairs: Path, tmp_path: Path
) -> None:
    """Of the same records: those of the first half are evenly spread over the file, and have a value."""
    other = write_pairs(dataset, 23, "other_pairs.json")
    common = f"data.path={pairs}", *COMMON, "stage=prefer", "val.answers=0", "val.every=1"
    held_out = f"val.path={pairs}", "val.limit=11"
    for steps in (1, 2):
        train.train(make_config(parts, dataset, tmp_path, *common, *held_out, f"max_steps={steps}"))
    assert [row["pairs"] for row in rows_of(tmp_path, "validation.jsonl")] == [11, 11]
    stored = StoredReference.read(tmp_path / HELD_OUT_PAIR_REFERENCE)
    assert stored is not None and int(stored.table.isnan().all(1).sum()) == 11
    with pytest.raises(CheckpointError):
        train.train(make_config(parts, dataset, tmp_path, *common, f"val.path={other}", "val.limit=11", "max_steps=3"))
    with pytest.raises(CheckpointError):
        train.train(make_config(parts, dataset, tmp_path, *common, held_out[0], "val.limit=12", "max_steps=3"))
    (tmp_path / HELD_OUT_PAIR_REFERENCE).unlink()
    with pytest.raises(CheckpointError):
        train.train(make_config(parts, dataset, tmp_path, *common, *held_out, "max_steps=3"))


def test_a_shared_prompt_is_in_a_row_once(parts: Path, dataset: Path, pairs: Path, tmp_path: Path) -> None:
    """The second answer of a pair begins with the last token of the prompt, which predicts its first one, and has no
    image. Both orders of answers are known from the samples without sharing."""
    common = f"data.path={pairs}", *COMMON, "stage=prefer", "pref.reference=none"
    plain, once = (
        begin(single_world(), make_config(parts, dataset, tmp_path / str(len(more)), *common, *more)).loader.steps
        for more in ((), (ONCE,))
    )
    for number in range(22):
        (whole, _), (shared, _) = plain.read_row(number), once.read_row(number)
        (chosen, rejected), (first, second) = whole.parts, shared.parts
        assert (
            rejected.input_ids[: shared.shared_prompt_tokens].tolist()
            == chosen.input_ids[: shared.shared_prompt_tokens].tolist()
        )
        assert first.input_ids.tolist() == chosen.input_ids.tolist()
        assert second.input_ids.tolist() == rejected.input_ids[shared.shared_prompt_tokens :].tolist()
        assert second.labels[0] == IGNORE and (second.labels[1:] != IGNORE).all() and not second.images
        assert shared.length == whole.length - shared.shared_prompt_tokens == once.records.lengths[number]
        assert shared.num_labels == whole.num_labels
        kinds = np.arange(len(rejected.input_ids), dtype=np.int8)
        assert replace(rejected, kinds=kinds).without_beginning(3).kinds.tolist() == kinds[3:].tolist()


def test_padded_pairs_of_a_whole_model_without_a_reference(
    parts: Path, dataset: Path, pairs: Path, tmp_path: Path
) -> None:
    cfg = make_config(parts, dataset, tmp_path, f"data.path={pairs}", *COMMON, *WHOLE, "pack=false")
    forms = {"SimPO": FORMS["SimPO"]}
    assert_plain(cfg, *last_step(single_world(), cfg, forms), forms)


@pytest.mark.slow
def test_the_export_of_adapters_has_what_pairs_have_taught(
    parts: Path, dataset: Path, pairs: Path, tmp_path: Path
) -> None:
    """transformers' class with the merged weights finds the log-probabilities of the last validation."""
    more = "val.every=3", f"val.path={pairs}", "val.answers=0", "export.enabled=true", "export.dtype=fp32"
    cfg = make_config(parts, dataset, tmp_path, f"data.path={pairs}", *COMMON, *ADAPTERS, *more)
    train.train(cfg)
    (row,) = rows_of(tmp_path, "validation.jsonl")
    assert row["margin"] != 0
    with torch.device("cpu"):
        model = LlavaForConditionalGeneration.from_pretrained(
            tmp_path / "export", dtype=torch.float64, attn_implementation="eager"
        )
    model.config.image_token_id = IMAGE_TOKEN
    steps = begin(single_world(), replace(cfg, output_dir=str(tmp_path / "other"))).loader.steps
    plain = PlainPairs(cfg, steps, model, None)
    sums = torch.zeros(2, dtype=torch.float64)
    for number in range(22):
        sample, pictures = plain.steps.read_row(number)
        with torch.no_grad():
            sums += torch.stack([plain.log_probabilities(model, own, pictures).sum() for own in sample.parts])
    assert (sums / 22).tolist() == pytest.approx([row["logp_chosen"], row["logp_rejected"]], rel=1e-5)
    found = evaluate_pairs(evaluation(tmp_path, f"data.path={pairs}", f"data.images={dataset / 'images'}"))
    assert found["pairs"] == 22
    for key in ("logp_chosen", "logp_rejected"):
        assert found[key] == pytest.approx(row[key], rel=1e-5)


def evaluation(model: Path, *more: str) -> EvaluateConfig:
    """Of pairs, seven at once, by the model in a run's folder."""
    words = f"model.checkpoint={model}", "task=pairs", "data=llava_json", "batch_size=7", "format=json"
    return command_config(EvaluateConfig, "evaluate", *words, *more)


def test_an_evaluation_of_pairs_compares_models_and_images(
    noise: Path, dataset: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model prefers nothing more than itself; two sources are two groups; blank images change the scores."""
    other = write_pairs(dataset, 5, "five_pairs.json")
    sources = f"+data.sources.a.path={pairs}", f"+data.sources.b.path={other}", f"data.images={dataset / 'images'}"
    evaluate(evaluation(noise, *sources, "blank=true"))
    alone = json.loads(capsys.readouterr().out)
    assert alone["pairs"] == 27 and alone["margin"] == pytest.approx(alone["logp_chosen"] - alone["logp_rejected"])
    of_sources = alone["groups"]["source"]
    assert {name: own["pairs"] for name, own in of_sources.items()} == {"a": 22, "b": 5}
    for key in ("accuracy", "margin", "logp_chosen"):
        assert alone[key] == pytest.approx((22 * of_sources["a"][key] + 5 * of_sources["b"][key]) / 27)
    evaluate(evaluation(noise, *sources, f"reference={noise}", "limit=6"))
    own = json.loads(capsys.readouterr().out)
    assert (own["pairs"], own["margin"], own["accuracy"]) == (6, 0, 0)
    model = open_assistant(str(noise))
    record = next(
        own for _, own in records_by_turns(evaluation(noise, f"data.path={pairs}", "data.pairs=true")) if own.images
    )
    files: list[ImageFile] = [dataset / "images" / name for name in record.images]
    seen, blank = (model.scores([(record, files)], blank) for blank in (False, True))
    assert seen[0].tokens == blank[0].tokens and seen[0].log_probability != blank[0].log_probability
    with pytest.raises(ConfigError):
        evaluation(noise, f"data.path={pairs}", "answers=a.jsonl")
