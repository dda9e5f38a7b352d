"""Measure the memory that a training will need, in one process, before its machines are booked: `train dry_run=8 ...`.

The process is rank 0 of the given number of ranks, and the other ranks are simulated. It runs two steps with random
weights and the largest micro-batches that the configuration allows. Collectives allocate memory but send nothing, so
the losses have no meaning.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from llava_fsdp.config import Config, DType, Format, OffloadMode, ScalerConfig
from llava_fsdp.data.synthetic import Contents, SyntheticLoader, dry_run_micro_batches, fullest, synthetic_step
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.weights.init_weights import Rule, draw_rule
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.compile import explained_compiler_errors
from llava_fsdp.parallel.context.share_rows import context_of
from llava_fsdp.parallel.local_shards import clean_name, local, local_shards
from llava_fsdp.parallel.malloc import return_freed_memory
from llava_fsdp.parallel.memory.offload import explained_memory_errors
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.fast_dtype import has_bf16, settle_precision
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights
from llava_fsdp.parallel.ranks.comm_volume import CollectiveBytes
from llava_fsdp.parallel.ranks.fake_collectives import is_simulated, simulate_collectives
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.blank_images import BlankImages, image_rule
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.memory.reached import freeze_unreached
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import PlanRow
from llava_fsdp.plan.planner import peak as plan_peak
from llava_fsdp.plan.search.auto import decide, settle_packing
from llava_fsdp.plan.workload import samples_of
from llava_fsdp.runtime.errors import NumericError
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.build_state import assemble
from llava_fsdp.train.setup.peak_memory import PeakMeter
from llava_fsdp.train.setup.preflight import warn_if_refused
from llava_fsdp.train.setup.run_info import device_name
from llava_fsdp.train.state import TrainState

STEPS = 2
"""Number of steps. The first one creates the optimizer's states, which the peak memory of the second includes."""
STATES = ("parameters", "gradients", "optimizer")
"""Kinds of tensors whose bytes are measured."""


def dry_run(cfg: Config) -> None:
    """Measure the memory that a training will need on rank 0, with all other ranks simulated, and print it as a table
    or, with format=json, as JSON. No files are left behind."""
    remark = warn_if_refused(cfg)  # that only the projector is missing, which this command does not need; else empty
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        if cfg.offload.mode is OffloadMode.nvme and cfg.offload.folder is None:  # its default would be output_dir
            cfg = replace(cfg, offload=replace(cfg.offload, folder=folder))
        with distributed(cfg) as world, explained_memory_errors(lambda: cfg, world.device):
            cfg, reason_for_dtype = settle_precision(cfg, [has_bf16(world.device)], world.device.type)
            if reason_for_dtype is not None:
                log().info("%s", reason_for_dtype)
            cfg = settle_auto(cfg, world)
            report = measure(cfg, world)
    if cfg.format is Format.json:
        print(json.dumps(report))
    else:
        print_report(report)
    if remark:
        log().info("%s", remark)


def settle_auto(cfg: Config, world: World) -> Config:
    """Replace every value `auto` in the configuration. `pack=auto` becomes true if the language model supports rows of
    packed samples; a planner of memory and time chooses the other values, by the dataset's statistics if they are
    known, else by the mean lengths of LLaVA's own data."""
    parts = shapes_of(cfg.model)
    cfg, reason_for_padding = settle_packing(cfg, parts)
    if reason_for_padding is not None:
        log().info("auto: %s", reason_for_padding)
    if not cfg.has_auto:
        return cfg
    model = build_architecture(parts, cfg.model, DTYPES[cfg.precision.param_dtype])
    decision = decide(cfg, world, parts, samples_of(cfg, image_rule(cfg, model)))
    log().info("%s", decision.summary(cfg))
    return decision.applied(cfg)


