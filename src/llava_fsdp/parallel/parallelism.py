"""The parallelism of a training: its ranks, how it shards, and which ranks do what together."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from llava_fsdp.config import Config, ParallelConfig
from llava_fsdp.parallel.check_torch import check_torch
from llava_fsdp.parallel.ranks.mesh import Meshes, set_timeout
from llava_fsdp.parallel.ranks.rank_layout import Place, RankLayout, Share, mesh_shape, shape_of_experts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh, ShardPlan

Range = tuple[int, int]
"""Indices [begin, end) of one dimension."""


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
        """Create the parallelism of a training with its device meshes. Collective: all ranks must call it. Raise
        ConfigError if `sharding.shard_size` or a key of `parallel` does not divide the number of ranks, or torch is too
        old."""
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
        """This rank's group among those that process different rows. All ranks of a group process the same ones."""
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
        """This rank's index among the ranks that share a row and process different positions of it."""
        return self.layout.context_index(self.world.rank)

    @property
    def place(self) -> Place:
        """Which stages of the model this rank has."""
        return self.layout.place(self.world.rank)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks that together have all stages of the model for the same rows, this one included: squares of
        gradient norms are summed over them. None: each rank has the whole model."""
        return self.meshes.pipeline.get_group("pipeline") if self.meshes.pipeline is not None else None

    @property
    def equal_ranks(self) -> Share | None:
        """This rank's index among the consecutive ranks that have the same stages. These ranks have the same tensors,
        or parts of them, and each writes its share of a checkpoint's replicas. None: all ranks have the same."""
        return self.layout.equal_ranks(self.world.rank) if self.meshes.pipeline is not None else None

    @property
    def state_ranks(self) -> Share:
        """This rank's index among the ranks that together hold the same parameters as it: all ranks, or those with the
        same stages."""
        return self.equal_ranks or Share(self.world.rank, self.world.size)

    @property
    def state_group(self) -> dist.ProcessGroup | None:
        """The process group of `state_ranks`. None: that of all ranks, or this is the only rank."""
        return self.meshes.pipeline.get_group("stage") if self.meshes.pipeline is not None else None

    def ranges_held(self, tensor: torch.Tensor, index: int) -> list[Range]:
        """Return which indices of each dimension of a sharded tensor one of `state_ranks` holds, by its index among
        them. A plain tensor is whole on every rank."""
        if not isinstance(tensor, DTensor):
            return [(0, size) for size in tensor.shape]
        names = tensor.device_mesh.mesh_dim_names or ()
        # ranks are numbered in the order of each mesh's dimensions (`make_meshes`)
        if self.meshes.experts is not None and "expert" in names:
            sizes = dict(zip(self.meshes.experts.mesh_dim_names or (), self.meshes.experts.shape, strict=True))
        else:
            assert self.meshes.states is not None
            sizes = dict(zip(self.meshes.states.mesh_dim_names or (), self.meshes.states.shape, strict=True))
            sizes["tensor"] = self.parallel.tensor
        places = {}
        for name, size in reversed(sizes.items()):
            index, places[name] = divmod(index, size)
        mesh, place = tensor.device_mesh, [places[name] for name in names]
        shape, begin = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, place, tensor.placements)
        return [(first, first + count) for first, count in zip(begin, shape, strict=True)]

    @property
    def layer_parts(self) -> int:
        """Number of parts into which each layer of the language model is divided. 1: layers are whole."""
        return self.parallel.tensor

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP is used."""
        return self.meshes.states is not None

    @property
    def shards(self) -> int | None:
        """The largest number of ranks over which a weight is sharded; None without FSDP."""
        sharded = (self.meshes.states, self.meshes.experts)
        return max((mesh["shard"].size() for mesh in sharded if mesh is not None), default=None)


def make_meshes(world: World, plan: ShardPlan, cfg: Config) -> Meshes:
    """Create the device meshes of a training; none for one rank, unless `offload` moves weights, which FSDP does.

    Args:
        world: this rank's device, and the number of ranks.
        plan: the FSDP2 settings of the sharding strategy.

    Raises:
        ConfigError: `sharding.shard_size`, `parallel.context`, `parallel.tensor`, `parallel.expert` or
            `parallel.pipeline` does not divide the number of ranks, or the installed torch is too old for them.
    """
    cfg.parallel.check_divides(world.size)
    parallel, layout = cfg.parallel, RankLayout(cfg.parallel, world.size)
    context, tensor, expert, stages = parallel.num_context, parallel.tensor, parallel.expert, parallel.pipeline
    for key, ranks in (("context", context), ("tensor", tensor), ("expert", expert), ("pipeline", stages)):
        if ranks > 1:
            check_torch(f"parallel.{key}")
    copies = layout.num_copies
    shape = mesh_shape(plan, copies, layout.shard_size(cfg.sharding.shard_size, world.local_size))
    if world.size == 1 and not cfg.offload.mode.moves_weights:
        return Meshes()  # no process group and no FSDP
    names = ("shard",) if plan.mesh is Mesh.SHARD else ("replicate", "shard")
    outer, inner = {"pipeline": stages} if stages > 1 else {}, {"tensor": tensor} if tensor > 1 else {}

    def root_of(sizes: tuple[int, ...], names: tuple[str, ...], inner: dict[str, int]) -> DeviceMesh:
        """Return a mesh of all ranks, which also has the dimensions of ranks that divide the model."""
        whole = {**outer, **dict(zip(names, sizes[-len(names) :], strict=True)), **inner}
        return init_device_mesh(world.device.type, tuple(whole.values()), mesh_dim_names=tuple(whole))

    def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], inner: dict[str, int]) -> DeviceMesh:
        root = root_of(sizes, names, inner)
        return root[names] if outer or inner else root

    # FSDP2 requires that its mesh and the mesh of divided layers are slices of one mesh
    dense = root_of(shape, names, inner)
    of_experts = shape_of_experts(shape, expert, tensor)
    meshes = Meshes(
        dense[names] if outer or inner else dense,
        mesh_of((copies // context, context), ("data", "context"), inner) if context > 1 else None,
        pipeline=init_device_mesh(
            world.device.type, (stages, layout.ranks_per_stage), mesh_dim_names=("pipeline", "stage")
        )
        if stages > 1
        else None,
        tensor=dense["tensor"] if tensor > 1 else None,
        experts=mesh_of((*of_experts, expert), (*names, "expert"), {}) if expert > 1 else None,
    )
    set_timeout(meshes, cfg.comm.init_timeout)  # torch gives groups of a mesh its default, 10 or 30 minutes
    return meshes
