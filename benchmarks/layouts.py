"""Does the planner order layouts of ranks as they are on this machine?

    python benchmarks/layouts.py            # eight layouts on 4 CPU ranks; about fifteen minutes on two idle cores

Trains the same samples with each layout through `llava_fsdp.train`, and measures the CPU seconds of a step, of all
ranks together. Beside them stand the seconds that `llava-fsdp plan` predicts. How to read the result is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from capped import facts, write_json
from provenance import REPOSITORY
from rich.console import Console
from rich.table import Table
from torchruns import end, last_of, start

QUESTION = "does the planner order layouts of ranks as they are on this machine?"
RANKS = 4
LAYOUTS = {
    "zero3": ["sharding=zero3"],
    "zero2": ["sharding=zero2"],
    "zero0": ["sharding=zero0"],
    "zero3, tensor 2": ["sharding=zero3", "parallel.tensor=2"],
    "zero3, tensor 4": ["sharding=zero3", "parallel.tensor=4"],
    "zero3, context 2": ["sharding=zero3", "parallel.context=2"],
    "zero2, pipeline 2": ["sharding=zero2", "parallel.pipeline=2"],
    "zero2, pipeline 2, tensor 2": ["sharding=zero2", "parallel.pipeline=2", "parallel.tensor=2"],
}
STEPS = (3, 43)
"""Steps after which CPU seconds are read."""
LIMIT = 600
"""Seconds that a training may take."""


def write_parts(folder: Path) -> None:
    """The package's own tiny model with wider and deeper layers; weights are drawn."""
    assets = REPOSITORY / "src" / "llava_fsdp" / "assets"
    for part, own, sizes in (
        ("language", "tiny-llama", {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
                                    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
        ("vision", "tiny-clip", {}),
    ):  # fmt: skip
        shutil.copytree(assets / own, folder / part, ignore=shutil.ignore_patterns("*.safetensors"))
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | sizes))


def keys_of(folder: Path) -> list[str]:
    """Keys of all layouts, of the training and of the plan."""
    return [
        "stage=finetune", f"model.language={folder / 'model' / 'language'}",
        f"model.vision={folder / 'model' / 'vision'}", "model.projector=random", "model.random_weights=true",
        f"data.root={folder / 'shapes'}", "global_batch_size=16", "tokens_per_micro_batch=1024", "data.max_length=512",
        "activation_checkpointing=none", "precision=fp32", "compile=false",
    ]  # fmt: skip


def predicted(keys: list[str], overrides: list[str]) -> float:
    """Seconds of a step, by the planner."""
    own = [*keys, *overrides, f"gpus={RANKS}", "gpu=auto", "offload=none", "rows=1000", "format=json"]
    command = [sys.executable, "-m", "llava_fsdp.plan", *own]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=None)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-2000:]}\nllava-fsdp plan failed")
    zero = overrides[0].partition("=")[2]
    rows = json.loads(done.stdout.strip().splitlines()[-1])["rows"]
    found = {row["sharding"]: row["step_seconds"] for row in rows if row["activation_checkpointing"] == "none"}
    if len(found) == 1:  # a single rank has each part of the layers, so that all strategies are alike
        return next(iter(found.values()))
    return found[zero]


def measured(name: str, keys: list[str], overrides: list[str], folder: Path) -> dict[str, Any]:
    """CPU seconds of a step of all ranks, the median of its wall seconds, and the losses.

    CPU seconds are read from the ranks while they run. A start takes a hundred times as many as a step, and differs
    from run to run by more than a step takes.
    """
    output = folder / "out"
    more = [f"output_dir={output}", f"max_steps={STEPS[1] + 1}", "checkpoint.resume=never", "export.enabled=false"]
    process = start(["-m", "llava_fsdp.train", *keys, *overrides, *more], RANKS, folder / "log.txt")
    spent, begin = [], time.monotonic()
    try:
        for steps in STEPS:
            while len(rows := rows_in(output / "metrics.jsonl")) < steps:
                if process.poll() is not None or time.monotonic() - begin > LIMIT:
                    raise SystemExit(f"{last_of(folder / 'log.txt')}\n{name}: it ended or hangs; its output is above")
                time.sleep(0.05)
            spent.append(cpu_seconds(process.pid))
    finally:
        end(process)
    shutil.rmtree(output)
    wall = statistics.median(row["seconds"] for row in rows[STEPS[0] : STEPS[1]])
    losses = [row["loss"] for row in rows[: STEPS[1]]]
    return {"cpu_seconds": (spent[1] - spent[0]) / (STEPS[1] - STEPS[0]), "wall_seconds": wall, "losses": losses}


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of metrics; none if there is no file yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and all that it has started have used until now."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def order_of(rows: list[dict[str, Any]], key: str) -> list[int]:
    """The place of every row, 1 for the fastest."""
    sorted_rows = sorted(range(len(rows)), key=lambda number: rows[number][key])
    return [sorted_rows.index(number) + 1 for number in range(len(rows))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parser.parse_args()
    report = facts(QUESTION, options) | {"ranks": RANKS, "rows": []}
    with tempfile.TemporaryDirectory(prefix="layouts-") as made:
        folder = Path(made)
        write_parts(folder / "model")
        keys = keys_of(folder)
        measured("images and index are made", keys, LAYOUTS["zero3"], folder)
        for name in options.layouts:
            row = {"layout": name, "predicted_seconds": predicted(keys, LAYOUTS[name])}
            row |= measured(name, keys, LAYOUTS[name], folder)
            report["rows"].append(row)
            write_json(report, "layouts-cpu", options.out)
            print(f"{name}: predicted {row['predicted_seconds']:.3f}, CPU {row['cpu_seconds']:.2f} s", flush=True)
    rows = report["rows"]
    worst = max(abs(a - b) / b for row in rows for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
    if worst > 1e-4:
        raise SystemExit(f"the layouts do not train the same: losses differ by {worst:.1e}")
    places = {key: order_of(rows, key) for key in ("predicted_seconds", "cpu_seconds", "wall_seconds")}
    squares = sum((a - b) ** 2 for a, b in zip(places["predicted_seconds"], places["cpu_seconds"], strict=True))
    count = len(rows)
    report |= {"places": places, "losses_differ_by": worst}
    if count > 1:
        report["rank_correlation"] = 1 - 6 * squares / (count * (count**2 - 1))
    path = write_json(report, "layouts-cpu", options.out)
    table = Table("layout", "predicted, s", "place", "CPU s of all ranks", "place", "wall s", "place")
    for number, row in enumerate(rows):
        cells = [f"{row[key]:.3f} {places[key][number]}".split() for key in places]
        table.add_row(row["layout"], *(text for pair in cells for text in pair))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    print(f"wrote {path}; rank correlation {report.get('rank_correlation', float('nan')):.2f}")


if __name__ == "__main__":
    main()
