"""Build the state of a training: data, model, shards, weights and optimizer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config, DType, OffloadMode, PairReference, Part, Source, check_profile
from llava_fsdp.data.loader import Loader, build_loader
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.data.validation_set import Choose, HeldOut, open_held_out, warn_of_trained
from llava_fsdp.export.check_folders import check_artifacts
from llava_fsdp.export.write import adapter_folder
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.llava.own_parts import NONE, OwnParts
from llava_fsdp.model.load_weights import fingerprint, load_weights, weight_digests
from llava_fsdp.model.sources.pretrained import artifacts_of
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.apply import Fill, apply_parallelism
from llava_fsdp.parallel.context.share_rows import context_of
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.ranks.consensus import on_all_ranks, on_first_rank
from llava_fsdp.parallel.ranks.mesh import first_rank_first, gather_lists
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.time.mfu import utilization_of
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch_loading
from llava_fsdp.train.average import WeightAverage
from llava_fsdp.train.checkpoints.resume import continues, without_saved_sources
from llava_fsdp.train.loss_scaler import build_scaler
from llava_fsdp.train.optimizer import build_optimizer
from llava_fsdp.train.setup.build_model import mean_counts, shape_of
from llava_fsdp.train.setup.preflight import check_parts_and_export, few_steps, find_sources, open_model
from llava_fsdp.train.setup.run_info import about_run
from llava_fsdp.train.setup.summary import RunFacts, show_run
from llava_fsdp.train.setup.unused import freeze_unused
from llava_fsdp.train.state import TrainState


def build_state(cfg: Config, parallelism: Parallelism, own_parts: OwnParts = NONE) -> TrainState:
    """Build the state of a training at step 0: the data, and the sharded model and optimizer with initial weights.
    Collective: all ranks must call it. `own_parts`: parts of the model that the program gives."""
    world = parallelism.world
    model, projector = open_model(cfg, world.device, own_parts)
    parts = model.parts
    warnings = on_first_rank(lambda: check_parts_and_export(cfg, model), "the export cannot be rehearsed")
    loader = open_data(cfg, world, model)
    freeze_unused(model, loader, cfg.precision)
    check_profile(cfg, loader.total_steps)
    check_same_records(loader)
    held_out = open_held_out_data(cfg, world, model) if cfg.val.every is not None else None
    read = without_saved_sources(cfg)  # `cfg` without files that a resumed run reads from its checkpoint instead
    check_artifacts(artifacts_of(parts, projector, read.model), world.local_rank, world.local_size, world.is_first)
    sources = find_sources(read, model, projector)
    watch = watch_loading(world.is_first, "fingerprint of frozen weights")
    digests = weight_digests(model, sources, world.rank, world.size, gather_lists, watch)
    adapter_folder.check_base(model, read.model, digests)  # that a LoRA adapter to continue from fits this base model
    # identifies the weights with which training begins, if the reference of preference pairs is computed from them now
    start_digest = ""
    if cfg.data.pairs and cfg.pair_reference is PairReference.stored and not continues(cfg):
        trained = weight_digests(model, sources, world.rank, world.size, gather_lists, watch, trained=True)
        start_digest = fingerprint(model, digests | trained)
    fingerprints = {**loader.steps.fingerprints(), "model": fingerprint(model, digests), **own_parts.names}
    utilization = utilization_of(model, cfg, world.device, world.size)
    about: dict[str, Any] = {}
    if world.is_first:
        weights = weights_of(
            model, parts_of(model), cfg.precision, cfg.sharding.blocks_per_unit, cfg.parallel, optim=cfg.optim
        )
        about = about_run(cfg, world, model, loader.steps.records, weights)
        if world.device.type == "cuda" and utilization.peak is None:
            log().info("%s", utilization.source)
        described = describe_projector(read, projector)
        is_llava = model.processor_folder is None
        planned = about["planned_peak"]
        show_run(
            cfg,
            world,
            RunFacts(loader, held_out, weights, described, model.named_parts, model.kernel, planned, is_llava),
        )
        for warning in warnings + few_steps(cfg, loader.total_steps):
            log().warning("%s", warning)

    packed = quantized_weights(model)

    def load(model: Architecture, masters: MasterWeights) -> None:
        shards = local_shards(model, masters)
        # with stages, a rank has only some parameters; otherwise a source without a shard is an error
        of_rank = {name: source for name, source in sources.items() if cfg.parallel.pipeline == 1 or name in shards}
        watch = watch_loading(world.is_first)
        on_all_ranks(lambda: load_weights(of_rank, shards, watch, packed), "the weights cannot be loaded")

    state = assemble(model, cfg, parallelism, loader, load)
    known = {"sources": sources, "fingerprints": fingerprints, "digests": digests, "about": about}
    known["start_digest"] = start_digest
    return replace(state, **known, utilization=utilization, held_out=held_out)


def describe_projector(cfg: Config, projector: Path | None) -> str:
    """Return a phrase that says where the projector comes from with which a training starts. `projector`: the path from
    which it is read; None: it is random, or part of `model.checkpoint` or of an adapter."""
    if continues(cfg) and Part.projector in cfg.model.trained:
        return "of the run's own checkpoint"
    is_missing = projector is None and cfg.model.projector == "auto"
    if is_missing and cfg.model.lora.checkpoint is not None:
        return f"of the adapter {cfg.model.lora.checkpoint}"
    if cfg.model.checkpoint is not None:
        return "of the checkpoint"
    return "random (no stage=pretrain run beside output_dir)" if is_missing else str(projector or "random")


def open_data(cfg: Config, world: World, model: Architecture, choose: Choose | None = None) -> Loader:
    """Return the loader of this rank's part of each step. If the dataset is the generated one, rank 0 first draws its
    images. `choose` builds the sampler from the records; None: the configured one. Collective."""
    if cfg.data.source is Source.shapes:
        with first_rank_first(world):
            draw_shapes(cfg.data)
    layout = RankLayout(cfg.parallel, world.size)
    # the ranks of a group process the same rows: all positions, or each its own (`context`)
    group, context = layout.row_group(world.rank), context_of(layout, world.rank, model.language_config)
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
        cut=context and context.cut,  # the positions of each row that this rank processes; None: all
        is_first=world.is_first,
    )


def open_held_out_data(cfg: Config, world: World, model: Architecture) -> HeldOut:
    """Open the validation data, and check that all ranks see the same records. Rank 0 warns if a file of them is also
    trained on. Collective."""
    positions = model.language_config.max_position_embeddings
    # `held_out_cfg` is the configuration for the validation data, `choose` makes the sampler from the records
    held_out = open_held_out(cfg, lambda held_out_cfg, choose: open_data(held_out_cfg, world, model, choose), positions)
    check_same_records(held_out.loader, "val.path, val.images")
    if world.is_first:
        warn_of_trained(cfg)
    return held_out


def check_same_records(loader: Loader, keys: str = "data.path, data.images") -> None:
    """Check that all ranks see the same records: each machine may read its own copy of the files. Raise DataError on
    every rank, with the numbers of the ranks that differ from rank 0. Collective. `keys`: the settings that name the
    data, for the message."""
    found = gather_lists([loader.steps.fingerprints()])
    differing = [rank for rank, other in enumerate(found) if other != found[0]]
    if differing:
        raise DataError(
            f"ranks {differing} have other records, tokenizers or image preparation than rank 0: are {keys} "
            "and the model the same files on every machine, and unchanged while the run began? Run it again"
        )


def assemble(
    model: Architecture,
    cfg: Config,
    parallelism: Parallelism,
    loader: Loader,
    fill: Fill,
    counts: Sequence[float] | None = None,
) -> TrainState:
    """Apply parallelism to a model that is on the meta device, load its weights and build its optimizer. Return the
    state of a training at step 0. Collective: all ranks must call it.

    Args:
        loader: yields the data of each step.
        fill: function that fills this rank's shards with the initial weights.
        counts: mean number of tokens, pairs of tokens that attend, labels and tiles of a sample, by which the model is
            divided into stages; None: those of the loader's dataset.
    """
    is_part = parallelism.meshes.pipeline is not None
    if is_part and counts is None:
        counts = mean_counts(loader.steps.records)
    applied = apply_parallelism(model, cfg, parallelism, fill, counts)
    # with offload the optimizer may run on the CPU, for which there may be no compiler
    on_device = applied.compilations is not None and cfg.offload.mode is OffloadMode.none
    optimizer, learning_rate = build_optimizer(
        model, applied.masters, cfg, loader.total_steps, is_part, on_device, parallelism
    )
    return TrainState(
        model,
        applied.masters,
        applied.offload.optimizer(optimizer),
        learning_rate,
        loader,
        parallelism,
        average=WeightAverage(applied.masters, cfg.optim.ema) if cfg.optim.ema is not None else None,
        scaler=build_scaler(cfg.precision.scaler) if cfg.precision.param_dtype is DType.fp16 else None,
        compilations=applied.compilations,
        dynamic=applied.dynamic,
        routers=applied.routers,
        pipeline=applied.pipeline,
        elsewhere=applied.elsewhere,
    )
