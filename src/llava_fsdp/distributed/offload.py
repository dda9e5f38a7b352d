"""Where a run's states lie beside the device: `offload=none|optimizer|params|nvme`. All give the same weights.

| | fp32 shards | gradients | moments | updated by |
|---|---|---|---|---|
| none | device | device | device | the fused kernel of the device |
| optimizer | device | device | host, pinned | the same, through two buffers (`distributed/streamed_optimizer.py`) |
| params | host, pinned | host, pinned | host | the CPU's fused kernel |
| nvme | a file | a file | a file | the CPU's fused kernel, where they are, read ahead |

Bytes of a rank between steps. Every sum is over the tensors of this rank: n elements of a parameter that it holds, n*
with the padding to ceil(rows / shards) rows, i bytes an element.

    W    n i, frozen weights that are whole on the rank, in the compute dtype; buffers
    C    n i, working copies in the compute dtype: at world size 1 without `params` and `nvme` alone, 0 for fp32
    S    n* i, shards that FSDP manages: trainable ones in the master dtype, frozen ones in the compute dtype
    G    n i, gradients in the master dtype, from the first micro-batch to the end of the step
    M    n i, moments: fp32 Adam 8 n of what trains; the step's count is 4 bytes a parameter more
    B    the largest bucket: at most 128 MiB, M where that is less

page(x) is x with every tensor rounded up to 4096 bytes; pow2(x) to a power of two, as torch's pinned allocator has it.

| | device, at rest | device, in the optimizer's step | host memory | disk |
|---|---|---|---|---|
| none | W + C + S + M | + G | 0 | 0 |
| optimizer | W + C + S | + G + 2 B | page(M), pinned | 0 |
| params | W | + 0 | page(S), pinned; pow2(G), pinned; M | 0 |
| nvme | W | + 0 | what the system caches of the files | page(S) + page(G) + page(M) |

At world size 1 without `params` and `nvme` nothing is wrapped, and S is the masters, n i. With them FSDP shards over a
mesh of this one rank, because FSDP is what moves weights. While a micro-batch runs, gathered units come on top on the
device in every mode, as without offload: two blocks and the root unit in the compute dtype, or all blocks in rows that
keep weights gathered; under `params` and `nvme` on a GPU also one unit's shards in the master dtype, on their way. A
reduced gradient passes through the device a unit at a time. Without a GPU the device is the host: `optimizer` and
`params` save nothing there, and `nvme` leaves W and what a micro-batch takes as private memory.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from llava_fsdp.config import ActivationCheckpointing, Config, OffloadMode, Strategy
from llava_fsdp.distributed.host_memory import Arena
from llava_fsdp.distributed.local_shards import like, local
from llava_fsdp.distributed.malloc import return_freed_memory
from llava_fsdp.distributed.mesh import World
from llava_fsdp.distributed.streamed_buffers import Copied, Mapped
from llava_fsdp.distributed.streamed_optimizer import StreamedOptimizer
from llava_fsdp.runtime.errors import ConfigError, OutOfMemory
from llava_fsdp.runtime.log import log

IN_MEMORY = ("tmpfs", "ramfs")
NO_ROOM = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|std::bad_alloc", re.IGNORECASE
)


class Offload:
    """What `offload` asks for, on one rank."""

    def __init__(self, cfg: Config, device: torch.device):
        self.mode = cfg.offload.mode
        self.device = device
        self.pin = device.type == "cuda"
        self.folder = offload_folder(cfg) if self.mode is OffloadMode.nvme else None
        self.shards: Arena | None = None
        self.gradients: Arena | None = None
        if self.folder is not None:
            return_freed_memory()

    @property
    def policy(self) -> OffloadPolicy:
        """For `fully_shard`. Pages of a file are not pinned: that would hold them in memory."""
        if not self.mode.moves_weights:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.pin and self.mode is OffloadMode.params)

    def materialize(self, model: nn.Module) -> None:
        """Allocate what this rank holds, uninitialised: shards where they are to lie, all else on the device."""
        made = self.take_shards(model) if self.mode.moves_weights else {}

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return tensor
            if id(tensor) not in made:  # a tied parameter is met once under each of its names
                made[id(tensor)] = torch.empty_like(tensor, device=self.device)
            return made[id(tensor)]

        model._apply(allocate)
        if self.mode is OffloadMode.nvme:
            self.take_gradients(model)

    def take_shards(self, model: nn.Module) -> dict[int, torch.Tensor]:
        """Every sharded parameter with its padding, by the identity of the one on the meta device.

        FSDP is told at once what it will gather from; else it copies shards with fewer rows than the largest elsewhere
        to pad them, and there is no public way to say so. tests/distributed/test_offload.py sees where shards lie.
        """
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        found = list(dict.fromkeys(p for module in modules for p in managed(module)))  # blocks may share a unit
        room = sum(Arena.room(p.padded_sharded_param_size, p.sharded_param.dtype) for p in found)
        self.shards = Arena(room, self.folder, pin=self.pin and self.folder is None)
        made: dict[int, torch.Tensor] = {}
        for own in found:
            padded = self.shards.take(own.padded_sharded_param_size, own.sharded_param.dtype)
            own._sharded_param_data = padded.view(-1)
            made[id(own.sharded_param)] = like(own.sharded_param, padded[: own.sharded_size[0]])
        return made

    def take_gradients(self, model: nn.Module) -> None:
        """Give every trainable shard a place in a file that its gradient is moved to as soon as it is reduced."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) for p in trainable)
        self.gradients = Arena(sum(Arena.room(local(p).shape, p.dtype) for p in trainable), self.folder)
        for parameter in trainable:
            place = self.gradients.take(local(parameter).shape, parameter.dtype)
            parameter.register_post_accumulate_grad_hook(GradientIntoFile(place))

    def loaded(self) -> None:
        """Weights are in their shards: let the pages of the file go."""
        if self.shards is not None and self.shards.of_file:
            self.shards.release_all()

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer with its moments where they are to lie."""
        if self.mode is OffloadMode.optimizer:
            return StreamedOptimizer(
                inner, lambda size: Arena(size, pin=self.pin), lambda made: Copied(made, self.device)
            )
        if self.mode is OffloadMode.nvme:
            others = [arena for arena in (self.shards, self.gradients) if arena is not None]
            return StreamedOptimizer(inner, lambda size: Arena(size, self.folder), lambda made: Mapped(made, others))
        return inner


class GradientIntoFile:
    """Moves a shard's gradient into a file; FSDP adds the next micro-batch's to it there."""

    def __init__(self, place: torch.Tensor):
        self.place = place

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if local(gradient).data_ptr() != self.place.data_ptr():
            self.place.copy_(local(gradient))
            parameter.grad = like(gradient, self.place)


def managed(module: FSDPModule) -> list[Any]:
    """What FSDP knows of the parameters of a unit."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def filesystem(folder: Path) -> str | None:
    """The kind of filesystem that a folder, or the nearest one above it that exists, lies on; None where unknown."""
    while not folder.exists():
        folder = folder.parent
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else None


