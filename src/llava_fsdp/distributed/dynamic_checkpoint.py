"""Activation checkpointing that is chosen block by block from measurements (`activation_checkpointing=dynamic`).

Training begins with every block recomputed, as in the mode `full`. The first step compiles kernels and allocates the
optimizer's states. In the next two steps each block measures, in the backward pass, the bytes that it would keep and
the seconds that its recomputation takes. Then the blocks whose recomputation takes the longest for their bytes keep
their activations, as many as the memory that is left has room for. Every rank makes the same choice. It is saved in
checkpoints, so that a resumed run makes it again without measuring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint

from llava_fsdp.config import ActivationCheckpointingConfig
from llava_fsdp.distributed.consensus import gathered
from llava_fsdp.distributed.mesh import World
from llava_fsdp.runtime.host import process_memory, read_host
from llava_fsdp.runtime.log import log

FIRST, LAST = 2, 3
"""The steps of a process in which blocks measure, counted from 1. Both are needed: in the second step the compiler may
compile a block again for rows of another length, and the fastest run counts."""
LARGER = 1.1
"""A block that keeps its activations does so for inputs of at most this many times the largest measured size. Larger
inputs are recomputed, so that they need no more memory than with every block recomputed."""
GB = 1e9


@dataclass(frozen=True)
class Measured:
    """What one block would keep, and how long its recomputation takes, for each element of its input."""

    size: int
    """Number of elements of the largest measured input; 0 if the block has not run backward."""
    nbytes: float
    """Bytes kept for each element of the input, beyond the input itself: the most that was measured."""
    seconds: float
    """Seconds of the block's forward pass for each element of the input: the least that was measured."""


@dataclass(frozen=True)
class Kept:
    """The blocks that keep their activations, the same on every rank."""

    blocks: tuple[int, ...]
    """Numbers of the blocks, in the order of `model.blocks()`: the language model's first."""
    sizes: tuple[int, ...]
    """For each of these blocks the number of elements of its input up to which it keeps its activations."""


class DynamicBlock(ActivationWrapper):
    """Wrapper around a model's block that either recomputes it in the backward pass or keeps its activations, and that
    can measure both."""

    def __init__(self, block: nn.Module, device: torch.device):
        super().__init__(block)
        self.device = device
        self.kept_size = 0
        """The largest number of elements of an input for which the activations are kept; 0: they are recomputed."""
        self.measures = False
        """Whether recomputations are measured."""
        self.runs: list[tuple[int, int, Callable[[], float]]] = []
        """For each measured run: number of elements of the input, bytes kept, and a function that returns the seconds,
        which waits for the device."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if 0 < input_of(args, kwargs).numel() <= self.kept_size:
            return self._checkpoint_wrapped_module(*args, **kwargs)
        if not self.measures:
            return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)
        is_forward = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_forward
            if not is_forward:
                self.measure(args, kwargs)
            is_forward = False
            return self._checkpoint_wrapped_module(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the block once more, in the backward pass just before it is recomputed, and discard the result. So the
        measurement needs no more memory than the recomputation, and FSDP has gathered the block's weights."""
        given = {storage_of(tensor) for tensor in (*tensors_in((args, kwargs)), *self.parameters())}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter) and (place := storage_of(tensor)) not in given:
                saved[place] = tensor.untyped_storage().nbytes()
            return tensor

        block = self._checkpoint_wrapped_module
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if on_cuda else []), saved_tensors_hooks(note, lambda tensor: tensor):
            seconds = stopwatch(self.device)
            output = block(*args, **kwargs)
            took = seconds()
        for tensor in tensors_in(output):  # the next block's input, which is kept in every mode
            saved.pop(storage_of(tensor), None)
        self.runs.append((input_of(args, kwargs).numel(), sum(saved.values()), took))

    def measured(self) -> Measured:
        """Return the measurements, and forget them. Waits for the device."""
        runs = [(size, nbytes / size, took() / size) for size, nbytes, took in self.runs if size]
        self.runs.clear()
        if not runs:
            return Measured(0, 0.0, 0.0)
        sizes, nbytes, seconds = zip(*runs, strict=True)
        return Measured(max(sizes), max(nbytes), min(seconds))


