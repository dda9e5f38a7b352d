"""The row of a validation: means over label tokens, and what is null."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llava_fsdp.config import FULL_WEIGHT, Metric, ParallelConfig
from llava_fsdp.runtime.files.jsonl import RowWriter
from llava_fsdp.train.events.held_out import validation, validation_answers
from llava_fsdp.train.events.held_out.validation import LossSum, Validation, answer_row, line_of, row_of
from llava_fsdp.train.events.held_out.validation_answers import Answered, AnswerGenerator
from llava_fsdp.train.events.run_events import RunEvents


def loss_sum(total: float, label_tokens: int) -> LossSum:
    """Of label tokens that all have weight 1."""
    return LossSum(total, label_tokens, label_tokens * FULL_WEIGHT)


def test_a_loss_is_the_mean_over_all_label_tokens() -> None:
    """Not the mean of the sources' means; null where there is no label, or no number."""
    losses = {"a": loss_sum(6.0, 3), "b": loss_sum(1.0, 4), "c": loss_sum(0.0, 0)}
    row = row_of(7, losses, {"a": [1.0], "b": [], "c": [0.5, 0.0]}, 1.5)
    assert (row["step"], row["loss"], row["label_tokens"], row["seconds"]) == (7, 1.0, 7, 1.5)
    assert row["sources"] == {
        "a": {"loss": 2.0, "label_tokens": 3, "score": 1.0, "questions": 1},
        "b": {"loss": 0.25, "label_tokens": 4, "score": None, "questions": 0},
        "c": {"loss": None, "label_tokens": 0, "score": 0.25, "questions": 2},
    }
    assert (row["score"], row["questions"]) == (0.5, 3)
    none = row_of(7, {"a": loss_sum(math.inf, 3), "b": loss_sum(1.0, 4)}, {"a": [], "b": []}, 1.5)
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
    held: Any = SimpleNamespace(
        state=SimpleNamespace(step=step), is_done_already=done, measure=lambda: seen.append(step), compare=list
    )
    held.is_due = lambda: Validation.is_due(held)
    held.cfg, held.last_step = SimpleNamespace(val=SimpleNamespace(every=3)), 7
    Validation.on_start(held, held)
    assert len(seen) == measured


def test_a_row_is_one_line() -> None:
    losses = {"a": loss_sum(6.0, 3), "b": loss_sum(math.nan, 4000)}
    row = row_of(7, losses, {"a": [1.0, 0.5, 0.0], "b": [0.0]}, 1.25) | {"metric": Metric.exact.value}
    assert line_of(row) == (
        "validation after step 7: loss none of 4,003 label tokens (a 2.0000, b none), exact match 37.5% of 4 "
        "questions (a 50.0% of 3, b 0.0% of 1), 1.2 s"
    )
    one = line_of(row | {"metric": Metric.vqa.value, "sources": {"a": row["sources"]["a"]}, "score": 0.0})
    assert "(" not in one and ", VQA accuracy 0.0% of 4" in one
    assert "of 0 questions" not in line_of(row_of(7, losses, {"a": [], "b": []}, 1.25))
    unasked = row_of(7, losses, {"a": [1.0], "b": []}, 1.25) | {"metric": Metric.exact.value}
    assert line_of(unasked).endswith("exact match 100.0% of 1 questions (a 100.0% of 1), 1.2 s")


def test_an_answer_has_the_first_picture_of_its_question() -> None:
    question: Any = SimpleNamespace(record="r", question="q", reference="x", images=[Path("a.png"), Path("b.png")])
    answered: Any = SimpleNamespace(text="y", score=0.5)
    found = answer_row(question, answered)
    assert found == {
        "record": "r", "question": "q", "answer": "y", "references": ["x"], "score": 0.5,
        "picture": str(Path("a.png").absolute()),
    }  # fmt: skip
    question.images = [b"inside of a container", Path("b.png")]
    assert answer_row(question, answered)["picture"] is None


@pytest.mark.parametrize(
    ("alone", "batch", "tokens", "expected"),
    [
        (False, 8, 640, 8), (False, 8, 639, 7), (False, 8, 160, 2), (False, 8, 159, 1), (False, 8, 79, 1),
        (False, 8, 10, 1), (False, 3, 640, 3), (True, 8, 640, 1),
    ],
)  # fmt: skip
def test_questions_and_answers_have_half_of_the_tokens_of_a_training_row(
    alone: bool, batch: int, tokens: int, expected: int
) -> None:
    """The longest question has 30 tokens, and an answer up to 10; at least one question is answered at a time, and no
    more if padding would change the answers."""
    questions = [SimpleNamespace(sample=SimpleNamespace(input_ids=[0] * length)) for length in (5, 30, 7)]
    val = SimpleNamespace(batch_size=batch, max_new_tokens=10)
    cfg = SimpleNamespace(val=val, rank_tokens=tokens)
    generator: Any = SimpleNamespace(questions=questions, cfg=cfg, answers_one_by_one=alone)
    rows: Any = AnswerGenerator.rows
    assert rows.fget(generator) == expected


