"""What do 8 and 4 bits cost or save compared with bf16, on the same steps of the embedded tiny model? Half an hour.

    python benchmarks/low_precision.py                  # --ways, --name, --steps, --seeds, --quick

Each way trains all weights of the language model and the projector, or adapters over a frozen base, in one process.
The ways take turns, ten steps each, on the same samples from the same random weights. Each seed gives other weights and
another order of samples. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench import MIB, Report, clock, command_line, composed, facts, show, write

from llava_fsdp.config import Config
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.setup.dry_run import held_bytes
from llava_fsdp.train.setup.peak_memory import PeakMeter
from llava_fsdp.train.state import TrainState

WAYS = {
    "bf16": (["stage=finetune", "precision=bf16"], None),
    "bf16, padded rows": (["stage=finetune", "precision=bf16", "pack=false"], "bf16"),
    "int8_mixed": (["stage=finetune", "precision=int8_mixed"], "bf16"),
    "fp8": (["stage=finetune", "precision=fp8"], "bf16"),
    "LoRA, base in bf16": (["stage=finetune_lora", "precision=bf16"], None),
    "LoRA, base in 4 bits": (["stage=finetune_qlora", "precision=bf16"], "LoRA, base in bf16"),
}
"""Overrides of each way, and the way that it is compared with."""
TURN = 10
LAST = 20
"""Steps at the end whose mean loss is compared."""


@dataclass
class Way:
    """A way's run, and what its steps took."""

    cfg: Config
    state: TrainState
    held: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rises: list[int] = field(default_factory=list)


def configure(overrides: list[str], folder: Path, steps: int, seed: int) -> Config:
    """The tiny model, and images of coloured shapes."""
    return composed([
        f"seed={seed}", f"output_dir={folder}", f"max_steps={steps}", "model.projector=random",
        "optim.schedule=constant", "global_batch_size=4", "micro_batch_size=4", "checkpoint.every=null",
        f"data.root={folder.parent}/shapes", *overrides,
    ])  # fmt: skip


def begin(cfg: Config, world: World) -> Way:
    """Build a run.

    Raises:
        ConfigError: this machine lacks what it needs.
    """
    torch.manual_seed(cfg.seed)
    state = build_state(cfg, Parallelism.of(cfg, world))
    state.model.train()
    return Way(cfg, state, sum(held_bytes(state).values()))


def take_turn(way: Way, first: int, last: int, world: World) -> None:
    for number in range(first, last):
        step = way.state.loader.steps.prepare(number)
        meter, started = PeakMeter(world.device), clock(world.device)
        result = train_step(way.state, step, way.cfg, time.perf_counter())
        way.seconds.append(clock(world.device) - started)
        way.rises.append(next(iter(meter.read().values())))
        way.losses.append(result.loss)


def row_of(name: str, ways: list[Way], tokens: float, beside: list[Way] | None, unit: str) -> Report:
    """Results of a way's runs, one for each seed.

    Args:
        unit: `cpu_second`, or `second` on a GPU.
    """
    seconds = [taken for way in ways for taken in way.seconds]
    row = {
        "way": name,
        "losses": [way.losses for way in ways],
        f"{unit}s": seconds,
        "last_loss": statistics.mean(last_loss(way) for way in ways),
        f"tokens_per_{unit}": tokens / statistics.median(seconds),
        "held_bytes": ways[0].held,
        "rise_bytes": statistics.median(rise for way in ways for rise in way.rises),
    }
    if beside is not None:
        pairs = list(zip(ways, beside, strict=True))
        row["last_beside"] = [last_loss(way) / last_loss(other) - 1 for way, other in pairs]
        row["all_beside"] = [statistics.mean(way.losses) / statistics.mean(other.losses) - 1 for way, other in pairs]
        row["time_beside"] = statistics.median(seconds) / statistics.median(t for way in beside for t in way.seconds)
    return row


def last_loss(way: Way) -> float:
    return statistics.mean(way.losses[-LAST:])


def show_rows(report: Report, unit: str) -> None:
    heads = "way", "last loss", "beside", "all steps beside", "tokens / s", "time beside", "weights MiB", "rise MiB"
    lines = [
        (row["way"], f"{row['last_loss']:.4f}",
         *(percent(row[key]) if key in row else "" for key in ("last_beside", "all_beside")),
         f"{row[f'tokens_per_{unit}']:,.0f}", f"{row['time_beside']:.2f} x" if "time_beside" in row else "",
         f"{row['held_bytes'] / MIB:.1f}", f"{row['rise_bytes'] / MIB:.1f}")
        for row in report["rows"]
    ]  # fmt: skip
    show(f"{report['options']['steps']} steps of the tiny model", heads, lines)


def percent(values: list[float]) -> str:
    """Mean, minimum and maximum of numbers, as percentages."""
    return f"{statistics.mean(values):+.2%} ({min(values):+.2%} to {max(values):+.2%})"


def draw(pyplot: Any, report: Report) -> None:
    _, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for row in report["rows"]:
        axes.plot(row["losses"][0], label=row["way"], linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(fontsize="small")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="each needs the way that it is compared with"
    )
    parser.add_argument("--name", help="beginning of the result's file name; low-precision-cpu or -cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    options = parser.parse_args()
    options.steps, options.seeds = (20, 1) if options.quick else (options.steps, options.seeds)
    lacking = {beside for name in options.ways if (beside := WAYS[name][1]) is not None} - set(options.ways)
    if lacking:
        parser.error(f"--ways lacks what others are compared with: {', '.join(lacking)}")
    torch.set_num_threads(1)
    report = facts("what do 8 and 4 bits cost or save beside bf16, on the same steps?", options)
    ways: dict[str, list[Way]] = {}
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="low-precision-") as folder:
        for seed in range(options.seeds):
            names = [name for name in options.ways if name not in not_run]
            configs = {
                name: configure(WAYS[name][0], Path(folder, f"{number}-{seed}"), options.steps, seed)
                for number, name in enumerate(names)
            }
            with distributed(next(iter(configs.values()))) as world:
                own: list[Way] = []
                for name, cfg in configs.items():
                    try:
                        own.append(begin(cfg, world))
                        ways.setdefault(name, []).append(own[-1])
                    except ConfigError as error:
                        not_run[name] = str(error)
                for first in range(0, options.steps, TURN):
                    for way in own:
                        take_turn(way, first, min(first + TURN, options.steps), world)
                    print(f"seed {seed}: {min(first + TURN, options.steps)} steps of each way", flush=True)
        of_seeds = [way.state.loader.steps for way in next(iter(ways.values()))]
        tokens = statistics.mean(s.prepare(n).facts.tokens for s in of_seeds for n in range(options.steps))
    device = world.device.type
    unit = "cpu_second" if device == "cpu" else "second"
    rows = [row_of(name, runs, tokens, ways.get(WAYS[name][1] or ""), unit) for name, runs in ways.items()]
    report |= {"rows": rows, "not_run": not_run, "tokens_of_a_step": tokens, "last": LAST}
    show_rows(report, unit)
    for name, why in not_run.items():
        print(f"NOT RUN: {name}: {why}")
    write(report, options.name or f"low-precision-{device}", options.folder, draw)


if __name__ == "__main__":
    main()
