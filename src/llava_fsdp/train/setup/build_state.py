"""Build the state of a training: data, model, shards, weights and optimizer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from llava_fsdp.config import ActivationCheckpointing, Config, DType, OffloadMode, Part, Source, check_profile
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.loader import Loader, build_loader
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.data.validation_set import Choose, HeldOut, open_held_out, warn_of_trained
from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.export.write import adapter_folder
from llava_fsdp.model.experts import RankPositions, RouterOutputs, find_experts, find_routers
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.load_weights import fingerprint, frozen_digests, load_weights
from llava_fsdp.model.loss import VocabularyPart, chunked_loss
from llava_fsdp.model.own_parts import NONE, OwnParts
from llava_fsdp.model.sources.pretrained import artifacts_of
from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.compile import Compilations, choose_compiling
from llava_fsdp.parallel.context.context import exchange_in, gather_in
from llava_fsdp.parallel.context.context_attention import ContextPlan, plan_context, share_attention
from llava_fsdp.parallel.expert_parallel import share_experts
from llava_fsdp.parallel.local_shards import clean_name, local_shards
from llava_fsdp.parallel.memory.dynamic_checkpoint import DynamicCheckpointing
from llava_fsdp.parallel.memory.offload import Offload, warn_if_useless
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.parallelize import parallelize, useless_settings, weights_of
from llava_fsdp.parallel.pipeline.pipeline import Pipeline
from llava_fsdp.parallel.pipeline.stages import chains_of_blocks, children_of, plan_of_stages, remove_others, stage_of
from llava_fsdp.parallel.precision.precision import MasterWeights, store_weights
from llava_fsdp.parallel.ranks.consensus import on_all_ranks, on_first_rank
from llava_fsdp.parallel.ranks.mesh import World, first_rank_first, gather_lists
from llava_fsdp.parallel.ranks.rank_layout import Place, RankLayout
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_parallel import cut_model, own_rows, reduction
from llava_fsdp.parallel.tensor.tensor_plan import divide_dropout, tensor_plan
from llava_fsdp.plan.time.mfu import utilization_of
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch_loading
from llava_fsdp.train.checkpoints.resume import continues, without_saved_sources
from llava_fsdp.train.loss_scaler import build_scaler
from llava_fsdp.train.optimizer import build_optimizer
from llava_fsdp.train.setup.build_model import mean_counts, shape_of
from llava_fsdp.train.setup.preflight import check_prompts, few_steps, find_sources, open_model
from llava_fsdp.train.setup.run_info import about_run
from llava_fsdp.train.setup.summary import show_run
from llava_fsdp.train.state import Elsewhere, TrainState


def build_state(cfg: Config, parallelism: Parallelism, own: OwnParts = NONE) -> TrainState:
    """Build the state of a training at step 0: the data, and the sharded model and optimizer with initial weights.
    Collective: all ranks must call it."""
    world = parallelism.world
    model, projector = open_model(cfg, world.device, own)
    parts = model.parts
    warnings = on_first_rank(lambda: check_prompts(cfg, model), "the export cannot be rehearsed")
    loader = open_data(cfg, world, model)
    check_profile(cfg, loader.total_steps)
    check_same_records(loader)
    held_out = open_held_out_data(cfg, world, model) if cfg.val.every is not None else None
    read = without_saved_sources(cfg)
    check_artifacts(artifacts_of(parts, projector, read.model), world.local_rank, world.local_size, world.is_first)
    sources = find_sources(read, model, projector)
    watch = watch_loading(world.is_first, "fingerprint of frozen weights")
    digests = frozen_digests(model, sources, world.rank, world.size, gather_lists, watch)
    adapter_folder.check_base(model, read.model, digests)
    fingerprints = {**loader.steps.fingerprints(), "model": fingerprint(model, digests), **own.names}
    utilization = utilization_of(model, cfg, world.device, world.size)
    about: dict[str, Any] = {}
    if world.is_first:
        experts = list(find_experts(model.language_model).values()), cfg.parallel.expert, cfg.parallel.tensor
        whole, per_unit = model.whole_while_frozen(), cfg.sharding.blocks_per_unit
        weights = weights_of(model, model.blocks(), whole, cfg.precision, per_unit, *experts)
        about = about_run(cfg, world, model, loader.steps.records, weights)
        planned, kernel = about["planned_peak"], model.kernel
        if world.device.type == "cuda" and utilization.peak is None:
            log().info("%s", utilization.source)
        show_run(cfg, world, loader, held_out, weights, describe_projector(read, projector), kernel, planned)
        for warning in warnings + few_steps(cfg, loader.total_steps):
            log().warning("%s", warning)

    packed = quantized_weights(model)

    def load(model: Llava, masters: MasterWeights) -> None:
        shards = local_shards(model, masters)
        of_rank = {name: source for name, source in sources.items() if cfg.parallel.pipeline == 1 or name in shards}
        watch = watch_loading(world.is_first)
        on_all_ranks(lambda: load_weights(of_rank, shards, watch, packed), "the weights cannot be loaded")

    state = assemble(model, cfg, parallelism, loader, load)
    known = {"sources": sources, "fingerprints": fingerprints, "digests": digests, "about": about}
    return replace(state, **known, utilization=utilization, held_out=held_out)


def describe_projector(cfg: Config, projector: Path | None) -> str:
    """Describe in words with which projector a training starts. `projector`: where it is read; None: not from a place
    of its own."""
    if continues(cfg) and Part.projector in cfg.model.trained:
        return "of the run's own checkpoint"
    is_missing = projector is None and cfg.model.projector == "auto"
    if is_missing and cfg.model.lora.checkpoint is not None:
        return f"of the adapter {cfg.model.lora.checkpoint}"
    if cfg.model.checkpoint is not None:
        return "of the checkpoint"
    return "random (no stage=pretrain run beside output_dir)" if is_missing else str(projector or "random")


def open_data(cfg: Config, world: World, model: Llava, choose: Choose | None = None) -> Loader:
    """Open the dataset. If it is the generated toy dataset, rank 0 first draws its images, which then all ranks read.
    Collective: all ranks must call it.

    Args:
        world: this rank's number and device, and the number of ranks.
        model: the model, on which the number of tokens of a sample depends.
        choose: function that builds the sampler; None: the configured sampler is used.

    Returns:
        The loader, which yields this rank's part of each step.
    """
    if cfg.data.source is Source.shapes:
        with first_rank_first(world):
            draw_shapes(cfg.data)
    group = RankLayout(cfg.parallel, world.size).row_group(world.rank)
    return build_loader(
        cfg,
        model.parts.language_folder,
        model.parts.vision_folder,
        shape_of(model),
        group.number,
        group.count,
        world.device,
        gather_lists,
        choose,
        cut=cut_of(cfg, world, model),
        is_first=world.is_first,
    )


def cut_of(cfg: Config, world: World, model: Llava) -> ContextCut | None:
    """Return which positions of each packed row this rank processes; None: all."""
    return context_of(cfg, world, model).cut if cfg.parallel.num_context > 1 else None


def context_of(cfg: Config, world: World, model: Llava) -> ContextPlan:
    """Return how this rank and others share the attention of a row."""
    parallel, index = cfg.parallel, RankLayout(cfg.parallel, world.size).context_index(world.rank)
    return plan_context(parallel.context_how, model.parts.language, parallel.num_context, index, parallel.tensor)


def open_held_out_data(cfg: Config, world: World, model: Llava) -> HeldOut:
    """Open the validation data, and check that all ranks see the same records (samples). Collective: all ranks must
    call it.

    Args:
        world: this rank's number and device, and the number of ranks.
        model: the model, on which the number of tokens of a sample depends.
    """
    positions = model.parts.language.max_position_embeddings
    held_out = open_held_out(cfg, lambda own, choose: open_data(own, world, model, choose), positions)
    check_same_records(held_out.loader, "val.path, val.images")
    if world.is_first:
        warn_of_trained(cfg)
    return held_out


def check_same_records(loader: Loader, keys: str = "data.path, data.images") -> None:
    """Check that all ranks see the same records: each machine may read its own copy of the files. Collective.

    Args:
        keys: the settings that name the data, for the message.

    Raises:
        DataError: ranks see other records than rank 0. Raised on every rank, naming these ranks.
    """
    found = gather_lists([loader.steps.fingerprints()])
    differing = [rank for rank, other in enumerate(found) if other != found[0]]
    if differing:
        raise DataError(
            f"ranks {differing} have other records, tokenizers or image preparation than rank 0: are {keys} "
            "and the model the same files on every machine, and unchanged while the run began? Run it again"
        )


def divide_layers(model: Llava, plan: Mapping[str, Cut], mesh: DeviceMesh, cfg: Config) -> None:
    """Divide the layers of a meta-device model among the ranks of a mesh of one dimension, in place.

    Args:
        plan: how the whole model is divided; the model may be a part of it.
    """
    size, index = mesh.size(), mesh.get_local_rank()
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    cuts = {name: cut for name, cut in plan.items() if name in names}
    first, _ = own_rows(model.parts.language.vocab_size, mesh)
    part = VocabularyPart(first, reduction(mesh, "max"), reduction(mesh, "sum"))
    if model.lm_head is not None:
        model.lm_head.label_loss = partial(chunked_loss, chunk_tokens=cfg.loss.chunk_tokens, part=part)
    divide_dropout(model, cuts, size, index)
    cut_model(model, cuts, mesh, chains_of_blocks(model))


def assemble(
    model: Llava,
    cfg: Config,
    parallelism: Parallelism,
    loader: Loader,
    fill: Callable[[Llava, MasterWeights], None],
    counts: Sequence[float] | None = None,
) -> TrainState:
    """Shard and compile a model that is on the meta device, load its weights and build its optimizer. Return the state
    of a training at step 0.

    The steps must have this order: freeze, activation checkpointing, shard, load weights into shards, build the
    optimizer.

    Args:
        loader: yields the data of each step.
        fill: function that fills this rank's shards with the initial weights.
        counts: mean number of tokens, pairs of tokens, labels and tiles of a sample, by which the model is divided into
            stages; None: those of the loader's dataset.
    """
    world, plan, meshes = parallelism.world, parallelism.plan, parallelism.meshes
    if meshes.context is not None:
        assert model.kernel is not None, "checked by the configuration"
        group = meshes.context.get_group("context")
        context = context_of(cfg, world, model)
        if world.is_first:
            ranks, how = context.cut.size, context.how.value
            log().info("%d ranks process each row together, parallel.context_how=%s: %s", ranks, how, context.reason)
        share_attention(model.language_model, model.kernel, context, exchange_in(group), gather_in(group))
    # With parallel.context a rank has only a part of each sample. Where a compiled block contains its activation
    # checkpointing, a hook in it would break its graph.
    compiling = choose_compiling(cfg, world.device, model.kernel and model.kernel.attention)
    is_hidden = compiling.on and cfg.activation_checkpointing.mode is ActivationCheckpointing.selective
    routers = [] if is_hidden or meshes.context is not None else find_routers(model.language_model)
    stages = None
    if meshes.pipeline is not None:
        counts = counts or mean_counts(loader.steps.records)
        stages = OwnStages(model, cfg, parallelism.place, counts)
        log().log(logging.INFO if world.is_first else logging.DEBUG, "%s", stages.description)
    cuts = tensor_plan(model, meshes.tensor.size()) if meshes.tensor is not None else {}  # of the whole model
    if stages is not None:
        stages.keep(model)
    buffers, mesh = computed_buffers(model), meshes.states
    if meshes.tensor is not None:
        store_weights(model, cfg.precision, sharded=mesh is not None)  # a DTensor's dtype cannot be set
        divide_layers(model, cuts, meshes.tensor, cfg)
    offload = Offload(cfg, world.device)
    warn_if_useless(cfg, world)
    compilations = Compilations() if compiling.on else None
    has_balance = cfg.model.balance_loss > 0
    positions = None
    if meshes.tensor is not None:
        positions = RankPositions(meshes.tensor.get_local_rank(), meshes.tensor.size(), reduction(meshes.tensor, "sum"))
    own = model.language_model, compiling.on, positions
    watched = RouterOutputs(routers, has_balance, *own) if routers else None
    share = None
    if meshes.experts is not None:
        found = list(find_experts(model.language_model).values())
        share = partial(share_experts, model.language_model, found, meshes.experts, plan.shards_frozen)
    roots_of = partial(stages.of, model) if stages is not None else None
    whole = model.whole_while_frozen()
    modules = model.blocks(), mesh, plan, cfg, offload, whole, compilations, share, roots_of
    masters = parallelize(model, *modules, model.output_layer())
    for message in useless_settings(cfg.sharding, model.blocks(), parallelism.shards):
        log().log(logging.WARNING if world.is_first else logging.DEBUG, message)
    fill(model, masters)
    restore_buffers(model, buffers, clean_name)
    offload.drop_loaded_shards()
    is_part = stages is not None
    on_device = compiling.on and cfg.offload.mode is OffloadMode.none  # the CPU may have no compiler
    optimizer, learning_rate = build_optimizer(model, masters, cfg, loader.total_steps, is_part, on_device)
    optimizer = offload.optimizer(optimizer)
    scaler = build_scaler(cfg.precision.scaler) if cfg.precision.param_dtype is DType.fp16 else None
    others: dict[str, Any] = {"scaler": scaler, "compilations": compilations, "routers": watched}
    if cfg.activation_checkpointing.mode is ActivationCheckpointing.dynamic:
        others["dynamic"] = DynamicCheckpointing(model.blocks(), cfg.activation_checkpointing, world)
    if stages is not None and meshes.pipeline is not None:
        width, dtype = model.parts.language.hidden_size, model.compute_dtype
        pipeline = Pipeline(list(stages.roots), parallelism, width, dtype)
        others |= {"pipeline": pipeline, "elsewhere": trained_elsewhere(pipeline, masters)}
    return TrainState(model, masters, optimizer, learning_rate, loader, parallelism, **others)


class OwnStages:
    """The stages of a model that this rank has."""

    def __init__(self, model: Llava, cfg: Config, place: Place, counts: Sequence[float]):
        """Divide a whole model, which is on the meta device, into stages.

        Args:
            place: says which stages this rank has.
            counts: mean number of tokens, pairs of tokens, labels and tiles of a sample.
        """
        self.plan = plan_of_stages(cfg, model, counts)
        self.place = place
        children = children_of(model.language_model)
        assert children is not None, "checked by plan_stages"
        self.children = children
        self.roots: list[Llava] = []

    @property
    def description(self) -> str:
        """How the model is divided, for the log."""
        ranks = "ranks" if self.place.stages == self.place.size else "ranks, two each"
        return f"{self.place.stages} stages on {self.place.size} groups of {ranks}: {self.plan}"

    def keep(self, model: Llava) -> None:
        """Remove from a model, in place, the modules that this rank does not have."""
        blocks = {number for stage in self.place.own for number in self.plan.blocks[stage]}
        has_first, has_last = 0 in self.place.own, self.place.stages - 1 in self.place.own
        remove_others(model, self.children, blocks, has_first, has_last)

    def of(self, model: Llava) -> list[nn.Module]:
        """Return this rank's stages as modules, which share the modules of the model."""
        last = self.place.stages - 1
        self.roots = [
            stage_of(model, self.children, self.plan.blocks[number], number == 0, number == last)
            for number in self.place.own
        ]
        return list(self.roots)


def trained_elsewhere(pipeline: Pipeline, masters: MasterWeights) -> dict[str, Elsewhere]:
    """Return the trained parameters that this rank does not have, by name. Collective: all ranks must call it."""
    index = pipeline.place.index
    own = {name: Elsewhere(index, p.dtype, tuple(p.shape)) for name, p in masters.named.items()}
    found = gather_lists([own if pipeline.equal_ranks[0] == 0 else {}])
    return {name: place for each in found for name, place in each.items() if place.group != index}
