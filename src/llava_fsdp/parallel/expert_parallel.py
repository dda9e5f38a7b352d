"""Expert parallelism: several ranks share the experts of a mixture. Each holds an equal part of them, and tokens travel
to the ranks of their experts and back. No token is dropped, however unequal the loads are.

transformers keeps the experts of a layer in one module, whose parameters have one row (slice of dimension 0) per
expert, and lets a registered function run them. The function of this module sends each token to the ranks of its
experts, runs transformers' own function on the tokens that arrive, and sends the results back. So whatever transformers
computes in experts (biases, gates, transposed weights) is computed here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.experts import find_experts
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.fake_collectives import is_simulated

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
    """Divide the experts of a meta-device language model evenly among ranks, in place, and let it run them by sending
    tokens to the ranks of their experts. Return the modules that `fully_shard` has to shard further, and the mesh for
    this: the ranks that hold the same experts.

    Args:
        modules: the modules that hold the experts of a layer.
        mesh: all ranks, ([replicate,] shard, expert). The ranks of a line along `expert` share the experts.
        shards_frozen: whether FSDP shards frozen weights too. Frozen experts that it does not shard become DTensors of
            the whole mesh, so that it is known which ranks hold copies of them.
    """
    exchange = SimulatedExchange if is_simulated() else Exchange  # simulated: only rank 0 of all ranks exists
    run_with(language_model, exchange(mesh.get_group(EXPERT)), NAME)
    size, index = mesh[EXPERT].size(), mesh.get_local_rank(EXPERT)
    sharded = []
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = parameter.detach().chunk(size)[index].contiguous()
            if parameter.requires_grad or shards_frozen:
                shard = DTensor.from_local(rows, mesh[EXPERT], [Shard(0)], run_check=False)
                sharded.append(module)
            else:
                placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
                shard = DTensor.from_local(rows, mesh, placements, run_check=False)
            module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    others = tuple(name for name in mesh.mesh_dim_names or () if name != EXPERT)
    return SharedExperts(list(dict.fromkeys(sharded)), mesh[others])


def share_experts_of(model: Architecture, parallelism: Parallelism) -> SharedExperts | None:
    """Divide the experts of a meta-device model among ranks, in place, and return the modules that `fully_shard` has to
    shard further, with their mesh. Return None if each rank has all experts."""
    mesh, language = parallelism.meshes.experts, model.language
    if mesh is None:
        return None
    return share_experts(language, list(find_experts(language).values()), mesh, parallelism.plan.shards_frozen)


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends and gets in one exchange of a layer's tokens."""

    send: list[int]
    """Number of rows for each rank."""
    receive: list[int]
    """Number of rows from each rank."""
    numbers: torch.Tensor
    """Number of the expert of each row that this rank gets, counted among its own; int64 [rows]."""


class Exchange:
    """Collectives between the ranks that share experts. Only the group's name is held, so the group can be freed."""

    def __init__(self, group: dist.ProcessGroup):
        self.size = group.size()
        self.group = group.group_name

    def route(self, sent: torch.Tensor, total: int) -> Route:
        """Tell the other ranks how many rows they will get. A row is a token for one expert. Return how many rows this
        rank sends to each rank and gets from it, and the number of the expert, among this rank's, for each row that it
        gets. The host waits for the device here, once in each layer, to know how much memory the rows take.

        Args:
            sent: number of this rank's rows for each expert, int64 [ranks, experts of a rank].
            total: number of this rank's rows for all experts.
        """
        got = self.counts(sent)
        send, receive = torch.stack([sent.sum(1), got.sum(1)]).tolist()
        numbers = torch.arange(got.shape[1], device=got.device).repeat(self.size)
        return Route(send, receive, numbers.repeat_interleave(got.flatten(), output_size=sum(receive)))

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Exchange numbers of rows, int64 [ranks, experts of a rank]: given those that this rank sends to each expert
        of each rank, return those that each of its own experts gets from each rank."""
        got = _functional_collectives.all_to_all_single(sent, None, None, self.group)
        return _functional_collectives.wait_tensor(got)

    def rows(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send rows [rows, ...] to the other ranks, those for rank 0 first. Return those from rank 0, rank 1, ...
        Differentiable. `send` and `receive` are the numbers of rows for and from each rank."""
        return _functional_collectives.all_to_all_single_autograd(rows.contiguous(), receive, send, self.group)


