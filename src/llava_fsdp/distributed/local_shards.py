"""What this rank holds of each parameter, and the whole of it again."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llava_fsdp.distributed.activation_checkpoint import clean_name
from llava_fsdp.distributed.precision import MasterWeights


@dataclass(frozen=True)
class Shard:
    """Rows [begin, end) of a parameter."""

    begin: int
    end: int
    tensors: list[torch.Tensor]
    """The local tensors that hold them: the model's own and, where there is one, the fp32 master."""


def local_shards(model: nn.Module, masters: MasterWeights) -> dict[str, Shard]:
    """This rank's rows of every parameter, by name."""
    shards = {}
    for wrapped_name, parameter in model.named_parameters():
        name = clean_name(wrapped_name)
        master = masters.named.get(name)
        holders = [parameter] if master is None or master is parameter else [parameter, master]
        begin, end = local_rows(parameter)
        shards[name] = Shard(begin, end, [local(h) for h in holders])
    return shards


def local_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows of dimension 0 that this rank holds; a single number is one row, on every rank."""
    if not tensor.ndim:
        return 0, 1
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as plain numbers."""
    tensor = tensor.detach()
    return unwrapped(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """torchao wraps weights that travel in fp8; what it wraps are their numbers in full."""
    return getattr(tensor, "_tensor", tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor sharded as it is, of plain numbers: what collectives and checkpoints of any kind take."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or type(tensor.to_local()) is torch.Tensor:
        return tensor
    return DTensor.from_local(
        local(tensor), tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip


def like(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A tensor that is cut over the ranks as `tensor` is, of which this rank holds `own`, on whatever device.

    `DTensor.from_local` would move it to the mesh's device.
    """
    return DTensor(own, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else own  # type: ignore[call-arg]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full parameter on every rank; a collective where it is sharded."""
    tensor = plain(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
