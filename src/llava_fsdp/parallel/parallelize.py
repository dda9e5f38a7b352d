"""Apply sharding, precision, compilation and activation checkpointing to any model made of stacks of blocks.

The order is: create the model on the meta device, freeze, convert to fp8, keep this rank's stages of a pipeline, divide
experts among ranks, compile, wrap for activation checkpointing, `fully_shard`, load weights, create the optimizer.
Activation checkpointing comes before `fully_shard`, so that FSDP gathers a block's weights before the block runs again
in the backward pass. Weights are loaded after sharding, so that no rank ever holds more than its shards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llava_fsdp.config import Config, LinearKind, MomentDType, PrecisionConfig, ShardingConfig
from llava_fsdp.parallel.compile import Compilations
from llava_fsdp.parallel.expert_parallel import SharedExperts
from llava_fsdp.parallel.local_shards import clean_name, local
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.memory import OUTPUT, Weight, sharded_dimension, unit_of_experts
from llava_fsdp.parallel.memory.offload import Offload
from llava_fsdp.parallel.precision.fp8 import multiply_in_fp8, weights_in_fp8
from llava_fsdp.parallel.precision.int8_mixed import PADDED_TO, multiply_in_int8
from llava_fsdp.parallel.precision.precision import (
    DTYPES,
    MASTERS,
    MasterWeights,
    compute_norms_in_fp32,
    norm_weights,
    norms_kept_in_fp32,
    store_weights,
)
from llava_fsdp.parallel.zero import ShardPlan

T = TypeVar("T")


def parallelize(
    model: nn.Module,
    stacks: list[nn.ModuleList],
    mesh: DeviceMesh | None,
    plan: ShardPlan,
    cfg: Config,
    offload: Offload,
    whole: list[nn.Module],
    count: Compilations | None = None,
    share: Callable[[], SharedExperts] | None = None,
    roots_of: Callable[[], list[nn.Module]] | None = None,
    output: nn.Module | None = None,
) -> MasterWeights:
    """Shard a meta-device model in place over the ranks, and allocate this rank's shards, uninitialised.

    Args:
        model: a model on the meta device, with `requires_grad` set. Its forward must run the same modules on every
            rank.
        stacks: lists of blocks, the language model's first. Each block is wrapped for activation checkpointing; one or
            several blocks (`sharding.blocks_per_unit`) become an FSDP unit.
        mesh: device mesh with the dimensions (replicate, shard) or (shard,); None: nothing is sharded.
        plan: the FSDP2 settings of the sharding strategy.
        offload: allocates the shards on the device, in host memory or in a file.
        whole: modules whose weights are never sharded while they are frozen.
        count: counts the compiled graphs of the language model's blocks; None: blocks are not compiled.
        share: divides the experts of a mixture among ranks; None: each rank has all experts.
        roots_of: called after blocks are wrapped; returns the modules whose forward is called, each a part of the
            model. None: the model itself.
        output: the output layer, which becomes an FSDP unit; None: its weight is in another unit.

    Returns:
        The master weights by parameter name: the tensors to load, to optimize and to save in checkpoints.
    """
    store_weights(model, cfg.precision, sharded=mesh is not None)
    compute_norms_in_fp32(model, cfg.precision)
    in_fp8 = cfg.precision.linear is LinearKind.fp8
    if in_fp8:
        multiply_in_fp8(stacks[0], sharded=mesh is not None)
    elif cfg.precision.linear is LinearKind.int8_mixed:
        multiply_in_int8(stacks[0], PADDED_TO[offload.device.type])
    experts = share() if share is not None else None
    one_row = cfg.packs or cfg.micro_batch_size == 1
    modes = cfg.activation_checkpointing, offload.device, count, one_row, experts is not None
    apply_activation_checkpointing(stacks, *modes)
    roots = roots_of() if roots_of is not None else [model]
    if mesh is not None:
        ignored = frozen_left_whole(model, plan, [*whole, *norms_kept_in_fp32(model, cfg.precision)])
        for root in roots:
            inside = set(root.modules())
            own = [nn.ModuleList(block for block in stack if block in inside) for stack in stacks]
            shared = experts and replace(experts, modules=[module for module in experts.modules if module in inside])
            last = output if output in inside else None
            shard(root, own, mesh, plan, cfg, ignored, offload, shared, last)
    materialize(model, offload.materialize, roots)
    trainable = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    master = MASTERS[cfg.precision.master_dtype]
    has_scales = in_fp8 and any(p.requires_grad for p in stacks[0].parameters())
    return MasterWeights(trainable, master, model if has_scales else None, compiled=count is not None)


def materialize(model: nn.Module, allocate: Callable[[nn.Module], object], roots: Sequence[nn.Module] = ()) -> None:
    """Allocate the tensors of a meta-device model in place with the function `allocate`, and then tie the parameters
    again that were tied on the meta device: a tied parameter has several names. `roots` are the parts of the model that
    are called in its place, if it is divided among ranks."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for root in roots or [model]:
        allocate(root)
    for first, *others in names.values():
        for other in others:
            module_name, _, leaf = other.rpartition(".")
            model.get_submodule(module_name).register_parameter(leaf, model.get_parameter(first))


