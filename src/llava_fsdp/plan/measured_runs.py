"""Correct a plan's seconds by what runs measured: each training writes the seconds of its steps into `plan.json`."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llava_fsdp.config import ActivationCheckpointing, Config, load
from llava_fsdp.config.command_line.renamed import present_tree
from llava_fsdp.plan.memory.micro_batches import MicroBatches
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import Choice, Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import DEVICES, Machine
from llava_fsdp.plan.workload import Samples, configured_split
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.run_dir import PLAN_FILE
from llava_fsdp.runtime.files.small_json import BadJson, kinds_of, read_object, require_kinds
from llava_fsdp.runtime.text.log import log

WIDEST = 2.0
"""By how much the width of a run's language model may differ from the planned one. A small model waits for the host,
and says nothing of a large one."""
MOST_RUNS = 8
"""Most runs from which a correction is made, the latest ones. To predict one takes seconds."""
CPU = "CPU"
"""Name of the device of runs without a GPU."""


@dataclass(frozen=True)
class MeanSample:
    """Mean sizes of a sample in the measured steps."""

    tokens: float
    spread: float
    """Standard deviation of the number of tokens."""
    tiles: float
    labels: float


@dataclass(frozen=True)
class MeasuredRun:
    """The content of a run's `plan.json`: what its steps took, and all that a planner needs to predict them."""

    version: str
    """Version of this package that trained."""
    device: str
    """CUDA's name of the GPU, or `CPU`."""
    width: int
    """Channels of the language model's hidden states."""
    ranks: int
    nodes: int
    strategy: str
    precision: str
    """Compute dtype."""
    steps: int
    """Number of measured steps of the run's latest start."""
    seconds: float
    """Median seconds of these steps, without waiting for data."""
    quartiles: list[float]
    """First and third quartile of these seconds."""
    samples: dict[str, Any]
    """Fields of MeanSample."""
    config: dict[str, Any]
    """The configuration of the latest start, without `auto`, as in `config.yaml`."""


@dataclass(frozen=True)
class Correction:
    """By how much predicted seconds are corrected."""

    factor: float
    """Geometric mean of measured / predicted seconds of the runs."""
    lowest: float
    """Smallest measured / predicted of a run."""
    highest: float
    runs: int
    device: str
    width: int

    def __str__(self) -> str:
        return (
            f"seconds are multiplied by {self.factor:.3g}: measured / predicted of {self.runs} "
            f"run{'s' * (self.runs > 1)} on {self.device}, width {self.width:,} ({self.lowest:.3g} to "
            f"{self.highest:.3g})"
        )


def find_correction(folder: Path, machine_of: Callable[[int], Machine], width: int) -> Correction | None:
    """Return the correction by the runs below `folder` on the planned kind of device, of those whose language model has
    the width nearest to `width`; None if there is no such run. Runs whose width differs by more than WIDEST, and those
    whose steps the planner cannot predict (`unlike_plans`), are left out. A file that cannot be used is warned of.

    Args:
        machine_of: number of ranks of a node -> the planned device as these ranks use it.

    Raises:
        ConfigError: `folder` is no folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"runs={folder} is not a folder; give one that has folders of runs, such as outputs")
    kind = kind_of_machine(machine_of(1))
    fitting = [
        (path, run)
        for path, run in read_runs(folder)
        if DEVICES.get(run.device, run.device) == kind
        and max(run.width / width, width / run.width) <= WIDEST
        and not unlike_plans(run)
    ]
    if not fitting:
        return None
    nearest = min((run.width for _, run in fitting), key=lambda own: abs(math.log(own / width)))
    latest = sorted((path.stat().st_mtime, path, run) for path, run in fitting if run.width == nearest)
    ratios: list[float] = []
    for _, path, run in reversed(latest):
        if len(ratios) == MOST_RUNS:
            break
        try:
            ratios.append(run.seconds / predicted_seconds(run, machine_of(run.ranks // run.nodes)))
        except Exception as error:  # an unusable run, such as one whose model is gone, must not end the plan
            log().warning("%s is left out: its steps cannot be predicted (%s: %s)", path, type(error).__name__, error)
    if not ratios:
        return None
    factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Correction(factor, min(ratios), max(ratios), len(ratios), kind, nearest)


def unlike_plans(run: MeasuredRun) -> bool:
    """Return whether a plan does not predict the steps of a run: pairs of answers need a pass of their reference, and
    `activation_checkpointing=dynamic` recomputes less than is planned."""
    data, checkpointing = (run.config.get(group) for group in ("data", "activation_checkpointing"))
    has_pairs = isinstance(data, dict) and bool(data.get("pairs"))
    dynamic = ActivationCheckpointing.dynamic.value
    return has_pairs or (isinstance(checkpointing, dict) and checkpointing.get("mode") == dynamic)


def kind_of_machine(machine: Machine) -> str:
    """Return the kind of a planned device: its name in the table of GPUs or, if the table lacks it, CUDA's name; `CPU`
    for CPU cores."""
    if machine.gpu is None:
        return CPU
    name = machine.name.partition(",")[0]  # of a GPU of this machine, its name in the table stands behind CUDA's
    return DEVICES.get(name, name)


def read_runs(folder: Path) -> Iterator[tuple[Path, MeasuredRun]]:
    """Yield each `plan.json` below `folder` with its content. A damaged one is warned of and left out."""
    for where, _, files in os.walk(folder):
        if PLAN_FILE in files:
            path = Path(where, PLAN_FILE)
            try:
                run = MeasuredRun(**known(read_object(path, kinds_of(MeasuredRun)), MeasuredRun))
                if run.seconds <= 0 or min(run.width, run.nodes, run.ranks // max(1, run.nodes)) < 1:
                    raise BadJson(f"{path}: a number in it is not above 0")
                yield path, run
            except BadJson as error:
                log().warning("%s; this run is left out", error)


def known(values: dict[str, Any], schema: type) -> dict[str, Any]:
    """Return the values of a JSON object that are fields of a dataclass; later versions may write more."""
    return {name: values[name] for name in kinds_of(schema)}


def predicted_seconds(run: MeasuredRun, machine: Machine) -> float:
    """Predict the seconds of a step of a run, by this version's planner and without a correction. `machine`: its
    device, as the run's ranks use it. Raises ConfigError if its model or configuration cannot be read."""
    node = OmegaConf.create(present_tree(run.config))
    assert isinstance(node, DictConfig)
    cfg = load(Config, node)
    mean = MeanSample(**known(require_kinds(run.samples, kinds_of(MeanSample)), MeanSample))
    samples = Samples(mean.tokens, mean.tiles, mean.labels, mean.spread, "measured steps", tile_tokens=1.0)
    planner = Planner(cfg, machine, samples, shapes_of(cfg.model))
    of_node = run.ranks // run.nodes
    ranks = RankCounts(run.ranks, cfg.sharding.shard_size or max(1, of_node // cfg.parallel.tensor), of_node)
    choice = Choice(cfg.sharding.strategy, cfg.activation_checkpointing, cfg.offload.mode)
    return planner.seconds(choice, ranks, MicroBatches(configured_split(cfg, samples, run.ranks)))