@contextmanager
def clear_memory_errors(cfg: Config, device: torch.device) -> Iterator[None]:
    """What torch says where memory runs out, as one message that names the cure.

    Raises:
        OutOfMemory: instead of torch's or Python's own error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not NO_ROOM.search(said):
            raise
        where = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "host memory"
        asked = re.search(r"tried to allocate ([\d.]+ \w+)|allocate (\d+ bytes)", said)
        size = f" ({next(filter(None, asked.groups()))} more were asked for)" if asked else ""
        raise OutOfMemory(f"out of {where}{size}; less is needed with {', or '.join(cures(cfg, device))}") from error


def cures(cfg: Config, device: torch.device) -> list[str]:
    """What takes less memory than this configuration, the cheapest first."""
    found = (
        ["activation_checkpointing=full"] if cfg.activation_checkpointing.mode is ActivationCheckpointing.none else []
    )
    found.append("a smaller tokens_per_micro_batch" if cfg.pack else "a smaller micro_batch_size")
    if cfg.sharding.strategy is not Strategy.FULL_SHARD:
        found.append("sharding=zero3")
    modes = list(OffloadMode) if device.type == "cuda" else [OffloadMode.nvme]
    later = modes[modes.index(cfg.offload.mode) + 1 :] if cfg.offload.mode in modes else modes
    found += [f"offload={mode.value}" for mode in later]
    return [*found, "more ranks under sharding=zero3"]


def describe_offload(cfg: Config, device: torch.device) -> str:
    """One line for the screen that a run begins with."""
    mode = cfg.offload.mode
    if mode is OffloadMode.none:
        return "none"
    if mode is not OffloadMode.nvme:
        saves = "" if device.type == "cuda" else ": without a GPU the device is the host, and this saves nothing"
        return f"{mode.value}, in host memory{saves}"
    folder = offload_folder(cfg)
    found = filesystem(folder)
    memory = ", which is memory: this saves nothing; offload.folder=DIR of a disk does" * (found in IN_MEMORY)
    return f"nvme, in files without names in {folder} ({found or 'unknown filesystem'}{memory})"


def offload_folder(cfg: Config) -> Path:
    """Where the files of `offload=nvme` lie.

    Raises:
        ConfigError: `offload.folder` is no folder. It is not made: a disk that is not mounted would fill the one below.
    """
    if cfg.offload.folder is not None and not Path(cfg.offload.folder).is_dir():
        raise ConfigError(f"offload.folder={cfg.offload.folder} is not a folder; make one, on a local disk, or name it")
    return Path(cfg.offload.folder or cfg.output_dir)


def warn_of_no_use(cfg: Config, world: World) -> None:
    """An offload that saves nothing on this machine works, and is said to save nothing."""
    said = describe_offload(cfg, world.device)
    if world.is_first and "saves nothing" in said:
        log().warning("offload=%s", said)
