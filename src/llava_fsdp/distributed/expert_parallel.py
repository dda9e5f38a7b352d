"""Expert parallelism: several ranks share the experts of a mixture. Each holds an equal part of them, and tokens travel
to the ranks of their experts and back. No token is dropped, however unequal the loads are.

transformers keeps the experts of a layer in one module, whose parameters have one row (slice of dimension 0) per
expert, and lets a registered function run them. The function of this module sends each token to the ranks of its
experts, runs transformers' own function on the tokens that arrive, and sends the results back. So whatever transformers
computes in experts (biases, gates, transposed weights) is computed here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llava_fsdp.distributed.fake_collectives import is_simulated

NAME = "llava_fsdp_expert_parallel"
"""Name of this module's function in transformers' table of functions that run experts."""
EXPERT = "expert"
"""Name of the mesh dimension whose ranks share experts."""
RUN = "grouped_mm"
"""Name of transformers' own function that runs experts, one matrix product for all of them."""


@dataclass(frozen=True)
class SharedExperts:
    """The experts that several ranks share, as `fully_shard` needs them."""

    modules: Sequence[nn.Module]
    """Modules of experts whose parameters FSDP shards further, over the ranks that hold the same experts."""
    mesh: DeviceMesh
    """Mesh of the ranks that hold the same experts, with the dimensions (replicate, shard) or (shard,)."""


def share_experts(
    language_model: Any, modules: Sequence[nn.Module], mesh: DeviceMesh, shards_frozen: bool
) -> SharedExperts:
    """Divide the experts of a meta-device language model among ranks, in place.

    Args:
        modules: the modules of experts. The ranks divide the experts of each evenly.
        mesh: mesh of all ranks with the dimensions (replicate, shard, expert) or (shard, expert). The ranks of a line
            along `expert` share the experts.
        shards_frozen: whether FSDP shards frozen weights too. Frozen experts that it does not shard become DTensors of
            the whole mesh, so that it is known which ranks hold copies of them.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, partial(run_shared, exchange=Exchange(mesh.get_group(EXPERT))))
    language_model.set_experts_implementation(NAME)
    size, index = mesh[EXPERT].size(), mesh.get_local_rank(EXPERT)
    sharded = []
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = parameter.detach().chunk(size)[index].contiguous()
            if parameter.requires_grad or shards_frozen:
                own = DTensor.from_local(rows, mesh[EXPERT], [Shard(0)], run_check=False)
                sharded.append(module)
            else:
                placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
                own = DTensor.from_local(rows, mesh, placements, run_check=False)
            module.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    others = tuple(name for name in mesh.mesh_dim_names or () if name != EXPERT)
    return SharedExperts(list(dict.fromkeys(sharded)), mesh[others])


class Exchange:
    """Collectives between the ranks that share experts. Holds only the group's name, so that it does not keep the group
    alive."""

    def __init__(self, group: dist.ProcessGroup):
        self.size, self.index = group.size(), group.rank()
        self.group = group.group_name

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Tell each rank how many rows it will get for each of its experts: int64 [ranks, experts of a rank] -> the
        same, of the rows that this rank will get from each rank."""
        if is_simulated():  # nothing arrives: every rank is taken to send as many rows as this one
            return sent[self.index].expand_as(sent)
        got = _functional_collectives.all_to_all_single(sent.contiguous(), None, None, self.group)
        return _functional_collectives.wait_tensor(got)

    def rows(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send rows to the other ranks; differentiable.

        Args:
            rows: [rows, ...]: the rows for rank 0, then those for rank 1, ...
            send: number of rows for each rank.
            receive: number of rows from each rank.

        Returns:
            The rows from rank 0, then those from rank 1, ...
        """
        return _functional_collectives.all_to_all_single_autograd(rows.contiguous(), receive, send, self.group)


def run_shared(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, exchange: Exchange
) -> torch.Tensor:
    """Run a layer's experts, of which this rank holds a part: return for each token the weighted sum of what its
    experts compute, [tokens, width]. Collective: all ranks that share experts must call it, also without tokens.

    Args:
        module: the layer's module of experts.
        hidden: the tokens, [tokens, width].
        chosen: numbers of each token's experts, int64 [tokens, choices].
        weights: weights of the sum, [tokens, choices].
    """
    choices, size = chosen.shape[1], exchange.size
    own = module.num_experts // size
    experts = chosen.flatten()
    order = experts.argsort(stable=True)  # pairs of a token and a choice by expert, and so by rank
    sent = torch.zeros(size * own, dtype=torch.int64, device=experts.device)
    sent = sent.scatter_add_(0, experts, torch.ones_like(experts)).view(size, own)
    got = exchange.counts(sent)
    # the one place in a layer where the host waits for the device: it must know how much memory the rows take
    send, receive = torch.stack([sent.sum(1), got.sum(1)]).tolist()
    rows = exchange.rows(hidden[order // choices], send, receive)
    numbers = torch.arange(own, device=experts.device).repeat(size)
    numbers = numbers.repeat_interleave(got.flatten(), output_size=sum(receive))
    found = exchange.rows(run_own(OwnExperts(module, own), rows, numbers), receive, send)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return (found[place].view(*chosen.shape, hidden.shape[1]) * weights[..., None]).sum(1).to(hidden.dtype)


def run_own(experts: OwnExperts, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Run this rank's experts on the rows that it got, [rows, width].

    Args:
        numbers: number of each row's expert among those of this rank, int64 [rows].
    """
    run: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[RUN]
    if len(rows):
        return run(experts, rows, numbers[:, None], rows.new_ones(len(rows), 1))
    # One row of zeros is run and dropped, so that the weights and the empty rows are in the autograd graph: in the
    # backward pass, FSDP reduces gradients and the other ranks exchange rows with this one.
    return run(experts, rows.sum(0, keepdim=True), numbers.new_zeros(1, 1), rows.new_ones(1, 1))[:0]


class OwnExperts:
    """This rank's part of a module of experts, with the attributes that transformers' functions read. Weights are plain
    tensors."""

    def __init__(self, module: nn.Module, count: int):
        self.module = module
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to_local() if isinstance(value, DTensor) else value
