"""Print a summary of a training before its first step, on rank 0."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table

from llava_fsdp.config import (
    FULL_WEIGHT,
    OWN_TEMPLATE,
    ActivationCheckpointing,
    Config,
    DType,
    LinearKind,
    LoraBias,
    LoraConfig,
    Normalize,
    OffloadMode,
    OptimConfig,
    Parity,
    Pixels,
    PrecisionConfig,
    Quantizer,
    SamplerName,
)
from llava_fsdp.data.columns import BLOCK
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.model.adapters.lora_names import LORA_A, module_of
from llava_fsdp.model.architecture import NamedPart, part_name
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.parallel.fsdp.unit_settings import describe_units
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.parallel.memory.offload import describe_offload
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.report.run_reader import REPORT_FILE
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.train.optimizer import rate_of


def unlike_original(cfg: Config, compiles: bool = False) -> str:
    """Return one line with the settings because of which results differ numerically from those of the original LLaVA
    trainer. `compiles`: whether blocks are compiled, which changes rounding."""
    precision = cfg.precision
    # (key, value, whether the value equals that of the original LLaVA)
    choices = [
        ("labels", cfg.labels.value, cfg.labels is Parity.llava_v1_5),
        ("sampler", cfg.sampler.name.value, cfg.sampler.name is SamplerName.llava_v1_5),
        ("optim", cfg.optim.name.value, not cfg.optim.is_muon),
        ("loss.normalize", cfg.loss.normalize.value, cfg.loss.normalize is Normalize.micro_batch),
        ("data.pixels", cfg.data.pixels.value, cfg.data.pixels is Pixels.llava_v1_5),
        ("precision.reduce_dtype", precision.reduce_dtype.value, precision.reduce_dtype is precision.param_dtype),
        ("precision.norm_dtype", precision.norm_dtype.value, precision.norm_dtype is precision.param_dtype),
    ]
    ours = [f"{key}={value}" for key, value, same in choices if not same]
    kernels = "; compiled blocks (compile=false runs them as they are)" if compiles else ""
    if not ours:
        return f"nothing of labels, order, loss.normalize, data.pixels and precision (compat=llava_v1_5){kernels}"
    return f"{', '.join(ours)} (compat=llava_v1_5 sets the original's){kernels}"


@dataclass(frozen=True)
class RunFacts:
    """What the screen with which a run begins shows, beside its configuration."""

    loader: Loader
    held_out: HeldOut | None
    """None without validation."""
    weights: dict[str, Weight]
    """The properties of all parameters (shape, dtype, ...), by name."""
    projector: str
    """Description of the projector with which the training starts."""
    parts: Mapping[str, NamedPart]
    """The model's parts (`Architecture.named_parts`)."""
    kernel: Kernel | None
    """None if rows are padded."""
    planned_peak: int | None
    """Planned peak memory of a GPU in bytes; None if there is no plan, as on a CPU."""
    is_llava: bool
    """Whether the original could train the model; it knows no models that are trained as their class has them."""