class SimulatedExchange(Exchange):
    """Exchange of a dry run, in which there are no other ranks: all loads are taken to be equal."""

    def route(self, sent: torch.Tensor, total: int) -> Route:
        self.counts(sent)
        each = [total // self.size + (rank < total % self.size) for rank in range(self.size)]
        return Route(each, each, torch.arange(total, device=sent.device) % sent.shape[1])


class MetaExchange(SimulatedExchange):
    """Exchange between `size` ranks on the meta device, which only allocates what a real one would."""

    def __init__(self, size: int):
        self.size = size

    def route(self, sent: torch.Tensor, total: int) -> Route:
        numbers = sent.new_empty(total)  # without values, which would depend on weights
        return replace(super().route(sent, total), numbers=numbers)

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        return sent.clone()

    def rows(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return rows.clone()


def run_shared(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, exchange: Exchange
) -> torch.Tensor:
    """Run a layer's experts, of which this rank holds a part: return for each token the weighted sum of what its
    experts compute, [tokens, width]. Collective, also without tokens.

    Args:
        hidden: the tokens, [tokens, width].
        chosen: numbers of each token's experts, int64 [tokens, choices].
        weights: weights of the sum, [tokens, choices].
        exchange: collectives between the ranks that share the experts.
    """
    choices, size = chosen.shape[1], exchange.size
    experts_per_rank = module.num_experts // size
    experts = chosen.flatten()
    order = experts.argsort(stable=True)  # pairs of a token and a choice by expert, and so by rank
    # `sent`: number of pairs for each expert, int64 [ranks, experts of a rank]; `route`: the numbers of rows that go to
    # and come from each rank, and the expert of each row that comes
    sent = torch.zeros(size * experts_per_rank, dtype=torch.int64, device=experts.device)
    sent = sent.scatter_add(0, experts, torch.ones_like(experts)).view(size, experts_per_rank)
    route = exchange.route(sent, len(experts))
    rows = exchange.rows(hidden[order // choices], route.send, route.receive)
    found = exchange.rows(run_own(OwnExperts(module, experts_per_rank), rows, route.numbers), route.receive, route.send)
    place = torch.empty_like(order)  # where each pair is in `order`
    place[order] = torch.arange(len(order), device=order.device)
    return (found[place].view(*chosen.shape, hidden.shape[1]) * weights[..., None]).sum(1).to(hidden.dtype)


def run_own(experts: OwnExperts, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Run this rank's experts on the rows that it got, [rows, width]. `numbers` has the number of each row's expert
    among those of this rank, int64 [rows]."""
    run: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[RUN]
    if len(rows):
        return run(experts, rows, numbers[:, None], rows.new_ones(len(rows), 1))
    # One row of zeros is run and dropped, so that the weights and the empty rows are in the autograd graph: in the
    # backward pass, FSDP reduces gradients and the other ranks exchange rows with this one.
    return run(experts, rows.sum(0, keepdim=True), numbers.new_zeros(1, 1), rows.new_ones(1, 1))[:0]


def run_with(language_model: Any, exchange: Exchange, name: str) -> None:
    """Let a language model run its experts with `run_shared`, which stays in transformers' table under `name`."""
    ALL_EXPERTS_FUNCTIONS.register(name, partial(run_shared, exchange=exchange))
    language_model.set_experts_implementation(name)


def share_experts_on_meta(language_model: Any, modules: Sequence[nn.Module], size: int) -> None:
    """Give a language model on the meta device the part of the experts that one of `size` ranks has, in place, and make
    it run them as that rank does. Nothing is sent; what would be received is allocated."""
    run_with(language_model, MetaExchange(size), f"{NAME}_meta_{size}")
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(parameter.detach().chunk(size)[0].clone(), parameter.requires_grad)
            module.register_parameter(name, shard)


class OwnExperts:
    """This rank's part of a module of experts, with the attributes that transformers' functions read."""

    def __init__(self, module: nn.Module, count: int):
        self.module = module
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to_local() if isinstance(value, DTensor) else value
