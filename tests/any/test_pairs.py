"""Whole models of transformers learn from pairs of answers: losses and gradients are those of the class alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from pair_data import pair_loss
from steps import begin
from torch.distributed.tensor import DTensor
from whole_models import IGNORE, WholeModel, assert_same_gradients, example_of, named

from llava_fsdp.config import Config, PrefConfig
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.loop import run_micro_batches
from llava_fsdp.train.main import settle_auto
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_pairs_are_those_of_the_class(
    name: str, size: int, whole: Whole, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    model = whole(name)
    records = write_pairs(model)
    pref = PrefConfig(beta=2.0, gamma=0.5, sft_weight=0.3, per_token=True)
    keys = "pref.beta=2.0", "pref.gamma=0.5", "pref.sft_weight=0.3", "pref.per_token=true", "pref.reference=none"
    cfg = model.config(tmp_path, *keys, records="pairs", stage="prefer")
    cfg = replace(cfg, micro_batch_size=2)
    run = gradients_of(single_world(), cfg) if size == 1 else pools[size].run(gradients_of, cfg)[0]
    peer, total = model.peer(), 0.0
    for record in records:
        question = record["conversations"][0]
        worse = record | {"conversations": [question, {"from": "gpt", "value": WORSE}]}
        mine = [log_probabilities(peer, model, own) for own in (record, worse)]
        loss = pair_loss(mine, [torch.zeros(1)] * 2, pref) / len(records)
        loss.backward()
        total += float(loss.detach())
    assert run[0] == pytest.approx(total, rel=1e-5)
    assert_same_gradients(run[1], {name: p.grad for name, p in peer.named_parameters() if p.grad is not None})