class DynamicCheckpointing:
    """Lets blocks measure in the first steps of a process, and then chooses which of them keep their activations."""

    def __init__(self, stacks: Sequence[nn.ModuleList], cfg: ActivationCheckpointingConfig, world: World):
        """Begin with every block recomputed.

        Args:
            stacks: the model's lists of blocks, the language model's first; the blocks are wrapped.
            cfg: says which part of the memory that is left activations may take.
            world: the device, and the number of ranks on this machine.
        """
        assert cfg.budget is not None, "checked by the configuration"
        self.blocks = [block for stack in stacks for block in stack if isinstance(block, DynamicBlock)]
        self.share, self.world = cfg.budget, world
        self.steps = 0
        """Number of finished steps of this process."""
        self.kept: Kept | None = None
        """The choice; None until it is made."""

    def after_step(self) -> None:
        """To be called after each step: let the blocks measure, or choose. Collective: all ranks must call it."""
        self.steps += 1
        if self.kept is not None or self.steps > LAST:
            return
        for block in self.blocks:
            block.measures = FIRST <= self.steps + 1 <= LAST
        if self.steps == LAST:
            own = [block.measured() for block in self.blocks], memory_left(self.world)
            ranks = gathered(own)
            blocks = [worst_of(of_ranks) for of_ranks in zip(*(found for found, _ in ranks), strict=True)]
            room = self.share * min(left for _, left in ranks)
            kept = choose(blocks, room)
            self.keep(kept)
            log().info("%s", describe(blocks, kept, room))

    def keep(self, kept: Kept) -> None:
        """Make the chosen blocks keep their activations, and all others recompute them."""
        self.kept = kept
        sizes = dict(zip(kept.blocks, kept.sizes, strict=True))
        for number, block in enumerate(self.blocks):
            block.kept_size = sizes.get(number, 0)

    def state(self) -> dict[str, list[int]] | None:
        """Return the choice for a checkpoint; None if it is not made yet."""
        return {"blocks": [*self.kept.blocks], "sizes": [*self.kept.sizes]} if self.kept is not None else None

    def restore(self, state: dict[str, list[int]]) -> None:
        """Make the choice that a checkpoint contains."""
        self.keep(Kept(tuple(state["blocks"]), tuple(state["sizes"])))


def choose(blocks: Sequence[Measured], room: float) -> Kept:
    """Choose the blocks that keep their activations: those whose recomputation takes the longest for their bytes, as
    many as there is room for. Among equal blocks, later ones come first, because they keep their activations for a
    shorter time.

    Args:
        room: bytes that the activations of these blocks may take together.
    """
    places = [number for number, block in enumerate(blocks) if block.size and block.nbytes]
    places.sort(key=lambda number: (blocks[number].seconds / blocks[number].nbytes, number), reverse=True)
    found = {}
    for number in places:
        size = int(LARGER * blocks[number].size)
        if (needed := size * blocks[number].nbytes) <= room:
            found[number] = size
            room -= needed
    return Kept(tuple(sorted(found)), tuple(size for _, size in sorted(found.items())))


def worst_of(of_ranks: Sequence[Measured]) -> Measured:
    """Combine the measurements of one block on all ranks: the largest input, the most bytes, the most seconds."""
    return Measured(
        max(one.size for one in of_ranks), max(one.nbytes for one in of_ranks), max(one.seconds for one in of_ranks)
    )


def describe(blocks: Sequence[Measured], kept: Kept, room: float) -> str:
    """Say in words which blocks keep their activations, for the log.

    Args:
        room: bytes that their activations could take together.
    """
    ran = [block for block in blocks if block.size]
    taken = sum(size * blocks[number].nbytes for number, size in zip(kept.blocks, kept.sizes, strict=True))
    forward = sum(block.size * block.seconds for block in ran)
    saved = sum(blocks[number].size * blocks[number].seconds for number in kept.blocks)
    return (
        f"activation_checkpointing=dynamic: {len(kept.blocks)} of {len(ran)} blocks keep their activations, at most "
        f"{taken / GB:.3g} of {room / GB:.3g} GB; the others are recomputed, which takes "
        f"{(forward - saved) * 1e3:.3g} instead of {forward * 1e3:.3g} ms for the largest micro-batch"
    )


def memory_left(world: World) -> float:
    """Return the bytes of the device's memory that no process has allocated, even at the peak of the steps so far. On a
    CPU it is this rank's equal share of the host's free memory.

    Args:
        world: the device, and the number of ranks on this machine.
    """
    if world.device.type == "cuda":
        # torch's allocator keeps the memory of the peak, so what is free now was free then
        return float(torch.cuda.mem_get_info(world.device)[0])
    until_peak = process_memory("VmHWM") - process_memory("VmRSS")
    return max(0.0, read_host().free / world.local_size - until_peak)


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start to measure time on the device. The returned function stops, without waiting for the device, and returns a
    function that waits for it and returns the seconds."""
    if device.type != "cuda":
        begin = time.perf_counter()

        def stop_clock() -> Callable[[], float]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return stop_clock
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()

    def stop_events() -> Callable[[], float]:
        events[1].record()

        def seconds() -> float:
            events[1].synchronize()
            return events[0].elapsed_time(events[1]) / 1e3

        return seconds

    return stop_events


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states among a block's arguments, which are its first tensor."""
    return next(tensors_in((args, kwargs)))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()
