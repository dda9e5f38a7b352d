"""What does each row of the ZeRO table cost on the same work? About three minutes with four ranks on two idle cores.

    python benchmarks/strategies.py --ranks 4

Time, memory and bytes sent of a step of `torch.nn.parallel.DistributedDataParallel` and of every strategy, with the
same samples, weights and optimizer. Losses must agree first. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import MIB, Report, command_line, composed, facts, in_turns, reason, show, spread, write, write_json
from strategy_runs import STRATEGIES, Case, Run, build, configure, specialize, write_language_model
from torch import nn
from torch.distributed.tensor import DTensor

from llava_fsdp.data.batching.batch import MicroBatch, Step
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.toy_shapes import ensure_shapes
from llava_fsdp.parallel.ranks.comm_volume import KINDS, CollectiveBytes
from llava_fsdp.parallel.ranks.mesh import distributed, join
from llava_fsdp.parallel.ranks.world import World, read_world
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh
from llava_fsdp.runtime.process.host import process_memory
from llava_fsdp.train.setup.peak_memory import reset_peak_memory

EQUAL_WITHIN = 1e-5
CHECKED_STEPS = 3


def variants(world_size: int) -> list[str]:
    """At one rank every row is the same; the question there is what `fully_shard` and DDP would add."""
    if world_size == 1:
        return ["ddp", "one rank", "fully_shard"]
    two_by_two = world_size > 2 and world_size % 2 == 0
    return ["ddp", *(z for z, s in STRATEGIES.items() if two_by_two or SHARD_PLANS[s].mesh is not Mesh.HYBRID)]


# What is measured


class WatchedLoader:
    """A loader that looks at the memory between two micro-batches: `train_step` then asks it for the next one."""

    def __init__(self, loader: Loader, look: Any):
        self.loader = loader
        self.device = loader.device
        self.look = look
        self.asked = 0

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        self.asked += 1
        if self.asked == 2:
            self.look()
        return self.loader.to_device(micro)


def local_storages(tensors: Any) -> dict[int, int]:
    """Bytes of every distinct storage of this rank behind the tensors."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage.size()
    return found


def live_storages() -> dict[int, int]:
    """Every storage that a Python object holds: FSDP's gathered weights and unsynchronised gradients too."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.size():
                found[storage.data_ptr()] = storage.size()
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def measure_memory(run: Run, step: Step) -> None:
    """One step, watched: what is held at rest, what is added between micro-batches, and the peak.

    At rest is right after the optimizer's update, before gradients are freed.
    """
    state, loader, device = run.state, run.state.loader, run.state.loader.device
    gc.collect()
    before = live_storages()

    def between() -> None:
        held = [*state.model.parameters(), *state.masters.named.values()]
        weights = sum(v for k, v in local_storages(held).items() if k not in before)
        # Not every gradient has a Python object, and some that FSDP keeps are in no parameter's `.grad`.
        found = live_storages() | local_storages(p.grad for p in held if p.grad is not None)
        new = sum(v for k, v in found.items() if k not in before)
        run.memory["between"] = {"gathered_parameters": weights, "gradients": new - weights}

    def at_rest(*_: Any) -> None:
        weights = [*state.model.parameters(), *state.masters.named.values()]
        gradients = [p.grad for p in state.masters.named.values() if p.grad is not None]
        run.memory["rest"] = {
            "parameters": sum(local_storages(weights).values()),
            "gradients": sum(local_storages(gradients).values()),
            "optimizer": sum(local_storages(optimizer_tensors(state.optimizer)).values()),
        }

    hook = state.optimizer.register_step_post_hook(at_rest)
    state.loader = WatchedLoader(loader, between)  # type: ignore[assignment]
    resident = reset_peak(device)
    try:
        run.step(step)
    finally:
        hook.remove()
        state.loader = loader
    run.memory["peak"] = peak(run, resident)
    run.memory = {name: largest_over_ranks(held) for name, held in run.memory.items()}


def reset_peak(device: torch.device) -> int:
    """Begin to look for the peak; returns the resident bytes of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    reset_peak_memory()
    return process_memory("VmRSS")


