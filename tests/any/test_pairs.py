"""Whole models of transformers learn from pairs of answers: losses and gradients are those of the class alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from harness import RankPool, single_world
from loaders import agreed_steps
from pair_data import pair_loss
from PIL import Image
from small import command_config
from steps import begin
from torch.distributed.tensor import DTensor
from trl import DPOConfig, DPOTrainer
from whole_models import IGNORE, WholeModel, assert_same_gradients, example_of, named

from llava_fsdp.config import Config, EvaluateConfig, PairForm, PairReference, PrefConfig
from llava_fsdp.evaluate.pairs import evaluate_pairs
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.loop import run_micro_batches
from llava_fsdp.train.main import settle_auto
from llava_fsdp.train.setup.pair_reference import open_references
from llava_fsdp.train.sums.expert_sums import ExpertSums
from llava_fsdp.train.sums.pair_step import PairStep
from llava_fsdp.train.sums.source_sums import SourceSums, sum_over_ranks

Whole = Callable[[str], WholeModel]
WORSE = "the lazy dog sleeps here"


def write_pairs(model: WholeModel) -> list[dict[str, Any]]:
    """The few records without later questions, with another answer as the rejected one; the records as they were."""
    records, pairs = [], []
    for record in model.records("few"):
        question, answer = record["conversations"][:2]
        shown = {"image": record["image"][: question["value"].count("<image>")]} if "image" in record else {}
        own = {"id": record["id"], **shown, "conversations": [question]}
        pairs.append(own | {"chosen": answer["value"], "rejected": WORSE})
        records.append(own | {"conversations": [question, answer]})
    (model.images.parent / "pairs.json").write_text(json.dumps(pairs))
    return records


def gradients_of(world: World, cfg: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first step and its gradients, by the class's names."""
    cfg = settle_auto(cfg, world)
    state = begin(world, cfg)
    (step, *_) = agreed_steps(state.loader)
    sums = SourceSums(step.facts, state.loader.device), ExpertSums(state.routers, step.facts, 0.0, state.loader.device)
    loss = sum_over_ranks(run_micro_batches(state, step, 1.0, *sums, PairStep(cfg, state.loader.device)))
    found = {named(name): p.grad for name, p in state.model.named_parameters() if p.grad is not None}
    return float(loss), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def log_probabilities(peer: Any, model: WholeModel, record: dict[str, Any]) -> torch.Tensor:
    """Of the tokens of the answer of a record."""
    example = example_of(model, record)
    logits = peer(**example.inputs, use_cache=False).logits[0]
    at = (example.labels[1:] != IGNORE).nonzero()[:, 0]
    return logits[at].float().log_softmax(-1)[torch.arange(len(at)), example.labels[1:][at]]


ONCE = "data.prompt_once=true"
NEXT = (
    "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad",
    "data.grid_pinpoints=[[40,20],[20,40],[40,40]]",
)  # fmt: skip


