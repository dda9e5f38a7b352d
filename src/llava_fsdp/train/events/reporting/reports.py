"""Report the steps of a training: which reports there are, and in which order they get a step's row of metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.config.command_line.renamed import rename_old_files
from llava_fsdp.plan.time.mfu import Utilization
from llava_fsdp.runtime.files.status_file import read_status
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.reporting.console import Console
from llava_fsdp.train.events.reporting.live_page import LivePage
from llava_fsdp.train.events.reporting.lost_rows import lost_rows
from llava_fsdp.train.events.reporting.measured_steps import MeasuredSteps
from llava_fsdp.train.events.reporting.metrics import MetricsFile, metrics_row, storage_errors
from llava_fsdp.train.events.reporting.skipped_records import SkippedRecords
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.events.reporting.step_warnings import ExpertWarnings, LossWarnings, SampleWarnings
from llava_fsdp.train.events.reporting.trackers import PATIENCE, Trackers
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import StepResult, TrainState


class Reports(RunEvents):
    """Gives the row of `metrics.jsonl` of each step, which is made once, to the reports. Only rank 0 has any."""

    def __init__(
        self,
        reports: Sequence[StepReport] = (),
        utilization: Utilization | None = None,
        is_lost: Callable[[], bool] = lambda: False,
        folder: Path = Path(),
    ):
        """Take the reports that get a row of values after each step. On ranks other than 0 there are none.

        Args:
            reports: get each row, in this order.
            utilization: computes the MFU of a step; None if it is unknown.
            is_lost: whether the run's folder may belong to another run now, so that nothing may be written into it.
            folder: the run's folder, whose `run_status.json` has the exit code.
        """
        self.folder = folder
        self.reports = list(reports)
        self.utilization = utilization
        self.is_lost = is_lost

    def after_step(self, result: StepResult) -> None:
        """Give the step's row of `metrics.jsonl` to each report; not if the folder may belong to another run now."""
        if self.reports and not self.is_lost():
            row = metrics_row(result, self.utilization)
            for report in self.reports:
                report.step(row, result)

    def on_progress(self, text: str) -> None:
        for report in self.reports:
            report.progress(text)

    def after_validation(self, row: dict[str, Any]) -> None:
        for report in self.reports:
            report.validation(row)

    def on_end(self) -> None:
        for report in self.reports:
            report.on_end()

    def close(self) -> None:
        for report in self.reports:
            report.close()

    def end(self, patience: float = PATIENCE) -> None:
        """Report how the run has ended: the final page, and the exit code for the trackers, which have `patience`
        seconds. To be called after `run_status.json` is written."""
        status = (read_status(self.folder) or {}) if self.reports else {}
        for report in self.reports:
            report.end(int(status.get("exit_code") or 0), patience)


def open_reports(state: TrainState, cfg: Config, is_lost: Callable[[], bool] = lambda: False) -> Reports:
    """Open the files, the page and the trackers to which rank 0 reports a training that begins at the state's step."""
    folder, first_step = Path(cfg.output_dir), state.step
    with storage_errors(folder):
        rename_old_files(folder)
        for message in lost_rows(folder, first_step) if first_step else ():
            log().warning(
                "%s: %s: the file was truncated or damaged, and curves and sums lack these rows", folder, message
            )
    about = {**state.about, "run": state.run, "total_steps": state.loader.total_steps}
    metrics = MetricsFile(folder, first_step)
    skipped = SkippedRecords(folder, first_step, state.loader.steps.records.left_out())
    page = LivePage(cfg, first_step, about)
    trackers = Trackers(cfg, first_step, state.run, about, page.run.config)
    console = Console(cfg, first_step, state.loader.total_steps, sys.stderr.isatty())
    reports = [
        metrics,  # first, because the page's process reads the file
        page,
        trackers,
        skipped,
        ExpertWarnings(),
        LossWarnings(cfg.numeric.spike_sigma),
        SampleWarnings(),
        console,  # last: the warnings of a step stand above its line
    ]
    if state.utilization is not None:
        reports.append(MeasuredSteps(cfg, state.about, state.utilization.language.hidden_size, is_lost))
    return Reports(reports, state.utilization, is_lost, folder)