def frozen_left_whole(model: nn.Module, plan: ShardPlan, whole: list[nn.Module]) -> set[nn.Parameter]:
    """Return the frozen parameters of a model that FSDP must not shard: all of them or, if the sharding strategy shards
    frozen weights, only those in some modules.

    Args:
        plan: the FSDP2 settings of the sharding strategy.
        whole: modules whose weights are never sharded while they are frozen.
    """
    roots = whole if plan.shards_frozen else [model]
    return {p for root in roots for p in root.parameters() if not p.requires_grad}


def shard(
    model: nn.Module,
    stacks: list[nn.ModuleList],
    mesh: DeviceMesh,
    plan: ShardPlan,
    cfg: Config,
    ignored: set[nn.Parameter],
    offload: Offload,
    experts: SharedExperts | None = None,
    output: nn.Module | None = None,
) -> None:
    """Apply `fully_shard` to the modules of experts that ranks share, to every group of blocks that has parameters to
    shard, to the output layer, and then to the whole model, whose remaining parameters form the root unit.

    The root unit and the output layer are not freed after the forward pass, because the backward pass begins with
    them. The output layer's gradient is reduced first, and the root unit's last. All parameters of a
    unit must have the same dtype. Therefore the trainable norms that compute in fp32 form a unit of their own, which is
    small and also stays gathered.

    Args:
        stacks: the model's lists of blocks, the language model's first.
        plan: the FSDP2 settings of the sharding strategy.
        ignored: parameters that are not sharded.
        offload: says whether FSDP keeps the shards in host memory.
        experts: experts that ranks share, and their mesh; None: experts are sharded with their blocks.
        output: the output layer; None: its weight is in another unit, or the model has none.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.precision.param_dtype],
        reduce_dtype=DTYPES[cfg.precision.reduce_dtype],
        cast_forward_inputs=False,  # the model casts images itself, with or without FSDP
    )
    common: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored, "offload_policy": offload.policy}
    common["shard_placement_fn"] = placement_over(mesh, cfg.precision.moment_dtype)
    norms = [m for m in norms_kept_in_fp32(model, cfg.precision) if set(m.parameters()) - ignored]
    together = GatheredFirst(norms) if norms else None
    if together is not None:
        # norms compute and are reduced in fp32, the dtype in which they are stored
        kept = replace(policy, param_dtype=None, reduce_dtype=None)
        fully_shard(together, mp_policy=kept, reshard_after_forward=False, **common)
        model.gathered_first = together
        common["ignored_params"] = ignored = ignored | set(together.parameters())
    if experts is not None:
        placement = placement_over(experts.mesh, cfg.precision.moment_dtype)
        own = {**common, "mesh": experts.mesh, "shard_placement_fn": placement}
        for module in experts.modules:
            fully_shard(module, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward, **own)
    units = []
    for stack in reversed(stacks):  # in the order of the forward pass: vision tower, then language model
        for unit in grouped(list(stack), cfg.sharding.blocks_per_unit):
            blocks = [block for block in unit if set(block.parameters()) - ignored]
            if blocks:
                one = blocks[0] if len(blocks) == 1 else blocks
                fully_shard(one, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward, **common)
                units.append(blocks[0])
    if output is not None and set(output.parameters()) - ignored:
        fully_shard(output, mp_policy=policy, reshard_after_forward=False, **common)
    if cfg.sharding.prefetch is not None:
        gather_ahead(units, cfg.sharding.prefetch)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **common)
    if together is not None:
        # this hook runs after FSDP's own forward pre-hook of the model, with which FSDP begins a forward pass
        model.register_forward_pre_hook(lambda *_: together())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the label tokens of the whole step, so gradients are summed over ranks and not
            # averaged. Neither setter acts on submodules, so both are called on every unit; gloo needs the second one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def placement_over(mesh: DeviceMesh, moments: MomentDType) -> Callable[[nn.Parameter], Shard]:
    """Return FSDP's `shard_placement_fn` for a mesh: a function from a parameter to the dimension along which it is
    sharded.

    Args:
        mesh: the last dimension contains the ranks that shard.
        moments: the dtype in which Adam's moments are stored.
    """

    def placement(parameter: nn.Parameter) -> Shard:
        own = moments if parameter.requires_grad else None
        return Shard(sharded_dimension(local(parameter).shape, mesh.shape[-1], own))

    return placement


def grouped(blocks: list[T], size: int) -> list[list[T]]:
    """Split a list of blocks into consecutive groups of `size` blocks; the last group may be smaller."""
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def describe_units(sharding: ShardingConfig) -> str:
    """Describe in words the settings of FSDP units (blocks per unit, prefetch) that differ from FSDP2's defaults; empty
    if none differs."""
    parts = [f"{sharding.blocks_per_unit} blocks gathered together"] if sharding.blocks_per_unit > 1 else []
    parts += [f"{sharding.prefetch} gathers begun ahead"] if sharding.prefetch is not None else []
    return ", ".join(parts)


def useless_settings(sharding: ShardingConfig, stacks: Sequence[nn.ModuleList], shards: int | None) -> list[str]:
    """Return a message for each setting of FSDP units (blocks per unit, prefetch) that has no effect in this training.

    Args:
        stacks: the model's stacks of blocks, after `fully_shard` was applied.
        shards: number of ranks that the weights are sharded over; None without FSDP.
    """
    size, ahead = sharding.blocks_per_unit, sharding.prefetch
    largest = max(map(len, stacks))
    units = sum(
        any(isinstance(block, FSDPModule) for block in unit) for stack in stacks for unit in grouped(list(stack), size)
    )
    messages = []
    if shards is None and size > 1:
        messages.append(f"sharding.blocks_per_unit={size} does nothing on one rank, which gathers nothing")
    elif size > largest:
        messages.append(f"sharding.blocks_per_unit={size} is as {largest}: no stack of the model has more blocks")
    if ahead is None:
        return messages
    if shards is None:
        messages.append(f"sharding.prefetch={ahead} does nothing on one rank, which gathers nothing")
    elif shards == 1:
        messages.append(f"sharding.prefetch={ahead} does nothing: every rank has whole weights")
    elif units < 2:
        messages.append(f"sharding.prefetch={ahead} does nothing: fewer than two units have sharded blocks")
    elif ahead >= units:
        messages.append(f"sharding.prefetch={ahead} is as {units - 1}: blocks that are sharded make {units} units")
    return messages


def gather_ahead(units: Sequence[nn.Module], count: int) -> None:
    """Make FSDP begin the all-gathers of the next `count` FSDP units when a unit begins to run, in the forward and in
    the backward pass.

    Args:
        units: for each FSDP unit of blocks one of its modules, in the order of the forward pass.
    """
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for place, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[place + 1 : place + 1 + count])
        unit.set_modules_to_backward_prefetch(sharded[max(0, place - count) : place][::-1])


@runtime_checkable
class Packed(Protocol):
    """Protocol of modules with quantised weights, several of which are packed into each element of `weight`."""

    per_element: int
    """Number of weights in an element."""
    statistics_bytes: int
    """Bytes of the weight's scales and offsets, which every rank holds whole."""


