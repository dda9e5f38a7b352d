"""Arithmetic on the numbers of ranks: which ranks process the same rows, hold the same weights or have the same stages.

It needs no process group. A training asks it about its own ranks (`Parallelism`), the planner about imagined ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

from llava_fsdp.config import ParallelConfig
from llava_fsdp.parallel.sharding_strategies import Mesh, ShardPlan
from llava_fsdp.runtime.errors import ConfigError


class Share(NamedTuple):
    """A rank, or a group of ranks, among several."""

    number: int
    """Number of the rank or group, from 0."""
    count: int
    """Number of all ranks or groups."""


@dataclass(frozen=True)
class Place:
    """Which stages a rank has."""

    index: int
    """Number of this rank's group among those that have different stages, from 0."""
    size: int
    """Number of these groups."""
    stages: int
    """Number of all stages; stage i belongs to group i % size."""

    @property
    def own(self) -> range:
        """Numbers of this rank's stages."""
        return range(self.index, self.stages, self.size)


@dataclass(frozen=True)
class RankLayout:
    """How the ranks of a training are numbered.

    From the slowest to the fastest number, ranks have different stages of the model (`parallel.pipeline`), different
    rows, different positions of the same rows (`parallel.context`), and different parts of each layer
    (`parallel.tensor`).
    """

    parallel: ParallelConfig
    size: int
    """Number of all ranks."""

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that have the same stages of the model: consecutive ranks."""
        return self.size // self.parallel.pipeline

    @property
    def num_copies(self) -> int:
        """Number of ranks that have the same part of each layer of the same stages. They shard or replicate it."""
        return self.ranks_per_stage // self.parallel.tensor

    @property
    def num_row_groups(self) -> int:
        """Number of groups of ranks that process different rows."""
        return self.ranks_per_stage // self.parallel.ranks_per_row

    @property
    def ranks_per_loss(self) -> int:
        """Number of ranks that count the same loss, by which a sum of losses over all ranks is divided."""
        return self.parallel.tensor

    @property
    def num_losses(self) -> int:
        """Number of groups of ranks that count the same loss."""
        return self.size // self.ranks_per_loss

    def row_group(self, rank: int) -> Share:
        """Return the number of a rank's group among the groups that process different rows, and the number of these
        groups. The ranks of a group process the same rows: `parallel.context` times `parallel.tensor` consecutive ranks
        with the same stages of the model, and the ranks at the same places among those with other stages. Raise
        ConfigError if one of these keys, or `parallel.pipeline`, does not divide the number of ranks."""
        self.parallel.check_divides(self.size)
        return Share(rank // self.parallel.ranks_per_row % self.num_row_groups, self.num_row_groups)

    def copy_of_layers(self, rank: int) -> Share:
        """Return a rank's number among the ranks that have the same part of each layer of the same stages."""
        return Share(rank % self.ranks_per_stage // self.parallel.tensor, self.num_copies)

    def is_lowest_of_copy(self, rank: int) -> bool:
        """Return whether a rank has the lowest number of the ranks that together have a copy of the model."""
        return rank % self.parallel.tensor == 0 and rank < self.ranks_per_stage

    def seed_rank(self, rank: int) -> int:
        """Return the number from which a rank's random numbers are seeded. It is the same for ranks that compute layers
        together, or have different stages for the same rows."""
        return self.copy_of_layers(rank).number

    def context_index(self, rank: int) -> int:
        """Return the index of a rank among the ranks that share a row and process different positions of it."""
        return rank // self.parallel.tensor % self.parallel.num_context

    def equal_ranks(self, rank: int) -> Share:
        """Return a rank's number among the ranks that have the same stages, and so parts of the same tensors."""
        return Share(rank % self.ranks_per_stage, self.ranks_per_stage)

    def place(self, rank: int) -> Place:
        """Return which stages a rank has."""
        return place_of_group(self.parallel, rank // self.ranks_per_stage)

    def shard_size(self, configured: int | None, local_size: int) -> int:
        """Return over how many ranks hybrid strategies shard: `configured` (`sharding.shard_size`) or, if that is None,
        those of the `local_size` ranks of a machine that have the same part of each layer."""
        return configured or max(1, min(local_size, self.ranks_per_stage) // self.parallel.tensor)

    def num_groups(self, shape: tuple[int, int]) -> int:
        """Return how many process groups of several ranks each rank belongs to, with the meshes of a training: that of
        all ranks, and one for each dimension of a mesh that has several ranks, but not all; 0 for a single rank.
        `shape`: (replicate, shard) sizes of the mesh of ranks that have the same parts of layers."""
        parallel = self.parallel
        sizes = [*shape, parallel.tensor]
        if parallel.num_context > 1:
            sizes += [shape[0] * shape[1] // parallel.num_context, parallel.num_context]
        if parallel.expert > 1:
            sizes += [*shape_of_experts(shape, parallel.expert, parallel.tensor), parallel.expert]
        if parallel.pipeline > 1:
            sizes += [parallel.pipeline, self.ranks_per_stage]
        return (self.size > 1) + sum(1 < size < self.size for size in sizes)


def place_of_group(parallel: ParallelConfig, group: int) -> Place:
    """Return which stages the ranks of a group have. `group` is its number, below `parallel.pipeline`."""
    return Place(group, parallel.pipeline, parallel.num_stages)


def shape_of_experts(shape: tuple[int, int], size: int, tensor: int) -> tuple[int, int]:
    """Return the (replicate, shard) sizes of the mesh of ranks that hold the same experts.

    Args:
        shape: (replicate, shard) sizes of the mesh of ranks that hold the same parts of layers.
        size: number of ranks that share the experts (`parallel.expert`): consecutive ranks, so that those which shard
            other weights together (`shard` of them) hold all experts, if there are enough of them.
        tensor: number of ranks that compute each layer together. Experts are sharded over them, too.

    Raises:
        ConfigError: neither `size` nor the number of ranks over which weights are sharded is a multiple of the other.
    """
    replicas, shards = shape[0], shape[1] * tensor
    if size % shards and shards % size:
        together = f"sharding.shard_size={shape[1]}" + f" x parallel.tensor={tensor}" * (tensor > 1)
        raise ConfigError(
            f"parallel.expert={size} and {together}: neither is a multiple of the other; set parallel.expert to a "
            f"divisor or a multiple of {shards}"
        )
    shards_of_expert = max(1, shards // size)
    return replicas * shards // (shards_of_expert * size), shards_of_expert


def mesh_shape(plan: ShardPlan, world_size: int, shard_size: int) -> tuple[int, int]:
    """Return the (replicate, shard) sizes of the device mesh of a sharding strategy, whose FSDP2 settings are `plan`.
    `shard_size`: number of ranks over which hybrid strategies shard; other strategies ignore it. Raise ConfigError if a
    hybrid strategy's `shard_size` does not divide the number of ranks (`world_size`)."""
    if plan.mesh is Mesh.REPLICATE:
        return world_size, 1
    if plan.mesh is Mesh.SHARD:
        return 1, world_size
    if world_size % shard_size:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"sharding.shard_size={shard_size} does not divide the {world_size} ranks of this run; "
            f"choose one of {divisors}"
        )
    return world_size // shard_size, shard_size
