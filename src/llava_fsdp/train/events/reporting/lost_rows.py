"""Find rows of finished steps that a run's JSON Lines files lack when it continues, because a file was truncated,
emptied or damaged."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llava_fsdp.config.command_line.renamed import present_row
from llava_fsdp.report.run_reader import METRICS_FILE, STARTS_FILE, VALIDATION_FILE
from llava_fsdp.runtime.files.jsonl import read_rows
from llava_fsdp.runtime.files.run_dir import FOLDER, folder_name
from llava_fsdp.runtime.files.safe_load import SMALL
from llava_fsdp.runtime.files.small_json import object_or_none

SKIPPED_FILE = "skipped_records.jsonl"
MOST_RANGES = 8
"""Maximum number of ranges of steps that a message names."""


def lost_rows(folder: Path, step: int) -> list[str]:
    """Return a message for each JSON Lines file (metrics, skipped records, validations) that lacks rows of finished
    steps.

    Steps before the first start in this folder are not checked: a run that continues from a checkpoint in another
    folder has no rows for them. Validations are checked only for steps after the last start, because `val.every` is
    known only for these, and only before `step`, because the validation of `step` itself may not be done yet. `step`:
    the step after which the run continues. Raises OSError if a file cannot be read."""
    checkpoint = folder / FOLDER / folder_name(step)
    starts = steps_in(folder / STARTS_FILE, step - 1)
    if not starts and not checkpoint.is_dir():
        return []
    begin = min(starts, default=0)
    messages = []
    if not starts:
        messages.append(f"{STARTS_FILE} has no start before step {step}")
    rows = {row["step"]: row for row in rows_until(folder / METRICS_FILE, step)}
    steps = range(begin + 1, step + 1)
    if missing := [number for number in steps if number not in rows]:
        messages.append(
            f"{METRICS_FILE} lacks the rows of {len(missing)} of {len(steps)} steps ({format_ranges(missing)})"
        )
    num_listed = Counter(row["step"] for row in rows_until(folder / SKIPPED_FILE, step))
    if incomplete := [number for number in steps if num_listed[number] < skipped_in(rows.get(number, {}))]:
        messages.append(
            f"{SKIPPED_FILE} lacks records that {METRICS_FILE} counts, of steps {format_ranges(incomplete)}"
        )
    validated = set(steps_in(folder / VALIDATION_FILE, step))
    due_steps = due_between(
        max(starts, default=step), step, object_or_none(checkpoint / "state.json", largest=SMALL) or {}
    )
    if missing := [number for number in due_steps if number not in validated]:
        messages.append(f"{VALIDATION_FILE} lacks the rows of steps {format_ranges(missing)}")
    return messages


def due_between(begin: int, end: int, facts: dict[str, Any]) -> range:
    """Return the steps after `begin` and before `end` after which a validation was due. `facts`: the content of a
    checkpoint's `state.json`, which has the configuration."""
    config = facts.get("config")
    val = config.get("val") if isinstance(config, dict) else None
    every = val.get("every") if isinstance(val, dict) else None
    if type(every) is not int or every < 1:
        return range(0)
    return range((begin // every + 1) * every, end, every)


def skipped_in(row: dict[str, Any]) -> int:
    """Return how many rows of `skipped_records.jsonl` belong to a row of `metrics.jsonl`."""
    counts = [present_row(row).get("skipped_records"), row.get("unlabelled")]
    return sum(count for count in counts if type(count) is int)


def rows_until(path: Path, last: int) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if type(row.get("step")) is int and row["step"] <= last]


def steps_in(path: Path, last: int) -> list[int]:
    return [row["step"] for row in rows_until(path, last)]


def format_ranges(steps: Iterable[int]) -> str:
    """Format sorted steps as ranges, such as `1 to 16, 20`; at most `MOST_RANGES` are named."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    ranges = [f"{first} to {last}" if last > first else str(first) for first, last in found[:MOST_RANGES]]
    more = len(found) - MOST_RANGES
    return ", ".join(ranges) + (f" and {more} more stretches" if more > 0 else "")
