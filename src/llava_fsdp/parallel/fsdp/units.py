"""Apply `fully_shard` to the units of a model: blocks, the output layer, experts that ranks share, and the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llava_fsdp.config import Config, MomentDType
from llava_fsdp.parallel.expert_parallel import SharedExperts
from llava_fsdp.parallel.fsdp.parts import ModelParts
from llava_fsdp.parallel.local_shards import clean_name, local
from llava_fsdp.parallel.memory.memory import sharded_dimension
from llava_fsdp.parallel.memory.offload import Offload
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import DTYPES, norms_kept_in_fp32
from llava_fsdp.parallel.sharding_strategies import ShardPlan
from llava_fsdp.runtime.errors import ConfigError

T = TypeVar("T")


def shard(
    model: nn.Module,
    parts: ModelParts,
    cfg: Config,
    parallelism: Parallelism,
    offload: Offload,
    experts: SharedExperts | None = None,
) -> None:
    """Apply `fully_shard` to the modules of experts that ranks share, to every group of blocks that has parameters to
    shard, to the output layer, and then to the whole model, whose remaining parameters form the root unit. Do nothing
    without a mesh.

    The root unit and the output layer are not freed after the forward pass, because the backward pass begins with
    them. The output layer's gradient is reduced first, and last the root unit's, then that of fp32 norms.

    Trainable norms that compute in fp32 form one more unit. The module that gathers it becomes `model.gathered_first`.

    Args:
        model: a module whose forward is called: a model, or a stage of it.
        parts: parts of the model; those that are not in the stage are ignored.
        offload: says whether FSDP keeps the shards in host memory.
        experts: experts that ranks share, and their mesh; None: experts are sharded with their blocks.

    Raises:
        ConfigError: torch is too old for `sharding.reductions`.
    """
    mesh, frees_blocks = parallelism.meshes.states, parallelism.plan.reshard_after_forward
    if mesh is None:
        return
    inside, norms = set(model.modules()), norms_kept_in_fp32(model, cfg.precision)
    ignored = frozen_left_whole(model, parallelism.plan, [*parts.whole, *norms])
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.precision.param_dtype],
        reduce_dtype=DTYPES[cfg.precision.reduce_dtype],
        cast_forward_inputs=False,  # the model casts images itself, with or without FSDP
    )
    common: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored, "offload_policy": offload.policy}
    common["shard_placement_fn"] = placement_over(mesh, cfg.precision.moment_dtype)
    # before the units of blocks, which then leave these norms out
    together = shard_norms([m for m in norms if set(m.parameters()) - ignored], policy, common)
    if together is not None:
        model.gathered_first = together
        common["ignored_params"] = ignored = ignored | set(together.parameters())
    if experts is not None:
        placement = placement_over(experts.mesh, cfg.precision.moment_dtype)
        arguments = {**common, "mesh": experts.mesh, "shard_placement_fn": placement}
        for module in (module for module in experts.modules if module in inside):
            fully_shard(module, mp_policy=policy, reshard_after_forward=frees_blocks, **arguments)
    units = []
    for stack in reversed(parts.stacks):  # in the order of the forward pass: vision tower, then language model
        for unit in grouped([block for block in stack if block in inside], cfg.sharding.blocks_per_unit):
            if blocks := [block for block in unit if set(block.parameters()) - ignored]:
                one = blocks[0] if len(blocks) == 1 else blocks
                fully_shard(one, mp_policy=policy, reshard_after_forward=frees_blocks, **common)
                units.append(blocks[0])
    output = parts.output if parts.output in inside else None
    if output is not None and set(output.parameters()) - ignored:
        fully_shard(output, mp_policy=policy, reshard_after_forward=False, **common)
    if cfg.sharding.prefetch is not None:
        gather_ahead(units, cfg.sharding.prefetch)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **common)
    if together is not None:
        # this hook runs after FSDP's own forward pre-hook of the model, with which FSDP begins a forward pass
        model.register_forward_pre_hook(lambda *_: together())
    reduce_at_once(model, cfg.sharding.reductions)
    reduce_by_sum(model)  # over ranks, not their mean: the loss is divided by the labels of the whole step


def shard_norms(
    norms: list[nn.Module], policy: MixedPrecisionPolicy, settings: dict[str, Any]
) -> "GatheredFirst | None":
    """Make one FSDP unit of the trainable norms that compute in fp32, because all parameters of a unit must have the
    same dtype. The unit is small, and stays gathered.

    Return a module that gathers the unit when it is called; the caller must call it before the first norm runs. Return
    None if there are no such norms. `settings`: other arguments of `fully_shard`."""
    if not norms:
        return None
    together = GatheredFirst(norms)
    # norms compute and are reduced in fp32, the dtype in which they are stored
    kept = replace(policy, param_dtype=None, reduce_dtype=None)
    fully_shard(together, mp_policy=kept, reshard_after_forward=False, **settings)
    return together


def reduce_by_sum(model: nn.Module) -> None:
    """Make FSDP sum gradients over ranks instead of averaging them: the loss is divided by the label tokens of the
    whole step. Neither setter acts on submodules, so both are called on every unit; gloo needs the second one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def frozen_left_whole(model: nn.Module, plan: ShardPlan, whole: list[nn.Module]) -> set[nn.Parameter]:
    """Return the frozen parameters of a model that FSDP must not shard: all of them or, if the sharding strategy shards
    frozen weights, only those in the modules `whole`.

    Args:
        plan: the FSDP2 settings of the sharding strategy.
        whole: modules whose weights are never sharded while they are frozen.
    """
    roots = whole if plan.shards_frozen else [model]
    return {p for root in roots for p in root.parameters() if not p.requires_grad}


