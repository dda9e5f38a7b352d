"""Print one screen about the run before training, on rank 0."""

import re
import sys
from collections import Counter
from collections.abc import Iterable

from rich.panel import Panel
from rich.table import Table

from llava_fsdp.config import (
    ActivationCheckpointing,
    Config,
    DType,
    LinearKind,
    LoraBias,
    LoraConfig,
    Normalize,
    OffloadMode,
    Parity,
    Pixels,
    PrecisionConfig,
    Quantizer,
    SamplerName,
    Source,
)
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.distributed.compile import choose_compiling
from llava_fsdp.distributed.memory import Weight
from llava_fsdp.distributed.mesh import World
from llava_fsdp.distributed.offload import describe_offload
from llava_fsdp.distributed.parallelize import describe_units
from llava_fsdp.model.attention import Kernel
from llava_fsdp.model.lora_names import LORA_A, module_of
from llava_fsdp.runtime.console import TextConsole


def unlike_original(cfg: Config, compiles: bool = False) -> str:
    """One line with the settings that make numbers differ from the original trainer's; compilation changes rounding."""
    precision = cfg.precision
    # key, value, whether it equals the original's
    choices = [
        ("labels", cfg.labels.value, cfg.labels is Parity.llava_v1_5),
        ("sampler", cfg.sampler.name.value, cfg.sampler.name is SamplerName.llava_v1_5),
        ("loss.normalize", cfg.loss.normalize.value, cfg.loss.normalize is Normalize.micro_batch),
        ("data.pixels", cfg.data.pixels.value, cfg.data.pixels is Pixels.llava_v1_5),
        ("precision.reduce_dtype", precision.reduce_dtype.value, precision.reduce_dtype is precision.param_dtype),
        ("precision.norm_dtype", precision.norm_dtype.value, precision.norm_dtype is precision.param_dtype),
    ]
    ours = [f"{key}={value}" for key, value, same in choices if not same]
    kernels = "; compiled blocks (compile=false runs them as they are)" if compiles else ""
    if not ours:
        return f"nothing of labels, order, loss.normalize, data.pixels and precision (compat=llava_v1_5){kernels}"
    return f"{', '.join(ours)}; compat=llava_v1_5 sets the original's (docs/llava.md){kernels}"


def show_run(
    cfg: Config,
    world: World,
    loader: Loader,
    held_out: HeldOut | None,
    weights: dict[str, Weight],
    projector: str,
    kernel: Kernel | None,
    peak: str,
) -> None:
    """Print model, data, packing of a step, and trainable parts; `peak` names the FLOP/s that MFU refers to."""
    console = TextConsole(on_stderr=True, width=None if sys.stderr.isatty() else 120)
    toys = ["a model with random weights"] if cfg.model.random_weights and cfg.model.checkpoint is None else []
    toys += ["the embedded images of shapes"] if cfg.data.source is Source.shapes else []
    if toys:
        console.print(
            Panel(
                f"This run uses {' and '.join(toys)}.\n"
                "The real thing: model=llava_v1_5_7b data=llava_json data.path=FILE.json data.images=DIR",
                title="embedded default" if len(toys) == 2 else "note",
            )
        )
    steps = loader.steps
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{cfg.model.name}: {cfg.model.checkpoint or f'{cfg.model.language} + {cfg.model.vision}'}")
    facts.add_row("projector", projector)
    facts.add_row("data", f"{describe_data(cfg, steps.records)}, template {cfg.data.template}")
    facts.add_row("steps", f"{loader.total_steps:,} ({steps.sampler.per_epoch:,} an epoch); output in {cfg.output_dir}")
    facts.add_row("batch", describe_batch(cfg, world, loader))
    if held_out is not None:
        facts.add_row("validation", describe_held_out(cfg, held_out))
    reason = "SDPA over padded rows: pack=false" if kernel is None else f"{kernel.attention.value} ({kernel.reason})"
    facts.add_row("attention", reason)
    facts.add_row(
        "compute",
        f"{world.device.type}, {cfg.precision.param_dtype.value}, "
        f"activation checkpointing {describe_activation_checkpointing(cfg, world)}",
    )
    facts.add_row("peak", peak)
    compiling = choose_compiling(cfg, world.device, kernel and kernel.attention)
    blocks = "the language model's blocks, when they first run, which takes a while" if compiling.on else "no"
    facts.add_row("compile", f"{blocks} ({compiling.reason})")
    if cfg.model.lora.enabled:
        facts.add_row("adapters", describe_adapters(cfg.model.lora, list(weights)))
    if cfg.model.quantize.mode is not Quantizer.none:
        facts.add_row("base", describe_packed(cfg, weights.values()))
    if units := describe_units(cfg.sharding):
        facts.add_row("units", units)
    facts.add_row("precision", describe_precision(cfg.precision))
    if cfg.offload.mode is not OffloadMode.none:
        facts.add_row("offload", describe_offload(cfg, world.device))
    facts.add_row("unlike LLaVA", unlike_original(cfg, compiling.on))
    console.print(facts)
    table = Table("part", "trains", "frozen", title="parameters", title_justify="left")
    for part, counts in trained_counts(weights).items():
        table.add_row(part, *(f"{count:,}" for count in counts))
    console.print(table)


