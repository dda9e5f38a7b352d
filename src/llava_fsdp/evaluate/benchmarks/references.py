"""Check the right answers that question files and annotation files give, and convert them to texts."""

from typing import Any

from llava_fsdp.config import Task
from llava_fsdp.data.records.record import shown
from llava_fsdp.evaluate.benchmarks.scoring import LETTERS
from llava_fsdp.runtime.errors import DataError


def answers_in_entry(raw: dict[str, Any], task: Task, where: str) -> tuple[tuple[str, ...], int]:
    """Return the right answers in an entry of a question file (empty if it has none), and the number of choices (0 if
    it is not multiple choice). The answers are under the key `label` (yes_no), `answer`, with or without `choices`
    (multiple_choice), or `answers` (other tasks). Raises DataError if a value has the wrong form."""
    match task:
        case Task.yes_no:
            return ((yes_or_no(raw["label"], where),) if "label" in raw else ()), 0
        case Task.multiple_choice:
            number = count_choices(raw["choices"], where) if "choices" in raw else len(LETTERS)
            return ((letter_of(raw["answer"], number, where),) if "answer" in raw else ()), number
        case _:
            return (texts_of(raw["answers"], where) if "answers" in raw else ()), 0


def count_choices(raw: object, where: str) -> int:
    if not isinstance(raw, list) or not 1 <= len(raw) <= len(LETTERS):
        raise DataError(f"{where}: choices is {shown(raw)}; it must be a list of 1 to {len(LETTERS)} choices")
    return len(raw)


def letter_of(raw: object, choices: int, where: str) -> str:
    """Return the letter of the right choice, given by `raw` as a letter or a number from 0; else raise DataError."""
    letter = LETTERS[raw] if type(raw) is int and 0 <= raw < choices else raw
    if not isinstance(letter, str) or letter not in tuple(LETTERS[:choices]):
        raise DataError(
            f"{where}: answer is {shown(raw)}; it must be a letter from A to {LETTERS[choices - 1]}, or a number from 0"
        )
    return letter


def texts_of(raw: object, where: str) -> tuple[str, ...]:
    """Return the right answers in a list of texts, or of objects with the text under the key `answer`, as in VQAv2 and
    VizWiz. Raise DataError if `raw` has another form."""
    texts = [a.get("answer") if isinstance(a, dict) else a for a in raw] if isinstance(raw, list) else []
    if not texts or not all(isinstance(a, str) for a in texts):
        raise DataError(f"{where}: answers is {shown(raw)}; it must be a list of texts, or of objects with answer")
    return tuple(str(a) for a in texts)


def yes_or_no(raw: object, where: str) -> str:
    if raw not in ("yes", "no"):
        raise DataError(f"{where}: label is {shown(raw)}; it must be yes or no")
    return str(raw)


def rows_of(raw: object, where: str) -> list[dict[str, Any]]:
    """Return `raw` if it is a list of JSON objects; raise DataError if not."""
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        raise DataError(f"{where} is {shown(raw)}; it must be a list of objects")
    return raw