def placement_over(mesh: DeviceMesh, moments: MomentDType) -> Callable[[nn.Parameter], Shard]:
    """Return FSDP's `shard_placement_fn` for a mesh, whose last dimension contains the ranks that shard: parameter ->
    dimension along which it is sharded. That of a trainable parameter also depends on `moments`, the dtype in which
    Adam's moments are stored: int8 moments have a scale for each block of values, and blocks must not be divided."""

    def placement(parameter: nn.Parameter) -> Shard:
        moments_of_weight = moments if parameter.requires_grad else None
        return Shard(sharded_dimension(local(parameter).shape, mesh.shape[-1], moments_of_weight))

    return placement


def grouped(blocks: list[T], size: int) -> list[list[T]]:
    """Split a list of blocks into consecutive groups of `size` blocks; the last group may be smaller."""
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def gather_ahead(units: Sequence[nn.Module], count: int) -> None:
    """Make FSDP begin the all-gathers of the next `count` FSDP units when a unit begins to run, in the forward and in
    the backward pass. `units`: for each FSDP unit of blocks one of its modules, in the order of the forward pass."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for place, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[place + 1 : place + 1 + count])
        unit.set_modules_to_backward_prefetch(sharded[max(0, place - count) : place][::-1])


def reduce_at_once(model: nn.Module, count: int) -> None:
    """Let FSDP reduce the gradients of `count` units at the same time. With 1, FSDP2's default, the backward
    pass waits before each reduce-scatter until the one before it is done, and then frees that one's input, a copy of a
    unit's gradients. Each further one takes the memory of another input (`FSDPParamGroup.post_backward` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).

    Raises:
        ConfigError: this torch keeps one input only; torch 2.13 is the first that can keep more.
    """
    if count == 1:
        return
    if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
        raise ConfigError(
            f"sharding.reductions={count} needs torch 2.13 or a newer one, and this is torch {torch.__version__}: set "
            "it to 1, or install a newer torch"
        )
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_max_input_buffers(count)


class GatheredFirst(nn.Module):
    """Module that makes one FSDP unit of several modules of a model. FSDP gathers it before any of them runs.

    If `fully_shard` were given a list of modules, it would register hooks on each of them, and these hooks would split
    the graphs of compiled blocks.
    """

    def __init__(self, modules: list[nn.Module]):
        super().__init__()
        self.together = nn.ModuleList(modules)

    def forward(self) -> None:
        """Do nothing: FSDP's hooks on this module gather the weights of the modules that it contains."""


def units_of_blocks(model: nn.Module, stacks: Sequence[nn.ModuleList], blocks_per_unit: int) -> dict[str, str]:
    """Return the name of the FSDP unit of every block, by block name. A unit is named after its first block. `stacks`:
    the model's lists of blocks. `blocks_per_unit`: number of consecutive blocks that form a unit."""
    names = block_names(model, stacks)
    units = [unit for stack in stacks for unit in grouped(list(stack), blocks_per_unit)]
    return {names[block]: names[unit[0]] for unit in units for block in unit}


def block_names(model: nn.Module, stacks: Sequence[nn.ModuleList]) -> dict[nn.Module, str]:
    """Return the name of each block in `stacks`, lists of layers, without activation checkpointing's prefix."""
    blocks = {block for stack in stacks for block in stack}
    return {module: clean_name(name) for name, module in model.named_modules() if module in blocks}
