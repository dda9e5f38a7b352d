"""What came of a sweep, from the runs' own metrics: a table, `results.json`, a picture and a page. Imports no torch."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from llava_fsdp.report.compare_page import comparison_page
from llava_fsdp.report.run_reader import (
    METRICS_FILE,
    REPORT_FILE,
    VALIDATION_FILE,
    job_names,
    own_overrides,
    put_page,
    runs_in,
)
from llava_fsdp.runtime.console import TextConsole
from llava_fsdp.runtime.errors import ExitCode, LlavaFsdpError
from llava_fsdp.runtime.jsonl import read_rows, replace_lines
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.run_dir import restored_umask
from llava_fsdp.sweep.curves import Curve, draw
from llava_fsdp.sweep.job import Job
from llava_fsdp.sweep.run_metrics import number
from llava_fsdp.sweep.torchrun import LOG_FILE

RESULTS_FILE = "results.json"
PICTURE_FILE = "results.svg"
GIB = 1 << 30
# Column, and what it says of a job; a column that says nothing of any job is left out.
COLUMNS: dict[str, Callable[[Job], str | None]] = {
    "loss": lambda job: shown(job.numbers.loss, ".4f"),
    "val loss": lambda job: shown(job.numbers.val_loss, ".4f"),
    "val score": lambda job: shown(job.numbers.val_score, ".4f"),
    "steps": lambda job: str(job.numbers.steps) if job.numbers.steps else None,
    "tokens/s": lambda job: shown(job.numbers.tokens_per_second, ",.0f"),
    "memory": lambda job: None if (n := job.numbers.peak_memory_bytes) is None else f"{n / GIB:.2f} GiB",
    "training": lambda job: f"{job.numbers.train_seconds:,.0f} s" if job.numbers.steps else None,
}


@restored_umask()
def write_results(folder: Path, jobs: Sequence[Job]) -> None:
    """Write what came of all jobs into the sweep's folder; a disk that refuses costs the files, not the sweep."""
    if not jobs:
        return
    if any(job.private for job in jobs):
        os.umask(0o077)
    best = best_of(jobs)
    said = {
        "metric": jobs[0].metric,
        "best": None if best is None else best.number,
        "jobs": [{**asdict(job), "differs": own} for job, own in zip(jobs, differing(jobs), strict=True)],
    }
    try:
        replace_lines(folder / RESULTS_FILE, [json.dumps(said, indent=2)])
        replace_lines(folder / PICTURE_FILE, [picture(jobs)])
    except (OSError, LlavaFsdpError) as error:
        log().error("the results cannot be written to %s: %s", folder, error)
        return
    log().info("results: %s", ", ".join(str(folder / name) for name in (RESULTS_FILE, PICTURE_FILE)))
    write_page(folder)


def write_page(folder: Path) -> None:
    """The page of all jobs; whatever is wrong with it costs neither the table nor the exit code of the sweep."""
    path = folder / REPORT_FILE
    try:
        put_page(path, comparison_page(runs_in(folder)), folder)
        log().info("page: %s", path)
    except Exception as error:
        log().warning("%s cannot be written (%s: %s)", path, type(error).__name__, error)


def best_of(jobs: Sequence[Job]) -> Job | None:
    """Of those that are done; the first of equals."""
    done = [job for job in jobs if job.is_done and job.value is not None]
    return min(done, key=lambda job: job.value or 0.0, default=None)


def differing(jobs: Sequence[Job]) -> list[list[str]]:
    return own_overrides([job.overrides for job in jobs])


def show(jobs: Sequence[Job]) -> None:
    """The table at the end, and why jobs failed, on standard output."""
    if not jobs:
        return
    best = best_of(jobs)
    wide = None if sys.stdout.isatty() else 160
    said = {name: [own(job) for job in jobs] for name, own in COLUMNS.items()}
    said = {name: own for name, own in said.items() if any(value is not None for value in own)}
    table = Table("job", "what differs", "status", *said, "folder", title="sweep", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a folder must stay whole to be copied
        column.justify = "right" if column.header in said else "left"
    for place, (job, differs) in enumerate(zip(jobs, differing(jobs), strict=True)):
        values = [own[place] or "-" for own in said.values()]
        table.add_row(f"{job.number}", " ".join(differs), status(job, job is best), *values, job.folder)
    console = TextConsole(width=wide)
    console.print(table)
    if best is not None and len(jobs) > 1:
        differs = " ".join(differing(jobs)[jobs.index(best)])
        console.print(f"best by {best.metric}: job {best.number}: {differs}")
    for job in jobs:
        if not job.is_done:
            where = f"\n  log: {job.folder}/{LOG_FILE}" if job.command else ""
            console.print(f"job {job.number} {status(job)}: {job.reason}{where}")


def status(job: Job, is_best: bool = False) -> str:
    if job.is_done:
        return "done, best" if is_best else "done"
    return "stopped" if job.exit_code == ExitCode.STOPPED else f"failed ({job.status})"


def picture(jobs: Sequence[Job]) -> str:
    """Losses of all jobs over the steps, as SVG; those of validations as points, where there are any."""
    curves = []
    for job, name in zip(jobs, job_names([(job.number, job.overrides) for job in jobs]), strict=True):
        names = (METRICS_FILE, VALIDATION_FILE)
        steps, validations = (read_rows(Path(job.folder) / own) if job.has_own_run else [] for own in names)
        points, marks = (
            [(float(row["step"]), loss) for row in rows if (loss := number(row, "loss")) is not None and "step" in row]
            for rows in (steps, validations)
        )
        curves.append(Curve(name, points, marks, "" if job.is_done else status(job)))
    return draw(curves, "training loss" + ("; points: validation loss" if any(c.marks for c in curves) else ""))


def shown(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
