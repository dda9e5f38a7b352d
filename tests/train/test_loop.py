"""A step of the loop is AdamW over the gradients of that step alone."""

from pathlib import Path

import pytest
import torch
from harness import single_world
from small import Configure
from tiers import slow_after

from llava_fsdp.distributed.zero import SHARD_PLANS
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step


def added(own: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if own is None or new is None:
        return new if own is None else own
    return own + new


@pytest.mark.parametrize("precision", slow_after(1, ["fp32", "bf16", "bf16_pure"]))
def test_gradients_are_gone_after_a_step(precision: str, configure: Configure) -> None:
    """Of masters and of working copies."""
    cfg = configure(f"precision={precision}", "micro_batch_size=6")
    plan = SHARD_PLANS[cfg.sharding.strategy]
    state = train.build_state(cfg, single_world(), plan, None)
    state.model.train()
    before = {name: master.detach().clone() for name, master in state.masters.named.items()}
    for number in range(2):
        train_step(state, state.loader.steps.prepare(number), plan, cfg, 0.0)
        assert torch.initial_seed() == derive("step", cfg.seed, number, 0), "for a model that has dropout of its own"
        held = [*state.model.parameters(), *state.masters.named.values()]
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in held)
    assert any(not torch.equal(before[name], master) for name, master in state.masters.named.items())


def test_two_steps_are_adamw_over_the_gradients_of_each(configure: Configure) -> None:
    """To the bit: gradients are taken anew for every step, and added over its micro-batches."""
    values = ["micro_batch_size=6", "optim.clip=null", "optim.schedule=constant", "optim.warmup_ratio=0"]
    cfg = configure(*values, "pack=false")
    plan = SHARD_PLANS[cfg.sharding.strategy]
    ours, theirs = (train.build_state(cfg, single_world(), plan, None) for _ in range(2))
    theirs.model.train()
    ours.model.train()
    weights = list(theirs.masters.named.values())
    optim = cfg.optim
    assert optim.weight_decay == 0
    optimizer = torch.optim.AdamW(
        weights, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0, fused=True
    )
    for number in range(2):
        train_step(ours, ours.loader.steps.prepare(number), plan, cfg, 0.0)
        step = theirs.loader.steps.prepare(number)
        assert len(step.micro_batches) == 2
        total: list[torch.Tensor | None] = [None] * len(weights)
        for micro in map(theirs.loader.to_device, step.micro_batches):
            loss = micro.scale * theirs.model(*micro.inputs)
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            total = [added(own, new) for own, new in zip(total, found, strict=True)]
        for weight, gradient in zip(weights, total, strict=True):
            weight.grad = gradient
        optimizer.step()
        for name, master in ours.masters.named.items():
            assert torch.equal(master, theirs.masters.named[name]), (number, name)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_rank_writes_the_page_of_a_run_without_a_reporter(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(train.ranks, "own_rank", lambda: rank)
    monkeypatch.setattr(train, "rewrite_page", written.append)
    train.RunParts(folder=tmp_path).report_end()
    assert written == ([tmp_path] if rank == 0 else [])