def describe_adapters(lora: LoraConfig, names: list[str]) -> str:
    modules = [module_of(name) for name in names if name.endswith(LORA_A)]
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", module) for module in modules)
    found = f"rank {lora.r}, scale {lora.scaling:g}, dropout {lora.dropout:g}"
    found += ", DoRA" if lora.use_dora else ""
    found += f", biases {lora.bias.value}" if lora.bias is not LoraBias.none else ""
    found += f", from {lora.checkpoint}" if lora.checkpoint else ""
    return f"{found}; {len(modules)} linear layers: {', '.join(f'{kind} ({n})' for kind, n in kinds.items())}"


def describe_packed(cfg: Config, weights: Iterable[Weight]) -> str:
    packed = [w for w in weights if w.per_element > 1]
    held = sum(w.numel * w.item_size(cfg.precision) + w.statistics for w in packed)
    count, quantize = sum(w.count for w in packed), cfg.model.quantize
    double = ", scales quantised again" if quantize.double and quantize.mode is not Quantizer.int8 else ""
    kind = f"{quantize.mode.value}{double}"
    return f"{len(packed)} linear layers of the language model in {kind}: {8 * held / count:.4g} bits a weight"


def describe_data(cfg: Config, records: Records) -> str:
    files = ", ".join(f"{name} ({own.path})" for name, own in cfg.data.sources.items()) or cfg.data.path
    wrong = f", {records.out:,} left out as wrong" if records.out else ""
    long = f", {records.long:,} left out as too long" if records.long else ""
    return f"{files}: {len(records):,} records{wrong}{long}"


def describe_held_out(cfg: Config, held_out: HeldOut) -> str:
    own = describe_data(cfg.held_out, held_out.loader.steps.records)
    questions = (
        f"{len(held_out.questions):,} questions by {cfg.val.metric.value}" if held_out.questions else "no questions"
    )
    return f"every {cfg.val.every:,} steps; {own}; {questions}"


def describe_precision(precision: PrecisionConfig) -> str:
    found = f"weights {precision.master_dtype.value}, moments {precision.moment_dtype.value}, norms "
    found += f"{precision.norm_dtype.value}, gradients added in {precision.reduce_dtype.value}"
    if precision.linear is LinearKind.fp8:
        found += "; linear layers of the language model's blocks multiply in fp8"
    if precision.param_dtype is DType.fp16:
        fixed = precision.scaler.scale
        found += f"; loss scale {f'2**{precision.scaler.initial_power}, dynamic' if fixed is None else f'{fixed:g}'}"
    return found


def describe_batch(cfg: Config, world: World, loader: Loader) -> str:
    if cfg.sampler.name is SamplerName.shuffle and cfg.pack:
        return (
            f"{cfg.global_batch_size} samples packed into rows of at most {cfg.row_tokens:,} tokens, "
            f"as few as they need on each of {world.size} ranks"
        )
    count = loader.num_micro_batches
    return (
        f"micro-batch {cfg.micro_batch_size} x accumulation {count} x ranks {world.size} = "
        f"{cfg.micro_batch_size * count * world.size} rows for a global batch of {cfg.global_batch_size}"
        + (", each micro-batch's packed into one" if cfg.pack else "")
    )


def describe_activation_checkpointing(cfg: Config, world: World) -> str:
    mode = cfg.activation_checkpointing.mode
    if mode is ActivationCheckpointing.budget:
        return f"{mode.value} {cfg.activation_checkpointing.budget:g}"
    if mode is ActivationCheckpointing.offload and world.device.type == "cpu":
        return f"{mode.value}: as full; without a GPU the host's memory is the device's, and this saves nothing more"
    return mode.value


def trained_counts(weights: dict[str, Weight]) -> dict[str, tuple[int, int]]:
    """Numbers of trainable and of frozen parameters, by part of the model."""
    found = {}
    for part in ("vision_tower", "multi_modal_projector", "image_newline", "language_model", "lm_head"):
        own = [w for n, w in weights.items() if n.partition(".")[0] == part]
        if own:
            trains = sum(w.count for w in own if w.trainable)
            found[part] = trains, sum(w.count for w in own) - trains
    return found
