"""Yes-no answers, scored like POPE (LLaVA's eval_pope.py); yes is the positive class."""

from collections.abc import Sequence
from dataclasses import dataclass

NEGATIONS = frozenset({"No", "no", "not"})


@dataclass(frozen=True)
class YesNoScores:
    """Counts and their rates; a rate whose divisor is 0 is 0, where the original fails."""

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
        """Share of right answers among those that say yes."""
        return rate(self.true_yes, self.true_yes + self.false_yes)

    @property
    def recall(self) -> float:
        """Share of answers that say yes among the questions where that is right."""
        return rate(self.true_yes, self.true_yes + self.false_no)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, from the counts, so that nothing is rounded in between."""
        return rate(2 * self.true_yes, 2 * self.true_yes + self.false_yes + self.false_no)

    @property
    def yes_ratio(self) -> float:
        """Share of answers that say yes; 1 for a model that always does."""
        return rate(self.true_yes + self.false_yes, self.questions)


def rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def says_yes(answer: str) -> bool:
    """Whether the first sentence has none of the words No, no and not. `NO`, an empty answer and `Maybe` say yes."""
    sentence = answer.partition(".")[0].replace(",", "")
    return NEGATIONS.isdisjoint(sentence.split(" "))


def score_yes_no(answers: Sequence[bool], right: Sequence[bool]) -> YesNoScores:
    """Compare answers, as `says_yes` reads them, with the right ones; True is yes.

    Raises:
        ValueError: their numbers differ.
    """
    pairs = list(zip(answers, right, strict=True))
    return YesNoScores(*(pairs.count(kind) for kind in ((True, True), (True, False), (False, False), (False, True))))
