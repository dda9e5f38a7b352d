"""One torchrun, followed to its end."""

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

from llava_fsdp.runtime.errors import ExitCode, LlavaFsdpError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.process_end import without_launcher
from llava_fsdp.runtime.status_file import own_word, read_status

LOG_FILE = "train.log"
PROGRESS_SECONDS = 10
STOP_SECONDS = "600"
"""That torchrun leaves its ranks to save a checkpoint before it kills them; without a word of ours 30."""
STEP_LINE = re.compile(r"step \d+/\d+ .*")


class JobFailed(LlavaFsdpError):
    """One job of a sweep did not finish."""

    def __init__(self, said: str, code: ExitCode = ExitCode.BUG, took_steps: bool = False):
        """
        Args:
            code: what the worker that failed first returned.
            took_steps: in this start; else what the folder holds is of an earlier one.
        """
        super().__init__(said)
        self.code = code
        self.took_steps = took_steps


def go_on() -> int:
    return 0


def run_torchrun(
    command: Sequence[str],
    folder: Path,
    name: str,
    level: Callable[[], int] = go_on,
    visible: str | None = None,
    held: Sequence[int] = (),
) -> None:
    """Run to the end, with everything it says in `train.log` and a step's line now and then on the terminal.

    The workers write to the file itself: with a pipe, a worker that outlives its torchrun would keep us waiting. It has
    a session of its own, so that a Ctrl-C reaches it through us alone, and once.

    Args:
        level: what is wished: 0 go on, 1 save and end, 2 end at once.
        visible: CUDA_VISIBLE_DEVICES; None: as it is.
        held: files that it keeps open: locks that must not be free while it runs.

    Raises:
        JobFailed: it returned an error; the message has the reason that a worker gave.
    """
    earlier = read_status(folder)
    environment = without_launcher(os.environ)
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    start = [sys.executable, "-m", "llava_fsdp.sweep.exec_child", str(os.getpid()), *command]
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
            pass_fds=held,
        )
        try:
            follow(child, reader, name, level)
        except BaseException:
            child.terminate()  # torchrun ends its workers
            child.wait()
            raise
    if child.returncode != 0:
        status = status_after(folder, earlier)
        reason = status.get("reason") or f"torchrun {ending(child.returncode)}: {tail(path)}"
        raise JobFailed(reason, failure_code(status), took_steps(status))


def follow(child: subprocess.Popen, reader: io.TextIOBase, name: str, level: Callable[[], int]) -> None:
    """Wait for the child, end it when that is wished, and say how far it is every `PROGRESS_SECONDS`."""
    next_line, done = 0.0, 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        steps = STEP_LINE.findall(reader.read())
        if steps and time.monotonic() >= next_line:
            log().info("%s: %s", name, steps[-1])
            next_line = time.monotonic() + PROGRESS_SECONDS
        if child.returncode is not None:
            return
        if (wished := level()) > done:
            done = wished
            child.send_signal(signal.SIGTERM if wished == 1 else signal.SIGKILL)  # ranks end with torchrun


def ending(code: int) -> str:
    if code >= 0:
        return f"returned {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def status_after(folder: Path, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """What this start has said of itself; an earlier run's word, which `before` is made of, stays where it is."""
    said = read_status(folder)
    return {} if said is None or said == earlier else own_word(said)


def took_steps(status: dict[str, Any]) -> bool:
    """Whether the start that said so came to a step, as far as can be told; of a first start in a folder it is all the
    same."""
    return bool(status) and not isinstance(status.get("before"), dict)


def failure_code(status: dict[str, Any]) -> ExitCode:
    """What the worker that failed first returned; BUG where none lived to say."""
    said = status.get("exit_code")
    try:
        return ExitCode(said) if said else ExitCode.BUG
    except ValueError:
        return ExitCode.BUG


def tail(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-5:])
