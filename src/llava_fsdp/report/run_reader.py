"""Read a training's output folder: metrics, configuration, how it was started and how it ended. Imports no torch.

The training may still be running, may have been killed, or may run on another machine. Incomplete lines are counted and
skipped. A folder that is not the output folder of a training is refused.
"""

import contextlib
import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llava_fsdp.config.command_line.renamed import present_row, present_tree
from llava_fsdp.config.command_line.tree import dotted
from llava_fsdp.report.charts.downsample import WINDOW, RunHistory
from llava_fsdp.runtime.errors import ConfigError, DataError, LlavaFsdpError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.run_dir import is_known_free
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs
from llava_fsdp.runtime.files.scores_file import read_scores
from llava_fsdp.runtime.files.small_json import BadJson, Kinds, MissingJson, read_object
from llava_fsdp.runtime.files.status_file import KILLED, is_without_end, mode_of, status_of
from llava_fsdp.runtime.text.humanize import format_time
from llava_fsdp.runtime.text.redact import redact_values, secrets_of
from llava_fsdp.runtime.text.terminal_text import shown_text

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
STARTS_FILE = "starts.jsonl"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
JOB_FILE = "job.json"
JOB: dict[str, Kinds] = {
    "number": (int,), "overrides": (list,), "exit_code": (int, type(None)), "reason": (str, type(None)),
    "has_own_run": (bool, type(None)), "value": (float, type(None)), "metric": (str, type(None)),
    "last_steps": (int, type(None)),
}  # fmt: skip
"""Allowed types of the values in a sweep's job.json."""
LONGEST_LINE = 1 << 22
"""Maximum number of characters of a line; a validation with its answers has a few thousand."""
MOST_VALIDATIONS = 2000


@dataclass
class RunRecord:
    """What was read from a training's output folder."""

    folder: Path
    name: str
    history: RunHistory = field(default_factory=RunHistory)
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Each start of the run in order, with versions, device, command and so on (`run_info.py`)."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Entries of results.json (`scores_file.py`)."""
    status: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Value by dotted key."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """What the overrides of a sweep's job set: value by dotted key."""
    value: float | None = None
    """The value that the sweep minimises, if this is a finished job of a sweep."""
    metric: str | None = None
    """The name of the metric from which `value` comes, if this is a job of a sweep."""
    unread: dict[str, int] = field(default_factory=dict)
    """File name -> number of lines that could not be read."""

    @property
    def about(self) -> dict[str, Any]:
        """The most recent of `starts`; empty if the run has no starts."""
        return self.starts[-1] if self.starts else {}

    @property
    def num_lost(self) -> int:
        """Number of steps without a row in metrics.jsonl, because the file was truncated or damaged."""
        first = min((start["step"] for start in self.starts), default=0)
        return max(0, self.history.last_step - first - self.history.num_rows) if self.starts else 0

    @property
    def end(self) -> dict[str, Any]:
        """Status of the last start of the run that took steps. If the latest start ended before its first step, this
        is its entry `before`, the status of the previous start."""
        before = self.status.get("before")
        is_refused = self.status.get("status") not in ("running", "stopping", "done")
        return before if is_refused and isinstance(before, dict) else self.status

    @property
    def state(self) -> str:
        return str(self.end.get("status", "unknown"))

    @property
    def reason(self) -> str:
        """Why the training ended. If a later start failed before its first step, also why that start failed."""
        reason = str(self.end.get("reason") or "")
        # A start that fails before its first step leaves its status in `refused` if the run had finished before.
        # Otherwise its status replaces the run's (`status`), and `end` is the one before it.
        refused = self.status.get("refused") if self.end is self.status else self.status
        if not isinstance(refused, dict):
            return reason
        later = f"{refused.get('status')} before its first step: {refused.get('reason') or ''}"
        return f"{reason + '; ' if reason else ''}a later start: {later}"