def show_run(cfg: Config, world: World, run: RunFacts) -> None:
    """Print in at most fifteen lines which model is trained on which data, and how."""
    loader, weights, kernel = run.loader, run.weights, run.kernel
    console = TextConsole(on_stderr=True, width=None if sys.stderr.isatty() else 120)
    records = loader.steps.records
    model = cfg.model.checkpoint or f"{cfg.model.language} + {cfg.model.vision}"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(min_width=13)
    facts.add_column(overflow="fold")
    toy = ", random weights" if cfg.model.random_weights and cfg.model.checkpoint is None else ""
    facts.add_row(cfg.stage.name, f"{cfg.model.name}: {model}{toy}; projector {run.projector.splitlines()[0]}")
    facts.add_row("trains", describe_trained(weights, run.parts) + describe_blocks(cfg.model.train))
    if cfg.model.lora.enabled:
        facts.add_row("adapters", describe_adapters(cfg.model.lora, list(weights)))
    if cfg.model.quantize.mode is not Quantizer.none:
        facts.add_row("base", describe_quantized(cfg, weights.values()))
    is_own = cfg.trained_template.partition("-")[0] == OWN_TEMPLATE  # it is recorded with a digest
    template = "the model's own chat template" if is_own else f"template {cfg.trained_template}"
    facts.add_row("data", f"{describe_data(cfg, records)}, {template}")
    facts.add_row("steps", describe_steps(cfg, loader, float(np.mean(records.lengths))))
    facts.add_row("learning", describe_learning(cfg.optim, weights, run.parts))
    facts.add_row("sharding", describe_sharding(cfg, world))
    facts.add_row("batch", describe_batch(cfg, world, loader))
    facts.add_row("precision", f"{cfg.precision.param_dtype.value}; {describe_precision(cfg.precision)}")
    compiling = choose_compiling(cfg, world.device, kernel and kernel.attention)
    attention = "SDPA over padded rows" if kernel is None else f"{kernel.attention.value} ({kernel.reason})"
    facts.add_row("kernels", f"attention {attention}; compile {'yes' if compiling.on else 'no'} ({compiling.reason})")
    if run.planned_peak is not None:
        there = torch.cuda.get_device_properties(world.device).total_memory
        facts.add_row("memory", f"{readable(run.planned_peak)} planned of the {readable(there)} of each GPU")
    facts.add_row("saves", describe_saves(cfg, run.held_out))
    facts.add_row("output", f"{cfg.output_dir}, a page of it in {cfg.output_dir}/{REPORT_FILE}")
    if run.is_llava:
        facts.add_row("unlike LLaVA", unlike_original(cfg, compiling.on))
    console.print(facts)


def describe_trained(weights: dict[str, Weight], named: Mapping[str, NamedPart]) -> str:
    """Say in one line how many parameters train, of the model and of each of its parts."""
    counts = trained_counts(weights, named)
    trainable = sum(count for count, _ in counts.values())
    total = trainable + sum(frozen for _, frozen in counts.values())
    parts = ", ".join(f"{named[part].title} {count:,}" for part, (count, _) in counts.items() if count)
    return f"{trainable:,} of {total:,} parameters ({trainable / total:.1%}): {parts}"


def describe_blocks(train: list[str]) -> str:
    """Return the values of `model.train` if one of them names blocks; else an empty text."""
    return f" (model.train=[{','.join(train)}])" if any(":" in text for text in train) else ""


def describe_steps(cfg: Config, loader: Loader, mean_tokens: float) -> str:
    """Say how many steps and epochs the training has, and how large a step is. `mean_tokens`: tokens of a sample."""
    per_epoch, total = loader.steps.sampler.per_epoch, loader.total_steps
    samples = len(loader.steps.sampler.samples(0))  # fewer than global_batch_size if there are fewer records
    return (
        f"{total:,}, {total / per_epoch:.3g} epochs of {per_epoch:,}; a step has {samples:,} "
        f"sample{'s' * (samples != 1)}, about {samples * mean_tokens:,.0f} tokens"
    )


def describe_learning(optim: OptimConfig, weights: dict[str, Weight], parts: Mapping[str, NamedPart]) -> str:
    """Return the learning rates of the parts of the model that train, and their schedule."""
    trained_parts = [part for part, (trains, _) in trained_counts(weights, parts).items() if trains]
    rate_of_part = {part: optim.lr if (rate := rate_of(parts[part], optim)) is None else rate for part in trained_parts}
    named = ", ".join(f"{parts[part].title} {rate:g}" for part, rate in rate_of_part.items() if rate != optim.lr)
    rates = set(rate_of_part.values())
    if len(rates) == 1:
        shown = f"{rates.pop():g}"
    else:
        shown = f"{optim.lr:g} ({named})" if optim.lr in rates else named
    warmup = f"{optim.warmup_ratio:.3g} of the steps" if optim.warmup_steps is None else f"{optim.warmup_steps} steps"
    schedule = optim.described_schedule
    comma = "," if schedule != optim.schedule.value else ""
    muon = "Muon for matrices, " if optim.is_muon else ""
    average = f", average {optim.ema:g} of the weights" if optim.ema is not None else ""
    return f"{muon}rate {shown}, {schedule}{comma} after a warm-up of {warmup}{average}"


