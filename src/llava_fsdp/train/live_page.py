"""Write the HTML page `report.html` of a training, at intervals while it runs and at its end. Only rank 0 does this."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.recipes import values_of
from llava_fsdp.data.images.thumbnails import thumbnail
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
"""Minimum number of seconds between two versions of the page."""
SHARE = 0.01
"""Maximum share of the training's time that may be spent on writing the page."""


class LivePage:
    """Collects the curves of a training and writes its HTML page `report.html`, so seldom that writing takes at most a
    hundredth of the training's time.

    If the page cannot be written, a warning is logged the first time, and training continues.
    """

    def __init__(self, cfg: Config, first_step: int, about: dict[str, Any]):
        self.run = Run(Path(cfg.output_dir), name_of(Path(cfg.output_dir)))
        self.path = self.run.folder / REPORT_FILE
        self.seen: tuple[int, int] | None = None
        """File size and modification time of `validation.jsonl` when it was last read."""
        self.last_reported = self.last_validated(first_step)
        """The last step whose validation has been passed to `on_validation`."""
        self.on_validation: Callable[[dict[str, Any]], None] = lambda row: None
        """Called with each new row of `validation.jsonl`."""
        self.failed = False
        self.due = 0.0
        """Time, by the monotonic clock, at which the page may be written again."""
        try:
            self.run.config = redact_values(values_of(cfg), secrets_of())
            read_metrics(self.run)
            self.begin(first_step, {"step": first_step, **about})
        except Exception as error:
            self.warn(error)
        self.write()

    def last_validated(self, first_step: int) -> int:
        """Return the last step, up to `first_step` (the number of steps that were finished when this process started),
        whose validation is on disk; -1 if there is none. The trackers (TensorBoard, Weights & Biases) get only the
        validations of later steps."""
        try:
            rows = read_rows(self.run, VALIDATION_FILE, check_validation)
        except Exception:
            return first_step
        return max((row["step"] for row in rows if row["step"] <= first_step), default=-1)

    def begin(self, first_step: int, start: dict[str, Any]) -> None:
        """Write `starts.jsonl`, which has a row for each start of the run (it is started again when it resumes): first
        the rows of earlier starts up to the step `first_step` at which this start continues, and then `start`, the row
        of this start."""
        earlier = read_rows(self.run, STARTS_FILE, check_start) if first_step else []
        is_start = "time" in start and first_step < start["total_steps"]  # a finished run gets no further starts
        self.run.starts = [own for own in earlier if own["step"] <= first_step] + ([start] if is_start else [])
        if self.run.starts == earlier and not is_start:
            return  # the files of a finished run are not changed
        replace_lines(self.run.folder / STARTS_FILE, map(json.dumps, self.run.starts))

    def add(self, row: dict[str, Any]) -> None:
        """Add the metrics of a step, a row of `metrics.jsonl`, to the training's curves, and write the page
        `report.html` if it is due."""
        try:
            self.run.history.add(row)
        except Exception as error:
            self.warn(error)
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write the page `report.html`, and choose the time at which it may be written again."""
        started = time.monotonic()
        try:
            self.look_at_validations()
            self.run.status = read_status(self.run.folder) or {}
            put_page(self.path, report_page(self.run, thumbnail), self.run.folder)
        except Exception as error:
            self.warn(error)
        ended = time.monotonic()
        self.due = ended + max(PAUSE, (ended - started) / SHARE)

    def look_at_validations(self) -> None:
        """Read the results of validations in `validation.jsonl` if the file has changed, and pass new rows to the
        trackers (TensorBoard, Weights & Biases)."""
        try:
            found = os.stat(self.run.folder / VALIDATION_FILE)
        except OSError:
            return
        if (found.st_mtime_ns, found.st_size) == self.seen:
            return
        self.seen = found.st_mtime_ns, found.st_size
        rows = validations_until(read_rows(self.run, VALIDATION_FILE, check_validation), self.run.history.step)
        for row in rows:
            if row["step"] > self.last_reported:
                self.on_validation(row)
                self.last_reported = row["step"]
        self.run.validations = thinned(rows)

    def warn(self, error: Exception) -> None:
        """Log a warning with `error` that the page `report.html` cannot be written, but only the first time."""
        if not self.failed:
            self.failed = True
            log().warning("%s cannot be written (%s: %s)", self.path, type(error).__name__, error)


def rewrite_page(folder: Path) -> None:
    """Write the HTML page `report.html` of a training run anew from the files in the run's folder. Used by a process
    that ends before it has finished a step."""
    if not os.path.isfile(folder / STARTS_FILE) and not os.path.isfile(folder / METRICS_FILE):
        return
    try:
        put_page(folder / REPORT_FILE, report_page(read_run(folder, is_own=True), thumbnail), folder)
    except Exception as error:
        log().warning("%s cannot be written (%s: %s)", folder / REPORT_FILE, type(error).__name__, error)
