"""Bytes of all tensors that are alive in a real training step, counted after every operation."""

import time
import weakref
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llava_fsdp.config import Config
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.blank_images import image_token
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step


class AllAlive(TorchDispatchMode):
    """The most bytes that were alive at once; FSDP resizes storages, so that each is asked again every time."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak = 0
        for tensor in tensors:
            self.see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        if self.now() > self.peak:
            time.sleep(1e-3)  # gloo's threads hold the tensors of a finished collective a little longer
            self.peak = max(self.peak, self.now())
        return made

    def see(self, tensor: torch.Tensor) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # a wrapper of a collective's result, or of a view of it, has a storage without memory
        tensor = tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def now(self) -> int:
        alive = [ref() for ref in list(self.storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def measure_step(world: World, cfg: Config) -> tuple[int, list[MicroBatchSizes]]:
    """Most bytes alive in a run's second step on this rank, and the micro-batches of that step."""
    state = train.build_state(cfg, Parallelism.of(cfg, world))
    for root in state.roots:
        root.train()
    train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    step = state.loader.steps.prepare(1)
    own = [*state.model.parameters(), *state.model.buffers(), *state.masters.named.values()]
    own += [v for found in state.optimizer.state.values() for v in found.values()]
    own += [t for micro in step.micro_batches for t in tree_leaves(micro.inputs) if torch.is_tensor(t)]
    own += [p.grad for p in state.masters.named.values() if p.grad is not None]
    alive = AllAlive(own)
    with alive:
        train_step(state, step, cfg, 0.0)
    whole = state.model.parts.class_config
    image_id = None if whole is None else image_token(whole)
    return alive.peak, [describe(micro, world.rank, image_id) for micro in step.micro_batches]


def describe(micro: Any, rank: int = 0, image_id: int | None = None) -> MicroBatchSizes:
    """The sizes of a micro-batch. `image_id`: the token of images, if the model is a whole one of transformers."""
    segments = micro.segments
    rows, length = micro.input_ids.shape
    samples = rows if segments is None else len(segments.lengths)
    context = 1 if segments is None else sum(segments.lengths) // (rows * length)
    if image_id is None:
        tiles, tokens = len(micro.images["tiles"]), len(micro.images["positions"])
    else:
        tiles = tokens = int((micro.input_ids == image_id).sum())
    return MicroBatchSizes(rows, length, samples, tiles, len(micro.label_ids), tokens, context, rank % context)
