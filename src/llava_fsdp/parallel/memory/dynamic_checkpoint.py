"""Activation checkpointing that is chosen block by block from measurements (`activation_checkpointing=dynamic`).

Training begins with every block recomputed, as in the mode `full`. The first step that updates weights compiles kernels
and allocates the optimizer's states. In the next two such steps each block measures, in the backward pass, the bytes
that it would keep and the seconds of its forward pass. Then the blocks whose forward pass takes the longest for their
bytes keep their activations, as many as the memory that is left has room for. Every rank makes the same choice. It is
saved in checkpoints, so that a run that resumes with the same settings makes it again without measuring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from llava_fsdp.config import ActivationCheckpointingConfig
from llava_fsdp.parallel.precision.summed_linear import SummedLinear
from llava_fsdp.parallel.ranks.consensus import gathered
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.process.host import process_memory, read_host
from llava_fsdp.runtime.text.log import log

FIRST, LAST = 2, 3
"""The steps, counted from 1, in which blocks are measured. The fastest run counts: in step 2 the compiler may still
compile a block again, for rows of another length."""
SIZE_MARGIN = 1.1
"""A block keeps its activations for inputs of at most this many times the largest measured size and row length. With
larger inputs it is recomputed."""
WARN_AFTER = 10
"""Number of steps with larger inputs after which a warning is printed."""
GB = 1e9


@dataclass(frozen=True)
class Measured:
    """What was measured of one block."""

    num_elements: int
    """Number of elements of the largest input; 0 if the block has not run backward."""
    length: int
    """Length of the longest row of an input. Some attention keeps bytes for each pair of tokens in a row."""
    nbytes: float
    """The most bytes kept for each element of the input, beyond the input itself."""
    seconds: float
    """Seconds of the forward pass for each element of the input: the least of all runs, then the most of all ranks."""


class TimedRun(NamedTuple):
    """One more forward pass of a block, run to measure it."""

    shape: torch.Size
    """Shape of the input."""
    nbytes: int
    """Bytes that the block would keep."""
    read_seconds: Callable[[], float]
    """Function that waits for the device and returns the seconds of the pass."""


class Limit(NamedTuple):
    """The largest input for which a block keeps its activations."""

    size: int
    """Number of elements; 0: activations are never kept."""
    length: int
    """Length of a row."""


@dataclass(frozen=True)
class KeptBlocks:
    """The blocks that keep their activations, the same on every rank."""

    limits: dict[int, Limit]
    """Number of a block in `model.blocks()` -> the largest input for which it keeps its activations."""
    device: str
    """Name and memory of the device on which the choice was made."""


class DynamicBlock(ActivationWrapper):
    """Wrapper around a block that recomputes it in the backward pass or keeps its activations."""

    def __init__(self, block: nn.Module, device: torch.device):
        """Wrap a block. Its first limit, the largest input for which it keeps its activations, is 0 elements, so that
        it recomputes them for every input."""
        super().__init__(block)
        self.device = device
        self.limit = Limit(0, 0)
        self.had_larger = False
        """Whether an input was above `limit` since this was last reset. Only inputs with gradients count."""
        self.measures = False
        """Whether one more forward pass is measured before each recomputation."""
        self.runs: list[TimedRun] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Keep the activations if the input is within `limit` (number of elements, length of rows), else
        recompute them in the backward pass; with `measures`, first measure the block there."""
        if self.limit.size:  # 0: this block never keeps its activations
            shape = input_of(args, kwargs).shape
            if shape.numel() <= self.limit.size and row_length(shape) <= self.limit.length:
                return self._checkpoint_wrapped_module(*args, **kwargs)
            self.had_larger |= torch.is_grad_enabled()
        if not self.measures:
            return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)
        is_forward = True  # `checkpoint` calls `run` in the forward pass, and again in the backward pass

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_forward
            if not is_forward:
                self.measure(args, kwargs)
            is_forward = False
            return self._checkpoint_wrapped_module(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the block once more, just before its recomputation in the backward pass, to measure its time and the
        bytes that it would keep. That needs no more memory than recomputing, and FSDP has gathered the weights."""
        block = self._checkpoint_wrapped_module
        excluded: dict[int, int] = {}
        sums = [module.gradient_sum for module in block.modules() if isinstance(module, SummedLinear)]
        for tensor in (*tensors_in((args, kwargs)), *block.parameters(), *block.buffers(), *sums):
            excluded |= storages_of(tensor)
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.update(storages_of(tensor))
            return tensor.detach()  # the tensor itself would keep the graph alive if an operation saves its own output

        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if on_cuda else []), saved_tensors_hooks(note, lambda tensor: tensor):
            seconds = stopwatch(self.device)
            output = self._checkpoint_wrapped_module(*args, **kwargs)
            read_seconds = seconds()
        for tensor in tensors_in(output):  # the next block's input, which is kept in every mode
            excluded |= storages_of(tensor)
        nbytes = sum(size for address, size in saved.items() if address not in excluded)
        self.runs.append(TimedRun(input_of(args, kwargs).shape, nbytes, read_seconds))

    def measured(self) -> Measured:
        """Return the measurements of all runs, and forget them: the largest input and row length, and the most bytes
        and the shortest time for each element of an input. All are 0 without a run. Waits for the device."""
        runs = [run for run in self.runs if run.shape.numel()]
        self.runs.clear()
        if not runs:
            return Measured(0, 0, 0.0, 0.0)
        return Measured(
            max(run.shape.numel() for run in runs),
            max(row_length(run.shape) for run in runs),
            max(run.nbytes / run.shape.numel() for run in runs),
            min(run.read_seconds() / run.shape.numel() for run in runs),
        )


class DynamicCheckpointing:
    """Lets blocks measure in the first steps of a process, and then chooses which of them keep their activations."""

    def __init__(self, stacks: Sequence[nn.ModuleList], cfg: ActivationCheckpointingConfig, world: World):
        """Begin with every block recomputed. `stacks` has the wrapped blocks, the language model's first."""
        assert cfg.budget is not None, "checked by the configuration"
        self.blocks = [block for stack in stacks for block in stack if isinstance(block, DynamicBlock)]
        self.world, self.share = world, cfg.budget
        """`share` of the device's memory that is free after the measurements is given to activations."""
        self.steps = 0
        """Number of steps of this process that have updated weights."""
        self.steps_with_larger = 0
        """Number of steps in which a block that keeps its activations had an input above its limit, on this rank."""
        self.kept: KeptBlocks | None = None
        """None until the choice is made."""

    def after_step(self, skipped: bool) -> None:
        """Let the blocks measure in the steps FIRST to LAST, and then choose, equally on all ranks, which of them keep
        their activations. Once that is chosen, only warn of larger inputs. To be called after each step. Collective.
        `skipped`: whether the step did not update the weights. Such steps do not count, because the optimizer's states,
        which take memory, may not exist yet."""
        if self.kept is not None:
            self.warn_of_larger()
            return
        self.steps += not skipped
        for block in self.blocks:
            block.measures = FIRST <= self.steps + 1 <= LAST  # in the next step
        if self.steps == LAST:
            of_rank = [block.measured() for block in self.blocks], memory_left(self.world)
            ranks = gathered(of_rank)
            blocks = [worst_of(of_ranks) for of_ranks in zip(*(found for found, _ in ranks), strict=True)]
            room = self.share * min(left for _, left in ranks)
            limits = choose(blocks, room)
            self.keep(KeptBlocks(limits, device_of(self.world)))
            log().info("%s", describe(blocks, limits, room))

    def warn_of_larger(self) -> None:
        """Count a step in which blocks that keep their activations had inputs above their limits. Warn once, when
        WARN_AFTER steps are counted."""
        larger = [block for block in self.blocks if block.had_larger]
        for block in larger:
            block.had_larger = False
        self.steps_with_larger += bool(larger)
        if larger and self.steps_with_larger == WARN_AFTER:
            log().warning(
                "activation_checkpointing=dynamic: in %d steps inputs were larger than those that were measured, and "
                "blocks were recomputed. To measure again, resume with another activation_checkpointing.budget",
                WARN_AFTER,
            )

    def keep(self, kept: KeptBlocks) -> None:
        """Make the chosen blocks keep the activations of inputs up to their limit, and all others recompute them."""
        self.kept = kept
        for number, block in enumerate(self.blocks):
            block.limit = kept.limits.get(number, Limit(0, 0))

    def state(self) -> dict[str, Any] | None:
        """Return, for a checkpoint, the largest input for which each block keeps its activations, as [block, elements,
        row length] in `limits`; None if that is not chosen yet."""
        if self.kept is None:
            return None
        return {"device": self.kept.device, "limits": [[number, *limit] for number, limit in self.kept.limits.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Make the blocks that a checkpoint names keep their activations, and log it. Do nothing if the blocks were
        chosen on devices unlike those of all ranks: they are then measured and chosen again. `state` is a result of
        `state()`: for each block its number and the largest input (elements, row length) that it keeps. Collective."""
        if set(gathered(device_of(self.world))) != {state["device"]}:
            return
        self.keep(
            KeptBlocks({number: Limit(size, length) for number, size, length in state["limits"]}, state["device"])
        )
        log().info(
            "activation_checkpointing=dynamic: %d of %d blocks keep their activations, as in the checkpoint",
            len(state["limits"]), len(self.blocks),
        )  # fmt: skip


def choose(blocks: Sequence[Measured], room: float) -> dict[int, Limit]:
    """Choose the blocks that keep their activations. Return, by the block's number, the largest input for which it
    does: SIZE_MARGIN times the largest one that was measured. Chosen are those whose forward pass takes the longest for
    their bytes, as many as fit into `room` bytes; among equal blocks the later ones, which keep them for less time."""
    places = [number for number, block in enumerate(blocks) if block.num_elements and block.nbytes]
    places.sort(key=lambda number: (blocks[number].seconds / blocks[number].nbytes, number), reverse=True)
    found = {}
    for number in places:
        limit = Limit(int(SIZE_MARGIN * blocks[number].num_elements), int(SIZE_MARGIN * blocks[number].length))
        if (needed := limit.size * blocks[number].nbytes) <= room:
            found[number] = limit
            room -= needed
    return dict(sorted(found.items()))


def worst_of(of_ranks: Sequence[Measured]) -> Measured:
    """Combine the measurements of one block on all ranks: the largest of each number."""
    return Measured(
        max(one.num_elements for one in of_ranks),
        max(one.length for one in of_ranks),
        max(one.nbytes for one in of_ranks),
        max(one.seconds for one in of_ranks),
    )


def describe(blocks: Sequence[Measured], limits: Mapping[int, Limit], room: float) -> str:
    """Describe how many blocks keep their activations, which could take `room` bytes, and what this saves. `limits`:
    {block: its largest input}. `size` is a number of input elements, `nbytes` and `seconds` are for each of them."""
    ran = [block for block in blocks if block.num_elements]
    taken = sum(limit.size * blocks[number].nbytes for number, limit in limits.items())
    forward = sum(block.num_elements * block.seconds for block in ran)
    saved = sum(blocks[number].num_elements * blocks[number].seconds for number in limits)
    return (
        f"activation_checkpointing=dynamic: {len(limits)} of the {len(ran)} blocks that run backward keep their "
        f"activations, about {taken / GB:.3g} of {room / GB:.3g} GB; recomputation takes an estimated "
        f"{(forward - saved) * 1e3:.3g} ms instead of {forward * 1e3:.3g} ms for the largest micro-batch"
    )


def device_of(world: World) -> str:
    """Return the name and the memory of this rank's device, as a text that is equal for equal devices."""
    if world.device.type != "cuda":
        return f"CPU, {read_host().usable_memory} bytes, {world.local_size} ranks"
    found = torch.cuda.get_device_properties(world.device)
    return f"{found.name}, {found.total_memory} bytes"


def memory_left(world: World) -> float:
    """Return the bytes of the device's free memory, which exclude all that torch's allocator has reserved so far. On a
    CPU it is this rank's equal share of the host's free memory, minus what the steps so far took only for a time."""
    if world.device.type == "cuda":
        # torch's allocator does not return memory after the peak
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
    found = next(tensors_in((args, kwargs)), None)
    assert found is not None, "a block without a tensor among its arguments"
    return found


def row_length(shape: torch.Size) -> int:
    """Return the number of tokens in a row of hidden states, [rows, tokens, channels] or [tokens, channels]."""
    return shape[-2] if len(shape) > 1 else 1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def storages_of(tensor: torch.Tensor) -> dict[int, int]:
    """Return the memory of a tensor, which its views share: address -> bytes. A tensor that wraps others, such as a
    weight that is cast to fp8, has their memory."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return {address: size for part in parts for address, size in storages_of(part).items()}
    storage = tensor.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}
