"""What every result says of where it comes from."""

import contextlib
import os
import platform
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def machine(device: str | None = None) -> dict[str, object]:
    """The machine in words; `device` is the GPU's name, where one computed."""
    return {
        "device": device or processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit, marked where the code that was run is not what it says; unknown outside a checkout."""
    try:
        git = ["git", "-C", str(REPOSITORY)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        ran = ["src", "conf", "benchmarks/*.py"]
        changed = subprocess.run([*git, "status", "--porcelain", *ran], capture_output=True, text=True, check=True)
        return head + (" with changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
