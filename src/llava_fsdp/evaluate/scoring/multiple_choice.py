"""Multiple choice, read as LLaVA's eval_science_qa.py reads it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

LETTERS = "ABCDE"
SENTENCE = re.compile(r"The answer is ([A-Z]).")
"""Any character may follow the letter, but one must."""


@dataclass(frozen=True)
class ChoiceScores:
    """Of some questions; an invalid answer is a wrong one."""

    questions: int
    right: int
    invalid: int

    @property
    def accuracy(self) -> float | None:
        """None without questions."""
        return self.right / self.questions if self.questions else None


def chosen(answer: str, choices: int) -> int | None:
    """Which choice an answer names, from 0; None where it names none of them.

    It is named by a letter alone (`B`), by one before a period and a space (`B. a cat`), or by `The answer is B.`,
    anywhere but only once. Other forms, such as `(B)`, `B.`, `b` or the choice's own words, name none.

    Args:
        choices: how many there are; the letters after them name none.
    """
    if answer in tuple(LETTERS):
        letter = answer
    elif answer[:1] in tuple(LETTERS) and answer[1:3] == ". ":
        letter = answer[0]
    else:
        said = SENTENCE.findall(answer)
        letter = said[0] if len(said) == 1 else ""
    return LETTERS.index(letter) if letter and letter in LETTERS[:choices] else None


def score_choices(picked: Sequence[int | None], right: Sequence[int]) -> ChoiceScores:
    """Counts of what `chosen` read, beside the right choices.

    Raises:
        ValueError: there is not one right choice for every answer.
    """
    pairs = list(zip(picked, right, strict=True))
    return ChoiceScores(len(pairs), sum(p == r for p, r in pairs), sum(p is None for p, _ in pairs))
