"""Processes that torchrun starts on CPU ranks: started, waited for, and ended with all that they have started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def start(
    command: list[str], ranks: int, log: Path, more: dict[str, str] | None = None, python: str = sys.executable
) -> subprocess.Popen:
    """torchrun with that many CPU ranks of one thread each, writing into `log`; `more` is added to its environment."""
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        # DeepSpeed calls ninja by name, and a virtual environment need not be active
        "PATH": places(),
        **(more or {}),
    }
    with log.open("w") as file:
        return subprocess.Popen(
            [*torchrun, *command], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def launch(command: list[str], what: str, log: Path, timeout: int, ranks: int) -> None:
    """Start, and wait; ended with all its processes when it takes too long.

    Raises:
        SystemExit: it failed, or had not ended in time.
    """
    process = start(command, ranks, log)
    try:
        code = process.wait(timeout)
        problem = f"failed with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"had not ended after {timeout} s (--timeout)"
    except BaseException:
        end(process)
        raise
    if problem:
        end(process)
        raise SystemExit(f"{last_of(log)}\n{what}: {problem}; the end of its output is above")


def last_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-100:])  # torchrun's own traceback is 40


def end(process: subprocess.Popen) -> None:
    """Ask torchrun to end its ranks, which are process groups of their own; it kills them itself after 30 seconds."""
    for sign, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def places() -> str:
    """PATH, the interpreter's own folder first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def deepspeed_missing() -> str | None:
    """Why DeepSpeed cannot run here; None where it can. It compiles its CPU collectives when it first runs."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed here: pip install -e '.[bench]' (docs/deepspeed.md)"
    for tool in ("ninja", "g++"):
        if shutil.which(tool, path=places()) is None:
            return f"{tool} is not on PATH; DeepSpeed compiles its CPU collectives with it"
    return None
