"""Muon, an optimizer that makes the update of each weight matrix orthogonal, on matrices that are sharded over ranks.

A matrix is orthogonalised whole, by one rank: the ranks send it their parts, and it sends each rank its part of the
result. All matrices are dealt out to the ranks so that each computes about as much. A result therefore does not depend
on the number of ranks, except for the order in which sums are rounded.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llava_fsdp.parallel.local_shards import plain_shard
from llava_fsdp.parallel.parallelism import Parallelism, Range
from llava_fsdp.parallel.precision.fused_adamw import FusedAdamW

MOMENTUM = "momentum_buffer"
"""Name of Muon's only moment in an optimizer's state, as in `torch.optim.Muon`."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b and c of the polynomial a x + b x^3 + c x^5, which brings singular values to about 1 (`torch.optim.Muon`)."""
ITERATIONS = 5
EPSILON = 1e-7
"""Smallest norm by which a matrix is divided."""
ADAMW_SIZE = 0.2
"""Usual root mean square of AdamW's updates, before the learning rate (arXiv 2502.16982, section 2.2)."""
ROUND_ELEMENTS = 1 << 25
"""Elements of matrices that a rank orthogonalises at a time, at least one matrix."""

Part = tuple[Range, Range]
"""Rows and columns of a matrix."""


@dataclass(frozen=True)
class Stack:
    """Matrices that one rank orthogonalises together: a weight, or experts of a layer."""

    parameter: int
    """Index of the parameter to which the matrices belong."""
    experts: Range
    """Which slices of dimension 0, if the parameter is a stack of experts; (0, 1) for a matrix."""
    rows: int
    columns: int
    parts: dict[int, Part]
    """Rank -> rows and columns of each matrix that it holds."""

    @property
    def count(self) -> int:
        return self.experts[1] - self.experts[0]

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def cost(self) -> int:
        """A number in proportion to the FLOPs of the orthogonalisation, nearly."""
        return self.elements * min(self.rows, self.columns)

    @property
    def holders(self) -> list[int]:
        """The ranks that hold the whole matrices."""
        return [rank for rank, part in self.parts.items() if part == ((0, self.rows), (0, self.columns))]

    def senders(self, owner: int) -> dict[Part, int]:
        """Return which rank sends each part to the owner: the owner itself if it has the part, else one of those that
        have it, another one for each owner."""
        ranks: dict[Part, list[int]] = {}
        for rank, part in self.parts.items():
            ranks.setdefault(part, []).append(rank)
        return {part: owner if owner in of_part else of_part[owner % len(of_part)] for part, of_part in ranks.items()}


@dataclass(frozen=True)
class Owned:
    """Matrices, and the rank that orthogonalises them."""

    stack: Stack
    owner: int
    senders: dict[Part, int]

    @property
    def stays(self) -> bool:
        """Whether no other rank holds a part."""
        return set(self.stack.parts) == {self.owner}


def stacks_of(parameter: int, shape: Sequence[int], held: Sequence[Sequence[Range]]) -> Iterator[Stack]:
    """Yield the matrices of a parameter.

    Args:
        parameter: the parameter's index.
        shape: [rows, columns] or [experts, rows, columns].
        held: for each rank and dimension, the indices that it holds.
    """
    rows, columns = shape[-2:]
    full = (0, rows), (0, columns)
    with_experts = [((0, 1), *ranges) if len(shape) == 2 else tuple(ranges) for ranges in held]
    holding = {rank: ranges for rank, ranges in enumerate(with_experts) if all(begin < end for begin, end in ranges)}
    experts = sorted({ranges[0] for ranges in holding.values()})
    if any(ranges[1:] != full for ranges in holding.values()):  # each expert is divided among ranks: one at a time
        experts = [(number, number + 1) for number in range(shape[0] if len(shape) == 3 else 1)]
    for begin, end in experts:
        parts = {rank: (r[1], r[2]) for rank, r in holding.items() if r[0][0] <= begin and end <= r[0][1]}
        yield Stack(parameter, (begin, end), rows, columns, parts)


