"""Offload weights, gradients and optimizer state from the device: `offload=none|optimizer|params|nvme`.

All modes train to the same weights. They differ in where a rank keeps shards, gradients and moments, and in the kernel
that updates the weights:

| | fp32 shards | gradients | moments | updated by |
|---|---|---|---|---|
| none | device | device | device | the fused kernel of the device |
| optimizer | device | device | host, pinned | the device's fused kernel, in buckets (see streamed_optimizer.py) |
| params | host, pinned | host, pinned | host | the CPU's fused kernel |
| nvme | a file | a file | a file | the CPU's fused kernel in the mapped file, read ahead |

The last table gives the bytes that a rank holds in each place, as sums of the following quantities. Each quantity is
summed over the rank's tensors. n is the number of elements of a parameter that the rank holds, n* is this number if the
shard is padded to ceil(rows / shards) rows, and i is the number of bytes of an element.

    W    n i, frozen weights that are whole on the rank, in the compute dtype; buffers
    C    n i, working copies in the compute dtype: only at world size 1 without `params` and `nvme`; 0 for fp32
    S    n* i, shards that FSDP manages: trainable ones in the master dtype, frozen ones in the compute dtype
    G    n i, gradients in the master dtype, from the first micro-batch to the end of the step
    M    n i, moments: for fp32 Adam 8 n of trainable weights; and 4 bytes a parameter for its step count
    B    the largest bucket (the moments that are updated at a time): at most 128 MiB, or M if that is less

page(x) is x with the size of every tensor rounded up to a multiple of 4096 bytes. pow2(x) is x with the size of every
tensor rounded up to a power of two, as torch's pinned allocator does. A + means: in addition to the bytes that are held
between steps.

| | device, between steps | device, in the optimizer's step | host memory | disk |
|---|---|---|---|---|
| none | W + C + S + M | + G | 0 | 0 |
| optimizer | W + C + S | + G + 2 B | page(M), pinned | 0 |
| params | W | + 0 | page(S), pinned; pow2(G), pinned; M | 0 |
| nvme | W | + 0 | the system's cache of the files | page(S) + page(G) + page(M) |

At world size 1 without `params` and `nvme` there is no FSDP, and S is n i, the master weights. With `params` or `nvme`
FSDP shards over a mesh of this one rank, because FSDP moves the weights. While a micro-batch runs, the device also
holds gathered units in every mode: two blocks and the root unit in the compute dtype, or all blocks with strategies
that keep weights gathered. With `params` and `nvme` on a GPU it also holds the shards of one unit in the master dtype
while they are copied. Reduced gradients leave the device a unit at a time. Without a GPU the device is the host. Then
`optimizer` and `params` save nothing, and with `nvme` only W and the memory of a micro-batch are private memory of the
process.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from llava_fsdp.config import ActivationCheckpointing, Config, OffloadMode, Strategy
from llava_fsdp.parallel.local_shards import like, local
from llava_fsdp.parallel.malloc import return_freed_memory
from llava_fsdp.parallel.memory.host_memory import Arena
from llava_fsdp.parallel.memory.streamed_buffers import DeviceStaging, FileStaging
from llava_fsdp.parallel.memory.streamed_optimizer import StreamedOptimizer
from llava_fsdp.runtime.errors import ConfigError, OutOfMemory
from llava_fsdp.runtime.files.os_errors import nearest_existing
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.runtime.text.log import log

IN_MEMORY = ("tmpfs", "ramfs")
"""Types of filesystems whose files are in memory."""
NO_ROOM = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|std::bad_alloc", re.IGNORECASE
)
"""Pattern for the messages of out-of-memory errors."""


class Offload:
    """Places this rank's parameters, gradients and moments where the setting `offload` says."""

    def __init__(self, cfg: Config, device: torch.device):
        """Read from the configuration what is offloaded from `device`, and where to. Memory is reserved later."""
        self.mode = cfg.offload.mode
        self.device = device
        self.pin = device.type == "cuda"
        self.folder = offload_folder(cfg) if self.mode is OffloadMode.nvme else None
        self.shards: Arena | None = None
        self.gradients: Arena | None = None
        if self.folder is not None:
            return_freed_memory()  # or holes in the heap would take host memory, which files are to save

    @property
    def policy(self) -> OffloadPolicy:
        """FSDP's offload policy. Mapped files are not pinned, because all their pages would then stay in memory."""
        if not self.mode.moves_weights:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.pin and self.mode is OffloadMode.params)

    def materialize(self, model: nn.Module) -> None:
        """Allocate all tensors of a meta-device model, uninitialised, offloaded shards in host memory or a file."""
        made = self.take_shards(model) if self.mode.moves_weights else {}

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return tensor
            if id(tensor) not in made:  # a tied parameter is visited once for each of its names
                made[id(tensor)] = torch.empty_like(tensor, device=self.device)
            return made[id(tensor)]

        model._apply(allocate)
        if self.mode is OffloadMode.nvme:
            self.take_gradients(model)  # reserves space for them in a file, too

    def take_shards(self, model: nn.Module) -> dict[int, torch.Tensor]:
        """Allocate this rank's padded shard of every parameter of a model on the meta device, after `fully_shard`, in
        host memory or in a file. Return the shards by `id` of the meta tensors that they replace.

        Also sets FSDP's private `_sharded_param_data`, for which there is no public setting. Otherwise FSDP would copy
        shards that need padding to memory of its own. tests/parallel/test_offload.py checks the shards' addresses.
        """
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # without duplicates, because several modules may be in one FSDP unit
        parameters = list(dict.fromkeys(p for module in modules for p in fsdp_parameters(module)))
        room = sum(Arena.room(p.padded_sharded_param_size, p.sharded_param.dtype) for p in parameters)
        self.shards = Arena(room, self.folder, pin=self.pin and self.folder is None)
        made: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            padded = self.shards.take(parameter.padded_sharded_param_size, parameter.sharded_param.dtype)
            parameter._sharded_param_data = padded.view(-1)
            made[id(parameter.sharded_param)] = like(parameter.sharded_param, padded[: parameter.sharded_size[0]])
        return made

    def take_gradients(self, model: nn.Module) -> None:
        """Reserve space in a file for this rank's gradients, and register hooks that move reduced gradients there."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) for p in trainable)
        self.gradients = Arena(sum(Arena.room(local(p).shape, p.dtype) for p in trainable), self.folder)
        for parameter in trainable:
            place = self.gradients.take(local(parameter).shape, parameter.dtype)
            parameter.register_post_accumulate_grad_hook(GradientIntoFile(place))

    def drop_loaded_shards(self) -> None:
        """Remove mapped shards from this process's memory, once weights are loaded; the file keeps them."""
        if self.shards is not None and self.shards.is_file_backed:
            self.shards.release_all()

    def optimizer(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap an optimizer to keep its moments in host memory (setting `optimizer`) or a mapped file (`nvme`)."""
        if self.mode is OffloadMode.optimizer:
            return StreamedOptimizer(
                inner, lambda size: Arena(size, pin=self.pin), lambda made: DeviceStaging(made, self.device)
            )
        if self.mode is OffloadMode.nvme:
            # mapped files of parameters and gradients; an update reads ahead in them as in that of the moments
            others = [arena for arena in (self.shards, self.gradients) if arena is not None]
            return StreamedOptimizer(
                inner, lambda size: Arena(size, self.folder), lambda made: FileStaging(made, others)
            )
        return inner


class GradientIntoFile:
    """Gradient hook that moves this rank's shard of the gradient into a mapped file. FSDP adds later ones there."""

    def __init__(self, place: torch.Tensor):
        self.place = place

    def __call__(self, parameter: torch.Tensor) -> None:
        """Move the gradient of a parameter into the file, unless it is there already."""
        gradient = parameter.grad
        assert gradient is not None
        if local(gradient).data_ptr() != self.place.data_ptr():
            self.place.copy_(local(gradient))
            parameter.grad = like(gradient, self.place)


def fsdp_parameters(module: FSDPModule) -> list[Any]:
    """Return the objects (`FSDPParam`) by which FSDP represents the parameters of a unit internally."""
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def filesystem(folder: Path) -> str | None:
    """Return the type (ext4, tmpfs, ...) of the filesystem of a folder, which need not exist yet; None if unknown."""
    device = os.stat(nearest_existing(folder)).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else None


@contextmanager
def explained_memory_errors(cfg: Callable[[], Config], device: torch.device) -> Iterator[None]:
    """Replace an out-of-memory error by one that names settings with which this training would need less memory. `cfg`:
    called after the error, when the planner may have replaced `auto`.

    Raises:
        OutOfMemory: memory ran out in the body.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        message = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not NO_ROOM.search(message):
            raise
        where = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "host memory"
        request = re.search(r"allocate (?:(\d+) bytes|([\d.]+ \w+))", message)
        size = f" ({request[2] or readable(int(request[1]))} more were requested)" if request else ""
        raise OutOfMemory(f"out of {where}{size}; less is needed with {', or '.join(cures(cfg(), device))}") from error


def cures(cfg: Config, device: torch.device) -> list[str]:
    """Return settings, as `key=value`, that need less memory, those first that slow a training down least."""
    by_mode = {
        ActivationCheckpointing.none: ["activation_checkpointing=full"],
        ActivationCheckpointing.dynamic: ["a smaller activation_checkpointing.budget"],
    }
    found = by_mode.get(cfg.activation_checkpointing.mode, [])
    if not cfg.packs:
        found.append("a smaller micro_batch_size")
    elif cfg.plans_tokens or cfg.row_tokens > cfg.data.max_length:  # else a row just holds the longest sample
        found.append("a smaller tokens_per_micro_batch")
    if cfg.can_share_rows:
        found.append("a larger parallel.context")
    if cfg.sharding.strategy is not Strategy.FULL_SHARD:
        found.append("sharding=zero3")
    modes = list(OffloadMode) if device.type == "cuda" else [OffloadMode.nvme]
    later = modes[modes.index(cfg.offload.mode) + 1 :] if cfg.offload.mode in modes else modes
    found += [f"offload={mode.value}" for mode in later]
    return [*found, "more ranks under sharding=zero3"]


def describe_offload(cfg: Config, device: torch.device) -> str:
    """Describe in one line what is moved off the device and where."""
    mode = cfg.offload.mode
    if mode is OffloadMode.none:
        return "none"
    if mode is not OffloadMode.nvme:
        saves = "" if device.type == "cuda" else ": without a GPU the device is the host, and this saves nothing"
        return f"{mode.value}, in host memory{saves}"
    folder = offload_folder(cfg)
    kind = filesystem(folder)
    memory = ", which is memory: this saves nothing; offload.folder=DIR of a disk does" * (kind in IN_MEMORY)
    return f"nvme, in files without names in {folder} ({kind or 'unknown filesystem'}{memory})"


def offload_folder(cfg: Config) -> Path:
    """Return the folder for the files of `offload=nvme`. Raise ConfigError if `offload.folder` does not exist: it is
    not created, since it may be on a disk that is not mounted."""
    if cfg.offload.folder is not None and not Path(cfg.offload.folder).is_dir():
        raise ConfigError(f"offload.folder={cfg.offload.folder} is not a folder; make one, on a local disk, or name it")
    return Path(cfg.offload.folder or cfg.output_dir)


def warn_if_useless(cfg: Config, device: torch.device) -> None:
    """Log a warning if the setting `offload` saves no memory on this machine. To be called on rank 0."""
    text = describe_offload(cfg, device)
    if "saves nothing" in text:
        log().warning("offload=%s", text)
