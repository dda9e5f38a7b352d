"""How long do steps wait for the page of a run, which is written while they go on?

    python benchmarks/live_page.py                       # at 5,000 steps; --steps, --rounds, --seconds

A folder holds the metrics of a run. A loop stands for its rank 0: steps of torch and of Python, and after each one the
call that passes its metrics to the page. Three kinds take turns: no page is due; a page is due and a process writes it,
as in training; a page is due and the thread of the steps writes it, as before. How to read the result is in
benchmarks/README.md.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from provenance import REPOSITORY, commit, machine

from llava_fsdp.config import Config, config_dir, load
from llava_fsdp.train.events.live_page import LivePage

NO_PAGE, BY_PROCESS, BY_THREAD = KINDS = ("no page", "by a process", "by the thread of the steps")
DUE = 5
"""The step of each series after which the page is due."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="of the run, before the first one that is timed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.5, help="of steps of each kind in a round, at least")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    report = {
        "question": "how long do steps wait for the page of a run?",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/live_page.py", *sys.argv[1:]]),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "machine": machine(),
        "rows": measure(options.steps, options.rounds, options.seconds),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"live-page-cpu-{report['date']}.json").write_text(json.dumps(report) + "\n")
    for row in report["rows"]:
        print({key: value for key, value in row.items() if key != "series"})


def measure(steps: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each kind, with the raw times of each round's series of steps."""
    torch.set_num_threads(1)
    series: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row_of(step)) + "\n" for step in range(1, steps + 1)))
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = load(Config, compose("train", [f"output_dir={run}"]))
        page = LivePage(cfg, steps, {"time": 1.0, "total_steps": 10**6})
        for turn in range(rounds):
            for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
                series[kind].append(time_steps(page, kind, seconds))
        assert not page.failed, "the page could not be written"
    return [summary(kind, series[kind]) for kind in KINDS]


def time_steps(page: LivePage, kind: str, seconds: float) -> dict[str, list[float]]:
    """Run steps for some seconds, and until the page is written. Return the milliseconds of each step (`step_ms`) and
    of the gap behind it, in which its metrics are passed to the page (`gap_ms`, and `gap_cpu_ms` of the thread)."""
    steps, gaps, cpu = [], [], []
    weight = torch.randn(384, 384)
    page.due = math.inf
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(steps) < DUE or page.process is not None:
        began = time.perf_counter()
        take_step(weight)
        ended, cpu_ended = time.perf_counter(), time.thread_time()
        is_due = len(steps) == DUE - 1
        if is_due and kind == BY_PROCESS:
            page.due = 0.0
        page.add(row_of(page.run.history.step + 1))
        if is_due and kind == BY_THREAD:
            page.write()
        cpu.append(round(1000 * (time.thread_time() - cpu_ended), 3))
        gaps.append(round(1000 * (time.perf_counter() - ended), 3))
        steps.append(round(1000 * (ended - began), 3))
    return {"step_ms": steps, "gap_ms": gaps, "gap_cpu_ms": cpu}


def take_step(weight: torch.Tensor) -> None:
    """What stands for a step: about 15 ms of matrix products, between which Python works as the host of a GPU does."""
    for _ in range(12):
        weight = torch.nn.functional.normalize(weight @ weight)
        sum(number for number in range(2000))


def row_of(step: int) -> dict[str, Any]:
    """A row of metrics.jsonl, as a training with two data sources writes it."""
    loss = 1 + 9 * math.exp(-step / 400) + math.sin(step) / 20
    return {
        "step": step, "loss": loss, "sources": {name: {"loss": loss, "label_tokens": 900} for name in ("a", "b")},
        "lr": 2e-5 * (1 + math.cos(step / 9000)), "grad_norm": 1 + math.sin(7 * step) / 3, "skipped": False,
        "skipped_steps": 0, "loss_scale": None, "label_tokens": 1800, "tokens": 90_000, "samples": 128, "images": 120,
        "tiles": 120, "truncated": 1, "labels_cut": 0, "unlabelled": 0, "skipped_records": 0,
        "seconds": 8 + math.cos(3 * step), "data_seconds": 0.01, "tokens_per_second": 90_000 / (8 + math.cos(3 * step)),
        "flops": 1e16, "mfu": 0.48, "hfu": 0.6, "recompiles": 0, "peak_memory_bytes": 61_000_000_000,
    }  # fmt: skip


def summary(kind: str, series: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the longest gap, that of the median round, and the median step, with the raw times behind them."""
    longest, cpu = ([max(own[name][DUE - 1 :]) for own in series] for name in ("gap_ms", "gap_cpu_ms"))
    return {
        "kind": kind,
        "longest_gap_ms": max(longest),
        "median_of_longest_gap_ms": statistics.median(longest),
        "longest_gap_cpu_ms": max(cpu),
        "median_of_longest_gap_cpu_ms": statistics.median(cpu),
        "median_gap_ms": statistics.median(ms for own in series for ms in own["gap_ms"]),
        "median_step_ms": statistics.median(ms for own in series for ms in own["step_ms"]),
        "longest_step_ms": max(ms for own in series for ms in own["step_ms"]),
        "series": series,
    }


if __name__ == "__main__":
    main()