def describe_sharding(cfg: Config, world: World) -> str:
    """Say in one line how weights, layers and activations are divided and kept."""
    groups, tensor = cfg.parallel.pipeline, cfg.parallel.tensor
    size = RankLayout(cfg.parallel, world.size).ranks_per_stage
    text = f"{cfg.sharding.strategy.value} over {size} {world.device.type} rank{'s' * (size > 1)}"
    text += f" in each of {groups} groups, which have different layers" if groups > 1 else ""
    text += f", of which each {tensor} compute every layer together" if tensor > 1 else ""
    if cfg.parallel.expert > 1:
        text += f", each {cfg.parallel.expert} of which share the experts"
    text += f", activation checkpointing {describe_activation_checkpointing(cfg, world)}"
    if cfg.offload.mode is not OffloadMode.none:
        text += f", offload {describe_offload(cfg, world.device)}"
    units = describe_units(cfg.sharding)
    return f"{text}; {units}" if units else text


def describe_saves(cfg: Config, held_out: HeldOut | None) -> str:
    """Say in one line when checkpoints are saved and when the model is validated."""
    every = "at the end" if cfg.checkpoint.every is None else f"every {cfg.checkpoint.every:,} steps and at the end"
    return f"{every}; validates {'never' if held_out is None else describe_held_out(cfg, held_out)}"


def describe_adapters(lora: LoraConfig, names: list[str]) -> str:
    """Describe the LoRA adapters in one line, with the number of adapted layers of each kind. `names`: parameters."""
    modules = [module_of(name) for name in names if name.endswith(LORA_A)]
    kinds = Counter(module.rpartition(".")[2] for module in modules)
    text = f"rank {lora.r}, scale {lora.scaling:g}, dropout {lora.dropout:g}"
    text += ", DoRA" if lora.use_dora else ""
    text += f", biases {lora.bias.value}" if lora.bias is not LoraBias.none else ""
    text += f", from {lora.checkpoint}" if lora.checkpoint else ""
    return f"{text}; {len(modules)} linear layers: {', '.join(f'{kind} ({n})' for kind, n in kinds.items())}"


def describe_quantized(cfg: Config, weights: Iterable[Weight]) -> str:
    """Say in one line how the weights of the base model are quantized."""
    quantized = [w for w in weights if w.per_element > 1]  # several quantized weights are packed into an element
    nbytes = sum(w.numel * w.item_size(cfg.precision) + w.statistics for w in quantized)
    count, quantize = sum(w.count for w in quantized), cfg.model.quantize
    double = ", scales quantised again" if quantize.double and quantize.mode is not Quantizer.int8 else ""
    kind = f"{quantize.mode.value}{double}"
    return f"{len(quantized)} linear layers of the language model in {kind}: {8 * nbytes / count:.4g} bits a weight"


def describe_data(cfg: Config, records: Records) -> str:
    """Say in one line which files are read, and how many of their records are used."""
    files = ", ".join(f"{name} ({source.path})" for name, source in cfg.data.sources.items()) or cfg.data.path
    wrong = f", {records.num_wrong:,} skipped as wrong" if records.num_wrong else ""
    long = f", {records.num_too_long:,} skipped as too long" if records.num_too_long else ""
    examined = records.index.examined
    images = f"; {examined.summary}" if examined is not None else ""
    several = ""
    if len(records) != records.num_records:  # some records give several samples, which begin with the same tokens
        several = f", {len(records):,} samples ({records.repeated:,} tokens are read repeatedly)"
    weights = ""
    if records.weights is not None:
        blocks = [slice(begin, begin + BLOCK) for begin in range(0, len(records), BLOCK)]
        labels = sum(int(records.labels[block].sum(dtype=np.int64)) for block in blocks)
        mean = sum(map(records.weight_of, blocks)) / FULL_WEIGHT / max(1, labels)
        weights = f", mean weight of a label {mean:.3g}"
    return f"{files}: {records.num_records:,} records{several}{weights}{wrong}{long}{images}"


