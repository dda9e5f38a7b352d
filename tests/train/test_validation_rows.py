"""The row of a validation: means over label tokens, and what is null."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llava_fsdp.config import Metric
from llava_fsdp.train.validation import LossSum, Validation, as_line, as_object, row_of


def test_a_loss_is_the_mean_over_all_label_tokens() -> None:
    """Not the mean of the sources' means; null where there is no label, or no number."""
    losses = {"a": LossSum(6.0, 3), "b": LossSum(1.0, 4), "c": LossSum(0.0, 0)}
    answers: Any = [SimpleNamespace(score=score) for score in (1.0, 0.5, 0.0)]
    row = row_of(7, losses, answers, 1.5)
    assert (row["step"], row["loss"], row["label_tokens"], row["seconds"]) == (7, 1.0, 7, 1.5)
    assert row["sources"] == {
        "a": {"loss": 2.0, "label_tokens": 3},
        "b": {"loss": 0.25, "label_tokens": 4},
        "c": {"loss": None, "label_tokens": 0},
    }
    assert (row["score"], row["questions"]) == (0.5, 3)
    none = row_of(7, {"a": LossSum(math.inf, 3), "b": LossSum(1.0, 4)}, [], 1.5)
    assert (none["loss"], none["sources"]["b"]["loss"], none["score"], none["questions"]) == (None, 0.25, None, 0)


@pytest.mark.parametrize(
    ("every", "due"), [(3, [3, 6, 7, 8]), (1, [1, 2, 3, 4, 5, 6, 7, 8]), (9, [7, 8]), (7, [7, 8]), (None, [])]
)
def test_steps_that_are_measured(every: int | None, due: list[int]) -> None:
    """Each so-manieth and the last of seven, or a later one where the run was longer before; never the start."""

    def is_due(step: int) -> bool:
        held: Any = SimpleNamespace(
            state=SimpleNamespace(step=step), cfg=SimpleNamespace(val=SimpleNamespace(every=every)), last_step=7
        )
        return Validation.is_due(held)

    assert [step for step in range(9) if is_due(step)] == due


@pytest.mark.parametrize(("step", "done", "measured"), [(3, False, 1), (3, True, 0), (2, False, 0), (7, False, 1)])
def test_a_validation_that_is_owed_is_done_when_a_run_continues(step: int, done: bool, measured: int) -> None:
    seen: list[int] = []
    held: Any = SimpleNamespace(state=SimpleNamespace(step=step), done=done, measure=lambda: seen.append(step))
    held.is_due = lambda: Validation.is_due(held)
    held.cfg, held.last_step = SimpleNamespace(val=SimpleNamespace(every=3)), 7
    Validation.catch_up(held)
    assert len(seen) == measured


def test_a_row_is_one_line() -> None:
    losses = {"a": LossSum(6.0, 3), "b": LossSum(math.nan, 4000)}
    answers: Any = [SimpleNamespace(score=score) for score in (1.0, 0.5, 0.0, 0.0)]
    row = row_of(7, losses, answers, 1.25) | {"metric": Metric.exact.value}
    assert as_line(row) == (
        "validation after step 7: loss none of 4,003 label tokens (a 2.0000, b none), exact match 37.5% of 4 "
        "questions, 1.2 s"
    )
    one = as_line(row | {"metric": Metric.vqa.value, "sources": {"a": row["sources"]["a"]}, "score": 0.0})
    assert "(" not in one and ", VQA accuracy 0.0% of 4" in one
    assert "of 0 questions" not in as_line(row_of(7, losses, [], 1.25))


def test_an_answer_has_the_first_picture_of_its_question() -> None:
    question: Any = SimpleNamespace(record="r", question="q", reference="x", images=[Path("a.png"), Path("b.png")])
    answered: Any = SimpleNamespace(text="y", score=0.5)
    found = as_object(question, answered)
    assert found == {
        "record": "r", "question": "q", "answer": "y", "references": ["x"], "score": 0.5,
        "picture": str(Path("a.png").absolute()),
    }  # fmt: skip
    question.images = [b"inside of a container", Path("b.png")]
    assert as_object(question, answered)["picture"] is None
