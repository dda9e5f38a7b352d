"""How many CPU seconds lie between a command and the end of its first step, beside other trainers?

    python benchmarks/first_step.py [FOLDER] [--before COMMIT] [--rounds 5]

Each way is a process of its own that trains one step of the embedded tiny model and ends; ways take turns. `--before`
adds this project at an older commit. The files of all have been read once before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import REPOSITORY

PEER = Path(__file__).with_name("first_step_peer.py")
TRAIN = (
    "-m", "llava_fsdp.train", "stage=finetune", "model.projector=random", "max_steps=1", "global_batch_size=16",
    "micro_batch_size=16", "export.enabled=false", "checkpoint.every=null", "output_dir=out",
)  # fmt: skip


def ways_of(work: Path, before: str | None) -> dict[str, tuple[Sequence[str], Path]]:
    """Each way's arguments for Python, and the folder of the sources that it imports."""
    ours = REPOSITORY / "src"
    ways = {
        "imports of torch and transformers' models alone": ([str(PEER), "imports"], ours),
        "this project": (TRAIN, ours),
        "transformers' Trainer": ([str(PEER), "trainer"], ours),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        ways["DeepSpeed's engine"] = ([str(PEER), "deepspeed"], ours)
    if before is not None:
        old = work / "before"
        subprocess.run(["git", "-C", str(REPOSITORY), "worktree", "add", "--detach", str(old), before], check=True)
        ways[f"this project at {before}"] = (TRAIN, old / "src")
    return ways


def run(arguments: Sequence[str], sources: Path, work: Path) -> tuple[float, float]:
    """Return the CPU seconds and the wall-clock seconds of a process and its children.

    Raises:
        SystemExit: it failed.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(sources), "DS_ACCELERATOR": "cpu"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    shutil.rmtree(work / "out", ignore_errors=True)  # a run that has ended is not trained again
    started, wall = spent(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=work, check=False, stdin=subprocess.DEVNULL, capture_output=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr.decode()[-3000:]}\n{arguments} failed with exit code {done.returncode}")
    assert arguments is not TRAIN or '"step": 1,' in (work / "out" / "metrics.jsonl").read_text(), "no step was trained"
    return spent() - started, time.perf_counter() - wall


def spent() -> float:
    """CPU seconds of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="How many CPU seconds does a training of one step take?")
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from capped import facts, write_json  # imports torch

    report = facts("how many CPU seconds lie between a command and the end of its first step?", options)
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        work = Path(folder)
        ways = ways_of(work, options.before)
        try:
            first = run(TRAIN, REPOSITORY / "src", work)  # also builds data and index
            for round_number in range(options.rounds + 1):
                for name, (arguments, sources) in ways.items():
                    cpu, wall = run(arguments, sources, work)
                    if round_number > 0:
                        own = found.setdefault(name, {"cpu_seconds": [], "wall_seconds": []})
                        own["cpu_seconds"].append(cpu)
                        own["wall_seconds"].append(wall)
        finally:
            subprocess.run(["git", "-C", str(REPOSITORY), "worktree", "remove", "--force", str(work / "before")],
                           check=False, capture_output=True)  # fmt: skip
    rows: list[dict[str, Any]] = [{"way": name, **taken} for name, taken in found.items()]
    report |= {"rows": rows, "first_command": {"cpu_seconds": first[0], "wall_seconds": first[1]}}
    for row in rows:
        cpu = row["cpu_seconds"]
        print(f"{statistics.median(cpu):6.2f} CPU s ({min(cpu):.2f} to {max(cpu):.2f})  {row['way']}")
    print(f"{first[0]:6.2f} CPU s  this project's first command, which draws its images and builds their index")
    print(f"wrote {write_json(report, 'first-step-cpu', options.folder)}")


if __name__ == "__main__":
    main()
