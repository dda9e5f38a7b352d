"""Rows of a tensor are written to a checkpoint once, however the ranks share them."""

import pytest
import torch
from harness import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from llava_fsdp.checkpoint.layout import copy_of_mesh, written_rows
from llava_fsdp.checkpoint.manifest import RowRange
from llava_fsdp.parallel.ranks.world import World

WAYS = {
    "cut twice": [Shard(0), Shard(0)],
    "cut twice, inner first": [_StridedShard(0, split_factor=2), Shard(0)],
    "copied": [Replicate(), Shard(0)],
    "on all ranks": [Replicate(), Replicate()],
}


def written(world: World, rows: int) -> dict[str, tuple[int, int, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensors: dict[str, torch.Tensor] = {}
    for name, placements in WAYS.items():
        values = torch.arange(3.0 * rows).view(rows, 3)
        box, offset = compute_local_shape_and_global_offset(values.shape, mesh, placements)
        own = values[offset[0] : offset[0] + box[0]].clone()
        tensors[name] = DTensor.from_local(own, mesh, placements, run_check=False, shape=values.shape, stride=(3, 1))
    entries, chosen = written_rows(tensors, "file")
    return {name: (entries[name].ranges[0].begin, entries[name].ranges[0].end, chosen[name]) for name in chosen}


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_each_row_is_written_once(rows: int, pools: dict[int, RankPool]) -> None:
    found = pools[4].run(written, rows)
    for name in WAYS:
        parts = sorted((held[name] for held in found if name in held), key=lambda part: part[0])
        ends = [0, *(end for _, end, _ in parts)]
        assert [begin for begin, _, _ in parts] == ends[:-1] and ends[-1] == rows, name
        assert torch.equal(torch.cat([values for _, _, values in parts]), torch.arange(3.0 * rows).view(rows, 3)), name


def written_of_parts(world: World) -> dict[str, tuple[RowRange, torch.Tensor]]:
    """Of a mesh of which each line divides layers: a weight that is divided by columns, and one that is not divided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    values = torch.arange(35.0).view(7, 5)
    box, offset = compute_local_shape_and_global_offset(values.shape, mesh, [Shard(0), Shard(1)])
    own = values[offset[0] : offset[0] + box[0], offset[1] : offset[1] + box[1]].clone()
    tensors: dict[str, torch.Tensor] = {
        "columns": DTensor.from_local(own, mesh, [Shard(0), Shard(1)], run_check=False, shape=(7, 5), stride=(5, 1)),
        "whole": distribute_tensor(values, mesh["shard"], [Shard(0)], src_data_rank=None),
    }
    entries, chosen = written_rows(tensors, "file")
    return {name: (entries[name].ranges[0], chosen[name]) for name in chosen}


@pytest.mark.ranks
def test_each_value_of_divided_weights_is_written_once(pools: dict[int, RankPool]) -> None:
    found = pools[4].run(written_of_parts)
    for name in ("columns", "whole"):
        seen, count = torch.zeros(7, 5), torch.zeros(7, 5)
        for rows, values in (held[name] for held in found if name in held):
            place = slice(rows.begin, rows.end), slice(*(rows.columns or (0, 5)))
            seen[place] += values
            count[place] += 1
        assert torch.equal(seen, torch.arange(35.0).view(7, 5)) and count.eq(1).all(), name


@pytest.mark.parametrize(
    ("ranks", "found"),
    [((0, 2, 4, 6), (0, 2)), ((1, 3, 5, 7), (1, 2)), ((4, 5), (2, 4)), (tuple(range(8)), (0, 1)), ((3, 7), (3, 4))],
)
def test_meshes_side_by_side_are_numbered(ranks: tuple[int, ...], found: tuple[int, int]) -> None:
    assert copy_of_mesh(ranks, 8) == found


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_ranks_with_the_same_tensors_share_the_writing(holders: int) -> None:
    """Rows, and numbers without rows: each is written once, and no rank writes all of them."""
    tensors = {f"number {n}": torch.tensor(float(n)) for n in range(6)} | {"rows": torch.arange(12.0).view(6, 2)}
    found = [written_rows(tensors, f"file {rank}", (rank, holders)) for rank in range(holders)]
    for rank, (entries, values) in enumerate(found):
        assert sum(name.startswith("number") for name in values) == 6 // holders
        (rows,) = entries["rows"].ranges
        assert rows == RowRange(f"file {rank}", 6 // holders * rank, 6 // holders * (rank + 1))
        assert values["rows"].equal(tensors["rows"][rows.begin : rows.end])
    assert sorted(name for _, values in found for name in values) == sorted([*tensors, *["rows"] * (holders - 1)])
