"""Rank 0 of many in one process: collectives that nobody answers, and that take the memory of real ones.

PyTorch's `fake` process group leaves what it receives as it was (a reduce-scatter's output before torch 2.12): values
that are not finite, and pages that no system counts. Here an all-gather is filled with this rank's shard, again and
again, and a reduce-scatter takes this rank's part of its input, as if the other ranks had given zeros.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from llava_fsdp.distributed.comm_volume import Traffic


def join_fake(size: int) -> None:
    """Make the process group in which this process is rank 0 and all others are imagined."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def is_imagined() -> bool:
    return dist.is_initialized() and dist.get_backend() == "fake"


def imagine_collectives(model: nn.Module, traffic: Traffic) -> None:
    """Give every unit of a sharded model collectives that need no other rank, and note their bytes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(ImaginedGather(traffic))
            module.set_custom_reduce_scatter(ImaginedScatter(traffic))


class Allocating:
    """A buffer for each call, as FSDP2's own collectives have it."""

    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ImaginedGather(Allocating, AllGather):
    """Every other rank has the shard that this one has."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts, own = output_tensor.view(group.size(), -1), group.rank()
        for rank in range(group.size()):
            if rank != own:  # FSDP2 has written this rank's shard into its place
                parts[rank].copy_(input_tensor)
        self.traffic.add("all_gather", output_tensor.nbytes, group.size())


class ImaginedScatter(Allocating, ReduceScatter):
    """Every other rank has a gradient of zero."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        self.traffic.add("reduce_scatter", input_tensor.nbytes, group.size())
