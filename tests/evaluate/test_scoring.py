"""Scores beside golden files whose numbers were worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llava_fsdp.evaluate.benchmarks.scoring import (
    exact_match,
    named_choice,
    normalize_vqa,
    official_accuracy,
    prepare_submission,
    says_yes,
    score_yes_no,
    textvqa_accuracy,
    vqa_accuracy,
)

HERE = Path(__file__).parent
WORDS = json.loads((HERE / "golden_words.json").read_text())
ANSWERS = json.loads((HERE / "golden_answers.json").read_text())["cases"]
CHOICES = json.loads((HERE / "golden_choices.json").read_text())


@pytest.mark.parametrize(("text", "expected"), WORDS["normalize_vqa"])
def test_normalize_vqa(text: str, expected: str) -> None:
    assert normalize_vqa(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("x;-y-z", "x y z"), ("x;- y-z", "x yz"), ("p/q(-r", "p q r")])
def test_several_signs(text: str, expected: str) -> None:
    """Which signs go is decided by the text as it came, not by what the signs before have left of it."""
    assert normalize_vqa(text) == expected


@pytest.mark.parametrize(("text", "expected"), WORDS["prepare_submission"])
def test_prepare_submission(text: str, expected: str) -> None:
    assert prepare_submission(text) == expected


@pytest.mark.parametrize("case", ANSWERS, ids=[case["about"] for case in ANSWERS])
def test_accuracy_against_ten_people(case: dict) -> None:
    references = [text for text, times in case["references"] for _ in range(times)]
    assert len(references) == 10
    assert official_accuracy(case["answer"], references) == pytest.approx(case["official"], abs=1e-12)
    assert vqa_accuracy(case["answer"], references) == pytest.approx(case["vqa"], abs=1e-12)
    assert textvqa_accuracy(case["answer"], references) == pytest.approx(case["textvqa"], abs=1e-12)


def test_more_than_32_periods_stay_as_in_the_official_code() -> None:
    assert normalize_vqa("." * 40) == "." * 8


def test_few_references_are_matched_and_not_left_out() -> None:
    assert vqa_accuracy("A cat.", ["cat"]) == 1
    assert vqa_accuracy("two", ["3", "2", "3"]) == 1
    assert vqa_accuracy("dog", ["cat"]) == 0
    assert official_accuracy("cat", ["cat"]) == 0


def test_what_all_wrote_and_preparing_changes_is_out_of_reach() -> None:
    assert vqa_accuracy("four", ["four"] * 10) == vqa_accuracy("4", ["four"] * 10) == 0
    assert vqa_accuracy("4", ["4"] * 10) == vqa_accuracy("four", ["four"]) == 1


def test_no_reference_is_no_score() -> None:
    with pytest.raises(ValueError, match="without references"):
        official_accuracy("cat", [])


def test_exact_match_minds_neither_case_nor_surrounding_space() -> None:
    assert exact_match(" Red ", ["blue", "red"]) == 1
    assert exact_match("red.", ["red"]) == 0
    assert exact_match("", [""]) == 1


@pytest.mark.parametrize(("answer", "choices", "expected"), CHOICES["chosen"])
def test_which_choice_is_named(answer: str, choices: int, expected: str | None) -> None:
    assert named_choice(answer, choices) == expected


@pytest.mark.parametrize(("answer", "expected"), CHOICES["says_yes"])
def test_what_says_yes(answer: str, expected: bool) -> None:
    assert says_yes(answer) is expected


def test_yes_and_no_are_counted() -> None:
    """No two counts and no two rates are alike, so that none can stand for another."""
    answers = [True] * 4 + [True] * 2 + [False] * 3 + [False]
    right = [True] * 4 + [False] * 2 + [False] * 3 + [True]
    assert score_yes_no(answers, right) == {
        "true_yes": 4, "false_yes": 2, "true_no": 3, "false_no": 1,
        "accuracy": 7 / 10, "precision": 4 / 6, "recall": 4 / 5, "f1": 8 / 11, "yes_ratio": 6 / 10,
    }  # fmt: skip


def test_rates_of_nothing_are_zero() -> None:
    never = score_yes_no([False, False], [False, False])
    assert [never[name] for name in ("accuracy", "precision", "recall", "f1", "yes_ratio")] == [1, 0, 0, 0, 0]
    empty = score_yes_no([], [])
    assert (empty["accuracy"], empty["f1"], empty["yes_ratio"]) == (0, 0, 0)


def test_scoring_needs_no_torch() -> None:
    code = "import sys, llava_fsdp.evaluate.benchmarks.scoring\n"
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
