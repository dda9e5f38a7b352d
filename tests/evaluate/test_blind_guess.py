"""The best blind guess: what somebody scores who sees the questions and never an image."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from llava_fsdp.config import Task
from llava_fsdp.evaluate.blind_guess import count_texts, guesses_of, score_blind_guess
from llava_fsdp.evaluate.question import BenchmarkQuestion


def asked(*rows: tuple[str, Any], groups: str = "") -> list[BenchmarkQuestion]:
    """Questions of these texts and right answers; `groups` has a letter for each, the name of its group."""
    return [
        BenchmarkQuestion(
            n, n, text, f"<image>\n{text}", ("a.jpg",), "here", (right,) if isinstance(right, str) else tuple(right),
            groups=(("source", groups[n]),) if groups else (),
        )
        for n, (text, right) in enumerate(rows)
    ]  # fmt: skip


def test_the_most_frequent_right_answer_of_every_text_is_guessed() -> None:
    """By hand: RED twice of three (case and space apart), yes twice of three, and a text of its own."""
    rows = [
        ("colour?", "blue"), ("colour?", " RED"), ("is it?", "no"), ("colour?", "red "), ("is it?", "yes"),
        ("is it?", "Yes"), ("how many?", "3"),
    ]  # fmt: skip
    questions = asked(*rows)
    accuracy, groups = score_blind_guess(Task.conversations, questions)
    assert (accuracy, groups, count_texts(questions)) == (5 / 7, {}, 3)
    most = {text: Counter(right.strip().lower() for own, right in rows if own == text) for text, _ in rows}
    expected = [most[text].most_common(1)[0][0] for text, _ in rows]
    assert [own.strip().lower() for own in guesses_of(Task.conversations, questions)] == expected


def test_a_group_is_guessed_by_its_own_answers() -> None:
    """The sources disagree: guessed as one, three of five are right; apart, all are."""
    rows = [("what?", "cat"), ("what?", "dog"), ("what?", "cat"), ("what?", "dog"), ("what?", "cat")]
    accuracy, groups = score_blind_guess(Task.conversations, asked(*rows, groups="ababa"))
    assert (accuracy, groups) == (3 / 5, {("source", "a"): 1.0, ("source", "b"): 1.0})


def test_whoever_sees_a_system_text_may_use_it() -> None:
    one, two = asked(("what?", "cat"), ("what?", "dog"))
    assert score_blind_guess(Task.conversations, [one, two])[0] == 0.5
    assert score_blind_guess(Task.conversations, [one, replace(two, system="say dog")])[0] == 1.0


@pytest.mark.parametrize(
    ("task", "rows", "expected"),
    [
        # one right answer each, which VQAv2's rules make equal: "A dog." and "dog", "two" and "2"
        (Task.vqa, [("q", "A dog."), ("q", "cat"), ("q", "dog"), ("n", "two"), ("n", "2")], 4 / 5),
        # yes: 1 + 0.3 + 0.3, by ten people each; no: 0 + 1 + 1
        (Task.vqa, [("q", ["yes"] * 10), ("q", ["yes"] + ["no"] * 9), ("q", ["no"] * 9 + ["yes"])], 2 / 3),
        # all ten wrote `four`, which no prepared answer equals; two wrote 4
        (Task.vqa, [("q", ["four"] * 10)], 0.0),
        (Task.textvqa, [("q", ["Dog's"] * 4 + ["cat"] * 6), ("q", ["dog 's"] * 10)], 1.0),
        (Task.multiple_choice, [("q", "B"), ("q", "B"), ("q", "A")], 2 / 3),
        (Task.yes_no, [("q", "no"), ("q", "no"), ("q", "yes"), ("r", "yes")], 3 / 4),
    ],
)
def test_answers_count_as_the_task_scores_them(task: Task, rows: list[tuple[str, Any]], expected: float) -> None:
    assert score_blind_guess(task, asked(*rows))[0] == pytest.approx(expected)
