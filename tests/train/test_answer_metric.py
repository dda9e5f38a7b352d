"""A function of a program's own scores answers: what it may return, what is refused, and the program of the documents
on two ranks."""

import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import TORCHRUN
from documents import DOCS, ROOT, blocks_of

from llava_fsdp.config import Metric
from llava_fsdp.runtime.errors import ConfigError, MetricError
from llava_fsdp.train.events.held_out.answer_metric import AnswerMetric, choose_metric


def with_metric(metric: Metric = Metric.exact) -> Any:
    return SimpleNamespace(val=SimpleNamespace(metric=metric))


def same(question: str, answer: str, expected: str) -> bool:
    return answer == expected


@pytest.mark.parametrize(
    ("value", "score"), [(0, 0.0), (1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.bool_(True), 1.0)]
)
def test_a_number_from_0_to_1_is_a_score(value: Any, score: float) -> None:
    found = AnswerMetric("mine", lambda question, answer, expected: value).score("q", "a", "e", "r")
    assert found == score and type(found) is float


@pytest.mark.parametrize(
    "value", [None, "1", 1.001, -0.1, math.nan, math.inf, [1.0], 1j, torch.tensor(0.5), np.array([0.5]), 10**400]
)
def test_what_is_no_such_number_names_the_function_and_the_record(value: Any) -> None:
    with pytest.raises(MetricError, match=r"the metric mine of held\.json, record 7 ") as caught:
        AnswerMetric("mine", lambda question, answer, expected: value).score("q", "a", "e", "held.json, record 7")
    assert caught.value.culprit == {"record": "held.json, record 7"} and caught.value.exit_code == 2
    assert not caught.value.on_every_rank


@pytest.mark.parametrize("error", [ZeroDivisionError("by me"), KeyError("x"), StopIteration(), SystemExit(0)])
def test_an_error_names_the_function_the_record_and_its_line(error: BaseException) -> None:
    def fails(question: str, answer: str, expected: str) -> float:
        raise error

    with pytest.raises(MetricError, match=rf"fails of held\.json.*{type(error).__name__}.*{Path(__file__).name}:\d+"):
        choose_metric(with_metric(), fails).score("q", "a", "e", "held.json, record 7")


def test_the_function_gets_question_answer_and_expected() -> None:
    seen: list[tuple[str, str, str]] = []
    metric = choose_metric(with_metric(), lambda *given: seen.append(given) or 1.0)  # type: ignore[func-returns-value]
    assert metric.score("what?", "red", "blue", "r") == 1.0 and seen == [("what?", "red", "blue")]


def test_a_metric_has_its_own_name() -> None:
    class Closeness:
        def __call__(self, question: str, answer: str, expected: str) -> float:
            return 1.0

    assert [choose_metric(with_metric(), own).name for own in (same, Closeness())] == ["same", "Closeness"]
    exact, vqa = (choose_metric(with_metric(own), None) for own in (Metric.exact, Metric.vqa))
    assert (exact.name, exact.score("q", "Red ", "red", "r"), exact.is_own) == ("exact", 1.0, False)
    assert (vqa.name, vqa.score("q", "the red.", "red", "r")) == ("vqa", 1.0)


def exact(question: str, answer: str, expected: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("own", "metric"),
    [
        (same, Metric.vqa),
        (exact, Metric.exact),
        (lambda answer, expected: 1.0, Metric.exact),
        (lambda question, answer, expected, more: 1.0, Metric.exact),
        ("package.function", Metric.exact),
    ],
)
def test_what_cannot_be_a_metric_is_refused_before_anything_begins(own: Callable[..., float], metric: Metric) -> None:
    with pytest.raises(ConfigError, match="metric"):
        choose_metric(with_metric(metric), own)


def program_of_the_documents() -> str:
    (block,) = [own for own in blocks_of(DOCS / "extending.md") if own.note == "my_training.py"]
    return block.text


def run_program(text: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program on two ranks, which validates after its first step."""
    (folder / "my_training.py").write_text(text)
    words = [
        "stage=finetune", "model.projector=random", "output_dir=out", "max_steps=1", "global_batch_size=4",
        "precision=fp32", "val.every=1", "val.limit=6", "val.answers=6", "val.max_new_tokens=4", "export.enabled=false",
        "compile=false", "checkpoint.asynchronous=false",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    began = time.monotonic()
    done = subprocess.run(
        [*TORCHRUN, "2", "my_training.py", *words], check=False, cwd=folder, env=environment,
        capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.ranks
def test_the_program_of_the_documents_scores_by_its_own_function(tmp_path: Path) -> None:
    text = program_of_the_documents()
    assert len(text.splitlines()) <= 20
    done, _ = run_program(text, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    row = json.loads(line)
    space: dict[str, Any] = {"__name__": "imported"}
    exec(text, space)
    score = space[row["metric"]]
    assert row["questions"] == 6 and row["metric"] in done.stderr + done.stdout
    for own in row["answers"]:
        assert own["score"] == score(own["question"], own["answer"], own["references"][0])
    assert row["metric"] in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("body", ["raise LookupError('on one rank')", "return 7.0"], ids=["an error", "no score"])
def test_a_function_that_fails_on_one_rank_ends_all(body: str, tmp_path: Path) -> None:
    """The other rank is in a collective then; it ends with the first one, and not after a timeout."""
    text = (
        "import os, time\n"
        "from llava_fsdp.train.run import run\n"
        "def my_metric(question, answer, expected):\n"
        "    if os.environ['RANK'] == '0':\n"
        "        return 1.0\n"
        "    open('failed', 'w').write(str(time.time()))\n"
        f"    {body}\n"
        "if __name__ == '__main__':\n"
        "    run(metric=my_metric)\n"
    )
    done, _ = run_program(text, tmp_path)
    took = time.time() - float((tmp_path / "failed").read_text())
    status = json.loads((tmp_path / "out" / "run_status.json").read_text())
    assert done.returncode != 0 and took < 60, f"{took} s"
    assert (status["class"], status["exit_code"]) == ("config", 2)
    assert "my_metric" in status["reason"] and "heldout.json" in status["reason"]
    assert "MetricError" in done.stderr and "my_metric" in done.stderr
