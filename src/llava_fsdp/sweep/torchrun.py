"""Run the torchrun command of one training of a sweep to its end."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.status_file import read_status, status_of_latest_start
from llava_fsdp.runtime.process.process_end import STOP_SECONDS, how_ended, without_launcher
from llava_fsdp.runtime.text.log import log

LOG_FILE = "train.log"
PROGRESS_SECONDS = 10
STEP_LINE = re.compile(r"step \d+/\d+ .*")


class JobFailed(LlavaFsdpError):
    """Error: one training of a sweep did not finish."""

    def __init__(self, reason: str, code: ExitCode = ExitCode.BUG, took_steps: bool = False):
        """Create the error. `code`: exit code of the rank that failed first. `took_steps`: whether this start of the
        training took a step; if not, its folder may have the results of an earlier start."""
        super().__init__(reason)
        self.code = code
        self.took_steps = took_steps


def run_torchrun(
    command: Sequence[str],
    folder: Path,
    name: str,
    stop_level: Callable[[], int] = int,
    visible: str | None = None,
    locks: Sequence[int] = (),
) -> None:
    """Run the torchrun command of a job to its end. Its output is written to `train.log` in `folder`. This process logs
    the latest step every 10 seconds.

    The ranks write to the file directly: with a pipe, this process would wait for a rank that outlives torchrun. The
    command runs in a session of its own, so that a Ctrl-C reaches it only once, through this process.

    Args:
        name: name of the job, for log messages.
        stop_level: function that returns 0 (go on), 1 (save a checkpoint and end) or 2 (end at once), and is called
            twice a second. The default, `int`, returns 0.
        visible: value of CUDA_VISIBLE_DEVICES for the command; None: unchanged.
        locks: file descriptors of GPU locks, which the command inherits.

    Raises:
        JobFailed: the command failed; the message is the reason that a rank recorded, if there is one.
    """
    earlier = read_status(folder)
    environment = without_launcher(os.environ)
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    # exec_child replaces itself by the command, which gets SIGTERM if this process ends
    start = [sys.executable, "-P", "-m", "llava_fsdp.sweep.exec_child", str(os.getpid()), *command]
    path = folder / LOG_FILE
    with path.open("a") as file, path.open(errors="replace") as reader:
        reader.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            start,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=locks,
        )
        try:
            follow(child, reader, name, stop_level)
        except BaseException:
            child.terminate()  # torchrun ends its workers
            child.wait()
            raise
    if child.returncode != 0:
        status = status_after(folder, earlier)
        reason = status.get("reason") or f"torchrun {how_ended(child.returncode)}: {tail(path)}"
        # a start that took no step records the earlier run's status as `before`
        took_steps = bool(status) and not isinstance(status.get("before"), dict)
        raise JobFailed(reason, failure_code(status), took_steps)


def follow(child: subprocess.Popen, reader: io.TextIOBase, name: str, stop_level: Callable[[], int]) -> None:
    """Wait for torchrun (`child`), end it when the user stops the sweep, and log the latest step every 10 seconds.

    Args:
        reader: the file to which torchrun's output is written, opened for reading.
        name: name of the job, for log messages.
        stop_level: function that returns 0 (go on), 1 (SIGTERM: the ranks save a checkpoint and end) or 2 (SIGKILL).
    """
    next_line, sent = 0.0, 0  # time of the next log message; the level whose signal has been sent
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        steps = STEP_LINE.findall(reader.read())
        if steps and time.monotonic() >= next_line:
            log().info("%s: %s", name, steps[-1])
            next_line = time.monotonic() + PROGRESS_SECONDS
        if child.returncode is not None:
            return
        if (requested := stop_level()) > sent:
            sent = requested
            child.send_signal(signal.SIGTERM if sent == 1 else signal.SIGKILL)  # ranks end with torchrun


def status_after(folder: Path, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return the status that the latest start of a training has written into its folder; empty if it has written
    nothing, so that the folder still has the `earlier` one."""
    status = read_status(folder)
    return {} if status is None or status == earlier else status_of_latest_start(status)


def failure_code(status: dict[str, Any]) -> ExitCode:
    """Return the exit code of the rank that failed first, from a training's status; ExitCode.BUG if it has none."""
    try:
        return ExitCode(status.get("exit_code") or ExitCode.BUG)
    except ValueError:
        return ExitCode.BUG


def tail(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-5:])