def read_run(folder: Path, name: str | None = None, is_own: bool = False, window: int = WINDOW) -> RunRecord:
    """Read everything in a training's output folder except the weights.

    Args:
        name: name of the training on pages; None: the last two parts of the folder's path.
        is_own: whether this process runs, or ran, the training. If not, the folder's lock shows whether it was killed.
        window: number of steps over which the last loss and the lowest loss are averaged.

    Raises:
        ConfigError: the folder is missing or not the output folder of a training, or its configuration cannot be read.
        DataError: none of its metrics can be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the output_dir of a training, or the folder of a sweep")
    files = (METRICS_FILE, STARTS_FILE, "run_status.json")
    if not any((folder / file).is_file() for file in files):
        raise ConfigError(
            f"{folder} is not the output_dir of a training: it has none of {', '.join(files)}; give such a folder, or "
            "that of a sweep"
        )
    run = RunRecord(folder, name or name_of(folder), RunHistory(window))
    read_metrics(run)
    run.starts = read_rows(run, STARTS_FILE, check_start)
    run.validations = thin_out(read_validations(run))
    run.evaluations = read_scores(folder)
    run.status = status_or_why(folder)
    # a status without an end, and nobody holds the lock
    if not is_own and is_without_end(run.status) and is_known_free(folder):
        run.status = {**run.status, "status": KILLED}
    run.config = read_config(folder / CONFIG_FILE)
    return run


def status_or_why(folder: Path) -> dict[str, Any]:
    """Return the content of the status file; empty without one. If it cannot be read, the status is `unknown`."""
    try:
        return status_of(folder)
    except MissingJson:
        return {}
    except BadJson as error:
        return {"status": "unknown", "reason": str(error)}


def runs_in(folder: Path) -> list[RunRecord]:
    """Read the training in a folder or, if it is that of a sweep, those of all its jobs in order."""
    jobs = [] if (folder / JOB_FILE).is_file() or not folder.is_dir() else sorted(job_files(folder))
    if not jobs:
        return [read_run(folder)]
    jobs_and_folders = sorted(((read_job(path), path.parent) for path in jobs), key=lambda pair: pair[0]["number"])
    names = job_names([(job["number"], job["overrides"]) for job, _ in jobs_and_folders])
    return [run_of_job(job, path, name) for (job, path), name in zip(jobs_and_folders, names, strict=True)]


def job_files(folder: Path) -> Iterator[Path]:
    """Yield each job.json of a sweep; they may be several folders deep (hydra.sweep.subdir)."""
    return folder.glob(f"**/{JOB_FILE}")


def read_job(path: Path) -> dict[str, Any]:
    """Return the content of a job.json. Raise ConfigError if the file is not what a sweep writes."""
    try:
        job = read_object(path, JOB)
        if not all(isinstance(word, str) for word in job["overrides"]):
            raise BadJson(f"{path} cannot be read: its 'overrides' are not texts")
        return job
    except BadJson as error:
        raise ConfigError(
            f"{error}; it is not what a sweep writes of a job: remove its folder, or name the runs one by one"
        ) from error


def run_of_job(job: dict[str, Any], folder: Path, name: str) -> RunRecord:
    """Read the training of a job of a sweep from its folder. It has no metrics if the folder cannot be read, or if the
    job ended before its first step (`has_own_run` is false): then the folder may hold an earlier run with other
    overrides. `job`: content of its job.json; `name`: its name on pages."""
    status = {"status": "failed" if job.get("exit_code") else "unknown", "reason": str(job.get("reason") or "")}
    run = RunRecord(folder, name, status=status)
    if job.get("has_own_run", True):
        try:
            run = read_run(folder, name, window=max(1, job.get("last_steps") or WINDOW))
        except LlavaFsdpError as error:  # a ConfigError only says that the job wrote no run, which its status shows
            status["reason"] = status["reason"] or ("" if isinstance(error, ConfigError) else str(error))
    run.overrides = parse_overrides(job["overrides"])
    run.metric = str(job.get("metric") or "loss")
    run.value = None if job.get("exit_code") else job.get("value")  # a job that failed cannot be the best
    return run


def job_names(jobs: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """Return a name for each job (number, Hydra overrides) of a sweep: its number, and those of its overrides that not
    all jobs have."""
    overrides_of_jobs = own_overrides([overrides for _, overrides in jobs])
    return [
        f"{number}: {' '.join(words) or 'as the others'}"
        for (number, _), words in zip(jobs, overrides_of_jobs, strict=True)
    ]


def own_overrides(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return for each job its overrides that not all jobs have; all of them for a single job."""
    count = Counter(override for overrides in jobs for override in set(overrides))
    return [[word for word in overrides if count[word] < len(jobs) or len(jobs) == 1] for overrides in jobs]


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return {key: value} of Hydra overrides. Values are parsed, so that 1e-4 equals 0.0001 in a configuration."""
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.lstrip("+").partition("=")
        if equals and not key.startswith("~"):
            values[key] = parse_value(text)
    return values


def parse_value(text: str) -> int | float | bool | str | None:
    """Parse the value of a Hydra override. Hydra writes those of a sweep's jobs with Python's constants."""
    constants = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
    if text in constants:
        return constants[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text[1:-1] if text[:1] in ("'", '"') and text[-1:] == text[:1] else text


def name_of(folder: Path) -> str:
    """Return the last two parts of a folder's path; one would often be the same for several trainings."""
    return "/".join(folder.resolve().parts[1:][-2:])


