"""What does activation checkpointing save, and what does it cost? Some minutes on a CPU.

    python benchmarks/activation_checkpointing.py                              # none, selective and full
    python benchmarks/activation_checkpointing.py FOLDER --model llava_v1_5_7b --ranks 8 --tokens 4096     # on a GPU

Each mode trains the same steps of the same model, as one rank or as rank 0 of simulated ones; losses must be equal to
the bit. Steps of the modes take turns. The rule of thumb is half the memory for a fifth more time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bench import MIB, Report, clock, command_line, composed, facts, in_turns, reason, show, write, write_json
from memory import MODELS, write_model

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config
from llava_fsdp.data.loader import ModelShape
from llava_fsdp.data.synthetic import SyntheticLoader, fullest, synthetic_step
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.parallel.malloc import return_freed_memory
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.comm_volume import Traffic
from llava_fsdp.parallel.ranks.fake_collectives import is_simulated, simulate_collectives
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_model import build_model, shape_of
from llava_fsdp.train.setup.build_state import assemble
from llava_fsdp.train.setup.dry_run import draw_shards, held_bytes
from llava_fsdp.train.setup.peak_memory import PeakMeter
from llava_fsdp.train.state import TrainState

RULE_OF_THUMB = {"memory": 0.5, "time": 1.2}
"""Of `none`: "half the memory, a fifth slower"."""


@dataclass
class Run:
    """A mode's model, and what its steps took."""

    cfg: Config
    state: TrainState
    shape: ModelShape
    held: int = 0
    """Bytes of weights and of the optimizer's states."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rises: list[int] = field(default_factory=list)


def configure(options: argparse.Namespace, work: Path) -> Config:
    """Samples of 512 positions, or of 2048 in a real model; one micro-batch a step."""
    folder = work / "deep"
    parts = [f"model.language={folder / 'language'}", f"model.vision={folder / 'vision'}", "data.max_length=512"]
    overrides = [
        "stage=finetune",
        *([f"model={options.model}"] if options.model else parts),
        "model.projector=random",
        "precision=bf16",
        f"tokens_per_micro_batch={options.tokens}",
        "global_batch_size=1",
        f"dry_run={options.ranks}",
        "optim.lr=1e-4",
        "optim.schedule=constant",
        "optim.warmup_ratio=0",
    ]
    return composed(overrides)


def build(mode: str, cfg: Config, world: World) -> Run:
    """The same weights in every mode."""
    activation_checkpointing = ActivationCheckpointingConfig(
        mode=ActivationCheckpointing(mode), budget=0.5 if mode == "budget" else None
    )
    cfg = replace(cfg, activation_checkpointing=activation_checkpointing)
    state, model = drawn(cfg, world)
    run = Run(cfg, state, shape_of(model))
    step(run, world)  # makes the optimizer's states, and what libraries allocate once
    run.held = sum(held_bytes(state).values())
    run.rises.clear()
    return run


def drawn(cfg: Config, world: World) -> tuple[TrainState, Llava]:
    """A run of random weights and no dataset; where it is one of simulated ranks, collectives reach nobody."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, shapes_of(cfg.model), world.device)
    loader = SyntheticLoader(world.device, 1000)
    state = assemble(model, cfg, Parallelism.of(cfg, world), loader, draw_shards)
    if is_simulated():
        simulate_collectives(model, Traffic())
    model.train()
    return state, model


def step(run: Run, world: World) -> None:
    """One step, its rise of memory above what is held between steps, and its time: the processor's, or the device's."""
    work = synthetic_step(run.state.step, fullest(run.cfg, run.shape), run.shape, run.cfg, world.size)
    meter = PeakMeter(world.device)
    started = clock(world.device)
    result = train_step(run.state, work, run.cfg, 0.0)
    run.seconds.append(clock(world.device) - started)
    run.rises.append(next(iter(meter.read().values())))
    run.losses.append(result.loss)