def describe_held_out(cfg: Config, held_out: HeldOut) -> str:
    """Say how often the model is validated, on which records and questions."""
    records_text = describe_data(cfg.held_out, held_out.loader.steps.records)
    questions = (
        f"{len(held_out.questions):,} questions by {cfg.val.metric.value}" if held_out.questions else "no questions"
    )
    return f"every {cfg.val.every:,} steps; {records_text}; {questions}"


def describe_precision(precision: PrecisionConfig) -> str:
    """Say in one line in which dtypes the training stores and computes, without the compute dtype."""
    text = f"weights {precision.master_dtype.value}, moments {precision.moment_dtype.value}, norms "
    text += f"{precision.norm_dtype.value}, gradients added in {precision.reduce_dtype.value}"
    if precision.linear is LinearKind.fp32_sums:
        text += ", those of blocks within products"
    if precision.linear.in_8_bits:
        number = precision.linear.value.removesuffix("_mixed")
        text += f"; linear layers of the language model's blocks multiply in {number}"
    if precision.param_dtype is DType.fp16:
        fixed = precision.scaler.scale
        text += f"; loss scale {f'2**{precision.scaler.initial_power}, dynamic' if fixed is None else f'{fixed:g}'}"
    return text


def describe_batch(cfg: Config, world: World, loader: Loader) -> str:
    """Say how the rows of a global batch (a padded sample each, or several packed ones) are divided among micro-batches
    and ranks. The sampler llava_v1_5 fixes the samples of each micro-batch, which packing puts into one row."""
    if cfg.sampler.name is not SamplerName.llava_v1_5 and cfg.packs:
        ranks = cfg.parallel.ranks_per_row
        each = "each rank" if ranks == 1 else f"each {ranks} ranks, which process a row together"
        return (
            f"{cfg.global_batch_size} samples packed into rows of at most {cfg.row_tokens:,} tokens, "
            f"as few as they need on {each}"
        )
    count, per_row = loader.num_micro_batches, cfg.parallel.ranks_per_row * cfg.parallel.pipeline
    groups, what = (
        RankLayout(cfg.parallel, world.size).num_row_groups,
        "ranks" if per_row == 1 else f"groups of {per_row} ranks",
    )
    return (
        f"micro-batch {cfg.micro_batch_size} x accumulation {count} x {what} {groups} = "
        f"{cfg.micro_batch_size * count * groups} rows for a global batch of {cfg.global_batch_size}"
        + (", each micro-batch's packed into one" if cfg.packs else "")
    )


def describe_activation_checkpointing(cfg: Config, world: World) -> str:
    """Return the mode of activation checkpointing, with what a user must know of it here."""
    mode = cfg.activation_checkpointing.mode
    if mode is ActivationCheckpointing.budget:
        return f"{mode.value} {cfg.activation_checkpointing.budget:g}"
    if mode is ActivationCheckpointing.dynamic:
        return f"{mode.value}: every block is recomputed for three steps, and then as few as there is memory for"
    if mode is ActivationCheckpointing.offload and world.device.type == "cpu":
        return f"{mode.value}: as full; without a GPU the host's memory is the device's, and this saves nothing more"
    return mode.value


def trained_counts(weights: dict[str, Weight], parts: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the number of (trainable, frozen) weights in each part of the model (vision tower, projector, ...)."""
    counts = {}
    for part in parts:
        part_weights = [w for n, w in weights.items() if part_name(n, parts) == part]
        if part_weights:
            trains = sum(w.count for w in part_weights if w.trainable)
            counts[part] = trains, sum(w.count for w in part_weights) - trains
    return counts