def peak(run: Run, resident: int) -> dict[str, int]:
    """On CUDA all that this variant held at once: others are idle, and what they hold is taken off.

    On the CPU by how much the process grew in the step; memory that it had freed and kept hides a part of that.
    """
    device = run.state.loader.device
    if device.type == "cuda":
        return {"max_memory_allocated": torch.cuda.max_memory_allocated(device) - run.allocated_before}
    return {"rss_rise": max(0, process_memory("VmHWM") - resident), "process_rss": process_memory("VmHWM")}


def largest_over_ranks(values: dict[str, int]) -> dict[str, int]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return {key: max(other[key] for other in gathered) for key in values}


def measure_moved(run: Run, step: Step) -> None:
    with CollectiveBytes() as counter:
        run.step(step)
    run.moved = counter.moved


def measure_time(runs: list[Run], steps: list[Step], repetitions: int) -> None:
    for number, run in enumerate(in_turns(runs, repetitions)):
        gc.collect()
        time_step(run, steps[number // len(runs) % len(steps)])


def time_step(run: Run, step: Step) -> None:
    device = run.state.loader.device
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else (None, None)
    gc.disable()  # its pauses would fall on whoever is running
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    if start is not None:
        start.record()
    run.step(step)
    if end is not None:
        end.record()
        torch.cuda.synchronize(device)
    mine = [time.perf_counter() - wall, time.process_time() - cpu, start.elapsed_time(end) / 1000 if start else 0.0]
    gc.enable()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    run.wall.append(max(g[0] for g in gathered))
    run.cpu.append(sum(g[1] for g in gathered))
    if start is not None:
        run.events.append(max(g[2] for g in gathered))


# One case


def prepare(case: Case, precision: str, options: argparse.Namespace, work: Path, world: World) -> list[Run]:
    """Build every variant and run the first steps of each: their losses, memory and bytes moved."""
    runs = []
    cfg = configure(case, options, work, world.size)
    for variant in variants(world.size):
        run = build(variant, specialize(cfg, variant, precision), world)
        steps = first_steps(run.state.loader)
        run.step(steps[0])
        measure_memory(run, steps[1])
        measure_moved(run, steps[2])
        runs.append(run)
    return runs


def first_steps(loader: Loader) -> list[Step]:
    """Prepared before anything is timed: the same samples for every variant."""
    source = map(loader.agree, loader.steps_from(0))
    return [next(source) for _ in range(CHECKED_STEPS)]


def largest_difference(runs: list[Run]) -> float:
    """Of all losses, relative to DDP's."""
    reference = runs[0].losses
    return max(abs(a - b) / abs(b) for run in runs for a, b in zip(run.losses, reference, strict=True))


def run_case(case: Case, options: argparse.Namespace, work: Path, world: World) -> tuple[list[Report], float]:
    """The rows of one case.

    Raises:
        SystemExit: variants do not compute the same thing in fp32, so that their cost cannot be compared.
    """
    runs = prepare(case, "fp32", options, work, world)
    difference = largest_difference(runs)
    if not difference <= EQUAL_WITHIN:
        losses = {run.variant: run.losses for run in runs}
        raise SystemExit(f"{case}: losses differ by {difference:.2g} (bound {EQUAL_WITHIN:g}): {losses}")
    if options.precision != "fp32":
        runs.clear()
        gc.collect()
        runs = prepare(case, options.precision, options, work, world)
    steps = first_steps(runs[0].state.loader)
    measure_time(runs, steps, options.repetitions)
    tokens = statistics.mean(s.facts.tokens for s in steps)
    base = statistics.median(runs[0].cpu), statistics.median(runs[0].events or runs[0].wall)
    return [row_of(case, run, tokens, base) for run in runs], difference


def row_of(case: Case, run: Run, tokens: float, base: tuple[float, float]) -> Report:
    seconds = {"cpu": run.cpu, "wall": run.wall} | ({"cuda_events": run.events} if run.events else {})
    slowest = statistics.median(run.events or run.wall)
    return {
        "stage": case.stage,
        "accumulation": case.accumulation,
        "variant": run.variant,
        "strategy": None if run.variant in ("ddp", "one rank") else run.cfg.sharding.strategy.value,
        "step_seconds": {name: spread(values) for name, values in seconds.items()},
        "cpu_ratio_to_ddp": statistics.median(run.cpu) / base[0],
        "time_ratio_to_ddp": slowest / base[1],
        "tokens_per_second": tokens / slowest,
        "memory": run.memory,
        "moved_per_step": run.moved,
        "losses_of_first_steps": run.losses[:CHECKED_STEPS],
    }


# The whole


def main() -> None:
    options = parse()
    if "RANK" not in os.environ and options.ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        sys.exit(subprocess.call([*command, str(options.ranks), __file__, *sys.argv[1:]]))
    torch.set_num_threads(options.threads)
    world = read_world()
    options.precision = options.precision or ("bf16" if world.device.type == "cuda" else "fp32")
    name = f"strategies-{world.device.type}"
    with process_group(world), working_folder(world) as work:
        report = facts("what does each row of the ZeRO table cost on the same work?", options) | {
            "ranks": world.size,
            "equality": {"fp32_largest_relative_difference": 0.0, "bound": EQUAL_WITHIN, "steps": CHECKED_STEPS},
            "not_run": not_run(world),
            "rows": [],
        }
        if world.is_first:
            write_language_model(work / "language", options)
            ensure_shapes(work / "shapes", train_pictures=CHECKED_STEPS * options.rows * world.size)
        dist.barrier()
        for case in [Case(s, a) for s in options.stages for a in options.accumulations]:
            failure = measured_case(case, options, work, world, report)
            gc.collect()
            if world.is_first:
                write_json(report, name, options.folder)
                print(f"{case}: {'done' if failure is None else f'failed, {failure}'}", file=sys.stderr)
            if failure is not None and world.size > 1:
                raise failure  # the other ranks wait in a collective, or have failed as well
        if world.is_first:
            finish(report, name, options.folder)
    if any("failed" in row for row in report["rows"]):
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks to start: 1, 2 or 4")
    parser.add_argument("--hidden", type=int, default=128, help="width of the random language model")
    parser.add_argument("--layers", type=int, default=3, help="its layers")
    parser.add_argument("--rows", type=int, default=8, help="samples of a step on each rank, at any accumulation")
    parser.add_argument("--stages", nargs="+", default=["pretrain", "finetune"], choices=["pretrain", "finetune"])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=6, help="timed steps of each variant")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of the timed steps; bf16 on CUDA, else fp32")
    parser.add_argument("--activation_checkpointing", choices=["none", "full"], default="full")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    options = parser.parse_args()
    if any(options.rows % a for a in options.accumulations):
        parser.error(f"--rows {options.rows} must be a multiple of every --accumulations {options.accumulations}")
    if options.hidden % 32:
        parser.error(f"--hidden {options.hidden} must be a multiple of 32, the width of a head")
    return options


@contextlib.contextmanager
def process_group(world: World) -> Iterator[None]:
    """The project's own group; DDP and `fully_shard` need one at one rank, too."""
    with distributed(composed(["deterministic=false"])):
        if world.size == 1:
            join(world, timeout_seconds=600)
        yield  # `distributed` ends whatever group there is


@contextlib.contextmanager
def working_folder(world: World) -> Iterator[Path]:
    """A temporary folder that all ranks share."""
    made: list[Any] = [tempfile.mkdtemp(prefix="strategies-") if world.is_first else None]
    dist.broadcast_object_list(made, src=0)
    try:
        yield Path(made[0])
    finally:
        if world.is_first:
            shutil.rmtree(made[0])


def measured_case(
    case: Case, options: argparse.Namespace, work: Path, world: World, report: Report
) -> Exception | SystemExit | None:
    """Add the rows of a case to the result, or one row with the reason for which it failed, which is returned."""
    try:
        rows, difference = run_case(case, options, work, world)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        report["rows"].append({"stage": case.stage, "accumulation": case.accumulation, "failed": reason(error)})
        return error.with_traceback(None)  # its frames hold the models
    report["rows"] += rows
    equality = report["equality"]
    equality["fp32_largest_relative_difference"] = max(equality["fp32_largest_relative_difference"], difference)
    return None


def finish(report: Report, name: str, folder: Path) -> None:
    rows, equality = [r for r in report["rows"] if "failed" not in r], report["equality"]
    print(f"losses in fp32 differ by at most {equality['fp32_largest_relative_difference']:.2g}, relative")
    for case in dict.fromkeys((r["stage"], r["accumulation"]) for r in rows):
        show_case(case, [r for r in rows if (r["stage"], r["accumulation"]) == case])
    for line in report["not_run"]:
        print(f"not run: {line}")
    write(report, name, folder, draw) if rows else write_json(report, name, folder)


def not_run(world: World) -> list[str]:
    left = []
    if world.size == 1:
        left.append("the rows over several ranks: this was one rank, where all rows are the same")
    elif world.size < 4:
        left.append("hybrid and hybrid2: a 2 x 2 mesh needs 4 ranks")
    if world.device.type != "cuda":
        left.append("CUDA: torch sees no GPU; gloo's bytes are exact, its times say nothing of NCCL's")
    return left


def show_case(case: tuple[str, int], rows: list[Report]) -> None:
    slowest = "cuda_events" if "cuda_events" in rows[0]["step_seconds"] else "wall"
    heads = ["variant", "CPU s min", "median", "/ ddp", f"{slowest} s min", "median", "/ ddp", "between steps, MiB"]
    heads += ["between +", f"{next(iter(rows[0]['memory']['peak']))}", *(f"{kind}, MiB / calls" for kind in KINDS)]
    lines = []
    for row in rows:
        memory, line = row["memory"], [row["variant"]]
        for name, ratio in (("cpu", "cpu_ratio_to_ddp"), (slowest, "time_ratio_to_ddp")):
            seconds = row["step_seconds"][name]
            line += [f"{seconds['min']:.3f}", f"{seconds['median']:.3f}", f"{row[ratio]:.2f}"]
        between = mib(sum(memory["between"].values())) if "between" in memory else "-"
        line += [mib(sum(memory["rest"].values())), between, mib(next(iter(memory["peak"].values())))]
        moved = row["moved_per_step"]
        lines.append([*line, *(f"{mib(moved[kind]['bytes'])} / {moved[kind]['calls']}" for kind in KINDS)])
    show(f"{case[0]}, accumulation {case[1]}; memory of the rank with most", heads, lines)


def mib(size: float) -> str:
    return f"{size / MIB:.2f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def draw(pyplot: Any, report: Report) -> None:
    """Time, memory and bytes sent of every variant, a column for each case."""
    rows = [r for r in report["rows"] if "failed" not in r]
    cases = list(dict.fromkeys((r["stage"], r["accumulation"]) for r in rows))
    _, axes = pyplot.subplots(3, len(cases), figsize=(4 * len(cases) + 2, 9), squeeze=False, layout="constrained")
    for column, case in enumerate(cases):
        own = [r for r in rows if (r["stage"], r["accumulation"]) == case]
        names, places = [r["variant"] for r in own], range(len(own))
        axes[0][column].bar(places, [r["step_seconds"]["cpu"]["median"] for r in own], label="CPU of all ranks, median")
        stack(axes[1][column], {k: [r["memory"]["rest"][k] for r in own] for k in own[0]["memory"]["rest"]})
        stack(axes[2][column], {k: [r["moved_per_step"][k]["bytes"] for r in own] for k in KINDS})
        axes[0][column].set_title(f"{case[0]}, accumulation {case[1]}")
        for axis in axes[:, column]:
            axis.set_xticks(places, names, rotation=35, ha="right", fontsize="small")
    for panels, label in zip(axes, ("seconds a step", "MiB between steps", "MiB in collectives a step"), strict=True):
        panels[0].set_ylabel(label)
        panels[-1].legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")


def stack(axis: Any, parts: dict[str, list[int]]) -> None:
    bottoms = [0.0] * len(next(iter(parts.values())))
    for label, sizes in parts.items():
        heights = [size / MIB for size in sizes]
        axis.bar(range(len(sizes)), heights, bottom=bottoms, label=label)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]


if __name__ == "__main__":
    main()
