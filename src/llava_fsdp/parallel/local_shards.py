"""Access this rank's shards of parameters as plain tensors (not DTensors), and gather whole parameters. Rows are
indices of dimension 0, columns of dimension 1."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WRAPPED = "_checkpoint_wrapped_module."
"""Text that torch's checkpoint wrapper adds to the names of parameters and modules in a wrapped block."""


class NamedMasters(Protocol):
    """The master weights of a model, by name (`MasterWeights` in precision/precision.py)."""

    named: dict[str, nn.Parameter]


@dataclass(frozen=True)
class LocalShard:
    """The part of a parameter that this rank holds: rows `begin` to `end`, `end` excluded."""

    begin: int
    end: int
    tensors: list[torch.Tensor]
    """This rank's tensors with these values: the shard of the model's parameter and, if the master weight is a separate
    tensor, the shard of the master weight."""
    columns: tuple[int, int] | None = None
    """Range of columns; None: all."""


def local_shards(model: nn.Module, masters: NamedMasters) -> dict[str, LocalShard]:
    """Return the part of every parameter that this rank holds, by name, with all tensors that have its values: the
    model's and, if it is separate, the master weight."""
    shards = {}
    for wrapped_name, parameter in model.named_parameters():
        name = clean_name(wrapped_name)
        master = masters.named.get(name)
        holders = [parameter] if master is None or master is parameter else [parameter, master]
        begin, end = local_rows(parameter)
        shards[name] = LocalShard(begin, end, [local(h) for h in holders], local_columns(parameter))
    return shards


def clean_name(name: str) -> str:
    """Return the name of a parameter or module as it was before its block was wrapped."""
    return name.replace(WRAPPED, "")


def local_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range [begin, end) of a tensor's rows that this rank holds. A scalar is one row on every rank."""
    if not tensor.ndim:
        return 0, 1
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0]
    if not tensor.numel():  # FSDP gives no rank a row of an empty tensor
        return 0, len(tensor.to_local())
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)


def local_columns(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the range [begin, end) of a tensor's columns that this rank holds; None if it holds whole rows."""
    if not isinstance(tensor, DTensor) or all(p.is_replicate() or p.dim == 0 for p in tensor.placements):  # type: ignore[attr-defined]
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[1], offset[1] + shape[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor, detached from autograd. A plain tensor is its own shard."""
    tensor = tensor.detach()
    return unwrapped(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def plain_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's shard, for operations in place, without torchao's fp8 wrapper. It takes
    a tenth of the time of `local`, which detaches. Unlike `DTensor.to_local`, it makes no new view of a parameter."""
    shard = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return shard if type(shard) in (torch.Tensor, nn.Parameter) else unwrapped(shard)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full-precision tensor inside torchao's wrapper of a weight that is gathered in fp8, if any."""
    return getattr(tensor, "_tensor", tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or DTensor detached from autograd and without torchao's wrapper for weights that are gathered in
    fp8, which collectives and checkpoints cannot use."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or type(tensor.to_local()) is torch.Tensor:
        return tensor
    return DTensor.from_local(
        local(tensor), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


def like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is sharded like `tensor` and whose shard on this rank is `shard`; `shard` itself if
    `tensor` is plain. It stays on its device, which `DTensor.from_local` would change to that of the mesh."""
    return DTensor(shard, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else shard  # type: ignore[call-arg]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a tensor on every rank. Collective if it is a DTensor."""
    tensor = plain(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
