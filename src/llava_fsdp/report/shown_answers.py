"""Choose which of a validation's answers are shown. Imports no torch."""

from collections.abc import Sequence
from typing import Any


def choose_answers(answers: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most `most` answers of a validation (as in validation.jsonl), in the order in which they are given.

    The data sources take turns, so that each gets an equal share, or all its answers if it has fewer. A missing source
    counts as one of its own. In a source, wrong answers (of a score below 1) come before right ones, and both are
    spread evenly over the source. The choice depends only on the arguments.
    """
    by_source: dict[str, list[int]] = {}
    for number, answer in enumerate(answers):
        by_source.setdefault(str(answer.get("source")), []).append(number)
    turns: list[tuple[int, int, int]] = []
    """(turn, place of the source, number of the answer) of every answer."""
    for place, numbers in enumerate(by_source.values()):
        # in this order, every beginning of the list is spread evenly over the source
        even = sorted(range(len(numbers)), key=bits_reversed)
        wrong_first = sorted(even, key=lambda place_in_numbers: answers[numbers[place_in_numbers]].get("score") == 1)
        turns += [(turn, place, numbers[place_in_numbers]) for turn, place_in_numbers in enumerate(wrong_first)]
    return [answers[number] for number in sorted(number for _, _, number in sorted(turns)[:most])]


def bits_reversed(number: int) -> int:
    """Return the number whose 32 bits are those of `number` in reverse order. Numbers sorted by it begin with 0,
    halfway, a quarter of the way and so on, so that every beginning of the sorted list is spread evenly."""
    return int(f"{number:032b}"[::-1], 2)