def test_a_validation_that_is_reported_shows_some_answers_and_their_metric(tmp_path: Path) -> None:
    """The score is of all answers, also of those that are not shown; without questions there is no metric."""
    question: Any = SimpleNamespace(record="r", question="q", reference="x", images=[], source=0)
    other: Any = SimpleNamespace(**{**vars(question), "source": 1})
    held_out = SimpleNamespace(names=["a", "b"], questions=[question, question, other])
    passed: list[dict[str, Any]] = []
    held: Any = SimpleNamespace(
        state=SimpleNamespace(step=7), held_out=held_out, rows=RowWriter(tmp_path / "validation.jsonl"),
        cfg=SimpleNamespace(val=SimpleNamespace(shown=2, max_new_tokens=8)), metric=SimpleNamespace(name="vqa"),
        events=SimpleNamespace(after_validation=passed.append), found=[], measured="",
    )  # fmt: skip
    answers = [Answered(number, f"answer {number}", score) for number, score in ((0, 1.0), (1, 0.5), (2, 0.0))]
    losses = [loss_sum(6.0, 3), loss_sum(1.0, 4)]
    Validation.report(held, losses, answers, {"mmx": {"score": 0.5, "questions": 4}}, 1.5)
    (row,) = passed
    assert [(own["source"], own["answer"]) for own in row["answers"]] == [("a", "answer 1"), ("b", "answer 2")]
    assert (row["metric"], row["score"], row["questions"]) == ("vqa", 0.5, 3)
    assert {name: (own["loss"], own["score"]) for name, own in row["sources"].items()} == {
        "a": (2, 0.75),
        "b": (0.25, 0),
    }
    assert "thoughts_cut" not in row and row["tasks"] == {"mmx": {"score": 0.5, "questions": 4}}
    Validation.report(held, losses, [Answered(0, "", 0.0, is_thought_cut=True), answers[1]], {}, 1.5)
    assert passed[1]["thoughts_cut"] == 1 and passed[1]["questions"] == 2
    held_out.questions = []
    Validation.report(held, losses, [], {}, 1.5)
    assert (passed[2]["metric"], passed[2]["answers"]) == (None, [])
    assert [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()] == passed


def test_losses_are_summed_by_source_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks compute each layer together; a rank without the last stage of a pipeline has no loss."""
    monkeypatch.setattr(validation, "evaluate", lambda state, micro, loader: micro)
    of_micro = [[4.0, None], [10.0], [2.0, 8.0]]
    steps = [
        SimpleNamespace(
            micro_batches=[None if own is None else torch.tensor(own) for own in each],
            facts=SimpleNamespace(label_tokens=3 + number, weight=(3 + number) * FULL_WEIGHT, skipped=[]),
        )
        for number, each in enumerate(of_micro)
    ]
    paused: list[int] = []
    loader = SimpleNamespace(
        device=torch.device("cpu"), steps_from=lambda first, stops: iter(steps[first:]), agree=lambda step: step
    )
    held: Any = SimpleNamespace(
        events=RunEvents(), pause=lambda: paused.append(1), watchdog=SimpleNamespace(wants_stop=bool),
        held_out=SimpleNamespace(
            loader=loader, names=["a", "b"],
            sampler=SimpleNamespace(source=lambda number: (0, 1, 0)[number], per_epoch=3),
        ),
        state=SimpleNamespace(parallelism=SimpleNamespace(ranks_per_loss=2)),
        cfg=SimpleNamespace(data=SimpleNamespace(pairs=False)),
    )  # fmt: skip
    assert Validation.measure_losses(held) == [loss_sum(7.0, 8), loss_sum(5.0, 4)] and len(paused) == 3


@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (3, 1), (4, 2), (6, 2)])
def test_every_question_is_answered_once(ranks: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest first, two at a time on a rank; ranks that compute layers together answer the same, and one of them
    reports it. Every rank runs the same number of batches."""
    monkeypatch.setattr(validation_answers, "gather_lists", lambda own: own)
    questions = [SimpleNamespace(sample=SimpleNamespace(input_ids=[0] * (number % 5))) for number in range(11)]
    answered: list[list[list[int]]] = []
    reported: list[int] = []
    for rank in range(ranks):
        monkeypatch.setattr(validation_answers, "rank_and_size", lambda rank=rank: (rank, ranks))
        batches: list[list[int]] = []

        def answer(numbers: list[int], batches: list[list[int]] = batches) -> list[Answered]:
            batches.append(numbers)
            return [Answered(number, "", 0.0) for number in numbers]

        held: Any = SimpleNamespace(
            questions=questions, model=None, rows=2, pause=lambda: None, answer=answer,
            cfg=SimpleNamespace(parallel=ParallelConfig(tensor=together)),
        )  # fmt: skip
        own = [found.number for found in AnswerGenerator.answers(held)]
        assert own == sorted(own)
        reported += own
        answered.append(batches)
    assert sorted(reported) == list(range(11))
    assert len({len(batches) for batches in answered}) == 1
    assert all(len(numbers) <= 2 for batches in answered for numbers in batches)
    assert all(answered[rank] == answered[rank // together * together] for rank in range(ranks))
    assert answered[0][0][0] == 4, "the first of the longest ones"
