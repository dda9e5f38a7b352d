"""Multiple choice, scored like LLaVA's eval_science_qa.py."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

LETTERS = "ABCDE"
SENTENCE = re.compile(r"The answer is ([A-Z]).")
"""One character, whichever, must follow the letter."""


@dataclass(frozen=True)
class ChoiceScores:
    """Counts over questions; invalid answers count as wrong."""

    questions: int
    right: int
    invalid: int

    @property
    def accuracy(self) -> float | None:
        """None without questions."""
        return self.right / self.questions if self.questions else None


def chosen(answer: str, choices: int) -> int | None:
    """The choice that an answer names, from 0; None if it names none of them.

    It is named by a letter alone (`B`), by a letter before a period and a space (`B. a cat`), or by `The answer is B.`
    anywhere, but only once. Other forms, such as `(B)`, `B.`, `b` or the choice's own words, name none.

    Args:
        choices: number of choices; letters behind them name none.
    """
    if answer in tuple(LETTERS):
        letter = answer
    elif answer[:1] in tuple(LETTERS) and answer[1:3] == ". ":
        letter = answer[0]
    else:
        named = SENTENCE.findall(answer)
        letter = named[0] if len(named) == 1 else ""
    return LETTERS.index(letter) if letter and letter in LETTERS[:choices] else None


def score_choices(picked: Sequence[int | None], right: Sequence[int]) -> ChoiceScores:
    """Compare choices, as `chosen` reads them, with the right ones.

    Raises:
        ValueError: their numbers differ.
    """
    pairs = list(zip(picked, right, strict=True))
    return ChoiceScores(len(pairs), sum(p == r for p, r in pairs), sum(p is None for p, _ in pairs))
