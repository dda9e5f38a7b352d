"""Predict which ways to train fit into memory and how fast each is, and recommend the fastest.

    llava-fsdp plan model=llava_v1_5_13b stage=finetune gpus=8

Needs no GPU, no weights, no network and no process group. The configuration keys are those of the command `train`. The
command predicts that training with every sharding strategy and every mode of activation checkpointing and offload.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    DType,
    Format,
    OffloadMode,
    ParallelConfig,
    PlanConfig,
    SamplerName,
    Source,
)
from llava_fsdp.model.parts import Parts
from llava_fsdp.parallel.precision.fast_dtype import settle_precision, slow_dtype
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh
from llava_fsdp.plan.measured_runs import Correction, find_correction
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.auto import chosen_overrides, settle_packing, smallest_context
from llava_fsdp.plan.search.layouts import LayoutChoices, Planned, Search, Searcher
from llava_fsdp.plan.search.longest import longest
from llava_fsdp.plan.search.search import choices, distinct_strategies, plan_rows, splits_to_try
from llava_fsdp.plan.show.longest_page import write_page as write_longest
from llava_fsdp.plan.show.scaling_page import assumptions, scale, write_page
from llava_fsdp.plan.show.table import as_object, overrides_of, search_object, show_longest, show_plan
from llava_fsdp.plan.time.hardware import Machine, machine_named, with_measured_speed
from llava_fsdp.runtime.errors import LlavaFsdpError, ModelError
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import StageLine, Watch, watch_silently

OWN_KEYS = {"gpus", "nodes", "gpu", "rows", "page", "longest", "runs", "format"}
TRIED = {"sharding", "activation_checkpointing", "offload"}
"""Configuration groups of which the planner tries all values that it can predict."""
CHOSEN = TRIED | {"tokens_per_micro_batch", "dry_run"}
"""Groups and keys that are not copied into the recommended command: those that the planner chooses, and `dry_run`,
which would keep the command from training."""


def plan(cfg: PlanConfig, typed: Sequence[str] = (), line: StageLine | None = None) -> None:
    """Print predicted memory and time for all strategies and modes of activation checkpointing and offload, and the
    command that trains with the fastest that fit. `typed`: the user's command-line arguments; those that `train` takes,
    too, are copied into the printed command. `line` shows the progress. Raises ModelError if the model cannot be
    computed on the meta device."""
    with explained_model_errors():
        print_plan(cfg, typed, line or StageLine("plan"))


@contextmanager
def explained_model_errors() -> Iterator[None]:
    """Context manager that converts errors of torch and transformers to a ModelError."""
    try:
        yield
    except LlavaFsdpError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"the planner cannot compute this model ({why}); is its config.json right?") from error


@dataclass(frozen=True)
class MadePlan:
    """The ways to train, and what they were made with."""

    planner: Planner
    """The planner of the best way."""
    rows: list[PlanRow]
    """The best first."""
    search: Search | None
    """None without `parallel.search`."""
    searched_cfg: PlanConfig
    """The configuration whose layouts are searched."""
    ways: Callable[..., LayoutChoices]
    """(planner, configuration, number of ranks) -> all ways to train with the layout of that configuration."""


def plan_objects(cfg: PlanConfig) -> list[PlanRow]:
    """Return the predictions for all combinations of strategy, activation checkpointing and offload, the best first.
    With `parallel.search`, they are those of the best layouts of ranks. Nothing is printed. Raises ModelError if the
    model cannot be computed on the meta device."""
    with explained_model_errors():
        machine = with_measured_speed(machine_named(cfg.gpu, cfg.gpus))
        cfg, _ = with_fp16(cfg, machine, ())
        cfg = with_precision(cfg, machine)
        parts = shapes_of(cfg.model)
        cfg, _ = settle_packing(cfg, parts)
        return make_plan(cfg, machine, parts, watch_silently, correction_of(cfg, parts)).rows


def print_plan(cfg: PlanConfig, typed: Sequence[str], line: StageLine) -> None:
    """Compute and print the plan. `typed`: the overrides that the user gave; `line`: shows the progress."""
    line.stage("the shapes of the model")
    machine = with_measured_speed(machine_named(cfg.gpu, cfg.gpus))
    cfg, fp16 = with_fp16(cfg, machine, typed)
    typed = [*typed, *fp16]
    cfg = with_precision(cfg, machine)
    parts = shapes_of(cfg.model)
    cfg, padded = settle_packing(cfg, parts)  # `padded`: the reason if samples cannot be packed
    if padded is not None:
        log().info("auto: %s", padded)
    if cfg.longest:
        return print_longest(cfg, machine, parts, line)
    warn_of_length(cfg, parts)
    tried = sorted({key_of(word) for word in typed} & TRIED)
    if tried:
        log().info("plan tries all values of %s itself, and ignores those that are given", " and ".join(tried))
    correction = correction_of(cfg, parts)
    made = make_plan(cfg, machine, parts, line.watch, correction)
    planner, rows, search = made.planner, made.rows, made.search
    more: dict[str, Any] = {} if search is None else {"search": search_object(search)}
    if cfg.runs is not None:
        more["correction"] = None if correction is None else asdict(correction)
    best = command(cfg, rows[0], planner.cfg.parallel, typed) if rows[0].fits else None
    if cfg.nodes > 1:
        plain, searched = planner, None
        if search is not None:  # the curves of single strategies have only the kinds that the configuration sets
            unsearched = replace(cfg.parallel, search=False, context=cfg.parallel.num_context)
            plain = planner.with_layout(replace(cfg, parallel=unsearched))
            searched = partial(fastest_on, cfg=made.searched_cfg, known=search.rows[0], ways=made.ways)
        points = scale(plain, cfg.gpus, cfg.nodes, chooses_size(cfg), searched, line.watch)
        assumed = assumptions(plain.machine, plain.samples)
        more |= {"scaling": points, "assumptions": assumed, "page": str(write_page(points, plain, Path(cfg.page)))}
    line.close()
    if cfg.format is Format.json:
        print(json.dumps(as_object(planner, rows, best, more)))
        return
    console = TextConsole(width=None if sys.stdout.isatty() else 160)
    show_plan(console, planner, rows, cfg.rows, best, search)
    if "page" in more:
        console.print(f"tokens/s against nodes: {more['page']}")


def correction_of(cfg: PlanConfig, parts: Parts) -> Correction | None:
    """Return the correction of predicted seconds by the runs in the folder `runs`, and log it; None without the key, or
    without a run on the planned device."""
    if cfg.runs is None:
        return None
    width = parts.language.hidden_size
    found = find_correction(Path(cfg.runs), lambda ranks: with_measured_speed(machine_named(cfg.gpu, ranks)), width)
    nothing = f"runs={cfg.runs}: no run on this device with a model of about this width; the seconds are not corrected"
    log().info("%s", found or nothing)
    return found


def make_plan(
    cfg: PlanConfig, machine: Machine, parts: Parts, watch: Watch, correction: Correction | None = None
) -> MadePlan:
    """Predict memory and time of all ways to train. With `parallel.search` the layout of ranks is searched; without it,
    `parallel.context=auto` becomes the smallest number with which the training fits.

    Args:
        cfg: without `auto` for precision and packing.
        watch: shows the progress.
        correction: of predicted seconds.
    """
    world_size = cfg.gpus * cfg.nodes
    factor = 1.0 if correction is None else correction.factor

    def ways(planner: Planner, tried: PlanConfig, world_size: int = world_size) -> LayoutChoices:
        tensor = tried.parallel.tensor
        ranks = RankCounts(world_size, tried.sharding.shard_size or max(1, cfg.gpus // tensor), cfg.gpus)
        strategies = distinct_strategies(ranks, tensor * tried.parallel.pipeline, tried.parallel.expert > 1)
        splits = splits_to_try(planner, tried, world_size, chooses_size(cfg))
        return LayoutChoices(planner, choices(tried, machine, strategies, cfg.activation_checkpointing), ranks, splits)

    def planner_of(tried: PlanConfig) -> Planner:
        return Planner(tried, machine, parts=parts, correction=factor)

    def plan_with(tried: PlanConfig) -> tuple[Planner, list[PlanRow]]:
        layout = ways(planner_of(tried), tried)
        return layout.planner, plan_rows(layout.planner, layout.choices, layout.ranks, layout.splits, watch)

    search = None
    # All modes are compared, so a mode that the configuration sets must not rule out kinds of parallelism.
    in_any_mode = ActivationCheckpointingConfig(mode=ActivationCheckpointing.auto, budget=None)
    searched_cfg = replace(cfg, activation_checkpointing=in_any_mode)
    if cfg.parallel.search:
        search = Searcher(planner_of, ways, watch).search(searched_cfg, world_size, cfg.gpus, cfg.rows)
        planner, rows = search.rows[0].planner, [one.row for one in search.rows]
    else:
        planner, rows = smallest_context(cfg, world_size, parts.language, plan_with)
    return MadePlan(planner, rows, search, searched_cfg, ways)


def chooses_size(cfg: PlanConfig) -> bool:
    """Return whether the planner chooses the size of a micro-batch. Every recipe sets `micro_batch_size`: only a user
    who sets `tokens_per_micro_batch` has chosen a size."""
    return not isinstance(cfg.tokens_per_micro_batch, int)


def fastest_on(world_size: int, cfg: PlanConfig, known: Planned, ways: Callable[..., LayoutChoices]) -> Planned:
    """Return the fastest way to train on `world_size` GPUs. `known`: the fastest one on all GPUs of `cfg`, which is not
    searched again; `ways`: returns all ways to train with one layout of ranks (`MadePlan.ways`).

    Raises:
        ConfigError: no layout of so many ranks is possible.
    """
    if world_size == known.ranks.world_size:
        return known
    searcher = Searcher(known.planner.with_layout, partial(ways, world_size=world_size), watch_silently)
    return searcher.search(cfg, world_size, cfg.gpus).rows[0]


def warn_of_length(cfg: PlanConfig, parts: Parts) -> None:
    """Log a warning if a training would refuse `data.max_length`, because the language model has fewer positions."""
    positions = parts.language.max_position_embeddings
    if cfg.data.max_length > positions:
        log().warning(
            "train refuses data.max_length=%d: the language model has %d positions (max_position_embeddings)",
            cfg.data.max_length, positions,
        )  # fmt: skip


def print_longest(cfg: PlanConfig, machine: Machine, parts: Parts, line: StageLine) -> None:
    """Print the longest samples that can be trained on 1, 2, 4, ... GPUs, and write a page with a chart."""
    points = longest(cfg, machine, parts, line.watch)
    line.close()
    title = (
        f"{cfg.model.name}, {machine.name}, {cfg.precision.param_dtype.value}, zero3; train refuses more than the "
        f"{parts.language.max_position_embeddings:,} positions of the language model"
    )
    page = str(write_longest(points, title, Path(cfg.page)))
    if cfg.format is Format.json:
        print(json.dumps({"longest": points, "page": page}))
        return
    show_longest(TextConsole(width=None if sys.stdout.isatty() else 160), points, title)
    print(f"longest sample against GPUs: {page}")


def with_fp16(cfg: PlanConfig, machine: Machine, typed: Sequence[str]) -> tuple[PlanConfig, list[str]]:
    """Replace `auto` and bf16 by fp16 for a GPU that lacks bf16 (V100, T4), and return (configuration, the overrides
    that the recommended command then needs). If the GPU has bf16, or the user's command-line arguments (`typed`) set a
    precision, nothing is changed."""
    lacks = machine.gpu is not None and machine.gpu.bf16 is None
    precision, is_set = cfg.precision, any(key_of(word).startswith("precision") for word in typed)
    from_16_bits = (DType.bf16, DType.auto)
    if not lacks or precision.param_dtype not in from_16_bits or is_set:
        return cfg, []
    also = {name: DType.fp16 for name in ("reduce_dtype", "norm_dtype") if getattr(precision, name) in from_16_bits}
    return replace(cfg, precision=replace(precision, param_dtype=DType.fp16, **also)), ["precision=fp16"]


def with_precision(cfg: PlanConfig, machine: Machine) -> PlanConfig:
    """Replace `precision.param_dtype=auto` as a training on this machine would. Log the choice, and a slow dtype."""
    cfg, chosen = settle_precision(cfg, [machine.has_bf16], machine.device)
    if chosen is not None:
        log().info("%s", chosen)
    if machine.gpu is None and (slow := slow_dtype(cfg, torch.device("cpu"), machine.has_bf16)):
        log().warning("%s", slow)
    return cfg


def key_of(word: str) -> str:
    """Return the key of a Hydra override, without the prefixes `+`, `++` and `~`."""
    return word.partition("=")[0].lstrip("+~")


def command(cfg: PlanConfig, row: PlanRow, parallel: ParallelConfig, typed: Sequence[str]) -> str:
    """Return the shell command that trains as planned. FILE, DIR and HOST in it are to be filled in by the user.

    Args:
        parallel: the keys of `parallel` for which `row` was planned.
        typed: the user's command-line arguments, which the command repeats.
    """
    launch = f"llava-fsdp train --nproc-per-node {cfg.gpus}"
    if cfg.nodes > 1:
        launch += f" --nnodes {cfg.nodes} --rdzv-endpoint HOST:29500"
    # without packing, the planner chooses the size of micro-batches, too
    chosen = CHOSEN | (set() if cfg.packs else {"micro_batch_size"})
    kinds = chosen_overrides(cfg.parallel, parallel)  # overrides of `parallel` that the planner chose
    own_keys = OWN_KEYS | (
        {"parallel", "parallel.search", *(word.partition("=")[0] for word in kinds)} if kinds else set()
    )
    # what the planner chose, and keys that `train` does not have, are not copied from the user's words
    kept = [word for word in typed if key_of(word) not in own_keys and key_of(word).partition(".")[0] not in chosen]
    keys = {key_of(word) for word in kept}
    kept = [f"stage={cfg.stage.name}"] * ("stage" not in keys) + [shlex.quote(word) for word in kept]
    # 1 is the default of a kind of parallelism
    planned = [overrides_of(row.choice), *(word for word in kinds if not word.endswith("=1"))]
    if SHARD_PLANS[row.choice.strategy].mesh is Mesh.HYBRID and cfg.sharding.shard_size is not None:
        planned.append(f"sharding.shard_size={cfg.sharding.shard_size}")
    if row.choice.offload is OffloadMode.nvme and cfg.offload.folder is not None:
        planned.append(f"offload.folder={shlex.quote(cfg.offload.folder)}")
    if not cfg.packs:
        planned.append(f"micro_batch_size={row.micro_batches[0].rows}")
    elif cfg.sampler.name is not SamplerName.llava_v1_5:
        planned.append(f"tokens_per_micro_batch={row.tokens}")
    # the generated dataset `shapes` is only meant for the model `tiny`; other models need the user's own data
    if cfg.data.source is Source.shapes and cfg.model.name != "tiny":
        planned.append("data=llava_json data.path=FILE.json data.images=DIR")
    return " ".join([launch, *kept, *planned])
