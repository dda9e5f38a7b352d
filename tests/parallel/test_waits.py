"""The host waits for the device once a step, where it reads what the step was; tests/gpu has CUDA's own word for it."""

import pytest
import torch
from harness import RankPool, World, single_world
from loaders import agreed_steps
from small import Configure
from steps import begin
from tiers import slow_after
from waiting import HostWaits

from llava_fsdp.config import Config
from llava_fsdp.train.loop import train_step

COMMON = "optim.clip=0.1", "max_steps=3"
PLANNED = {"loop.py train_step: tolist": 1}
SHORT = "tokens_per_micro_batch=256", "data.max_length=256", "global_batch_size=24"
CASES = {
    "packed-4": (SHORT, 4),
    "padded-4": (("pack=false", "micro_batch_size=3"), 4),
    "padded": (("pack=false",), 1),
    "packed": ((), 1),
    "fp16": (("pack=false", "precision=fp16", "precision.scaler.scale=2"), 1),
    "activation_checkpointing": (("activation_checkpointing=full", "precision=bf16"), 1),
}


def waits(world: World, cfg: Config) -> list[tuple[int, dict[str, int]]]:
    """By step: how many micro-batches a rank ran, and where it waited."""
    state = begin(world, cfg)
    found = []
    for step in agreed_steps(state.loader):
        with HostWaits() as seen:
            train_step(state, step, cfg, 0.0)
        found.append((len(step.micro_batches), dict(seen.seen)))
    return found


@pytest.mark.parametrize("case", slow_after(2, CASES))
@pytest.mark.parametrize("stage", slow_after(1, ["pretrain", "finetune"]))
def test_one_wait_a_step_however_many_micro_batches(stage: str, case: str, configure: Configure) -> None:
    overrides, accumulation = CASES[case]
    if case == "packed-4" and stage == "pretrain":
        overrides = (*overrides, "data.max_length=64", "tokens_per_micro_batch=100")
    found = waits(single_world(), configure(*COMMON, *overrides, stage=stage))
    assert found[0][0] >= accumulation
    assert all(seen == PLANNED for _, seen in found), found


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", slow_after(1, ["zero2", "zero3"]))
@pytest.mark.slow
def test_one_wait_a_step_on_two_ranks(strategy: str, configure: Configure, pools: dict[int, RankPool]) -> None:
    overrides = f"sharding={strategy}", "micro_batch_size=3", "pack=false", "model.train=[projector,language,vision]"
    for found in pools[2].run(waits, configure(*COMMON, *overrides)):
        assert [count for count, _ in found] == [2, 2, 2]
        assert all(seen == PLANNED for _, seen in found), found


def test_what_would_wait_is_seen() -> None:
    values = torch.arange(4.0)
    with HostWaits() as seen:
        float(values.sum())
        bool((values > 0).all())
        values[values > 1]
        values[values > 1] = 0.0
        values.nonzero()
        values.tolist()
        values.cpu()
        values.to("cpu")
        torch.equal(values, values)
        torch.tensor([1.0], device=values.device)
        values.repeat_interleave(torch.ones(4, dtype=torch.int64))
        values[torch.arange(2)] = values[:2] * 2  # by number: does not
    assert sum(seen.seen.values()) == 11
