"""A run's state from one number of ranks and strategy to another: every bit of it, whatever it is made of."""

import hashlib

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from small import Configure
from steps import begin
from torch.distributed.tensor import DTensor

from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.checkpoints.resume import resume
from llava_fsdp.train.events.save_and_stop import open_saver
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.state import TrainState

Digests = dict[str, str]
KINDS = {
    "fp32": ("finetune", ""),
    "stage 1, bf16": ("pretrain", "precision=bf16"),
    "bf16 masters": ("finetune", "precision=bf16_pure"),
    "int8 moments": ("finetune", "precision=bf16 precision.moment_dtype=int8"),
    "fp16": ("finetune", "precision=fp16"),
    "offloaded moments": ("finetune", "precision=bf16 offload=optimizer"),
    "offloaded weights": ("finetune", "precision=bf16 offload=params"),
    "in files": ("pretrain", "precision=bf16 offload=nvme"),
}

RANKS = ((2, "zero2"), (4, "zero3"), (1, "zero3"), (2, "zero0"), (4, "hybrid"))


def digests(state: TrainState) -> Digests:
    """Of every whole tensor, of the fp16 scale and of the position."""
    found = {"scaler": str(state.scaler and state.scaler.state()), "position": f"{state.step} {state.samples}"}
    for name, tensor in tensors(state).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        content = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(content).hexdigest()}"
    return found


def trained(world: World, cfg: Config, steps: int) -> tuple[Digests, Digests]:
    """What a run began with, and what it has after so many steps more, which it saves."""
    state = begin(world, cfg)
    saver = open_saver(state, cfg, resume(state, cfg))
    began = digests(state)
    state.model.train()
    for number, step in enumerate(agreed_steps(state.loader, state.step), start=1):
        train_step(state, step, cfg, 0.0)
        if number == steps:
            break
    saver.save()
    saver.close()
    return began, digests(state)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_the_same_to_the_bit(kind: str, configure: Configure, pools: dict[int, RankPool]) -> None:
    """Two ranks of zero2, four of zero3, one, two of zero0, four of hybrid: each continues the one before.

    Offload needs shards and a process group; one rank alone continues without it.
    """
    stage, values = KINDS[kind]
    left: Digests | None = None
    offloaded = "offload=" in values
    ranks_then = RANKS[:3] if offloaded else RANKS
    for size, sharding in ranks_then:
        own = [*values.split(), f"sharding={sharding}", "max_steps=9", "global_batch_size=4", "micro_batch_size=1"]
        if sharding == "hybrid":
            own.append("sharding.shard_size=2")
        if size == 1:
            own.append("offload=none")
        cfg = configure(*own, stage=stage)
        ranks = [trained(single_world(), cfg, 1)] if size == 1 else pools[size].run(trained, cfg, 1, timeout=120)
        assert all(own == ranks[0] for own in ranks)
        began, ended = ranks[0]
        assert left is None or began == left
        assert began != ended
        left = ended
    assert left is not None and left["position"] == f"{len(ranks_then)} {4 * len(ranks_then)}"
