"""Apply all kinds of parallelism to a model: the transformations in their order, and the reason for each place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from llava_fsdp.config import ActivationCheckpointing, Config
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.experts import RouterOutputs
from llava_fsdp.model.load_weights import stored_buffers
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.parallel.compile import Compilations, choose_compiling, explained_compiler_errors
from llava_fsdp.parallel.context.share_rows import share_rows
from llava_fsdp.parallel.expert_parallel import share_experts_of
from llava_fsdp.parallel.fsdp.materialize import masters_of, materialize
from llava_fsdp.parallel.fsdp.parts import ModelParts, parts_of
from llava_fsdp.parallel.fsdp.unit_settings import count_reduced, log_useless_settings
from llava_fsdp.parallel.fsdp.units import shard
from llava_fsdp.parallel.fsdp.waiting_gradients import add_with_kernel
from llava_fsdp.parallel.local_shards import clean_name
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.dynamic_checkpoint import DynamicCheckpointing
from llava_fsdp.parallel.memory.offload import Offload, warn_if_useless
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.pipeline.own_stages import Elsewhere, plan_own_stages, trained_elsewhere
from llava_fsdp.parallel.pipeline.pipeline import Pipeline
from llava_fsdp.parallel.precision.low_precision import multiply_in
from llava_fsdp.parallel.precision.precision import MasterWeights, compute_norms_in_fp32, store_weights
from llava_fsdp.parallel.sharding_strategies import Sync
from llava_fsdp.parallel.tensor.divide_layers import cuts_of, divide_layers
from llava_fsdp.parallel.watch_routers import routers_to_watch, watch_routers

Fill = Callable[[Architecture, MasterWeights], None]
"""Type of a function that fills this rank's shards with the initial weights."""


@dataclass(frozen=True)
class ParallelModel:
    """What belongs to a model to which parallelism was applied."""

    masters: MasterWeights
    offload: Offload
    compilations: Compilations | None = None
    """The counter of compiled graphs; None if the model's blocks are not compiled."""
    routers: RouterOutputs | None = None
    """Keeps what the routers of a mixture of experts return; None: no routers, or they are not watched."""
    dynamic: DynamicCheckpointing | None = None
    """Chooses which blocks are recomputed; None unless `activation_checkpointing=dynamic`."""
    pipeline: Pipeline | None = None
    """This rank's stages of the model; None: it has the whole model."""
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    """Trained parameters that only ranks with other stages have, by name."""