def measure(cfg: Config, world: World, contents: Contents | None = None) -> dict[str, Any]:
    """Run two training steps on this rank and measure memory. The other ranks are simulated or real. Return what is
    printed with format=json. `contents`: numbers of tokens, images and labels of a micro-batch; None: the largest.

    Raises:
        NumericError: no step updated the weights, so that the optimizer's states could not be measured.
    """
    if cfg.precision.param_dtype is DType.fp16:
        # with a dynamic scale the first steps may be skipped, and would create no optimizer states
        cfg = replace(cfg, precision=replace(cfg.precision, scaler=ScalerConfig(scale=1.0)))
    return_freed_memory()
    parallelism = Parallelism.of(cfg, world)
    model = build_model(cfg, shapes_of(cfg.model), world.device)
    rule = image_rule(cfg, model)
    if isinstance(rule, BlankImages):  # a model with a processor, for which a training does this too
        freeze_unreached(rule, cfg.precision)
    shape = shape_of(model)
    context = context_of(parallelism.layout, world.rank, model.language_config)
    contents = contents or fullest(cfg, shape, context and context.cut, rule)
    planned_memory = planned_memory_of(cfg, world, contents)
    counts = samples_of(cfg, rule).counts
    # while the model is on the meta device, where its own code counts the tokens of an image
    image_inputs = rule.inputs_of(sizes_planned(cfg, contents), cfg.packs) if isinstance(rule, BlankImages) else None
    meter = PeakMeter(world.device)
    loader = SyntheticLoader(world.device, STEPS, has_tiles=image_inputs is None)
    state = assemble(model, cfg, parallelism, loader, draw_shards, counts)
    bytes_at_rest: dict[str, int] = {}
    state.optimizer.register_step_post_hook(lambda *_: bytes_at_rest.update(held_bytes(state)))
    for root in state.roots:
        root.train()
    seconds = []
    for number in range(STEPS):
        counter = CollectiveBytes()
        if is_simulated():
            for root in state.roots:
                simulate_collectives(root, counter.traffic)
        step = synthetic_step(number, contents, shape, cfg, parallelism.layout.num_losses, image_inputs)
        started = time.perf_counter()
        with counter, explained_compiler_errors():
            train_step(state, step, cfg, started)
        seconds.append(time.perf_counter() - started)
    if not bytes_at_rest:
        raise NumericError("dry_run: random weights overflow in fp16, so that no step updates them; try precision=bf16")
    peak = meter.read()
    return {
        "ranks": world.size,
        "strategy": cfg.sharding.strategy.value,
        "precision": cfg.precision.param_dtype.value,
        "activation_checkpointing": cfg.activation_checkpointing.mode.value,
        "device": device_name(world.device),
        "micro_batches": len(step.micro_batches),
        "micro_batch": sizes_of(contents),
        "bytes": {name: {"measured": bytes_at_rest[name], "planned": planned_memory.at_rest[name]} for name in STATES},
        "peak": peak | {"planned": planned_memory.bytes["total"]},
        "plan": {"moment": planned_memory.peak_moment, "bytes": planned_memory.bytes},
        "collectives": counter.moved,
        "seconds": seconds,
    }


def sizes_of(contents: Contents) -> dict[str, int]:
    """Return the sizes of a micro-batch as a dry run prints them."""
    return {
        "positions": contents.tokens,
        "samples": len(contents.lengths),
        "pictures": contents.images,
        "tiles": contents.tiles,
        "image_tokens": contents.image_tokens,
        "labels": contents.labels,
    }


def planned_memory_of(cfg: Config, world: World, contents: Contents) -> PlanRow:
    """Estimate by arithmetic the memory of this rank in the steps that a dry run measures."""
    count = dry_run_micro_batches(contents, cfg, RankLayout(cfg.parallel, world.size).num_losses)
    micros = [sizes_planned(cfg, contents)] * count
    return plan_peak(cfg, world.size, world.device, micros, world.rank)


