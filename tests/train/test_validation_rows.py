"""The row of a validation: means over label tokens, and what is null."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from llava_fsdp.train.validation import LossSum, Validation, row_of


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