def compare(options: argparse.Namespace, work: Path) -> Report:
    """Run all modes; return the result, which is written after each round of steps. A mode that fails takes no further
    part, and its row has the reason.

    Raises:
        SystemExit: two modes that promise the same bits have other losses.
    """
    cfg = configure(options, work)
    report = facts("what does activation checkpointing save, and what does it cost?", options) | {
        "clock": "wall seconds" if torch.cuda.is_available() else "CPU seconds of the process",
        "rule_of_thumb": RULE_OF_THUMB, "losses": "equal to the bit",
    }  # fmt: skip
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}

    def attempt(mode: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            runs.pop(mode, None)
            failed[mode] = reason(error)
            print(f"{mode}: {failed[mode]}", file=sys.stderr)

    with distributed(cfg) as world:
        return_freed_memory()
        for mode in options.modes:
            attempt(mode, lambda mode=mode: runs.update({mode: build(mode, cfg, world)}))
        for number, mode in enumerate(in_turns(options.modes, options.repetitions), start=1):
            if mode in runs:
                attempt(mode, lambda mode=mode: step(runs[mode], world))
            if number % len(options.modes) == 0:
                report["rows"] = rows_of(runs, failed)
                write_json(report, name_of(options), options.folder)
    return report


def rows_of(runs: dict[str, Run], failed: dict[str, str]) -> list[Report]:
    exact = {mode: run.losses for mode, run in runs.items() if mode != "budget"}
    if len({tuple(losses) for losses in exact.values()}) > 1:
        raise SystemExit(f"losses differ: {exact}")
    base = runs.get("none")
    rows: list[Report] = [{"mode": mode, "failed": why} for mode, why in failed.items()]
    for mode, run in runs.items():
        peak = run.held + max(run.rises)
        row = {
            "mode": mode,
            "held_bytes": run.held,
            "rise_bytes": run.rises,
            "peak_bytes": peak,
            "seconds": run.seconds[1:],
        }
        if base is not None:
            row |= {
                "memory_ratio": peak / (base.held + max(base.rises)),
                "rise_ratio": max(run.rises) / max(base.rises),
                "time_ratio": min(run.seconds[1:]) / min(base.seconds[1:]),
                "median_time_ratio": statistics.median(run.seconds[1:]) / statistics.median(base.seconds[1:]),
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", help="one of conf/model, of which only the shape is taken; a small deep one")
    parser.add_argument("--ranks", type=int, default=1, help="simulated ranks")
    parser.add_argument("--tokens", type=int, default=2048, help="positions of the row")
    parser.add_argument("--repetitions", type=int, default=5)
    modes = [mode.value for mode in ActivationCheckpointing]
    parser.add_argument("--modes", nargs="*", choices=modes, default=["none", "selective", "full"])
    parser.add_argument("--tiny", action="store_true", help="a model of a few megabytes")
    options = parser.parse_args()
    options.modes = ["none", *[mode for mode in options.modes if mode != "none"]]
    with tempfile.TemporaryDirectory(prefix="checkpointing-") as made:
        write_model(Path(made) / "deep", *MODELS["tiny" if options.tiny else "deep"])
        options.model = None if options.tiny else options.model
        report = compare(options, Path(made))
    show_rows(report)
    if any("failed" in row for row in report["rows"]):
        raise SystemExit(1)
    write(report, name_of(options), options.folder, draw)


def name_of(options: argparse.Namespace) -> str:
    model = f"{options.model}-" if options.model else ""
    return f"activation-checkpointing-{model}{'cuda' if torch.cuda.is_available() else 'cpu'}"


def show_rows(report: Report) -> None:
    lines = []
    for row in report["rows"]:
        if "failed" in row:
            lines.append((row["mode"], f"FAILED: {row['failed']}"))
            continue
        ratios = [f"{row[key]:.2f}" if key in row else "-" for key in ("memory_ratio", "rise_ratio", "time_ratio")]
        sizes = [f"{size / MIB:,.0f} MiB" for size in (row["peak_bytes"], row["held_bytes"], max(row["rise_bytes"]))]
        seconds = f"{min(row['seconds']):.2f}"
        lines.append((row["mode"], sizes[0], ratios[0], *sizes[1:], ratios[1], seconds, ratios[2]))
    heads = ("activation_checkpointing", "peak", "/ none", "held", "rise in a step", "/ none", "seconds", "/ none")
    rule = report["rule_of_thumb"]
    show(f"rule of thumb for full: {rule['memory']} of the memory, {rule['time']} of the time", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    """Memory and time of each mode, with the rule of thumb."""
    rows, rule = report["rows"], report["rule_of_thumb"]
    _, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    held = [row["held_bytes"] / MIB for row in rows]
    rises = [max(row["rise_bytes"]) / MIB for row in rows]
    seconds = [min(row["seconds"]) for row in rows]
    places = range(len(rows))
    axes[0].bar(places, held, label="held between steps")
    axes[0].bar(places, rises, bottom=held, label="rise in a step")
    axes[0].set_ylabel("MiB")
    axes[1].bar(places, seconds, label="fastest step")
    axes[1].set_ylabel(report["clock"], fontsize="small")
    limits = rule["memory"] * (held[0] + rises[0]), rule["time"] * seconds[0]
    for axis, key, limit in zip(axes, ("memory_ratio", "time_ratio"), limits, strict=True):
        axis.set_xticks(places, [f"{row['mode']}\n{row[key]:.2f}" for row in rows])
        axis.axhline(limit, color="k", linestyle=":", label="rule of thumb for full")
        axis.legend(fontsize="small")
    axes[0].set_title(f"{report['options'].get('model', 'small model')}, {report['options']['tokens']} tokens")


if __name__ == "__main__":
    main()
