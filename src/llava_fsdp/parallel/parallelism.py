"""The parallelism of a training: its ranks, how it shards, and which ranks do what together."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist

from llava_fsdp.config import Config, ParallelConfig
from llava_fsdp.parallel.ranks.mesh import Meshes, World, make_meshes
from llava_fsdp.parallel.ranks.rank_layout import Place, RankLayout, Share
from llava_fsdp.parallel.zero import SHARD_PLANS, ShardPlan


@dataclass(frozen=True)
class Parallelism:
    """The parallelism of a training. Made once, from the configuration and the process group, and handed to everything
    that depends on ranks. The idea is that of torchtitan's `ParallelDims`.

    Questions of arithmetic are answered by `layout`, which the planner also asks about imagined ranks. The properties
    of this class answer them for this rank.
    """

    world: World
    parallel: ParallelConfig
    plan: ShardPlan
    """The FSDP2 settings of the sharding strategy."""
    meshes: Meshes = field(default_factory=Meshes)

    @classmethod
    def of(cls, cfg: Config, world: World) -> Self:
        """Create the parallelism of a training with its device meshes. Collective: all ranks must call it.

        Raises:
            ConfigError: `sharding.shard_size` or a key of `parallel` does not divide the number of ranks, or the
                installed torch is too old for it.
        """
        plan = SHARD_PLANS[cfg.sharding.strategy]
        return cls(world, cfg.parallel, plan, make_meshes(world, plan, cfg))

    @cached_property
    def layout(self) -> RankLayout:
        return RankLayout(self.parallel, self.world.size)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.world.is_first

    @property
    def row_group(self) -> Share:
        """This rank's group among those that process different rows. All ranks of a group process the same rows."""
        return self.layout.row_group(self.world.rank)

    @property
    def seed_rank(self) -> int:
        """The number from which this rank's random numbers are seeded: the same on ranks that must draw the same."""
        return self.layout.seed_rank(self.world.rank)

    @property
    def ranks_per_loss(self) -> int:
        """Number of ranks that count the same loss, by which a sum of losses over all ranks is divided."""
        return self.layout.ranks_per_loss

    @property
    def context_index(self) -> int:
        """This rank's number among those that share a row, each with some of its positions."""
        return self.layout.context_index(self.world.rank)

    @property
    def place(self) -> Place:
        """Which stages of the model this rank has."""
        return self.layout.place(self.world.rank)

    @property
    def line(self) -> dist.ProcessGroup | None:
        """The ranks that together have all stages of the model for the same rows, this one included: squares of
        gradient norms are summed over them. None: each rank has the whole model."""
        return self.meshes.pipeline.get_group("pipeline") if self.meshes.pipeline is not None else None

    @property
    def equal_ranks(self) -> Share | None:
        """This rank's number among the consecutive ranks that have the same stages, and so the same tensors or parts of
        them: each writes its share of a checkpoint's replicas. None: all ranks have the same."""
        return self.layout.equal_ranks(self.world.rank) if self.meshes.pipeline is not None else None

    @property
    def layer_parts(self) -> int:
        """Number of parts into which each layer of the language model is divided. 1: layers are whole."""
        return self.parallel.tensor

    @property
    def shards(self) -> int | None:
        """The largest number of ranks over which a weight is sharded; None without FSDP."""
        sharded = (self.meshes.states, self.meshes.experts)
        return max((mesh["shard"].size() for mesh in sharded if mesh is not None), default=None)
