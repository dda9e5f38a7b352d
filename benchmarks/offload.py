"""What trains in a limited memory that DDP, or sharding alone, does not fit into? A few minutes.

    python benchmarks/offload.py      # two gloo ranks with one RLIMIT_DATA; on a GPU one rank with a part of its memory

On the CPU a model that does not fit under DDP at batch 1 trains at batch 16 with zero3, and one that is twice as deep
trains with `offload=nvme`, with the losses that it has without a limit. On a GPU a model of 1.5 billion parameters
trains within 24 GB, with every `offload`. benchmarks/README.md explains the result.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import MIB, Report, command_line, facts, run_json, write
from capped import Fits, PeakPrivate, attempt, private_bytes
from strategy_runs import Case, build, configure, specialize, write_language_model

from llava_fsdp.config import Config, OffloadConfig, OffloadMode
from llava_fsdp.data.toy_shapes import ensure_shapes
from llava_fsdp.parallel.memory.offload import explained_memory_errors
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.mesh import distributed
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import OutOfMemory
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state

STEPS = 2


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, help="512; on a GPU 2048")
    parser.add_argument("--layers", type=int, help="8, and twice as many for nvme; on a GPU 28")
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank in a micro-batch")
    parser.add_argument("--limit", type=int, help="MiB beyond the imports: 400; on a GPU MB in all: 24000")
    parser.add_argument("--scratch", type=Path, help="a folder on a local disk")
    parser.add_argument("--attempt", nargs=3, metavar=("MODE", "BATCH", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    options.hidden = options.hidden or (2048 if on_gpu else 512)
    options.layers = options.layers or (28 if on_gpu else 8)
    options.limit = options.limit or (24000 if on_gpu else 400)
    if options.attempt:
        mode, batch, work = options.attempt
        print(json.dumps(gpu_attempt(mode, int(batch), Path(work), options)))
        return
    known = facts("what trains in a limited memory that DDP, or sharding alone, does not fit into?", options)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        ensure_shapes(Path(folder) / "shapes")
        report = on_one_gpu(Path(folder), options) if on_gpu else on_two_ranks(Path(folder), options)
    report = known | report
    for row in report["rows"]:
        print(describe(row))
    write(report, f"offload-{'cuda' if on_gpu else 'cpu'}", options.folder, draw)


# Two ranks of this machine


def on_two_ranks(work: Path, options: argparse.Namespace) -> Report:
    limit = private_bytes() + options.limit * MIB
    # variant, offload, layers, batch, whether the limit is on
    cases = [
        ("ddp", "none", 1, 1, True),
        ("zero3", "none", 1, options.batch, True),
        ("zero3", "none", 2, 1, True),
        ("zero3", "nvme", 2, options.batch, True),
        ("zero3", "none", 2, options.batch, False),
    ]
    rows = []
    for variant, mode, times, batch, limited in cases:
        layers = times * options.layers
        folder = work / f"{layers}"
        if not folder.exists():
            write_language_model(folder / "language", argparse.Namespace(hidden=options.hidden, layers=layers))
            (folder / "shapes").symlink_to(work / "shapes")
        outcome = attempt(limit if limited else None, cpu_steps, variant, mode, batch, folder, timeout=3600)
        rows.append(row_of(variant, mode, layers, batch, limited, outcome))
        print(describe(rows[-1]), flush=True)
    free, nvme = rows[4], rows[3]
    assert not nvme["fits"] or nvme["losses"] == free["losses"], "offload=nvme trained something else"
    return {"ranks": 2, "limit_bytes": limit, "limit_beyond_imports_bytes": options.limit * MIB, "rows": rows}


def base_row(variant: str, mode: str, layers: int, batch: int, limited: bool, why: str) -> Report:
    return {"variant": variant, "offload": mode, "layers": layers, "batch": batch, "limited": limited,
            "fits": not why, "why": why}  # fmt: skip


def row_of(variant: str, mode: str, layers: int, batch: int, limited: bool, outcome: Fits) -> Report:
    row = base_row(variant, mode, layers, batch, limited, outcome.why)
    for found in outcome.results or []:
        row |= {key: max(row.get(key, 0), found[key]) for key in ("step_seconds", "private_bytes", "trained")}
        row["losses"] = found["losses"]
    return row


def configured(variant: str, mode: str, batch: int, work: Path, ranks: int, precision: str) -> Config:
    chosen = argparse.Namespace(rows=batch, activation_checkpointing="full")
    cfg = specialize(configure(Case("finetune", 1), chosen, work, ranks), variant, precision)
    return replace(cfg, offload=OffloadConfig(mode=OffloadMode(mode), folder=str(work) if mode == "nvme" else None))


def cpu_steps(world: World, variant: str, mode: str, batch: int, work: Path) -> Report:
    cfg = configured(variant, mode, batch, work, world.size, "fp32")
    with PeakPrivate() as peak:
        with contextlib.redirect_stderr(io.StringIO()):
            run = build(variant, cfg, world)
        started = time.perf_counter()
        for number in range(STEPS):
            run.step(run.state.loader.steps.prepare(number))
        seconds = (time.perf_counter() - started) / STEPS
    return {
        "step_seconds": seconds,
        "private_bytes": peak.bytes,
        "trained": sum(p.numel() for p in run.state.masters.named.values()),
        "losses": run.losses,
    }


# One GPU


def on_one_gpu(work: Path, options: argparse.Namespace) -> Report:
    write_language_model(work / "language", options)
    rows = []
    for mode in OffloadMode:
        for batch in (1, options.batch):
            sizes = ["--hidden", str(options.hidden), "--layers", str(options.layers), "--limit", str(options.limit)]
            command = [sys.executable, __file__, *sizes, "--attempt", mode.value, str(batch), str(work)]
            found = run_json(command, timeout=3600)
            rows.append(base_row("one rank", mode.value, options.layers, batch, True, found.get("failed", "")) | found)
            print(describe(rows[-1]), flush=True)
    return {"ranks": 1, "limit_bytes": options.limit * 10**6, "rows": rows}


def gpu_attempt(mode: str, batch: int, work: Path, options: argparse.Namespace) -> Report:
    """A few steps in a process of their own, which may allocate `limit` MB of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit * 10**6 / total))
    cfg = configured("zero3", mode, batch, work, 1, "bf16")
    with distributed(cfg) as world:
        try:
            with explained_memory_errors(lambda: cfg, world.device), contextlib.redirect_stderr(io.StringIO()):
                state = build_state(cfg, Parallelism.of(cfg, world))
                state.model.train()
                results, seconds = [], []
                for number in range(STEPS + 1):
                    step = state.loader.steps.prepare(number)
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    results.append(train_step(state, step, cfg, started))
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
        except OutOfMemory as error:
            return {"fits": False, "why": str(error)}
        return {
            "step_seconds": min(seconds[1:]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "trained": sum(p.numel() for p in state.masters.named.values()),
            "losses": [result.loss for result in results],
        }


# What is shown


def name_of(row: Report) -> str:
    offload = "" if row["offload"] == "none" else f" offload={row['offload']}"
    return f"{row['variant']}{offload}, {row['layers']} layers, batch {row['batch']}" + (
        "" if row["limited"] else ", free"
    )


def describe(row: Report) -> str:
    if not row["fits"]:
        return f"{name_of(row)}: does not fit ({row['why']})"
    held = row.get("peak_bytes", row.get("private_bytes", 0))
    return f"{name_of(row)}: {row['step_seconds']:.2f} s a step, {held / MIB:,.0f} MiB, losses {row['losses']}"


def draw(pyplot: Any, report: Report) -> None:
    """Bytes that each run held, against the limit; what did not fit is crossed out at it."""
    rows, limit = report["rows"], report["limit_bytes"] / MIB
    _, axes = pyplot.subplots(figsize=(9, 0.5 * len(rows) + 1.8), layout="constrained")
    for place, row in enumerate(rows):
        held = row.get("peak_bytes", row.get("private_bytes", 0)) / MIB
        axes.barh(place, held, color="C0" if row["limited"] else "C7")
        said = f"{row['step_seconds']:.0f} s a step" if row["fits"] else "does not fit"
        axes.text(limit / 50, place, said, va="center", color="white" if row["fits"] else "C3")
    axes.axvline(limit, color="C3", linestyle="--", label=f"the limit, {limit:,.0f} MiB")
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(
        "MiB on the GPU, at the peak" if any("peak_bytes" in row for row in rows) else "private MiB of a rank"
    )
    axes.legend(loc="upper right")
    trained = max(row.get("trained", 0) for row in rows) / 1e6
    axes.set_title(f"{report['ranks']} rank(s), up to {trained:,.0f} M trained parameters", fontsize="medium")


if __name__ == "__main__":
    main()
