"""Write and print the results of a sweep: a table, `results.json` and a report page. Imports no torch."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from llava_fsdp.report.compare_page import comparison_page
from llava_fsdp.report.results import columns, metric_name
from llava_fsdp.report.run_reader import REPORT_FILE, own_overrides, put_page, runs_in
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.jsonl import replace_lines
from llava_fsdp.runtime.files.run_dir import restoring_umask
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log
from llava_fsdp.sweep.job import Job
from llava_fsdp.sweep.torchrun import LOG_FILE

RESULTS_FILE = "results.json"
PRINTED = ("steps", "loss", "lowest val loss", "best val score", "tokens/s", "memory", "training")
"""Columns of results in the printed table; a terminal has no room for the others."""


@restoring_umask()
def write_results(folder: Path, jobs: Sequence[Job]) -> None:
    """Write the results of all jobs, and the page that compares them, into a sweep's folder. If a job is private, only
    the owner can read them. An error is logged and does not end the sweep."""
    if not jobs:
        return
    if any(job.private for job in jobs):
        os.umask(0o077)
    best, path = best_of(jobs), folder / RESULTS_FILE
    results = {
        "metric": jobs[0].metric,
        "best": None if best is None else best.number,
        "jobs": [{**asdict(job), "differs": words} for job, words in zip(jobs, differing_overrides(jobs), strict=True)],
    }
    try:
        replace_lines(path, [json.dumps(results, indent=2)])
        log().info("results: %s", path)
    except (OSError, LlavaFsdpError) as error:
        log().error("the results cannot be written to %s: %s", folder, error)
    write_page(folder)


def write_page(folder: Path) -> None:
    """Write the HTML page that compares all jobs. An error is only logged."""
    path = folder / REPORT_FILE
    try:
        put_page(path, comparison_page(runs_in(folder)), folder)
        log().info("page: %s", path)
    except Exception as error:
        log().warning("%s cannot be written (%s: %s)", path, type(error).__name__, error)


def best_of(jobs: Sequence[Job]) -> Job | None:
    """Return the (first) job with the lowest `value`, which the sweep minimizes; None if no job has finished."""
    done = [job for job in jobs if job.is_done and job.value is not None]
    return min(done, key=lambda job: job.value or 0.0, default=None)


def differing_overrides(jobs: Sequence[Job]) -> list[list[str]]:
    """Return for each job its overrides that not all jobs have."""
    return own_overrides([job.overrides for job in jobs])


def print_results(jobs: Sequence[Job]) -> None:
    """Print a table of all jobs, the best of them, and why jobs failed."""
    if not jobs:
        return
    best, differences = best_of(jobs), differing_overrides(jobs)
    windows = [job.last_steps for job in jobs if job.numbers.loss is not None]
    texts_by_column = columns([job.numbers for job in jobs], windows, PRINTED)
    table = Table("job", "what differs", "status", *texts_by_column, "folder", title="sweep", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a folder must stay whole to be copied
        column.justify = "right" if column.header in texts_by_column else "left"
    for index, job in enumerate(jobs):
        values = [texts[index] or "-" for texts in texts_by_column.values()]
        table.add_row(f"{job.number}", " ".join(differences[index]), status(job, job is best), *values, job.folder)
    console = TextConsole(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if best is not None and len(jobs) > 1:
        metric, words = metric_name(best.metric, windows), " ".join(differences[jobs.index(best)])
        console.print(f"best by {metric}: job {best.number}: {words}")
    for job in jobs:
        if not job.is_done:
            where = f"\n  log: {job.folder}/{LOG_FILE}" if job.command else ""
            console.print(f"job {job.number} {status(job)}: {job.reason}{where}")


def status(job: Job, is_best: bool = False) -> str:
    """Return how a job ended, in words."""
    if job.is_done:
        return "done, best" if is_best else "done"
    return "stopped" if job.exit_code == ExitCode.STOPPED else f"failed ({job.status})"
