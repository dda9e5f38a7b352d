"""Read and write `results.json` in a run's folder: the scores that its models reached in evaluations."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.errors import StorageError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.small_json import BadJson, Kinds, MissingJson, read_object, require_kinds

SCORES_FILE = "results.json"
QUESTIONS = "questions"
"""Key of the number of questions, among the scores of a task."""
KINDS: dict[str, Kinds] = {
    "run": (str, type(None)), "step": (int, type(None)), "task": (str,), "data": (str,),
    "questions": (int, type(None)), "limit": (int, type(None)), "scores": (dict,), "time": (str,),
}  # fmt: skip
"""Allowed types of the values of an evaluation's entry. `scores`: name -> number."""
TITLES = {
    "accuracy": "accuracy", "accuracy_blank_pictures": "with blank images", "accuracy_blind_guess": "best blind guess",
}  # fmt: skip
"""Scores that are shares of 1: name -> how it is shown."""
SAME = ("run", "step", "task", "data", "questions", "limit")
"""A new entry replaces an older one with the same values of these keys."""


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Return the scores of each evaluation that is recorded in a run's folder, in the order of their times; an
    empty list if there is no such file, or it cannot be read."""
    try:
        return entries_in(folder / SCORES_FILE)
    except BadJson:
        return []


def entries_in(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of scores; none without the file. Raises BadJson if it cannot be read."""
    try:
        found = read_object(path, {"evaluations": (list,)})
    except MissingJson:
        return []
    return [entry for entry in found["evaluations"] if is_entry(entry)]


def is_entry(entry: Any) -> bool:
    """Return whether a JSON value has the keys of an evaluation's scores."""
    try:
        require_kinds(entry, KINDS)
    except ValueError:
        return False
    return all(isinstance(value, int | float) for value in entry["scores"].values())


def scores_text(scores: Mapping[str, float]) -> str:
    """Return the scores of an evaluation as one line of text, without the number of questions."""
    shown = [
        f"{TITLES[name]} {value:.1%}" if name in TITLES and value <= 1 else f"{name} {value:.4g}"
        for name, value in scores.items()
        if name != QUESTIONS
    ]
    return ", ".join(shown)


def add_scores(folder: Path, entry: dict[str, Any]) -> None:
    """Record the scores of an evaluation in a run's folder. They replace those of the same model and questions. Raises
    StorageError if the file cannot be written, or an earlier one cannot be read."""
    path = folder / SCORES_FILE
    finite = {name: value for name, value in entry["scores"].items() if math.isfinite(value)}
    entry = {**entry, "scores": finite}
    key = [entry.get(name) for name in SAME]
    try:
        with locked_folder(folder):
            others = [other for other in entries_in(path) if [other.get(name) for name in SAME] != key]
            replace_file(path, json.dumps({"evaluations": [*others, entry]}, indent=1).encode(), 0o666)
    except (BadJson, OSError) as error:
        reason = why(error, folder) if isinstance(error, OSError) else str(error)
        raise StorageError(f"{path} cannot be read or written: {reason}") from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder, so that only one process of this machine adds scores to it, where the file
    system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
