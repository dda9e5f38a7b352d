"""Determine which rows (slices of dimension 0) of each tensor a rank holds, and which of them it writes into its
checkpoint file."""

import functools
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llava_fsdp.checkpoint.manifest import RowRange, TensorEntry
from llava_fsdp.parallel.local_shards import local, local_columns, local_rows
from llava_fsdp.parallel.ranks.consensus import rank_and_size


def held_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the rows of a tensor that this rank holds: the index of the first row, and the rows' values [rows, ...].
    If the tensor is sharded by columns, the values are this rank's columns. A scalar is returned with index 0."""
    begin, end = local_rows(tensor)
    values = local(tensor)
    assert values.ndim == 0 or len(values) == end - begin, f"{tuple(values.shape)} holds rows {begin} to {end}"
    return begin, values


def written_rows(
    tensors: Mapping[str, torch.Tensor], file: str, equal_ranks: tuple[int, int] | None = None
) -> tuple[dict[str, TensorEntry], dict[str, torch.Tensor]]:
    """Choose the rows that this rank writes to a checkpoint. Rows that several ranks hold are divided evenly among
    them. Return, by tensor name, what the manifest records of the chosen rows, and the values [rows, ...]. Tensors
    without chosen rows are left out.

    Args:
        tensors: all tensors of the checkpoint that this rank holds a part of, by name. Ranks with the same pipeline
            stages of a model have tensors of the same names.
        file: name of this rank's file in the checkpoint.
        equal_ranks: (i, n): this rank is number i of the n ranks with the same tensors; None: all ranks have the same.
    """
    entries, values_to_write = {}, {}
    for tensor_number, name in enumerate(sorted(tensors)):
        first, values = held_rows(tensors[name])
        copy_number, num_copies = replica_of(tensors[name], equal_ranks)
        if not values.ndim:
            # each scalar is written by one rank; `tensor_number` distributes the scalars over the ranks
            begin, end = 0, int(tensor_number % num_copies == copy_number)
        else:
            begin, end = (first + len(values) * n // num_copies for n in (copy_number, copy_number + 1))
            values = values[begin - first : end - first]
        if begin < end:
            rows = RowRange(file, begin, end, local_columns(tensors[name]))
            entries[name] = TensorEntry(values.dtype, tuple(tensors[name].shape), (rows,))
            values_to_write[name] = values
    return entries, values_to_write


def replica_of(tensor: torch.Tensor, equal_ranks: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return (i, n): this rank is number i, from 0, of the n ranks that hold the same part of a tensor.

    A tensor that is not a DTensor is whole on every rank that has it. A DTensor may have several meshes of the same
    form, each with a copy: of 8 ranks, ranks 0 to 3 and ranks 4 to 7 may each shard it over a mesh of four. Then 2
    ranks hold each part, and rank 5 is number 1 of those that hold the second part. Dimensions of the mesh that
    replicate the tensor multiply the number of copies.

    Args:
        equal_ranks: (i, n): this rank is number i of the n consecutive ranks that have tensors of the same names (the
            same stages of the model); None: all ranks have.
    """
    index, num_ranks = equal_ranks or rank_and_size()
    if not isinstance(tensor, DTensor):
        return index, num_ranks
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    first = rank_and_size()[0] - index
    number, count = copy_of_mesh(tuple((tensor.device_mesh.mesh.flatten() - first).tolist()), num_ranks)
    for place, length, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            number, count = number * length + place, count * length
        else:
            shards_rows_or_columns = isinstance(placement, (Shard, _StridedShard)) and placement.dim in (0, 1)
            assert shards_rows_or_columns, f"{placement} does not shard rows or columns"
    return number, count


@functools.cache
def copy_of_mesh(ranks: tuple[int, ...], size: int) -> tuple[int, int]:
    """Return (i, n), if ranks 0 to `size` - 1 are divided into n meshes of the same form: i is the index of the mesh
    that has the given ranks. Each mesh has the ranks of the first one plus a constant."""
    offsets = [rank - min(ranks) for rank in ranks]
    begins: list[int] = []
    covered: set[int] = set()
    for begin in range(size):
        if begin not in covered:  # the smallest rank that is in no mesh yet is the first of the next one
            begins.append(begin)
            covered |= {begin + offset for offset in offsets}
    assert len(begins) * len(ranks) == size and covered == set(range(size)), f"{ranks} are no regular mesh of {size}"
    return begins.index(min(ranks)), len(begins)
