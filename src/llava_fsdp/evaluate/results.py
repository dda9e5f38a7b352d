"""Scores of answers, over all questions and over groups of them, as numbers and as a table."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from llava_fsdp.config import Task
from llava_fsdp.evaluate.question import CATEGORY, Asked
from llava_fsdp.evaluate.scoring import (
    chosen,
    exact_match,
    prepare_submission,
    says_yes,
    score_choices,
    score_yes_no,
    textvqa_accuracy,
    vqa_accuracy,
)
from llava_fsdp.evaluate.scoring.multiple_choice import LETTERS

Numbers = dict[str, Any]
COLUMNS = ("accuracy", "invalid", "precision", "recall", "f1", "yes_ratio")
"""Of a table, where a task has them."""


def score_words(rule: Callable[[str, Sequence[str]], float]) -> Callable[[Sequence[Asked], Sequence[str]], Numbers]:
    def score(asked: Sequence[Asked], answers: Sequence[str]) -> Numbers:
        return {"accuracy": sum(rule(t, a.references) for a, t in zip(asked, answers, strict=True)) / len(asked)}

    return score


def score_letters(asked: Sequence[Asked], answers: Sequence[str]) -> Numbers:
    picked = [chosen(t, a.choices or len(LETTERS)) for a, t in zip(asked, answers, strict=True)]
    found = score_choices(picked, [LETTERS.index(a.references[0]) for a in asked])
    return {"accuracy": found.accuracy, "right": found.right, "invalid": found.invalid}


def score_yes(asked: Sequence[Asked], answers: Sequence[str]) -> Numbers:
    found = score_yes_no([says_yes(t) for t in answers], [a.references[0] == "yes" for a in asked])
    names = "accuracy", "precision", "recall", "f1", "yes_ratio", "true_yes", "false_yes", "true_no", "false_no"
    return {name: getattr(found, name) for name in names}


SCORES: dict[Task, Callable[[Sequence[Asked], Sequence[str]], Numbers]] = {
    Task.conversations: score_words(exact_match),
    Task.vqa: score_words(vqa_accuracy),
    Task.textvqa: score_words(textvqa_accuracy),
    Task.multiple_choice: score_letters,
    Task.yes_no: score_yes,
}
"""Of at least one question, whose right answers are known."""


def groups_of(asked: Asked, task: Task) -> tuple[tuple[str, str], ...]:
    if task is not Task.multiple_choice:
        return asked.groups
    return (*asked.groups, ("picture", "with" if asked.images else "without"))


def score_all(task: Task, asked: Sequence[Asked], answers: Sequence[str]) -> Numbers:
    """The scores of all questions, and under `groups` those of every group, by its kind and its name.

    Of yes and no with categories `mean_f1` is the mean of their F1, which POPE's results are compared by.
    """
    score = SCORES[task]
    members: dict[tuple[str, str], list[int]] = {}
    for place, own in enumerate(asked):
        for group in groups_of(own, task):
            members.setdefault(group, []).append(place)
    groups: dict[str, dict[str, Numbers]] = {}
    for (kind, name), places in sorted(members.items()):
        found = score([asked[p] for p in places], [answers[p] for p in places])
        groups.setdefault(kind, {})[name] = {"questions": len(places)} | found
    whole = score(asked, answers)
    if task is Task.yes_no and CATEGORY in groups:
        whole["mean_f1"] = sum(own["f1"] for own in groups[CATEGORY].values()) / len(groups[CATEGORY])
    return whole | ({"groups": groups} if groups else {})


def table_of(result: Numbers) -> Table:
    """Every rate in percent, counts as they are; a row for all questions and one for each group."""
    shown = [name for name in COLUMNS if name in result]
    table = Table(box=SIMPLE, pad_edge=False, title="scores in percent, of all and by group", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("questions", *shown):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    rows = [("all", result)]
    for kind, groups in result.get("groups", {}).items():
        rows += [(f"{kind}: {name}", numbers) for name, numbers in groups.items()]
    for name, numbers in rows:
        cells = [said(numbers[key]) for key in ("questions", *shown)]
        table.add_row(name, *cells, end_section=name == "all")
    return table


def said(value: float) -> str:
    return f"{100 * value:.2f}" if isinstance(value, float) else f"{value:,}"


def submission_of(asked: Sequence[Asked], answers: Sequence[str]) -> list[dict[str, Any]]:
    """As VQAv2's server takes answers, prepared as the original prepares them."""
    return [{"question_id": a.id, "answer": prepare_submission(t)} for a, t in zip(asked, answers, strict=True)]
