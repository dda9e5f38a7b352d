"""Does a training that hangs in a kernel end when it is told to? Less than a minute.

    python benchmarks/hangs.py FOLDER

A process with the watchdog and the guard of a training waits for a kernel that sleeps, and gets SIGTERM. All cases run
at once, each in a process of its own; one that does not end in time is killed. Without a GPU, calls that sleep stand in
for kernels. The result is written after every case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.heartbeat import Phase, beat_age
from llava_fsdp.runtime.process.watchdog import Watchdog

ON_GPU = ("sleeping kernel", "full queue, static launcher", "full queue, no static launcher")
ON_CPU = ("sleeping call", "sleeping call with Python's lock")
"""Launching a compiled kernel into a full queue may block with Python's lock held, and stop the watchdog's thread."""
HANGS = 40.0
"""Seconds that a kernel sleeps."""
SILENCE = 6
"""Seconds without a heartbeat after which the guard kills the process."""
READY, ENDED = 25.0, 14.0
"""Seconds that a case has until it hangs, and from the signal to its end."""
LAUNCHES = 5000
"""More than the queue of a stream holds (1,024)."""


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        hang(sys.argv[2], Path(sys.argv[3]))
        return
    import torch  # not before: a case without a GPU needs none
    from bench import command_line, facts, write_json

    options = command_line(__doc__).parse_args()
    report = facts("does a training that hangs in a kernel end when it is told to?", options) | {"cases": []}
    cases = ON_GPU
    if not torch.cuda.is_available():
        report["cases"] = [{"name": name, "not_run": "needs a GPU, and torch sees none"} for name in ON_GPU]
        cases = ON_CPU
    for row in report["cases"]:
        print(f"NOT RUN: {row['name']}: {row['not_run']}", flush=True)
    with ThreadPoolExecutor(len(cases)) as threads:
        for done in as_completed([threads.submit(run_case, name) for name in cases]):
            report["cases"].append(done.result())
            write_json(report, "hangs", options.folder)
            print(report["cases"][-1], flush=True)
    if any("failed" in row for row in report["cases"]):
        raise SystemExit(1)


def run_case(name: str) -> dict[str, Any]:
    """Start a case, send it SIGTERM when it hangs, and return how it ended."""
    row: dict[str, Any] = {"name": name}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+") as errors:
        command = [sys.executable, str(Path(__file__).resolve()), "--case", name, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        killer = threading.Timer(READY, process.kill)
        killer.start()
        assert process.stdout is not None
        said = process.stdout.readline()
        killer.cancel()
        if not said.startswith("ready"):
            process.wait()
            errors.seek(0)
            return row | {"failed": f"did not hang within {READY:g} s: {(said + errors.read())[-1000:].strip()}"}
        time.sleep(3)  # the queue fills, and heartbeats are due
        row["heartbeat_age"] = round(beat_age(Path(folder), 0), 1)
        process.send_signal(signal.SIGTERM)
        sent_at = time.monotonic()
        try:
            row["exit_code"] = process.wait(ENDED)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may wait for the kernel
                process.wait(5)
            return row | {"failed": f"neither the watchdog nor the guard ended it within {ENDED:g} s of SIGTERM"}
    row["seconds"] = round(time.monotonic() - sent_at, 1)
    ends = {int(ExitCode.STOPPED): "watchdog", -signal.SIGKILL: "guard"}
    if row["exit_code"] not in ends:
        return row | {"failed": f"ended by itself with exit code {row['exit_code']}"}
    return row | {"ended_by": ends[row["exit_code"]]}


def hang(name: str, folder: Path) -> None:
    """Hang in one of the ways, under the watchdog and the guard that a training has."""
    wait = prepared_call(name) if name in ON_CPU else prepared_kernels(name)
    this = [(0, "here", os.getpid())]
    with Watchdog(folder, 0, SILENCE) as watchdog, watchdog.watching_peers(this, is_guarded=True):
        watchdog.at(Phase.COMPUTE)
        print("ready", flush=True)
        wait()


def prepared_call(name: str) -> Callable[[], None]:
    library = ctypes.CDLL(None) if name == ON_CPU[0] else ctypes.PyDLL(None)

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread gets it; the call sleeps on
        library.sleep(int(HANGS))

    return wait


def prepared_kernels(name: str) -> Callable[[], None]:
    import torch

    def kernel(values: torch.Tensor) -> torch.Tensor:
        return values.add_(1)

    launches = 0
    if name != ON_GPU[0]:
        from torch._inductor import config

        config.use_static_cuda_launcher = name == ON_GPU[1]  # pyright: ignore[reportAttributeAccessIssue]
        kernel, launches = torch.compile(kernel), LAUNCHES
    values = torch.zeros(1 << 20, device="cuda")
    kernel(values)
    torch.cuda.synchronize()

    def wait() -> None:
        torch.cuda._sleep(int(HANGS * 1.9e9))  # cycles of the GPU's clock
        for _ in range(launches):
            kernel(values)
        torch.cuda.synchronize()

    return wait


if __name__ == "__main__":
    main()
