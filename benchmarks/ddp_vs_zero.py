"""How large a batch fits into a limited memory, and how long does an epoch take with it: DDP, zero2, zero3?

    python benchmarks/ddp_vs_zero.py

Two gloo ranks have the same limit on private memory. The model, samples, loss and optimizer are the same, and losses
with a batch of 1 must agree first. A batch fits if the two longest steps of an epoch run; the largest one is found by
bisection. benchmarks/README.md explains the result.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import MIB, Report, command_line, facts, write
from capped import attempt, largest, private_bytes
from strategy_runs import Case, Run, build, configure, specialize, write_language_model

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, Step
from llava_fsdp.data.toy_shapes import ensure_shapes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.setup.build_state import open_data

VARIANTS = ("ddp", "zero2", "zero3")
KINDS = ("train", "eval")
PUBLISHED = {"batch": {"zero": 200, "ddp": 100}, "epoch_seconds": {"zero": 19.06, "ddp": 27.36}}
EQUAL_WITHIN = 1e-5
LONGEST = 0
"""In place of a number of steps: the two with the longest rows."""
KEPT = 8
"""Steps that are prepared; an epoch of more runs them again."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--limit", type=int, default=None, help="MiB beyond what the imports take; default: 24 bytes a "
                        "trained parameter, half as much again as the states of one of them")  # fmt: skip
    parser.add_argument("--samples", type=int, default=256, help="of an epoch")
    parser.add_argument("--repetitions", type=int, default=2, help="epochs of each variant, in turn")
    parser.add_argument("--start", type=int, default=8, help="batch of a rank that is tried first")
    parser.add_argument("--most", type=int, default=256, help="largest batch of a rank that is tried")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options)
    for row in report["rows"]:
        found = {k: [row[k]["batch"], round(best(row, k, "wall"), 2), round(best(row, k, "cpu"), 2)] for k in KINDS}
        print(f"{row['variant']}: batch of a rank, wall and CPU seconds of an epoch: {json.dumps(found)}")
    write(report, "ddp-vs-zero", options.folder, draw)


def measure(work: Path, options: argparse.Namespace) -> Report:
    known = facts("how large a batch fits into a limited memory, and how long does an epoch take with it?", options)
    ensure_shapes(work / "shapes")
    write_language_model(work / "language", options)
    trained = sum(attempt(None, count_trained, work, options).results or []) // 2
    more = options.limit * MIB if options.limit else 24 * trained
    limit = private_bytes() + more
    print(f"{trained:,} trained parameters, {more / MIB:.0f} MiB for them and their activations", flush=True)
    compare_losses(limit, work, options)
    rows = [find_batches(variant, limit, work, options) for variant in VARIANTS]
    for _ in range(options.repetitions):
        for row in rows:
            time_epochs(row, limit, work, options)
    return known | {
        "ranks": 2,
        "trained_parameters": trained,
        "state_bytes_of_a_rank": {"ddp": 16 * trained, "zero2": 8 * trained, "zero3": 8 * trained},
        "limit_bytes": limit,
        "limit_beyond_imports_bytes": more,
        "published": PUBLISHED,
        "rows": rows,
    }


def compare_losses(limit: int, work: Path, options: argparse.Namespace) -> None:
    """Variants that do not compute the same have no batch worth printing."""
    losses = {}
    for variant in VARIANTS:
        outcome = attempt(limit, train_steps, variant, 1, LONGEST, work, options)
        if not outcome:
            raise SystemExit(f"{variant} does not fit at batch 1: raise --limit ({outcome.why})")
        losses[variant] = (outcome.results or [])[0]["losses"]
    for variant, found in losses.items():
        for ours, theirs in zip(found, losses["ddp"], strict=True):
            assert abs(ours - theirs) <= EQUAL_WITHIN * abs(theirs), (variant, losses)
    print(f"losses at batch 1 are equal: {losses['ddp']}", flush=True)


def find_batches(variant: str, limit: int, work: Path, options: argparse.Namespace) -> Report:
    row: Report = {"variant": variant, "attempts": []}
    for kind, function in (("train", train_steps), ("eval", evaluate_steps)):

        def fits(batch: int, kind: str = kind, function: Any = function) -> bool:
            outcome = attempt(limit, function, variant, batch, LONGEST, work, options)
            row["attempts"].append({"kind": kind, "batch": batch, "fits": bool(outcome), "why": outcome.why})
            print(f"{variant} {kind} at {batch}: {'fits' if outcome else 'does not fit'}", flush=True)
            return bool(outcome)

        start = row["train"]["batch"] if kind == "eval" else options.start
        row[kind] = {"batch": largest(fits, start, options.most), "epochs": []}
    return row


