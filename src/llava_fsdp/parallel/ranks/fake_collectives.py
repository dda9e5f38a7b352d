"""Simulate rank 0 of many ranks in one process, with collectives that take as much memory as real ones.

PyTorch's `fake` process group does not write to some output buffers (before torch 2.12 those of a reduce-scatter). The
values in such a buffer may not be finite, and its memory pages are never allocated. The collectives of this module do
write: an all-gather fills its output with copies of this rank's shard, and a reduce-scatter returns this rank's part of
its input, as if all other ranks had sent zeros.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from llava_fsdp.parallel.ranks.comm_volume import Traffic


def join_fake(size: int) -> None:
    """Initialise a fake process group of `size` ranks, of which only rank 0 exists."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def is_simulated() -> bool:
    """Return whether the process group is a fake one, in which only rank 0 exists."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def simulate_collectives(model: nn.Module, traffic: Traffic) -> None:
    """Replace the collectives of every FSDP unit by simulated ones. `traffic` counts what real ones would send."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SimulatedGather(traffic))
            module.set_custom_reduce_scatter(SimulatedScatter(traffic))


class Allocating:
    """Base class that allocates a new buffer for each call, as FSDP2's own collectives do."""

    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class SimulatedGather(Allocating, AllGather):
    """A simulated all-gather, with the result as if every other rank held the same shard as this rank."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the parts of all ranks in the output with this rank's shard, and count the bytes."""
        parts = output_tensor.view(group.size(), -1)
        for rank in range(group.size()):
            if rank != group.rank():  # FSDP2 has already written this rank's shard into its part of the output
                parts[rank].copy_(input_tensor)
        self.traffic.add("all_gather", output_tensor.nbytes, group.size())


class SimulatedScatter(Allocating, ReduceScatter):
    """A simulated reduce-scatter, with the result as if the gradients of all other ranks were zero."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Copy this rank's part of its own gradients, [ranks * part], into the output, without adding those of other
        ranks, and count the bytes."""
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        self.traffic.add("reduce_scatter", input_tensor.nbytes, group.size())
