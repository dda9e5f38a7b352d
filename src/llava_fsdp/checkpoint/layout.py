"""Which rows of which tensor a rank writes, and which it needs back."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from llava_fsdp.checkpoint.manifest import rows_of
from llava_fsdp.distributed.local_shards import local, local_rows


@dataclass(frozen=True)
class Part:
    """Rows [begin, end) of a tensor, and the memory that holds them on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """of the whole tensor"""
    begin: int
    end: int
    values: torch.Tensor
    """[end - begin, ...]; a single number as it is"""


def held_parts(tensors: dict[str, torch.Tensor]) -> dict[str, Part]:
    """What this rank holds of every tensor."""
    found = {}
    for name, tensor in tensors.items():
        begin, end = local_rows(tensor)
        values = local(tensor)
        assert values.ndim == 0 or len(values) == end - begin, f"{name}: {tuple(values.shape)}, rows {begin} to {end}"
        found[name] = Part(values.dtype, tuple(tensor.shape), begin, end, values)
    return found


def written_parts(tensors: dict[str, torch.Tensor]) -> dict[str, Part]:
    """What of it this rank writes. Rows that several ranks hold are shared out evenly between them."""
    found = {}
    held = held_parts(tensors)
    for number, name in enumerate(sorted(held)):
        part = held[name]
        replica, replicas = replica_of(tensors[name])
        if not part.shape:  # one row: each of them by another rank
            mine = number % replicas == replica
            begin, end = (0, 1) if mine else (0, 0)
        else:
            count = part.end - part.begin
            begin, end = (part.begin + count * n // replicas for n in (replica, replica + 1))
        if begin < end:
            values = part.values if not part.shape else part.values[begin - part.begin : end - part.begin]
            found[name] = Part(part.dtype, part.shape, begin, end, values)
    return found


def replica_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which of how many ranks with the same rows this one is. What is no DTensor is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    number, count = 0, 1
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            number, count = number * size + place, count * size
        else:
            assert isinstance(placement, Shard) and placement.dim == 0, f"{placement} is no cut into rows"
    return number, count


def estimated_bytes(parts: dict[str, Part]) -> int:
    return sum(part.values.nbytes for part in parts.values())


def row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    whole = torch.Size(shape).numel() * dtype.itemsize
    return whole // max(1, rows_of(shape))
