"""How many CPU seconds lie between a command and the end of its first step? A few minutes.

    python benchmarks/first_step.py

Each way is a process of its own that trains one step of the embedded tiny model and ends; ways take turns. The files of
all are read once before anything is timed.
"""

from __future__ import annotations

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

from bench import Report, command_line, facts, write_json
from provenance import REPOSITORY

PEER = Path(__file__).with_name("first_step_peer.py")
TRAIN = (
    "-m", "llava_fsdp.train", "stage=finetune", "model.projector=random", "max_steps=1", "global_batch_size=16",
    "micro_batch_size=16", "export.enabled=false", "checkpoint.every=null", "output_dir=out",
)  # fmt: skip


def ways_of() -> dict[str, Sequence[str]]:
    """Each way's arguments for Python."""
    ways = {
        "imports of torch and transformers' models alone": (str(PEER), "imports"),
        "this project": TRAIN,
        "transformers' Trainer": (str(PEER), "trainer"),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        ways["DeepSpeed's engine"] = (str(PEER), "deepspeed")
    return ways


def run(arguments: Sequence[str], work: Path) -> tuple[float, float]:
    """Return the CPU seconds and the wall-clock seconds of a process and its children.

    Raises:
        SystemExit: it failed.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src"), "DS_ACCELERATOR": "cpu"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process would compile the modules that it imports
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
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = facts("how many CPU seconds lie between a command and the end of its first step?", options)
    rows: list[Report] = [{"way": name, "cpu_seconds": [], "wall_seconds": []} for name in ways_of()]
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        first = run(TRAIN, Path(folder))  # also builds data and index
        for number in range(options.rounds + 1):
            for row, arguments in zip(rows, ways_of().values(), strict=True):
                cpu, wall = run(arguments, Path(folder))
                if number > 0:
                    row["cpu_seconds"].append(cpu)
                    row["wall_seconds"].append(wall)
    report |= {"rows": rows, "first_command": {"cpu_seconds": first[0], "wall_seconds": first[1]}}
    for row in rows:
        cpu = row["cpu_seconds"]
        print(f"{statistics.median(cpu):6.2f} CPU s ({min(cpu):.2f} to {max(cpu):.2f})  {row['way']}")
    print(f"{first[0]:6.2f} CPU s  this project's first command, which draws its images and builds their index")
    print(f"wrote {write_json(report, 'first-step-cpu', options.folder)}")


if __name__ == "__main__":
    main()
