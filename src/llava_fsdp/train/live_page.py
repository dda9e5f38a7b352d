"""`report.html` of a run that goes on: written anew now and then, and once more at its end. Rank 0 alone."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.recipes import values_of
from llava_fsdp.data.images.thumbnails import Thumbnails
from llava_fsdp.report.run_page import report_page
from llava_fsdp.report.run_reader import (
    METRICS_FILE,
    REPORT_FILE,
    STARTS_FILE,
    VALIDATION_FILE,
    Run,
    check_start,
    check_validation,
    name_of,
    put_page,
    read_metrics,
    read_rows,
    read_run,
    thinned,
    validations_until,
)
from llava_fsdp.runtime.jsonl import replace_lines
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.redact import redact_values, secrets_of
from llava_fsdp.runtime.status_file import read_status

PAUSE = 10
"""Seconds between two pages, at least."""
SHARE = 0.01
"""Of the time that pages may take."""


class LivePage:
    """Keeps a run's curves, and writes its page.

    The next page waits for so long that all pages together take a hundredth of the time. A page that cannot be written
    is warned of once, whatever the reason: a training must not end for it.
    """

    def __init__(self, cfg: Config, first_step: int, about: dict[str, Any]):
        self.run = Run(Path(cfg.output_dir), name_of(Path(cfg.output_dir)))
        self.path = self.run.folder / REPORT_FILE
        self.thumbnails = Thumbnails()
        self.seen: tuple[int, int] | None = None
        """Of validation.jsonl, when it was read."""
        self.told = self.last_told(first_step)
        self.on_validation: Callable[[dict[str, Any]], None] = lambda row: None
        self.failed = False
        self.due = 0.0
        try:
            self.run.config = redact_values(values_of(cfg), secrets_of())
            read_metrics(self.run)
            self.begin(first_step, {"step": first_step, **about})
        except Exception as error:
            self.warn(error)
        self.write()

    def last_told(self, first_step: int) -> int:
        """The last step whose validation was there when this start began: one that was owed is news."""
        try:
            rows = read_rows(self.run, VALIDATION_FILE, check_validation)
        except Exception:
            return first_step
        return max((row["step"] for row in rows if row["step"] <= first_step), default=-1)

    def begin(self, first_step: int, start: dict[str, Any]) -> None:
        """Of the starts before, those whose steps this one goes on from stay."""
        earlier = read_rows(self.run, STARTS_FILE, check_start) if first_step else []
        is_start = "time" in start and first_step < start["total_steps"]  # a run that has finished has no more of them
        self.run.starts = [own for own in earlier if own["step"] <= first_step] + ([start] if is_start else [])
        if self.run.starts == earlier and not is_start:
            return  # nothing of a finished run is touched
        replace_lines(self.run.folder / STARTS_FILE, map(json.dumps, self.run.starts))

    def add(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl; a page where it is time for one."""
        try:
            self.run.history.add(row)
        except Exception as error:
            self.warn(error)
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        started = time.monotonic()
        try:
            self.look_at_validations()
            self.run.status = read_status(self.run.folder) or {}
            put_page(self.path, report_page(self.run, self.thumbnails), self.run.folder)
        except Exception as error:
            self.warn(error)
        ended = time.monotonic()
        self.due = ended + max(PAUSE, (ended - started) / SHARE)

    def look_at_validations(self) -> None:
        """Read them where they have changed, and tell of new ones."""
        try:
            found = os.stat(self.run.folder / VALIDATION_FILE)
        except OSError:
            return
        if (found.st_mtime_ns, found.st_size) == self.seen:
            return
        self.seen = found.st_mtime_ns, found.st_size
        rows = validations_until(read_rows(self.run, VALIDATION_FILE, check_validation), self.run.history.step)
        for row in rows:
            if row["step"] > self.told:
                self.on_validation(row)
                self.told = row["step"]
        self.run.validations = thinned(rows)

    def warn(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            log().warning("%s cannot be written (%s: %s); the run goes on", self.path, type(error).__name__, error)


def rewrite_page(folder: Path) -> None:
    """Of a start that ended before its first step: what an earlier one left is shown with how this one ended."""
    if not os.path.isfile(folder / STARTS_FILE) and not os.path.isfile(folder / METRICS_FILE):
        return
    try:
        put_page(folder / REPORT_FILE, report_page(read_run(folder, is_own=True), Thumbnails()), folder)
    except Exception as error:
        log().warning("%s cannot be written (%s: %s)", folder / REPORT_FILE, type(error).__name__, error)
