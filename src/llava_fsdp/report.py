"""A training as a page, or several side by side: `python -m llava_fsdp.report outputs/finetune`.

One run: its `report.html` is written anew. Several, or the folder of a sweep: one page of all of them. Reads what
trainings leave behind, whether they go on, have ended or were killed. Imports neither torch nor transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

from llava_fsdp.comparison_page import comparison_page
from llava_fsdp.errors import ConfigError, ExitCode, LlavaFsdpError, StorageError
from llava_fsdp.log import log, setup_logging
from llava_fsdp.report_page import report_page
from llava_fsdp.runs import JOB_FILE, REPORT_FILE, Run, name_of, put_page, read_run
from llava_fsdp.thumbnails import Thumbnails

USAGE = """\
usage: python -m llava_fsdp.report RUN [RUN...] [out=FILE]

RUN       the output_dir of a training; or the folder of a sweep, which stands for all of its jobs
out=FILE  where the page goes; otherwise RUN/report.html of a single run, and comparison.html of several
"""
COMPARISON = "comparison.html"


def main() -> None:
    setup_logging()
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(USAGE, end="")
        sys.exit(ExitCode.DONE if words else ExitCode.USER)
    try:
        print(write(words))
    except LlavaFsdpError as error:
        log().error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)


def write(words: list[str]) -> Path:
    """Write the page that a command line asks for, and say where.

    Raises:
        LlavaFsdpError: a RUN is none, or cannot be read; or the page cannot be written.
    """
    folders, out = parse(words)
    runs = [run for folder in folders for run in runs_in(folder)]
    is_one = len(runs) == 1 and runs[0].folder == folders[0]
    path = out or (runs[0].folder / REPORT_FILE if is_one else Path(COMPARISON))
    page = report_page(runs[0], Thumbnails()) if is_one else comparison_page(with_names_of_their_own(runs))
    try:
        put_page(path, page, runs[0].folder)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); give another file: out=FILE") from error
    return path


def parse(words: list[str]) -> tuple[list[Path], Path | None]:
    """RUNs, and where the page goes."""
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    folders = [Path(word) for word in words if not word.startswith("out=")]
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word} is no option; options are written key=value, and -h lists them")
    if given and not given[-1]:
        raise ConfigError("out= names no file; write out=FILE")
    if not folders:
        raise ConfigError("no RUN is named; give the output_dir of a training")
    return folders, Path(given[-1]) if given else None


def runs_in(folder: Path) -> list[Run]:
    """A folder's run, or those of a sweep's jobs in their order."""
    own = folder / JOB_FILE
    jobs = [] if own.is_file() or not folder.is_dir() else sorted(folder.glob(f"*/{JOB_FILE}"))
    if not jobs:
        return [read_run(folder)]
    found = [(read_job(path), path.parent) for path in jobs]
    return [run_of_job(job, path) for job, path in sorted(found, key=lambda one: one[0]["number"])]


def read_job(path: Path) -> dict[str, Any]:
    """Raises ConfigError where it is not what a sweep writes."""
    try:
        job = json.loads(path.read_text())
        if type(job["number"]) is int and all(isinstance(word, str) for word in job["overrides"]):
            return job
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{path} is not what a sweep writes of a job; remove its folder, or name the runs one by one")


def run_of_job(job: dict[str, Any], folder: Path) -> Run:
    """Also of a job that ended before it had a run."""
    name = f"{job['number']}: {' '.join(job['overrides'])}"
    try:
        return read_run(folder, name)
    except ConfigError:
        status = {"status": "failed" if job.get("exit_code") else "unknown", "reason": str(job.get("reason") or "")}
        return Run(folder, name, status=status)


def with_names_of_their_own(runs: list[Run]) -> list[Run]:
    """Whole paths, where names are not enough."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.name} ({run.folder.resolve()})" if run.name != name_of(run.folder) else str(run.folder)
    return runs


if __name__ == "__main__":
    main()
