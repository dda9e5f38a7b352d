"""Yes or no, read and counted as POPE does (LLaVA's eval_pope.py). Positive is yes."""

from collections.abc import Sequence
from dataclasses import dataclass

NEGATIONS = frozenset({"No", "no", "not"})


@dataclass(frozen=True)
class YesNoScores:
    """Counts, and the rates of them; a rate of nothing is 0 (the original divides by zero there)."""

    true_yes: int
    false_yes: int
    true_no: int
    false_no: int

    @property
    def questions(self) -> int:
        return self.true_yes + self.false_yes + self.true_no + self.false_no

    @property
    def accuracy(self) -> float:
        return rate(self.true_yes + self.true_no, self.questions)

    @property
    def precision(self) -> float:
        """The share of right ones among the answers that say yes."""
        return rate(self.true_yes, self.true_yes + self.false_yes)

    @property
    def recall(self) -> float:
        """The share of answers that say yes among the questions where that is right."""
        return rate(self.true_yes, self.true_yes + self.false_no)

    @property
    def f1(self) -> float:
        """Twice the product of precision and recall over their sum, without rounding in between."""
        return rate(2 * self.true_yes, 2 * self.true_yes + self.false_yes + self.false_no)

    @property
    def yes_ratio(self) -> float:
        """The share of answers that say yes: a model that always does has 1."""
        return rate(self.true_yes + self.false_yes, self.questions)


def rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def says_yes(answer: str) -> bool:
    """Whether the first sentence has none of the words No, no and not. `NO`, an empty answer and `Maybe` say yes."""
    sentence = answer.partition(".")[0].replace(",", "")
    return NEGATIONS.isdisjoint(sentence.split(" "))


def score_yes_no(said: Sequence[bool], right: Sequence[bool]) -> YesNoScores:
    """Counts of what `says_yes` read, beside the right answers (True: yes).

    Raises:
        ValueError: there is not one right answer for every answer.
    """
    pairs = list(zip(said, right, strict=True))
    return YesNoScores(*(pairs.count(kind) for kind in ((True, True), (True, False), (False, False), (False, True))))
