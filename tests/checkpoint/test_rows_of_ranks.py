"""Rows of a tensor are written to a checkpoint once, however the ranks share them."""

import pytest
import torch
from harness import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from llava_fsdp.checkpoint.layout import written_rows
from llava_fsdp.distributed.mesh import World

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
