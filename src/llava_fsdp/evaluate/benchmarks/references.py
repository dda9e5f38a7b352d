"""Check the right answers to a benchmark's questions, as question files and annotation files give them, and convert
them to texts."""

from typing import Any

from llava_fsdp.config import Task
from llava_fsdp.data.records.record import shown
from llava_fsdp.evaluate.benchmarks.scoring import LETTERS
from llava_fsdp.runtime.errors import DataError


def answers_in_entry(raw: dict[str, Any], task: Task, where: str) -> tuple[tuple[str, ...], int]:
    """Return the right answers in an entry of a benchmark's question file (empty if it has none), and the number of
    choices (0 if the benchmark is not multiple choice).

    The right answers are under the key `label` (yes_no), `answer`, with or without `choices` (multiple_choice), or
    `answers` (other kinds of benchmark).

    Args:
        raw: the parsed entry.
        task: kind of the benchmark.
        where: file and place of the entry, for error messages.

    Raises:
        DataError: the value of one of these keys has the wrong form.
    """
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
    """Return the letter of the right choice of a multiple-choice question. Raise DataError if `raw` does not give it.

    Args:
        raw: the letter, or the number of the choice, from 0.
        choices: number of choices.
        where: file and place of the question, for the message.
    """
    letter = LETTERS[raw] if type(raw) is int and 0 <= raw < choices else raw
    if not isinstance(letter, str) or letter not in tuple(LETTERS[:choices]):
        raise DataError(
            f"{where}: answer is {shown(raw)}; it must be a letter from A to {LETTERS[choices - 1]}, or a number from 0"
        )
    return letter


def texts_of(raw: object, where: str) -> tuple[str, ...]:
    """Return the texts of a benchmark question's right answers. Raise DataError if `raw` has another form.

    Args:
        raw: a list of texts, or a list of objects that have the text under the key `answer`, as in VQAv2 and VizWiz.
        where: file and place of the question, for the message.
    """
    found = [a.get("answer") if isinstance(a, dict) else a for a in raw] if isinstance(raw, list) else []
    if not found or not all(isinstance(a, str) for a in found):
        raise DataError(f"{where}: answers is {shown(raw)}; it must be a list of texts, or of objects with answer")
    return tuple(str(a) for a in found)


def yes_or_no(raw: object, where: str) -> str:
    if raw not in ("yes", "no"):
        raise DataError(f"{where}: label is {shown(raw)}; it must be yes or no")
    return str(raw)


def rows_of(raw: object, where: str) -> list[dict[str, Any]]:
    """Return `raw` if it is a list of JSON objects; raise DataError if it is not. `where` names its file and key in the
    message."""
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        raise DataError(f"{where} is {shown(raw)}; it must be a list of objects")
    return raw
