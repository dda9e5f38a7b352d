"""How a sweep is stopped, whatever launcher has placed its jobs.

A signal to the sweep writes a file that every job watches: jobs that run end their torchrun, which saves a checkpoint
first, and those that have not begun do not. Launchers know nothing of that: joblib kills its workers and all below
them as soon as it or one of the workers is interrupted, and a terminal's Ctrl-C goes to every process of the
foreground. So Hydra and its launcher run in a session of their own, and what the user started is a process that takes
signals and waits.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from llava_fsdp.runtime.durable_files import replace_file
from llava_fsdp.runtime.errors import ExitCode
from llava_fsdp.runtime.log import log

STOP_FILE = ".stop"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE, NOW = 1, 2
MEANING = {
    SAVE: "running jobs are stopped after their step, with a checkpoint; others do not begin",
    NOW: "running jobs are ended at once",
}


class StopRequest:
    """A file in a folder that all jobs see; the object is pickled to wherever jobs run."""

    def __init__(self, path: Path):
        self.path = path
        self.main = (socket.gethostname(), os.getpid())
        """The process that runs Hydra."""

    def is_main(self) -> bool:
        return self.main == (socket.gethostname(), os.getpid())

    def is_abandoned(self) -> bool:
        """Whether the process that runs Hydra is gone, as far as this machine can tell."""
        host, pid = self.main
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return host == socket.gethostname()
        return False

    def level(self) -> int:
        """0: continue; 1: save and end; 2: end at once."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.path.read_text())
        return SAVE if self.is_abandoned() else 0

    def raise_to(self, level: int) -> None:
        if self.level() < level:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, str(level).encode())

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def take_signals(self) -> None:
        """Make a signal to the process that runs Hydra ask all jobs to end."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: self.raise_to(SAVE))


def ignore_signals() -> None:
    """Leave signals to the sweep, in a launcher's worker: they reach the sweep too."""
    with contextlib.suppress(ValueError):  # not the main thread
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def supervise(words: Sequence[str], stop: StopRequest) -> int:
    """Run a Python module's command in a session of its own; each signal raises the level of the stop request.

    Args:
        words: module and arguments.

    Returns:
        Its exit code; of a process that was killed, minus the signal's number.
    """
    start = [sys.executable, "-m", "llava_fsdp.sweep.exec_child", str(os.getpid()), sys.executable, "-m", *words]
    child = subprocess.Popen(start, start_new_session=True)

    def on_signal(number: int, frame: FrameType | None) -> None:
        level = stop.level() + 1
        if level > NOW:
            child.kill()  # what it has started ends with it
            os._exit(ExitCode.INTERRUPTED)
        stop.raise_to(level)
        log().warning("%s: %s", signal.Signals(number).name, MEANING[level])

    for number in SIGNALS:
        signal.signal(number, on_signal)
    return child.wait()