def time_epochs(row: Report, limit: int, work: Path, options: argparse.Namespace) -> None:
    """At the largest batches; one whose later steps do not fit after all is made smaller."""
    for kind, function in (("train", train_steps), ("eval", evaluate_steps)):
        while True:
            batch = row[kind]["batch"]
            steps = math.ceil(options.samples / (2 * batch))
            outcome = attempt(limit, function, row["variant"], batch, steps, work, options, timeout=3600)
            if outcome.results:
                break
            assert batch > 1, (
                f"{row['variant']} {kind}: a longest step fits at batch 1, an epoch does not: {outcome.why}"
            )
            row[kind] = {"batch": batch - 1, "epochs": []}
            row["attempts"].append({"kind": kind, "batch": batch, "fits": False, "why": f"in an epoch: {outcome.why}"})
        share = options.samples / (2 * batch * steps)  # the last step is full too
        wall, cpu = (share * max(r[k] for r in outcome.results) for k in ("wall", "cpu"))
        row[kind]["epochs"].append({"steps": steps, "wall": wall, "cpu": cpu})
        print(f"{row['variant']} {kind} epoch of {steps} steps at {batch}: {wall:.1f} s, {cpu:.1f} CPU s", flush=True)


# On every rank


def count_trained(world: World, work: Path, options: argparse.Namespace) -> int:
    run, _ = prepare(world, "ddp", 1, work, options)
    return sum(p.numel() for p in run.state.masters.named.values())


def prepare(world: World, variant: str, batch: int, work: Path, options: argparse.Namespace) -> tuple[Run, Config]:
    """A run that has seen nothing yet; rows are recomputed, so that a sample costs little beside the states."""
    chosen = argparse.Namespace(rows=batch, activation_checkpointing="full")
    cfg = specialize(configure(Case("finetune", 1), chosen, work, world.size), variant, "fp32")
    with contextlib.redirect_stderr(io.StringIO()):
        return build(variant, cfg, world), cfg


def train_steps(world: World, variant: str, batch: int, steps: int, work: Path, options: argparse.Namespace) -> Report:
    run, _ = prepare(world, variant, batch, work, options)
    prepared = prepare_steps(run, steps, options)
    started = time.perf_counter(), time.process_time()
    for number in range(steps or len(prepared)):
        run.step(prepared[number % len(prepared)])
    return timed(started) | {"losses": run.losses}


def evaluate_steps(
    world: World, variant: str, batch: int, steps: int, work: Path, options: argparse.Namespace
) -> Report:
    """Between two epochs of training: the optimizer's state is there."""
    run, cfg = prepare(world, variant, batch, work, options)
    with contextlib.redirect_stderr(io.StringIO()):
        small = open_data(replace(cfg, micro_batch_size=1, global_batch_size=world.size), world, run.state.model)
    run.step(small.steps.prepare(0))
    model = run.ddp if run.ddp is not None else run.state.model
    model.eval()
    prepared = [micro_of(step) for step in prepare_steps(run, steps, options)]
    started = time.perf_counter(), time.process_time()
    with torch.no_grad():
        for number in range(steps or len(prepared)):
            model(**run.state.loader.to_device(prepared[number % len(prepared)]).inputs)
    return timed(started)


def prepare_steps(run: Run, steps: int, options: argparse.Namespace) -> list[Step]:
    epoch = math.ceil(options.samples / run.cfg.global_batch_size)
    prepared = [run.state.loader.steps.prepare(number) for number in range(min(epoch, KEPT))]
    by_length = sorted(prepared, key=lambda step: -micro_of(step).input_ids.numel())
    return prepared if steps else by_length[:2]


def micro_of(step: Step) -> MicroBatch:
    assert len(step.micro_batches) == 1
    return step.micro_batches[0]


def timed(started: tuple[float, float]) -> Report:
    return {"wall": time.perf_counter() - started[0], "cpu": time.process_time() - started[1]}


# What is shown


def best(row: Report, kind: str, clock: str) -> float:
    return min(epoch[clock] for epoch in row[kind]["epochs"])


def draw(pyplot: Any, report: Report) -> None:
    _, axes = pyplot.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    names = [row["variant"] for row in report["rows"]]
    for offset, kind in enumerate(KINDS):
        places = [n + 0.4 * offset - 0.2 for n in range(len(names))]
        batches = [row[kind]["batch"] for row in report["rows"]]
        axes[0].bar_label(axes[0].bar(places, batches, 0.38, label=kind))
        axes[0].margins(y=0.1)
        for axis, clock in ((axes[1], "wall"), (axes[2], "cpu")):
            axis.bar(places, [best(row, kind, clock) for row in report["rows"]], 0.38, label=kind)
    titles = ("largest batch of a rank", f"wall s, {report['options']['samples']} samples", "CPU s of a rank")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xticks(range(len(names)), names)
        axis.set_title(title, fontsize="medium")
    axes[0].legend()


if __name__ == "__main__":
    main()
