"""Stop a sweep on a signal, whichever Hydra launcher runs its trainings.

A signal to the sweep's main process creates a stop file, which every job (training) watches: a running job ends its
torchrun, which saves a checkpoint first, and a job that has not begun never begins. Hydra's launchers cannot do this:
joblib kills its workers and their child processes as soon as joblib or a worker is interrupted, and Ctrl-C in a
terminal goes to every foreground process. Therefore Hydra and its launcher run in a session of their own, and the main
process, which the user started, only handles signals and waits.
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

from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.text.log import log

STOP_FILE = ".stop"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE, NOW = 1, 2
"""Levels of a stop request: save a checkpoint and end; end at once."""
MEANING = {
    SAVE: "running jobs are stopped after their step, with a checkpoint; others do not begin",
    NOW: "running jobs are ended at once",
}


class StopRequest:
    """A request to stop, written to a file in a folder that all jobs see. Hydra's launcher pickles the object and sends
    it to the jobs."""

    def __init__(self, path: Path):
        self.path = path
        self.main = (socket.gethostname(), os.getpid())
        """(host, process id) of the process that runs Hydra."""

    def is_main(self) -> bool:
        """Return whether this is the process that runs Hydra."""
        return self.main == (socket.gethostname(), os.getpid())

    def is_abandoned(self) -> bool:
        """Return whether the process that runs Hydra has ended, so that its jobs must end, too; False if that process
        is on another machine, where this cannot be seen."""
        host, pid = self.main
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return host == socket.gethostname()
        return False

    def level(self) -> int:
        """Return the level of the request: 0 (go on), `SAVE` (save a checkpoint and end) or `NOW` (end at once). If
        there is no stop file, it is `SAVE` if the process that runs Hydra has ended, else 0."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.path.read_text())
        return SAVE if self.is_abandoned() else 0

    def raise_to(self, level: int) -> None:
        """Write a level, `SAVE` or `NOW`, to the stop file, unless the request already has this or a higher level."""
        if self.level() < level:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, str(level).encode())

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def take_signals(self) -> None:
        """Ask all jobs to stop on SIGINT or SIGTERM. For the process that runs Hydra."""
        for number in SIGNALS:
            signal.signal(number, lambda *_: self.raise_to(SAVE))


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM in a process that runs a job: the main process handles them."""
    with contextlib.suppress(ValueError):  # not the main thread
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def supervise(words: Sequence[str], stop: StopRequest) -> int:
    """Run a Python module (`words`: its name and arguments) in a session of its own, and wait for it. The first SIGINT
    or SIGTERM asks the jobs to save a checkpoint and end, the second to end at once; the third ends everything. Return
    the module's exit code, or minus the number of the signal that killed it."""
    python = [sys.executable, "-P", "-m"]
    # exec_child replaces itself by the module, which gets SIGTERM if this process ends
    start = [*python, "llava_fsdp.sweep.exec_child", str(os.getpid()), *python, *words]
    child = subprocess.Popen(start, start_new_session=True)

    def on_signal(number: int, frame: FrameType | None) -> None:
        """Raise the level of the stop request by one; at the third signal, end everything."""
        level = stop.level() + 1
        if level > NOW:
            child.kill()  # processes that the child has started end with it
            os._exit(ExitCode.INTERRUPTED)
        stop.raise_to(level)
        log().warning("%s: %s", signal.Signals(number).name, MEANING[level])

    for number in SIGNALS:
        signal.signal(number, on_signal)
    return child.wait()