def apply_parallelism(
    model: Architecture, cfg: Config, parallelism: Parallelism, fill: Fill, counts: Sequence[float] | None = None
) -> ParallelModel:
    """Divide, shard and compile a model on the meta device, in place, and load this rank's weights. Collective.

    Args:
        model: `requires_grad` must be set for what trains.
        parallelism: this rank's place among all ranks, and its process groups.
        fill: function that fills this rank's shards with the initial weights.
        counts: mean number of tokens, pairs of tokens, labels and tiles of a sample, by which the model is divided into
            stages; None without `parallel.pipeline`.

    Returns:
        The master weights (`masters`, the tensors for which the caller builds the optimizer), and the objects that a
            training uses together with the model.
    """
    # First what needs the whole model. All ranks must come to the same plan.
    share_rows(model, parallelism)
    compiles = choose_compiling(cfg, parallelism.device, model.kernel and model.kernel.attention).on
    routers = routers_to_watch(model, cfg, parallelism, compiles)
    stages = plan_own_stages(model, cfg, parallelism, counts)
    cuts = cuts_of(model, parallelism)
    stored = stored_buffers(model)
    # Stages of other ranks are removed before anything is done to the modules that stay. Buffers are computed before
    # layers are divided.
    if stages is not None:
        stages.keep(model)
    kept, parts = {name for name, _ in model.named_buffers()}, parts_of(model)
    buffers = {name: values for name, values in stored.items() if name in kept}
    buffers |= computed_buffers(model, buffers)
    # Dtypes before division: the local tensor of a divided weight would keep its dtype.
    store_weights(model, cfg.precision, parallelism.is_sharded)
    divide_layers(model, cuts, parallelism, cfg.loss.chunk_tokens)
    offload = Offload(cfg, parallelism.device)
    if parallelism.is_first:
        warn_if_useless(cfg, parallelism.device)
    # Hooks, 8-bit layers and shared experts before compilation, whose graphs contain them.
    compilations = Compilations() if compiles else None
    watched = watch_routers(model, routers, cfg.model.balance_loss > 0, parallelism, compiles)
    compute_norms_in_fp32(model, cfg.precision)
    multiply_in(cfg.precision, parts.stacks[0], parallelism.is_sharded, parallelism.device)
    experts = share_experts_of(model, parallelism)
    # Compilation and activation checkpointing before FSDP, which then gathers a block's weights before the block runs
    # again in the backward pass. Stages are made of wrapped blocks.
    checkpoint_blocks(parts, cfg, offload, compilations, has_units=experts is not None)
    roots: list[nn.Module] = stages.of(model) if stages is not None else [model]
    for root in roots:
        shard(root, parts, cfg, parallelism, offload, experts)
    # strategies whose gradients wait, unreduced, for the step's last micro-batch
    if compiles and parallelism.device.type == "cuda" and parallelism.plan.gradient_sync is Sync.LAST_MICRO_BATCH:
        for root in roots:
            add_with_kernel(root, compiled=True)
    # Memory is taken after sharding, so that no rank ever holds more than its shards.
    materialize(model, offload.materialize, roots)
    masters = masters_of(model, parts.stacks[0], cfg.precision, compiles)
    log_useless_settings(
        cfg.sharding, parts.stacks, parallelism.shards, max(map(count_reduced, roots)), parallelism.is_first
    )
    fill(model, masters)
    restore_buffers(model, buffers, clean_name)
    with explained_compiler_errors():
        masters.refresh()  # after buffers are restored, because fp8 layers add buffers here
    offload.drop_loaded_shards()  # after all that writes to them
    dynamic, pipeline = None, None
    if cfg.activation_checkpointing.mode is ActivationCheckpointing.dynamic:
        dynamic = DynamicCheckpointing(parts.stacks, cfg.activation_checkpointing, parallelism.world)
    if stages is not None:
        pipeline = Pipeline(roots, parallelism, model.language_config.hidden_size, model.compute_dtype)
    # trained parameters in the stages of other ranks
    elsewhere = trained_elsewhere(pipeline, masters) if pipeline is not None else {}
    return ParallelModel(masters, offload, compilations, watched, dynamic, pipeline, elsewhere)


def checkpoint_blocks(
    parts: ModelParts, cfg: Config, offload: Offload, compilations: Compilations | None, has_units: bool
) -> None:
    """Wrap the blocks of a model for activation checkpointing, and compile those of the language model.

    Args:
        parts: the model's lists of blocks.
        offload: has the device on which the blocks run.
        compilations: counts the compiled graphs; None: blocks are not compiled.
        has_units: whether blocks contain FSDP units of their own, such as experts that ranks share.
    """
    one_row = cfg.packs or cfg.micro_batch_size == 1  # whether every batch has a single row, as packed ones have
    mode = cfg.activation_checkpointing
    apply_activation_checkpointing(parts.stacks, mode, offload.device, compilations, one_row, has_units)


def parallelize(
    model: nn.Module, parts: ModelParts, cfg: Config, parallelism: Parallelism, offload: Offload
) -> MasterWeights:
    """Shard any model on the meta device, in place, and allocate this rank's shards, uninitialized. Before that, set
    the dtypes of weights and norms, replace linear layers by low-precision ones and wrap blocks for activation
    checkpointing. Layers, experts and stages are not divided among ranks.

    Args:
        model: a model with `requires_grad` set. Its forward must run the same modules on every rank.
        parts: the model's lists of blocks, and modules that are treated alone.
        parallelism: this rank's place among all ranks, and its process groups.
        offload: allocates the shards on the device, in host memory or in a file.

    Returns:
        The master weights by parameter name: the tensors to load, to optimize and to save in checkpoints.
    """
    store_weights(model, cfg.precision, parallelism.is_sharded)
    compute_norms_in_fp32(model, cfg.precision)
    multiply_in(cfg.precision, parts.stacks[0], parallelism.is_sharded, offload.device)
    checkpoint_blocks(parts, cfg, offload, None, has_units=False)
    shard(model, parts, cfg, parallelism, offload)
    materialize(model, offload.materialize)
    return masters_of(model, parts.stacks[0], cfg.precision, compiled=False)
