"""Compute the best accuracy that answers without any image can reach: each question gets the answer that is right most
often among the questions of the same text. A model whose accuracy is no higher may not use its images at all."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from llava_fsdp.config import Task
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.evaluate.benchmarks import scoring
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.evaluate.results import SCORES, members_of

NORMALIZE: Mapping[Task, Callable[[str], str]] = MappingProxyType({
    Task.conversations: lambda text: text.strip().lower(),
    Task.vqa: lambda text: scoring.normalize_vqa(scoring.prepare_submission(text)),
    Task.textvqa: scoring.prepare_submission,
    Task.multiple_choice: lambda text: text,
    Task.yes_no: lambda text: text,
})  # fmt: skip
"""Task -> function that changes an answer's text. Two answers that the task's score does not distinguish become the
same text."""


def text_of(question: BenchmarkQuestion) -> tuple[str | None, str]:
    """Return what is known of a question without its images: its system text and its text."""
    return question.system, question.text.replace(IMAGE_TAG, "").strip()


def count_texts(questions: Sequence[BenchmarkQuestion]) -> int:
    return len({text_of(question) for question in questions})


def guesses_of(task: Task, questions: Sequence[BenchmarkQuestion]) -> list[str]:
    """Return, for each question, the answer that is right most often among the questions of the same text. All
    questions must have right answers.

    A right answer of a question counts as much as it scores there: 1 if it is the only one; if ten people have
    answered, more if more of them agree. Answers that the score does not distinguish are counted together. If several
    answers are right equally often, the first in the order of the questions is taken.
    """
    normalize = NORMALIZE[task]
    counts: dict[tuple[str | None, str], Counter[str]] = {}
    as_written: dict[str, str] = {}
    for question in questions:
        count = counts.setdefault(text_of(question), Counter())
        # each different answer once, in the form in which it comes first
        for answer in {normalize(text): text for text in reversed(question.references)}.values():
            count[normalize(answer)] += SCORES[task]([question], [answer])["accuracy"]
            as_written.setdefault(normalize(answer), answer)
    best = {text: as_written[count.most_common(1)[0][0]] for text, count in counts.items()}
    return [best[text_of(question)] for question in questions]


def score_blind_guess(task: Task, questions: Sequence[BenchmarkQuestion]) -> tuple[float, dict[tuple[str, str], float]]:
    """Return the accuracy of the best blind guess (`guesses_of`: answers without looking at the images) of all
    questions, and {(kind, name) of a group: its accuracy}. A group's guess is made from its own right answers alone."""

    def accuracy(some_questions: Sequence[BenchmarkQuestion]) -> float:
        return SCORES[task](some_questions, guesses_of(task, some_questions))["accuracy"]

    groups = members_of(task, questions)
    return accuracy(questions), {
        group: accuracy([questions[index] for index in indices]) for group, indices in groups.items()
    }