def deal_out(stacks: Iterable[Stack], ranks: int) -> list[list[list[Owned]]]:
    """Choose the rank that orthogonalises each stack, so that all compute about as much. Matrices that are whole on
    some ranks are not sent to others.

    Returns:
        Rounds: for each, and for each rank, the stacks that it orthogonalises.
    """
    load = [0] * ranks
    of_rank: list[list[Owned]] = [[] for _ in range(ranks)]
    for stack in sorted(stacks, key=lambda s: (-s.cost, s.parameter, s.experts)):
        owner = min(stack.holders or range(ranks), key=lambda rank: (load[rank], rank))
        load[owner] += stack.cost
        of_rank[owner].append(Owned(stack, owner, stack.senders(owner)))
    return [list(each) for each in zip_longest(*map(rounds_of, of_rank), fillvalue=[])]


def rounds_of(stacks: Sequence[Owned]) -> list[list[Owned]]:
    """Divide the stacks of a rank into groups of at most ROUND_ELEMENTS elements, or of one stack."""
    rounds: list[list[Owned]] = []
    filled = ROUND_ELEMENTS
    for owned in stacks:
        if filled + owned.stack.elements > ROUND_ELEMENTS:
            rounds.append([])
            filled = 0
        rounds[-1].append(owned)
        filled += owned.stack.elements
    return rounds


@dataclass(frozen=True)
class HeldPart:
    """A part of matrices that one rank holds or sends."""

    owned: Owned
    part: Part

    @property
    def elements(self) -> int:
        return self.owned.stack.count * area(self.part)


class Round:
    """What one rank sends, receives and orthogonalises at a time. Made once, because all steps are alike.

    Args:
        rank: the rank.
        dealt: for each rank, the stacks that it orthogonalises in this round.
    """

    def __init__(self, rank: int, dealt: Sequence[Sequence[Owned]]):
        self.dealt = dealt
        self.own = dealt[rank]
        self.stays = all(owned.stays for of_rank in dealt for owned in of_rank)
        """Whether no rank needs a part that another one has."""
        self.sent = [[o.stack for o in of_rank if rank in o.senders.values()] for of_rank in dealt]
        """For each rank, the stacks of which this rank sends its part to it."""
        self.received = [
            [HeldPart(o, part) for o in self.own for part, sender in o.senders.items() if sender == other]
            for other in range(len(dealt))
        ]
        """For each rank, the parts of this rank's own stacks that come from it."""
        self.returned = [
            [HeldPart(o, o.stack.parts[other]) for o in self.own if other in o.stack.parts]
            for other in range(len(dealt))
        ]
        """For each rank, the parts of results that this rank sends to it."""
        self.results = [
            [HeldPart(o, o.stack.parts[rank]) for o in of_rank if rank in o.stack.parts] for of_rank in dealt
        ]
        """For each rank, the stacks of which this rank gets its part of the result from it."""


def area(part: Part) -> int:
    """Return the number of elements of a part."""
    (top, bottom), (left, right) = part
    return (bottom - top) * (right - left)