class GatheredFirst(nn.Module):
    """Module that makes one FSDP unit of several modules of a model. FSDP gathers this unit before any of the modules
    runs.

    If `fully_shard` were given a list of modules, it would register hooks on each of them, and these hooks would split
    the graphs of compiled blocks.
    """

    def __init__(self, modules: list[nn.Module]):
        super().__init__()
        self.together = nn.ModuleList(modules)

    def forward(self) -> None:
        """Do nothing: FSDP's hooks on this module gather the weights of the modules that it contains."""


def weights_of(
    model: nn.Module,
    stacks: list[nn.ModuleList],
    whole: list[nn.Module],
    precision: PrecisionConfig,
    blocks_per_unit: int = 1,
    experts: Sequence[nn.Module] = (),
    sharers: int = 1,
    tensor: int = 1,
    output: nn.Module | None = None,
) -> dict[str, Weight]:
    """Return, for every parameter of a meta-device model, the properties from which the bytes that a rank holds are
    computed, by parameter name, in the order in which FSDP2 has the parameters of a unit.

    Args:
        stacks: the model's lists of blocks, the language model's first.
        whole: modules whose weights are never sharded while they are frozen.
        blocks_per_unit: number of consecutive blocks that form an FSDP unit.
        experts: modules with the experts of a mixture.
        sharers: number of ranks that share these experts.
        tensor: number of ranks that compute each layer together.
        output: the output layer, if it is an FSDP unit of its own.
    """
    in_fp8 = weights_in_fp8(stacks[0]) if precision.linear is LinearKind.fp8 else set()
    norms = norm_weights(model, precision)
    kept_whole = norms | {p for module in whole for p in module.parameters()}
    names = block_names(model, stacks)
    unit_names = units_of_blocks(model, stacks, blocks_per_unit)
    units = {p: unit_names[names[block]] for block in names for p in block.parameters()}
    units |= dict.fromkeys(output.parameters() if output is not None else (), OUTPUT)
    own_names = {p: name for name, p in model.named_parameters()}
    weights: dict[str, Weight] = {}
    for p in dict.fromkeys(p for module in in_order_of_fsdp(model) for p in module.parameters(recurse=False)):
        moments = precision.moment_dtype if p.requires_grad else None
        flags = p.requires_grad, p in kept_whole, p in norms, p in in_fp8
        weights[own_names[p]] = Weight(tuple(p.shape), *flags, units.get(p, ""), moments=moments)
    for module_name, module in model.named_modules():
        if sharers > 1 and module in experts:
            block = next(name for block, name in names.items() if module in set(block.modules()))
            for leaf, _ in module.named_parameters():
                name = f"{module_name}.{leaf}"
                weights[name] = replace(weights[name], unit=unit_of_experts(block), sharers=sharers, tensor=tensor)
        if isinstance(module, Packed):
            name = f"{module_name}.weight"
            size = {"per_element": module.per_element, "statistics": module.statistics_bytes}
            weights[name] = replace(weights[name], **size)
    return weights


def in_order_of_fsdp(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a module in the order in which FSDP2 collects them: children first, then the module itself
    (`_get_managed_modules` in torch/distributed/fsdp/_fully_shard/_fsdp_init.py)."""
    for child in module.children():
        yield from in_order_of_fsdp(child)
    yield module


def units_of_blocks(model: nn.Module, stacks: Sequence[nn.ModuleList], blocks_per_unit: int) -> dict[str, str]:
    """Return the name of the FSDP unit of every block, by block name. A unit is named after its first block.

    Args:
        stacks: the model's lists of blocks.
        blocks_per_unit: number of consecutive blocks that form a unit.
    """
    names = block_names(model, stacks)
    units = [unit for stack in stacks for unit in grouped(list(stack), blocks_per_unit)]
    return {names[block]: names[unit[0]] for unit in units for block in unit}


def block_names(model: nn.Module, stacks: Sequence[nn.ModuleList]) -> dict[nn.Module, str]:
    """Return the name of each block (layer) of a model, without the prefixes that activation checkpointing adds.
    `stacks` are the model's lists of blocks."""
    blocks = {block for stack in stacks for block in stack}
    return {module: clean_name(name) for name, module in model.named_modules() if module in blocks}