def read_metrics(run: RunRecord) -> None:
    """Read metrics.jsonl into `run.history`, and count the lines that cannot be read in `run.unread`. Raise DataError
    if there are such lines, and no line describes a training step. A file without lines is no error."""
    path, first_problem = run.folder / METRICS_FILE, ""
    for number, line in lines_of(path):
        try:
            # `present_row` gives columns of older versions their present names
            run.history.add(present_row(json.loads(line)))
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            first_problem = first_problem or f"line {number}: {str(error)[:200]}"
            run.unread[path.name] = run.unread.get(path.name, 0) + 1
    if run.unread.get(path.name) and not run.history.num_rows:
        raise DataError(
            f"{path} has {run.unread[path.name]} lines, and none is a step of a training ({first_problem}); is this "
            "the output_dir of one?"
        )


def read_validations(run: RunRecord) -> list[dict[str, Any]]:
    """Return a row of validation.jsonl for each validated step, up to the last step that `read_metrics` has read."""
    return validations_until(read_rows(run, VALIDATION_FILE, check_validation), run.history.last_step)


def read_rows(run: RunRecord, name: str, check: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Return the JSON objects in the JSON Lines file `name` of a run's folder. Other lines, and objects for which
    `check` raises an error, are left out and counted in `run.unread`."""
    rows = []
    for _, line in lines_of(run.folder / name):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            check(row)
            rows.append(row)
        except (ValueError, OverflowError, OSError, RecursionError, TypeError, KeyError, AttributeError):
            run.unread[name] = run.unread.get(name, 0) + 1
    return rows


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each line that is not blank; nothing if there is no file. Raise DataError if the
    file cannot be read."""
    if not path.is_file():
        return
    try:
        with path.open(errors="replace") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), ""), start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def check_start(row: dict[str, Any]) -> None:
    """Raise ValueError, naming the field, if a field of the row that a run writes at its start is malformed, and
    KeyError if `step` or `time` is missing. Other fields may be absent."""
    if type(row["step"]) is not int:
        raise ValueError("step")
    for name, kind in (("versions", dict), ("trains", list), ("recipe", list), ("at_rest", dict)):
        if not isinstance(row.get(name, kind()), kind):
            raise ValueError(name)
    for name in ("trains", "recipe"):
        if not all(isinstance(cells, list) and len(cells) == 3 for cells in row.get(name, [])):
            raise ValueError(name)
    if not are_numbers([*row.get("at_rest", {}).values(), row.get("planned_peak")]):
        raise ValueError("a size is not a number")
    format_time(row["time"])  # raises an error if it is not a time


def check_validation(row: dict[str, Any]) -> None:
    """Raise ValueError if a field of the row that a validation writes is malformed, KeyError if `step` is missing."""
    if type(row["step"]) is not int:
        raise ValueError("step")
    sources = (row.get("sources") or {}).values()
    values = [
        values_of_source.get(key)
        for values_of_source in (row, *sources)
        for key in ("loss", "score", "label_tokens", "questions")
    ]
    if not are_numbers([*values, row.get("thoughts_cut")]):
        raise ValueError("a loss or score is not a number")
    if not all(isinstance(answer, dict) for answer in row.get("answers") or []):
        raise ValueError("answers")


def are_numbers(values: list[Any]) -> bool:
    """Return whether each value is a finite number or None."""
    return all(value is None or (type(value) in (int, float) and math.isfinite(value)) for value in values)


def validations_until(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the last row of each step up to `step`, in the order of steps. Rows of later steps were written before the
    training resumed from an earlier step."""
    by_step = {row["step"]: row for row in rows if row["step"] <= step}
    return [by_step[step] for step in sorted(by_step)]


def thin_out(rows: list[dict[str, Any]], most: int = MOST_VALIDATIONS) -> list[dict[str, Any]]:
    """Return every n-th row including the last one, at most `most`."""
    interval = -(-len(rows) // most) or 1
    return rows[::-1][::interval][::-1]


def read_config(path: Path) -> dict[str, Any]:
    """Return the values in a config.yaml by dotted key, with secrets hidden; empty if the file does not exist. Keys
    that had other names in older versions get their present names. Raise ConfigError if the file is not YAML."""
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(refuse_yaml_bombs(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error
    return redact_values(dotted(present_tree(tree)), secrets_of()) if isinstance(tree, dict) else {}


def put_page(path: Path, page: str, *folders: Path) -> None:
    """Write a page atomically. Only users who may read the metrics in all `folders` may read it."""
    modes = [mode_of(folder / METRICS_FILE) for folder in folders]
    replace_file(path, shown_text(page).encode(), functools.reduce(operator.and_, modes))