def part_of(matrices: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a view of a part of whole matrices [count, rows, columns]."""
    return matrices[:, slice(*part[0]), slice(*part[1])]


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [count, rows, columns] with the same singular vectors, and singular values near 1, in the same
    dtype: five Newton-Schulz iterations, as in `torch.optim.Muon`."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def size_of_update(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of AdamW's updates, so that both can have
    one learning rate (arXiv 2502.16982; `adjust_lr_fn="match_rms_adamw"` of `torch.optim.Muon`)."""
    return ADAMW_SIZE * math.sqrt(max(rows, columns))


class Muon(FusedAdamW):
    """Muon (Jordan et al. 2024, with Nesterov momentum) for the matrices, and AdamW for all other parameters.

    Args:
        groups: as `torch.optim.AdamW` takes them, with lr and weight_decay in each.
        matrices: the parameters of the groups that are matrices [rows, columns] or stacks of them.
        momentum: share of the old mean of gradients in the new one.
        dtype: dtype in which matrices are sent and orthogonalised.
        parallelism: the ranks, and how they shard.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: set[nn.Parameter],
        momentum: float,
        dtype: torch.dtype,
        parallelism: Parallelism,
        **adamw: Any,
    ):
        super().__init__(groups, **adamw)
        self.matrices = [p for group in self.param_groups for p in group["params"] if p in matrices]
        self.is_matrix = matrices
        self.momentum = momentum
        self.dtype = dtype
        self.group = parallelism.state_group
        self.rank, ranks = parallelism.state_ranks
        held = [[parallelism.ranges_held(parameter, rank) for rank in range(ranks)] for parameter in self.matrices]
        stacks = (stacks_of(index, p.shape, held[index]) for index, p in enumerate(self.matrices))
        self.rounds = [Round(self.rank, dealt) for dealt in deal_out(chain.from_iterable(stacks), ranks)]
        self.first_expert = [ranges[self.rank][0][0] for ranges in held]

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a zero moment for a matrix, sharded like it; for other parameters, AdamW's state."""
        if parameter in self.is_matrix:
            return {MOMENTUM: torch.zeros_like(parameter, requires_grad=False)}
        return super().new_state(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient. Collective. `closure`, an argument of all torch optimizers, must
        be None."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            self.update_group(group, [p for p in group["params"] if p not in self.is_matrix])
        updated = [p for p in self.matrices if p.grad is not None]
        for parameter in updated:
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter)
        if updated:
            moments = [plain_shard(self.state[p][MOMENTUM]) for p in updated]
            torch._foreach_lerp_(moments, [plain_shard(p.grad) for p in updated], 1 - self.momentum)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for round_ in self.rounds:
            for owned, update in self.orthogonalized(round_):
                self.apply(owned.stack, update, groups[self.matrices[owned.stack.parameter]])

    def orthogonalized(self, round_: Round) -> Iterator[tuple[Owned, torch.Tensor]]:
        """Orthogonalise the stacks of a round. Yield each stack of which this rank holds a part, with the update of
        this part, [matrices, rows, columns]. Collective, unless no rank needs the parts of another one."""
        if round_.stays:
            for owned in round_.own:
                yield owned, orthogonalize(self.direction(owned.stack))
            return
        sent = [[self.direction(stack) for stack in stacks] for stacks in round_.sent]
        whole = {id(o): self.empty(o.stack.count, o.stack.rows, o.stack.columns) for o in round_.own}
        received = self.exchange(sent, [[held.elements for held in of_rank] for of_rank in round_.received])
        for held, values in zip(chain.from_iterable(round_.received), received, strict=True):
            target = part_of(whole[id(held.owned)], held.part)
            target.copy_(values.view(target.shape))
        results = {key: orthogonalize(matrices) for key, matrices in whole.items()}
        back = [[part_of(results[id(held.owned)], held.part) for held in of_rank] for of_rank in round_.returned]
        updates = self.exchange(back, [[held.elements for held in of_rank] for of_rank in round_.results])
        for held, values in zip(chain.from_iterable(round_.results), updates, strict=True):
            (top, bottom), (left, right) = held.part
            yield held.owned, values.view(held.owned.stack.count, bottom - top, right - left)

    def exchange(self, sent: list[list[torch.Tensor]], sizes: list[list[int]]) -> list[torch.Tensor]:
        """Send tensors to each rank, and return those from rank 0, rank 1, ..., flattened. Collective. `sizes`: for
        each rank, the elements of each tensor that comes from it."""
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        outgoing = torch.cat(flat) if flat else self.empty(0)
        incoming = self.empty(sum(map(sum, sizes)))
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        dist.all_to_all_single(incoming, outgoing, [sum(of_rank) for of_rank in sizes], splits, self.group)
        return list(incoming.split([size for of_rank in sizes for size in of_rank]))

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=plain_shard(self.matrices[0]).device)

    def view(self, tensor: torch.Tensor, stack: Stack) -> torch.Tensor:
        """Return this rank's part of a stack, [matrices, rows, columns], as a view of a tensor that is sharded like the
        stack's parameter."""
        shard = plain_shard(tensor)
        if shard.ndim == 2:
            return shard[None]
        first = self.first_expert[stack.parameter]
        return shard[stack.experts[0] - first : stack.experts[1] - first]

    def direction(self, stack: Stack) -> torch.Tensor:
        """Return this rank's part of what is to be orthogonalised: Nesterov's combination of gradient and mean of
        gradients; zeros without a gradient."""
        parameter = self.matrices[stack.parameter]
        if parameter.grad is None:
            return torch.zeros_like(self.view(parameter, stack), dtype=self.dtype)
        gradient, moment = self.view(parameter.grad, stack), self.view(self.state[parameter][MOMENTUM], stack)
        return gradient.lerp(moment, self.momentum).to(self.dtype)

    def apply(self, stack: Stack, update: torch.Tensor, group: dict[str, Any]) -> None:
        """Decay this rank's part of a stack, and subtract its update. `group` has the learning rate."""
        parameter = self.matrices[stack.parameter]
        if parameter.grad is not None:
            weights = self.view(parameter, stack)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(update.to(weights.dtype), alpha=-group["lr"] * size_of_update(stack.rows, stack.columns))
