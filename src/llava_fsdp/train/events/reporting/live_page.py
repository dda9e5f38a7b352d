"""Write the HTML page `report.html` of a training, at intervals while it runs and at its end. Only rank 0 does this.

While steps run, a process of its own (this module's `main`) reads the run's files and writes the page, because building
it takes a good part of a second. A thread of rank 0 would hold the GIL for as long, and delay steps.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line.tree import dotted, tree_of
from llava_fsdp.data.images.thumbnails import thumbnail
from llava_fsdp.report.run_page import report_page
from llava_fsdp.report.run_reader import (
    METRICS_FILE,
    REPORT_FILE,
    STARTS_FILE,
    VALIDATION_FILE,
    RunRecord,
    check_start,
    name_of,
    put_page,
    read_metrics,
    read_rows,
    read_run,
    read_validations,
    thin_out,
)
from llava_fsdp.runtime.files.jsonl import replace_lines
from llava_fsdp.runtime.files.status_file import read_status
from llava_fsdp.runtime.process.process_end import end_with
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact_values, secrets_of
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.state import StepResult

PAUSE_SECONDS = 10
"""Minimum number of seconds between two versions of the page."""
CPU_SHARE = 0.01
"""Maximum share of one CPU core's time for the processes that write the page."""
PATIENCE = 2
"""Seconds that the end of a run waits for such a process before it kills it."""


class LivePage(StepReport):
    """Collects the curves of a training and writes its page: itself when the run begins and ends, and by a process of
    its own after steps, so seldom that these processes take at most `CPU_SHARE` of a core's time.

    If the page cannot be written, a warning is logged the first time, and training continues.
    """

    def __init__(self, cfg: Config, first_step: int, about: dict[str, Any]):
        """Read the rows of earlier starts and write the page. An error is only logged, to not end the training.
        `first_step`: steps finished when this start of the run begins; `about`: its description (`about_run`)."""
        self.run = RunRecord(Path(cfg.output_dir), name_of(Path(cfg.output_dir)))
        self.path = self.run.folder / REPORT_FILE
        self.has_warned = False
        self.process: subprocess.Popen[bytes] | None = None
        """The process that writes the page now, if there is one."""
        try:
            self.run.config = redact_values(dotted(tree_of(cfg)), secrets_of())
            read_metrics(self.run)
            self.begin(first_step, {"step": first_step, **about})
        except Exception as error:
            self.warn(error)
        self.write()
        self.next_at = time.monotonic() + PAUSE_SECONDS
        """Time, by the monotonic clock, from which the page may be written again."""

    def begin(self, first_step: int, start: dict[str, Any]) -> None:
        """Write `starts.jsonl`, with a row for each start of the run: the rows of earlier starts up to `first_step`, at
        which this start continues, and then `start`, the description of this start (`about_run`). `start` is left out
        if the run has already finished, or if the description was not made, so that there is no `time` in it."""
        earlier_starts = read_rows(self.run, STARTS_FILE, check_start) if first_step else []
        is_start = "time" in start and first_step < start["total_steps"]
        self.run.starts = [earlier for earlier in earlier_starts if earlier["step"] <= first_step] + (
            [start] if is_start else []
        )
        if self.run.starts == earlier_starts and not is_start:
            return  # the files of a finished run are not changed
        replace_lines(self.run.folder / STARTS_FILE, map(json.dumps, self.run.starts))

    def step(self, row: dict[str, Any], result: StepResult | None = None) -> None:
        """Add a step's row to the curves. If the page is due, start a process that writes it. `result` is unused; other
        reports need it."""
        try:
            self.run.history.add(row)
            if self.process is not None:
                self.look_at_process(self.process)
            elif time.monotonic() >= self.next_at:
                self.next_at = time.monotonic() + PAUSE_SECONDS
                self.process = start_process(self.run.folder)
        except Exception as error:
            self.warn(error)

    def look_at_process(self, process: subprocess.Popen[bytes]) -> None:
        """If the process that writes the page has ended, choose the time from which the next one may start, so that
        these processes take at most the share `CPU_SHARE` of a core's time. `os.wait4` tells the CPU seconds of the
        process; `Popen.poll` does not."""
        try:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        except ChildProcessError:  # something else in this process has waited for it
            self.process = None
            return
        if pid == 0:
            return
        self.process = None
        process.returncode = os.waitstatus_to_exitcode(status)
        self.next_at = max(self.next_at, time.monotonic() + (usage.ru_utime + usage.ru_stime) / CPU_SHARE)
        if process.returncode:
            why = f"its process ended with {process.returncode}; `llava-fsdp report {self.run.folder}` shows the error"
            self.warn(RuntimeError(why))

    def write(self) -> None:
        """Write the complete page. A process that writes an earlier version is ended before."""
        try:
            self.end_process()
            self.run.status = read_status(self.run.folder) or {}
            self.run.unread.pop(VALIDATION_FILE, None)  # the file is read from its beginning again
            self.run.validations = thin_out(read_validations(self.run))
            put_page(self.path, report_page(self.run, thumbnail), self.run.folder)
        except Exception as error:
            self.warn(error)

    def end(self, exit_code: int, patience: float) -> None:
        """Write the last version of the page, and log its path. Both arguments are unused; other reports need them."""
        self.write()
        if not self.has_warned:
            log().info("report: %s", self.path)

    def end_process(self) -> None:
        """End the process that writes the page, so that it cannot replace a later version."""
        if self.process is None:
            return
        self.process.terminate()  # it removes its temporary file
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()
        self.process.wait()
        self.process = None

    def warn(self, error: Exception) -> None:
        """Log a warning, but only the first."""
        if not self.has_warned:
            self.has_warned = True
            log().warning("%s cannot be written (%s: %s)", self.path, type(error).__name__, error)


def rewrite_page(folder: Path) -> None:
    """Write the page anew from the run's files. For a process that ends before it has finished a step."""
    if not os.path.isfile(folder / STARTS_FILE) and not os.path.isfile(folder / METRICS_FILE):
        return
    try:
        put_page(folder / REPORT_FILE, report_page(read_run(folder, is_own=True), thumbnail), folder)
    except Exception as error:
        log().warning("%s cannot be written (%s: %s)", folder / REPORT_FILE, type(error).__name__, error)


def start_process(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes the page from the run's files. It prints nothing, and ends with this process."""
    command = [sys.executable, "-P", "-m", "llava_fsdp.train.events.reporting.live_page", str(os.getpid()), str(folder)]
    # in a session of its own: Ctrl-C in a terminal reaches all processes of the terminal's session
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def main() -> None:
    """Write the page: `python -m llava_fsdp.train.events.reporting.live_page PARENT FOLDER`, with the process id of the
    training's rank 0, and the run's folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as an exception, which removes the temporary file
    end_with(int(sys.argv[1]))
    os.nice(10)  # the data workers of the training come first
    folder = Path(sys.argv[2])
    put_page(folder / REPORT_FILE, report_page(read_run(folder, is_own=True), thumbnail), folder)


if __name__ == "__main__":
    main()
