"""Compute the scores of all answers and of groups of them, and arrange them in a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from llava_fsdp.config import Task
from llava_fsdp.evaluate.benchmarks import scoring
from llava_fsdp.evaluate.benchmarks.scoring import LETTERS
from llava_fsdp.evaluate.question import CATEGORY, BenchmarkQuestion
from llava_fsdp.runtime.files.scores_file import QUESTIONS

Numbers = dict[str, Any]
Questions = Sequence[BenchmarkQuestion]
Score = Callable[[Questions, Sequence[str]], Numbers]
BLANK, BLIND = "accuracy_blank_pictures", "accuracy_blind_guess"
"""Accuracies beside that of the model: of its answers to blank images, and of the best blind guess."""
COLUMNS = {
    "accuracy": "accuracy", BLANK: "blank images", BLIND: "blind guess", "invalid": "invalid", "precision": "precision",
    "recall": "recall", "f1": "f1", "yes_ratio": "yes ratio",
}  # fmt: skip
"""Columns of the table, in order: name of the score -> title. Scores that a task lacks have no column."""


def mean_of(accuracy: Callable[[str, Sequence[str]], float]) -> Score:
    """Return a score: the mean of `accuracy`, a function of an answer and the right answers to its question."""

    def score(questions: Questions, answers: Sequence[str]) -> Numbers:
        total = sum(accuracy(text, q.references) for q, text in zip(questions, answers, strict=True))
        return {"accuracy": total / len(questions)}

    return score


def score_letters(questions: Questions, answers: Sequence[str]) -> Numbers:
    """Return the scores of answers to multiple-choice questions; `invalid` counts answers that name no choice."""
    chosen_letters = [
        scoring.named_choice(text, q.choices or len(LETTERS)) for q, text in zip(questions, answers, strict=True)
    ]
    right = sum(choice == q.references[0] for q, choice in zip(questions, chosen_letters, strict=True))
    return {"accuracy": right / len(questions), "right": right, "invalid": chosen_letters.count(None)}


def score_yes(questions: Questions, answers: Sequence[str]) -> Numbers:
    """Return the scores of answers to yes-no questions, as POPE computes them."""
    says_yes = [scoring.says_yes(text) for text in answers]
    return scoring.score_yes_no(says_yes, [q.references[0] == "yes" for q in questions])


SCORES: dict[Task, Score] = {
    Task.conversations: mean_of(scoring.exact_match),
    Task.vqa: mean_of(scoring.vqa_accuracy),
    Task.textvqa: mean_of(scoring.textvqa_accuracy),
    Task.multiple_choice: score_letters,
    Task.yes_no: score_yes,
}


def groups_of(question: BenchmarkQuestion, task: Task) -> tuple[tuple[str, str], ...]:
    """Return the groups of a question that are also scored separately, as (kind, name). Multiple-choice questions are
    also grouped by whether they have an image."""
    if task is not Task.multiple_choice:
        return question.groups
    return (*question.groups, ("picture", "with" if question.images else "without"))


def members_of(task: Task, questions: Questions) -> dict[tuple[str, str], list[int]]:
    """Return the indices of the questions of each group, by (kind, name), sorted."""
    members: dict[tuple[str, str], list[int]] = {}
    for index, question in enumerate(questions):
        for group in groups_of(question, task):
            members.setdefault(group, []).append(index)
    return dict(sorted(members.items()))


def put_beside(result: Numbers, name: str, accuracy: float, groups: Mapping[tuple[str, str], float]) -> None:
    """Add another accuracy, with which the model's own is compared, under the key `name` to the scores `result` of all
    questions, and to those of each group, in place. `groups`: {(kind, name) of a group: that accuracy}."""
    result[name] = accuracy
    for (kind, group), value in groups.items():
        result["groups"][kind][group][name] = value


def score_all(task: Task, questions: Questions, answers: Sequence[str]) -> Numbers:
    """Return the scores of all answers by name, and, under the key `groups`, those of each group of questions: kind ->
    name -> scores. For yes-no questions with categories, `mean_f1` is the mean of the categories' F1, which POPE
    reports."""
    score = SCORES[task]
    groups: dict[str, dict[str, Numbers]] = {}
    for (kind, name), indices in members_of(task, questions).items():
        numbers = score([questions[i] for i in indices], [answers[i] for i in indices])
        groups.setdefault(kind, {})[name] = {"questions": len(indices)} | numbers
    total = score(questions, answers)
    if task is Task.yes_no and CATEGORY in groups:
        total["mean_f1"] = sum(group["f1"] for group in groups[CATEGORY].values()) / len(groups[CATEGORY])
    return total | ({"groups": groups} if groups else {})


def table_of(result: Numbers) -> Table:
    """Return scores as a table: a row for all questions and one for each group. Rates are in percent."""
    shown = [name for name in COLUMNS if name in result]
    table = Table(box=SIMPLE, pad_edge=False, title="scores in percent, of all and by group", title_justify="left")
    table.add_column("", no_wrap=True)
    for title in ("questions", *(COLUMNS[name] for name in shown)):
        table.add_column(title, justify="right", no_wrap=True)
    rows = [("all", result)]
    for kind, groups in result.get("groups", {}).items():
        rows += [(f"{kind}: {name}", numbers) for name, numbers in groups.items()]
    for name, numbers in rows:
        cells = [number_text(numbers[key]) for key in ("questions", *shown)]
        table.add_row(name, *cells, end_section=name == "all")
    return table


def table_of_tasks(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the scores of lmms-eval's tasks as a table, a row for each score, as lmms-eval computes it."""
    table = Table(box=SIMPLE, pad_edge=False, title="scores by lmms-eval", title_justify="left")
    for title in ("task", "questions", "score", "value"):
        table.add_column(title, justify="left" if title in ("task", "score") else "right", no_wrap=True)
    for task, numbers in scores.items():
        for name, value in numbers.items():
            if name != QUESTIONS:
                table.add_row(task, str(numbers.get(QUESTIONS) or ""), name, f"{value:.4f}")
    return table


def number_text(value: float) -> str:
    return f"{100 * value:.2f}" if isinstance(value, float) else f"{value:,}"


def submission_of(questions: Questions, answers: Sequence[str]) -> list[dict[str, Any]]:
    """Return answers as VQAv2's evaluation server accepts them, normalised as the original LLaVA does for it."""
    pairs = zip(questions, answers, strict=True)
    return [{"question_id": question.id, "answer": scoring.prepare_submission(text)} for question, text in pairs]
