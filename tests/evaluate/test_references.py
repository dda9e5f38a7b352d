"""Right answers as files write them, and what a line of answers must agree with to be continued."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llava_fsdp.config import AspectRatio, Task
from llava_fsdp.evaluate import main as evaluate
from llava_fsdp.evaluate.answers_file import AnswersFile, Shard, blank_file
from llava_fsdp.evaluate.question import LETTER, SHORT, SUFFIXES, BenchmarkQuestion, image_names, with_image_tag
from llava_fsdp.evaluate.read_questions import read_row
from llava_fsdp.evaluate.references import answers_in_entry
from llava_fsdp.evaluate.results import groups_of
from llava_fsdp.evaluate.vqa_files import bare_question
from llava_fsdp.runtime.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        (Task.yes_no, {"label": "yes"}, (("yes",), 0)),
        (Task.yes_no, {"label": "Yes"}, None),
        (Task.yes_no, {"answer": "no"}, ((), 0)),
        (Task.multiple_choice, {"answer": 2, "choices": ["a", "b", "c"]}, (("C",), 3)),
        (Task.multiple_choice, {"answer": 0, "choices": ["a"]}, (("A",), 1)),
        (Task.multiple_choice, {"answer": "B", "choices": ["a", "b"]}, (("B",), 2)),
        (Task.multiple_choice, {"answer": 4}, (("E",), 5)),
        (Task.multiple_choice, {"choices": ["a"] * 5}, ((), 5)),
        *((Task.multiple_choice, {"answer": answer, "choices": ["a", "b"]}, None)
          for answer in (2, -1, True, "C", "b", "", "AB", None)),
        *((Task.multiple_choice, {"choices": choices}, None) for choices in ([], ["a"] * 6, "ab")),
        (Task.vqa, {"answers": ["a", {"answer": "b", "id": 1}]}, (("a", "b"), 0)),
        *((Task.textvqa, {"answers": answers}, None) for answers in ([], ["a", 1], "a", [{"text": "a"}])),
    ],
)  # fmt: skip
def test_right_answers_of_a_row(task: Task, row: dict[str, Any], expected: tuple | None) -> None:
    if expected is not None:
        assert answers_in_entry(row, task, "here") == expected
        return
    with pytest.raises(DataError):
        answers_in_entry(row, task, "here")


def test_what_a_question_is_asked_and_counted_as() -> None:
    row = {"question_id": 7, "text": "Is it?", "image": "a.jpg", "category": "default"}
    asked = read_row(Path("q.jsonl"), 3, 4, row, Task.yes_no)
    assert (asked.number, asked.id, asked.prompt, asked.text) == (3, 7, "Is it?", "<image>\nIs it?")
    assert asked.groups == () and asked.images == ("a.jpg",)
    asked = read_row(Path("q.jsonl"), 0, 1, row | {"category": "rare"}, Task.multiple_choice)
    assert asked.prompt == asked.text == "<image>\nIs it?"
    assert groups_of(asked, Task.yes_no) == (("category", "rare"),)
    assert groups_of(asked, Task.multiple_choice) == (("category", "rare"), ("picture", "with"))
    with pytest.raises(DataError):
        read_row(Path("q.jsonl"), 0, 1, row | {"question_id": True}, Task.yes_no)
    assert with_image_tag("a", ("1", "2")) == "a" and with_image_tag("a <image>", ("1",)) == "a <image>"
    assert image_names(None, "") == () and image_names(["a", "b"], "") == ("a", "b")
    assert bare_question(f"What IS it?\nReference OCR token: a, b\n {SHORT} ") == "what is it?"
    assert {Task.vqa: SHORT, Task.textvqa: SHORT, Task.yes_no: SHORT, Task.multiple_choice: LETTER} == SUFFIXES


def answers(path: Path, shard: Shard, **change: Any) -> AnswersFile:
    asked = [BenchmarkQuestion(n, f"q{n}", f"what {n}", "", ("a.jpg",), "here") for n in range(7)]
    asked[2] = replace(asked[2], **change)
    return AnswersFile(path, asked, {"model": "m", "blank": False}, "name", shard)


@pytest.mark.parametrize(
    "change", [{"id": "other"}, {"prompt": "other"}, {"images": ("b.jpg",)}, {"images": ()}], ids=str
)
def test_an_answer_to_another_question_is_not_taken_over(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = answers(path, Shard())
    with first.writing() as add:
        add(first.questions[2:3], ["yes"])
    assert answers(path, Shard()).texts == {2: "yes"}
    with pytest.raises(ConfigError):
        answers(path, Shard(), **change)


def test_questions_are_shared_out_and_each_process_has_a_file(tmp_path: Path) -> None:
    shards = [answers(tmp_path / "a.b.jsonl", Shard(rank, 3)) for rank in range(3)]
    assert [[a.number for a in own.pending()] for own in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    shards[0].texts[3] = "yes"
    assert [a.number for a in shards[0].pending()] == [0, 6]
    assert [own.path_to_write.name for own in shards] == [f"a.b.jsonl.part-{n}-of-3" for n in range(3)]
    assert answers(tmp_path / "a.jsonl", Shard()).path_to_write.name == "a.jsonl"
    assert blank_file(tmp_path / "a.b.jsonl").name == "a.b_blank.jsonl"


def test_what_answers_depend_on_is_kept_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that changes an answer to the same question: else a file of other answers would be continued."""
    monkeypatch.setattr(evaluate, "model_digest", lambda _: "digest")
    own = SimpleNamespace(source=SimpleNamespace(template="v1", aspect=AspectRatio.pad))
    monkeypatch.setattr(evaluate, "open_model", lambda *_: own)
    monkeypatch.setattr(evaluate, "folder_of", lambda _: Path("images"))
    data = SimpleNamespace(template="auto", image_aspect_ratio=AspectRatio.square)
    cfg: Any = SimpleNamespace(answers="a.jsonl", max_new_tokens=9, data=data, model=SimpleNamespace(checkpoint="m"))
    assert evaluate.AnswerGenerator(cfg, [], Shard()).settings == {
        "model": "digest", "max_new_tokens": 9, "template": "v1", "image_aspect_ratio": "pad",
    }  # fmt: skip
    assert [evaluate.asks_blank(SimpleNamespace(task=task, blank=None)) for task in Task] == [  # pyright: ignore
        task is Task.conversations for task in Task
    ]
    assert evaluate.asks_blank(SimpleNamespace(task=Task.vqa, blank=True))  # pyright: ignore
    assert not evaluate.asks_blank(SimpleNamespace(task=Task.conversations, blank=False))  # pyright: ignore


def test_a_model_is_told_by_the_content_of_all_its_files(tmp_path: Path) -> None:
    """By their names too; of a run its export counts, and what else lies in its folder does not."""
    model = tmp_path / "run" / "export"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({}))
    (model / "inner" / "a.bin").write_bytes(b"1")
    found = [evaluate.model_digest(str(tmp_path / "run"))]
    (tmp_path / "run" / "metrics.jsonl").write_text("grows")
    assert evaluate.model_digest(str(tmp_path / "run")) == evaluate.model_digest(str(model)) == found[0]
    (model / "inner" / "a.bin").write_bytes(b"2")
    found.append(evaluate.model_digest(str(model)))
    (model / "inner" / "a.bin").rename(model / "a.bin")
    found.append(evaluate.model_digest(str(model)))
    assert len(set(found)) == 3