def plain_pairs(
    model: WholeModel, records: list[dict[str, Any]], pref: PrefConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of all pairs without a reference, and its gradients, by transformers' class, one answer at a time."""
    peer, total = model.peer(), 0.0
    for record in records:
        worse = record | {"conversations": [record["conversations"][0], {"from": "gpt", "value": WORSE}]}
        mine = [log_probabilities(peer, model, own) for own in (record, worse)]
        loss = pair_loss(mine, [torch.zeros(1)] * 2, pref) / len(records)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("gemma3", (), id="gemma3"),
        pytest.param("qwen2_5_vl", (), id="qwen2_5_vl"),
        pytest.param("qwen2_5_vl", (ONCE,), id="qwen2_5_vl-once"),
        pytest.param("paddleocr_vl", (ONCE,), id="paddleocr_vl-once"),  # positions by rows and columns
        pytest.param("aya_vision", (ONCE,), id="aya_vision-once", marks=pytest.mark.slow),
    ],
)
def test_pairs_are_those_of_the_class(
    name: str, more: tuple[str, ...], size: int, whole: Whole, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    model = whole(name)
    records = write_pairs(model)
    pref = PrefConfig(beta=2.0, gamma=0.5, sft_weight=0.3, per_token=True)
    keys = "pref.beta=2.0", "pref.gamma=0.5", "pref.sft_weight=0.3", "pref.per_token=true", "pref.reference=none"
    cfg = model.config(tmp_path, *keys, *more, records="pairs", stage="prefer")
    cfg = replace(cfg, micro_batch_size=2)
    run = gradients_of(single_world(), cfg) if size == 1 else pools[size].run(gradients_of, cfg)[0]
    total, gradients = plain_pairs(model, records, pref)
    assert run[0] == pytest.approx(total, rel=1e-5)
    assert_same_gradients(run[1], gradients)


@pytest.mark.parametrize("name", ["paddleocr_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_an_evaluation_of_pairs_has_the_log_probabilities_of_the_class(name: str, whole: Whole) -> None:
    model = whole(name)
    records = write_pairs(model)
    words = f"model.checkpoint={model.folder}", f"data.path={model.images.parent / 'pairs.json'}", "batch_size=3"
    more = "task=pairs", "data=llava_json", f"data.images={model.images}"
    found = evaluate_pairs(command_config(EvaluateConfig, "evaluate", *words, *more))
    peer, sums = model.peer(), torch.zeros(2)
    for record in records:
        worse = record | {"conversations": [record["conversations"][0], {"from": "gpt", "value": WORSE}]}
        with torch.no_grad():
            sums += torch.stack([log_probabilities(peer, model, own).sum() for own in (record, worse)])
    wanted = (sums / len(records)).tolist()
    assert [found["logp_chosen"], found["logp_rejected"]] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (ONCE,)], ids=["", "once"])
def test_pairs_of_tiles_are_those_of_the_class(more: tuple[str, ...], whole: Whole, tmp_path: Path) -> None:
    """LLaVA-NeXT, whose images are several tiles, on this project's own path."""
    model = whole("llava_next")
    path = model.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_seq_length": 16}))  # as published folders have it
    records = write_pairs(model)
    pref = PrefConfig(beta=0.5, per_token=True)
    keys = "pref.beta=0.5", "pref.per_token=true", "pref.reference=none", "data.template=chat_template", *NEXT
    cfg = model.config(tmp_path, *keys, *more, records="pairs", stage="prefer")
    loss, found = gradients_of(single_world(), replace(cfg, micro_batch_size=2))
    wanted, gradients = plain_pairs(model, records, pref)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert_same_gradients(found, {ours(name): own for name, own in gradients.items()})


def test_one_prompt_for_both_answers_needs_causal_attention(whole: Whole, tmp_path: Path) -> None:
    """Gemma 3's tokens of an image attend to each other."""
    model = whole("gemma3")
    write_pairs(model)
    with pytest.raises(ConfigError, match="prompt_once"):
        gradients_of(single_world(), model.config(tmp_path, ONCE, records="pairs", stage="prefer"))


TRL_FORMS = {
    "sigmoid": (PrefConfig(beta=0.3, reference=PairReference.stored), {}),
    "robust": (
        PrefConfig(form=PairForm.robust, beta=0.3, label_smoothing=0.1, reference=PairReference.stored),
        {"label_smoothing": 0.1},
    ),
    "hinge": (PrefConfig(form=PairForm.hinge, beta=0.3, reference=PairReference.stored), {}),
    "ipo": (PrefConfig(form=PairForm.ipo, beta=0.3, per_token=True, reference=PairReference.stored), {}),
    "sigmoid_norm": (PrefConfig(beta=0.3, per_token=True, reference=PairReference.stored), {}),
}
"""What trl's `loss_type` and other arguments are here."""


def trl_row(model: WholeModel, record: dict[str, Any]) -> dict[str, Any]:
    """A record of `write_pairs` in trl's form, whose images stand before the text."""
    prompt, chosen = record["conversations"]
    messages = {"prompt": ("user", prompt["value"].removeprefix("<image>\n")), "chosen": ("assistant", chosen["value"])}
    messages["rejected"] = "assistant", WORSE
    row = {key: [{"role": role, "content": text}] for key, (role, text) in messages.items()}
    return row | {"images": [Image.open(model.images / name) for name in record["image"]]}


def up_to(end: int, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """A mask of answers, int64 [rows, length], without what follows the first token `end` of each."""
    is_end = (ids == end) * answers
    return answers * (is_end.cumsum(1) == is_end)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_pairs_are_those_of_trl(name: str, whole: Whole, tmp_path: Path) -> None:
    """Its DPOTrainer, with its own data and its own processing of them, and a copy of the first weights as reference.
    The weights have been moved, so that margins are not 0."""
    model = whole(name)
    records = [record for record in write_pairs(model) if "image" in record and len(record["image"]) == 1]
    records = [record for record in records if record["conversations"][0]["value"].startswith("<image>\n")]
    records += [record | {"id": "again", "image": ["3.png"]} for record in records]
    path = model.images.parent / "pairs.json"
    answers = [{"chosen": r["conversations"][1]["value"], "rejected": WORSE} for r in records]
    own = [r | {"conversations": r["conversations"][:1]} | a for r, a in zip(records, answers, strict=True)]
    path.write_text(json.dumps(own))
    cfg = settle_auto(model.config(tmp_path, records="pairs", stage="prefer"), single_world())
    state = begin(single_world(), cfg)
    open_references(state, cfg, False, lambda: None)
    state.model.train()
    (step, *_) = agreed_steps(state.loader)
    peer, dice = model.peer(), torch.Generator().manual_seed(7)
    moved = {n: p + 0.01 * torch.randn(p.shape, generator=dice) for n, p in peer.named_parameters()}
    with torch.no_grad():
        for parameters in (state.model.named_parameters(), peer.named_parameters()):
            for key, parameter in parameters:
                parameter.copy_(moved[named(key)])
    for form, (pref, more) in TRL_FORMS.items():
        state.optimizer.zero_grad()
        pairs = PairStep(replace(cfg, pref=pref), state.loader.device, state.pair_reference)
        sums = SourceSums(step.facts, state.loader.device), ExpertSums(None, step.facts, 0.0, state.loader.device)
        loss = float(run_micro_batches(state, step, 1.0, *sums, pairs))
        found = {named(n): p.grad.clone() for n, p in state.model.named_parameters() if p.grad is not None}
        args = DPOConfig(
            output_dir=str(tmp_path / form), per_device_train_batch_size=len(records), loss_type=form, beta=0.3,
            max_length=None, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            dataloader_pin_memory=False, remove_unused_columns=False, **more,
        )  # fmt: skip
        rows = Dataset.from_list([trl_row(model, record) for record in records])
        trainer = DPOTrainer(peer, model.peer(), args, train_dataset=rows, processing_class=model.processor)
        peer.zero_grad()
        batch = dict(next(iter(trainer.get_train_dataloader())))
        # trl learns the line break behind an answer, too
        batch["completion_mask"] = up_to(model.end, batch["input_ids"], batch["completion_mask"])
        wanted = trainer.compute_loss(trainer.model, batch)
        wanted.backward()
        assert loss == pytest.approx(wanted.item(), rel=1e-5), form
        assert_same_gradients(found, {n: p.grad for n, p in peer.named_parameters() if p.grad is not None})