def sizes_planned(cfg: Config, contents: Contents) -> MicroBatchSizes:
    """Return the sizes of a dry run's micro-batch as the planner takes them."""
    rows = 1 if cfg.packs else len(contents.lengths)
    return MicroBatchSizes(
        rows,
        length=contents.tokens // rows,
        samples=len(contents.lengths),
        tiles=contents.tiles,
        labels=contents.labels,
        image_tokens=contents.image_tokens,
        context=contents.ranks_per_row,
    )


@torch.no_grad()
def draw_shards(model: Architecture, masters: MasterWeights) -> None:
    """Fill this rank's shard of every parameter with random values from the distribution of its initial weights, on the
    shard's device. The master weights, which the optimizer updates, get the same values."""
    packed = {clean_name(name): layer for name, layer in quantized_weights(model).items()}
    for name, shard in local_shards(model, masters).items():
        first, *others = shard.tensors  # the parameter and, if it is another tensor, the master weight
        rule = draw_rule(model, name)
        if name in packed:  # a quantized weight: any bytes are valid codes
            first.view(torch.uint8).random_()
            packed[name].draw_scales(2 * rule.scale)  # values up to two standard deviations
            continue
        match rule.kind:
            case Rule.ONES:
                first.fill_(1)
            case Rule.ZEROS:
                first.zero_()
            case Rule.NORMAL:
                first.normal_(0, rule.scale)
            case Rule.UNIFORM:
                first.uniform_(-rule.scale, rule.scale)
        for other in others:
            other.copy_(first)


def held_bytes(state: TrainState) -> dict[str, int]:
    """Return the bytes of this rank's parameters, gradients and optimizer states (`STATES`). To be called while the
    gradients exist. A master weight that is the parameter itself counts once."""
    statistics_of_quantized = [t for layer in quantized_weights(state.model).values() for t in layer.statistics]
    weights = {id(p): p for p in [*state.model.parameters(), *statistics_of_quantized, *state.masters.named.values()]}
    gradients = [p.grad for p in state.masters.named.values() if p.grad is not None]
    moments = [v for states in state.optimizer.state.values() for key, v in states.items() if key != "step"]
    moments += state.average.named.values() if state.average is not None else ()
    tensors = zip(STATES, (weights.values(), gradients, moments), strict=True)
    return {name: sum(local(t).nbytes for t in held) for name, held in tensors}


def print_report(report: dict[str, Any]) -> None:
    """Print what `measure` returns as a table."""
    console = TextConsole(width=None if sys.stdout.isatty() else 120)
    micro = report["micro_batch"]
    # each token of a whole model's images counts as a tile
    tiles = f"{micro['tiles']:,} tiles, " if micro["tiles"] != micro["image_tokens"] else ""
    plural = "es" if report["micro_batches"] > 1 else ""
    console.print(
        f"rank 0 of {report['ranks']} simulated ranks on {report['device']}: {report['strategy']}, "
        f"{report['precision']}, activation checkpointing {report['activation_checkpointing']}\n"
        f"{report['micro_batches']} micro-batch{plural} of {micro['positions']:,} tokens in {micro['samples']:,} "
        f"samples, {micro['pictures']:,} images ({tiles}{micro['image_tokens']:,} tokens), "
        f"{micro['labels']:,} labels; random weights, synthetic samples, nothing written"
    )
    table = Table("", "measured", "planned", title="bytes of this rank", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in report["bytes"].items():
        table.add_row(f"{name} between steps", f"{counts['measured']:,}", f"{counts['planned']:,}")
    planned = report["peak"]["planned"]
    for number, (name, value) in enumerate((n, v) for n, v in report["peak"].items() if n != "planned"):
        table.add_row(name.replace("_", " "), f"{value:,}", "" if number else f"{planned:,}")
    for name, counts in ((name, counts) for name, counts in report["collectives"].items() if counts["calls"]):
        table.add_row(f"{name.replace('_', '-')} in a step ({counts['calls']} calls)", f"{counts['bytes']:,}", "")
    console.print(table)
