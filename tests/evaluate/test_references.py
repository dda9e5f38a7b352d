"""Right answers as files write them, and what a line of answers must agree with to be continued."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import command_config

from llava_fsdp.config import AspectRatio, EvaluateConfig, Task
from llava_fsdp.evaluate import answers_file
from llava_fsdp.evaluate import main as evaluate
from llava_fsdp.evaluate.answers_file import AnswersFile, QuestionShard, blank_file
from llava_fsdp.evaluate.benchmarks.pope_files import annotate_yes_no
from llava_fsdp.evaluate.benchmarks.references import answers_in_entry
from llava_fsdp.evaluate.benchmarks.scienceqa_files import annotate_problems, read_choice_record
from llava_fsdp.evaluate.benchmarks.vqa_files import (
    annotate_textvqa,
    annotate_vqa,
    bare_question,
    check_ten,
    read_vqa_questions,
)
from llava_fsdp.evaluate.check_images import check_images
from llava_fsdp.evaluate.question import (
    LETTER,
    SHORT,
    SUFFIXES,
    BenchmarkQuestion,
    image_names,
    with_image_tag,
    with_instruction,
)
from llava_fsdp.evaluate.read_questions import read_file, read_row
from llava_fsdp.evaluate.results import groups_of, number_text, score_all, submission_of, table_of
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, DataError, StorageError
from llava_fsdp.runtime.files.digests import digest_of_file


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


def answers(path: Path, shard: QuestionShard, **change: Any) -> AnswersFile:
    asked = [BenchmarkQuestion(n, f"q{n}", f"what {n}", "", ("a.jpg",), "here") for n in range(7)]
    asked[2] = replace(asked[2], **change)
    return AnswersFile(path, asked, {"model": "m", "blank": False}, "name", shard)


@pytest.mark.parametrize(
    "change", [{"id": "other"}, {"prompt": "other"}, {"images": ("b.jpg",)}, {"images": ()}], ids=str
)
def test_an_answer_to_another_question_is_not_taken_over(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = answers(path, QuestionShard())
    with first.open_for_writing() as add:
        add(first.questions[2:3], ["yes"])
    assert answers(path, QuestionShard()).texts == {2: "yes"}
    with pytest.raises(ConfigError):
        answers(path, QuestionShard(), **change)


def test_questions_are_shared_out_and_each_process_has_a_file(tmp_path: Path) -> None:
    shards = [answers(tmp_path / "a.b.jsonl", QuestionShard(rank, 3)) for rank in range(3)]
    assert [[a.number for a in own.missing_questions()] for own in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    shards[0].texts[3] = "yes"
    assert [a.number for a in shards[0].missing_questions()] == [0, 6]
    assert [own.path_to_write.name for own in shards] == [f"a.b.jsonl.part-{n}-of-3" for n in range(3)]
    assert answers(tmp_path / "a.jsonl", QuestionShard()).path_to_write.name == "a.jsonl"
    assert blank_file(tmp_path / "a.b.jsonl").name == "a.b_blank.jsonl"


def test_what_answers_depend_on_is_kept_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that changes an answer to the same question: else a file of other answers would be continued."""
    monkeypatch.setattr(evaluate, "model_digest", lambda _: "digest")
    prompting = {"template": "v1", "image_aspect_ratio": "pad"}
    own = SimpleNamespace(source=SimpleNamespace(template="v1", prompting=prompting))
    asked: list[Any] = []
    monkeypatch.setattr(evaluate, "open_model", lambda *given: asked.extend(given) or own)
    monkeypatch.setattr(evaluate, "folder_of", lambda _: Path("images"))
    data = SimpleNamespace(template="auto", image_aspect_ratio=AspectRatio.square)
    cfg: Any = SimpleNamespace(answers="a.jsonl", max_new_tokens=9, data=data, model=SimpleNamespace(checkpoint="m"))
    assert evaluate.BenchmarkAnswerer(cfg, [], QuestionShard()).settings == {
        "model": "digest", "max_new_tokens": 9, "template": "v1", "image_aspect_ratio": "pad",
    }  # fmt: skip
    assert asked == ["m", "auto", AspectRatio.square], "what a folder does not say"
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


def test_answers_of_all_processes_are_merged_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits as long as any process writes; part files are gone at the end. A second end changes nothing."""
    path, clock = tmp_path / "a.jsonl", iter(range(0, 1000, 60))
    first, second, third = (answers(path, QuestionShard(rank, 3)) for rank in range(3))
    missing = [(own, question) for own in (third, second) for question in own.missing_questions()]
    others = [given for own, question in missing for given in ((own, [question]), None)]

    def sleep(seconds: float) -> None:
        own, asked = (others.pop() if others else None) or (second, [])
        with own.open_for_writing() as add:
            add(asked, [f"{question.number}" for question in asked])

    monkeypatch.setattr(answers_file, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    with first.open_for_writing() as add:
        add(first.missing_questions(), ["0", "3", "6"])
    first.wait(stall=130)
    assert first.finish() == [f"{number}" for number in range(7)]
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [f"{n}" for n in range(7)]
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    assert not answers(path, QuestionShard()).missing_questions()


def test_no_answer_for_a_while_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = iter(range(0, 1000, 60)), []
    monkeypatch.setattr(answers_file, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: next(clock)))
    with pytest.raises(CommunicationError, match=r"no new answer for 130 s, and 7 are missing, of ranks \[0, 1, 2\]"):
        answers(tmp_path / "a.jsonl", QuestionShard(0, 3)).wait(stall=130)
    assert len(slept) == 2


def test_settings_that_differ_are_named_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with (own := answers(path, QuestionShard())).open_for_writing() as add:
        add(own.questions[:1], ["yes"])
    with pytest.raises(ConfigError, match=r"with other settings: model=m there, other here; name another"):
        AnswersFile(path, own.questions, {"model": "other", "blank": False}, "name")
    with pytest.raises(StorageError, match="cannot be read"):
        answers(tmp_path, QuestionShard())
    (tmp_path / "file").write_text("")
    unwritable = answers(tmp_path / "b.jsonl", QuestionShard())
    unwritable.path = tmp_path / "file" / "b.jsonl"
    with pytest.raises(StorageError, match="cannot be written"), unwritable.open_for_writing():
        pass


@pytest.mark.parametrize(
    ("given", "trained", "same"),
    [
        ("v1", "v1", True), ("chatml_direct", "chatml", True), ("v1", "plain", False),
        ("chat_template", "chat_template-abc", True), ("chat_template-abc", "chat_template-abc", True),
        ("chat_template-abd", "chat_template-abc", False), ("v1", "chat_template-abc", False),
        ("chat_template", "v1", False),
    ],
)  # fmt: skip
def test_which_templates_are_the_same(given: str, trained: str, same: bool) -> None:
    assert evaluate.same_template(given, trained) is same


def test_a_process_has_its_gpu_and_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 of four, the first and second of their machine, which has two GPUs."""
    chosen: list[Any] = []
    monkeypatch.setattr(evaluate.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(evaluate.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(evaluate.torch.cuda, "set_device", chosen.append)
    cfg: Any = SimpleNamespace(answers="a.jsonl")
    for rank in (2, 3):
        here = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank - 2, "LOCAL_WORLD_SIZE": 2}
        for key, value in here.items():
            monkeypatch.setenv(key, str(value))
        assert evaluate.open_shard(cfg) == QuestionShard(rank, 4)
    assert [device.index for device in chosen] == [0, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="started 3 ranks on this machine, which has 2 GPUs"):
        evaluate.open_shard(cfg)


def test_a_run_is_told_by_its_newest_checkpoint_or_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [tmp_path / "run" / "checkpoints" / f"step-{step:06d}" for step in (2, 4)]
    for number, folder in enumerate([*kept, tmp_path / "run" / "adapter"]):
        folder.mkdir(parents=True)
        (folder / "manifest.json" if number < 2 else folder / "weights").write_text(f"{number}")
    monkeypatch.setattr(evaluate, "list_checkpoints", lambda _: kept)
    run, newest = str(tmp_path / "run"), digest_of_file(kept[1] / "manifest.json").xxh128
    (tmp_path / "run" / "log.txt").write_text("grows")
    assert evaluate.model_digest(run) == newest
    monkeypatch.setattr(evaluate, "list_checkpoints", lambda _: [])
    assert evaluate.model_digest(run) == evaluate.model_digest(str(tmp_path / "run" / "adapter")) != newest
    assert evaluate.model_digest(str(kept[0])) == digest_of_file(kept[0] / "manifest.json").xxh128


def test_what_is_printed_of_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [BenchmarkQuestion(n, n, "", f"<image>\nwhat\n{n}", ("a.jpg",) * (n == 0), "here") for n in range(3)]
    asked[1] = replace(asked[1], references=("yes", "yes", "no"))
    evaluate.print_result(2, asked, ["one\ntwo", " x ", "y"], {"questions": 3})
    assert capsys.readouterr().out.splitlines() == [
        "a.jpg: what", "    0", "  answer: one", "    two",
        "no image: what", "    1", "  answer: x", "  right:  yes | no",
        "3 questions answered; without right answers there are no scores",
    ]  # fmt: skip
    scores = {"questions": 3, "accuracy": 0.5, "mean_f1": 0.25, "accuracy_blank_pictures": 0.125}
    scores |= {"accuracy_blind_guess": 0.25, "question_texts": 2}
    evaluate.print_result(0, asked, ["", "", ""], scores)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "mean F1 of the categories: 25.00%" and lines[-1] == "accuracy with blank images: 12.50%"
    assert lines[-2].startswith("best blind guess") and lines[-2].endswith("2 question texts): 25.00%")
    assert ["all", "3", "50.00", "12.50", "25.00"] in [line.split() for line in lines]


def pope(number: int, category: str = "a", image: str = "0.jpg") -> BenchmarkQuestion:
    groups = (("category", category),)
    return BenchmarkQuestion(number, number, "Is it?\nShort", "", (image,), f"q{number}", groups=groups)


def test_a_category_has_one_file_of_labels(tmp_path: Path) -> None:
    """Found by the end of its name; the questions keep their order though categories alternate."""
    asked = [pope(0, "a"), pope(1, "b"), pope(2, "a")]
    (tmp_path / "x_a.json").write_text('{"label": "yes"}\n\n{"label": "no", "text": "Is it?", "image": "0.jpg"}\n')
    (tmp_path / "x_b.json").write_text('{"label": "no"}\n')
    found = annotate_yes_no(asked, tmp_path)
    assert [(q.number, q.references) for q in found] == [(0, ("yes",)), (1, ("no",)), (2, ("no",))]
    (tmp_path / "y_b.json").write_text('{"label": "no"}\n')
    with pytest.raises(ConfigError, match=r"has 2 files whose names end in _b\.json"):
        annotate_yes_no(asked, tmp_path)
    with pytest.raises(ConfigError, match=r"has 0 files whose names end in _\*\.json"):
        annotate_yes_no([pope(0, "*")], tmp_path)
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        annotate_yes_no(asked, tmp_path / "gone")
    for line, said in (("[1]", "not an object"), ('{"image": "1.jpg", "label": "no"}', "q0 about")):
        (tmp_path / "z").write_text(line)
        with pytest.raises(DataError, match=f"z, line 1, record 0.*{said}"):
            annotate_yes_no([pope(0)], tmp_path / "z")


def test_problems_give_letters_choices_and_groups(tmp_path: Path) -> None:
    """By the id of a question, a text or a number; groups of the question stay."""
    problems = {"9": {"choices": ["x", "y", "z"], "answer": 2, "subject": "art", "grade": ""}, "8": {"choices": ["x"]}}
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    for identity in ("9", 9):
        [found] = annotate_problems([replace(pope(0), id=identity)], tmp_path)
        assert (found.references, found.choices) == (("C",), 3)
        assert found.groups == (("category", "a"), ("subject", "art"))
    for identity, said in (("7", "problem 7 is null"), ("8", "problem 8 is .* must have choices and answer")):
        with pytest.raises(DataError, match=f"q0: .*problems.json, {said}"):
            annotate_problems([replace(pope(0), id=identity)], tmp_path / "problems.json")


def test_annotations_of_vqa_are_found_and_checked(tmp_path: Path) -> None:
    rows = [{"question_id": 0, "answer_type": "other", "answers": [{"answer": "a"}, {"answer": "b"}]}]
    (tmp_path / "a.json").write_text(json.dumps({"annotations": rows}))
    [found] = annotate_vqa([pope(0)], tmp_path / "a.json")
    assert found.references == ("a", "b") and found.groups == (("category", "a"), ("answer type", "other"))
    with pytest.raises(DataError, match=r"q1: annotations=.* has no such question with the id 1"):
        annotate_vqa([pope(1)], tmp_path / "a.json")
    data = [{"question_id": "7", "image_id": "5", "question": "IS IT?", "answers": ["a"]}]
    (tmp_path / "t.json").write_text(json.dumps({"data": data}))
    for identity in ("5", 5, "7"):
        own = replace(pope(0), id=identity, prompt="is it?")
        assert annotate_textvqa([own], tmp_path / "t.json")[0].references == ("a",)
    with pytest.raises(DataError, match="no such question with the id 6"):
        annotate_textvqa([replace(pope(0), id="6", prompt="is it?")], tmp_path / "t.json")
    (tmp_path / "t.json").write_text(json.dumps({"data": [1]}))
    with pytest.raises(DataError, match="must be a list of objects"):
        annotate_textvqa([pope(0)], tmp_path / "t.json")
    row = {"image_id": 1, "question_id": 2, "question": "?"}
    content = {"data_subtype": "val2014", "questions": [row, row | {"image_id": 123_456}]}
    images = [q.images[0] for q in read_vqa_questions(Path("q"), content)]
    assert images == ["COCO_val2014_000000000001.jpg", "COCO_val2014_000000123456.jpg"]
    for wrong in (
        {"data_subtype": 3},
        {"questions": [row | {"question_id": "2"}]},
        {"questions": [row | {"image_id": None}]},
    ):
        with pytest.raises(DataError):
            list(read_vqa_questions(Path("q"), content | wrong))


def test_images_need_a_folder_and_a_tag(tmp_path: Path) -> None:
    """But for those that a record brings itself, or that no question has."""
    data = command_config(EvaluateConfig, "evaluate", "model.checkpoint=x", f"data.images={tmp_path}").data
    shown = replace(pope(0), text="<image> a")
    check_images([replace(shown, images=())], data)
    check_images([replace(shown, inline={"0.jpg": Path("0.jpg")})], replace(data, images=None))
    with pytest.raises(DataError, match=r"q0 has image 0\.jpg, and data\.images is not set"):
        check_images([shown], replace(data, images=None))
    with pytest.raises(DataError, match=r"data\.images=.*gone is not a folder"):
        check_images([shown], replace(data, images=str(tmp_path / "gone")))
    (tmp_path / "0.jpg").write_text("x")
    check_images([shown], replace(data, images=str(tmp_path)))
    for text, tags in (("a", 0), ("<image><image>", 2)):
        with pytest.raises(DataError, match=f"q0: {tags} <image> tags for 1 images"):
            check_images([replace(shown, text=text)], replace(data, images=str(tmp_path)))
    two = replace(shown, text="<image><image>", images=("0.jpg", "1.jpg"))
    with pytest.raises(DataError, match=r"q0: image .*1\.jpg does not exist"):
        check_images([two], replace(data, images=str(tmp_path)))


def test_the_mean_of_categories_and_the_groups_of_a_score() -> None:
    """Two categories and two other kinds of group: the mean is of the categories. A letter behind the last is none."""
    asked = [replace(pope(n, "ab"[n % 2]), references=("yes" if n < 2 else "no",)) for n in range(4)]
    asked = [replace(q, groups=(*q.groups, ("kind", "k"), ("other", "o"))) for q in asked]
    found = score_all(Task.yes_no, asked, ["yes", "no", "no", "no"])
    f1 = {name: group["f1"] for name, group in found["groups"]["category"].items()}
    assert f1 == {"a": 1, "b": 0} and found["mean_f1"] == 0.5 and found["groups"]["kind"]["k"]["questions"] == 4
    assert "mean_f1" not in score_all(Task.yes_no, [replace(q, groups=()) for q in asked], ["yes"] * 4)
    choice = replace(pope(0), references=("A",), choices=2)
    scores = score_all(Task.multiple_choice, [choice, replace(choice, choices=0), choice], ["C", "C", "A"])
    assert (scores["invalid"], scores["right"], scores["accuracy"]) == (1, 1, 1 / 3)


def asked(number: int, prompt: str, *references: str, **values: Any) -> BenchmarkQuestion:
    return BenchmarkQuestion(
        number, f"id {number}", prompt, f"<image>\n{prompt}", (), f"q {number}", references, **values
    )


def test_an_instruction_is_the_last_line_of_what_is_asked_and_written(caplog: pytest.LogCaptureFixture) -> None:
    first, second = with_instruction([asked(0, "Is it?"), asked(1, "Why?")], Task.vqa, adds=True)
    assert (first.prompt, first.text) == (f"Is it?\n{SHORT}", f"<image>\nIs it?\n{SHORT}")
    assert second.prompt == f"Why?\n{SHORT}"
    ends = [asked(0, "Is it?"), asked(1, f"Is it?\n{SHORT} \n")]
    with pytest.raises(ConfigError, match="suffix=true: q 1 ends with"):
        with_instruction(ends, Task.vqa, adds=True)
    with caplog.at_level("INFO"):
        assert with_instruction(ends[1:], Task.vqa, adds=False) == ends[1:] and not caplog.text
        assert with_instruction(ends, Task.vqa, adds=False) == ends and "q 0 does not end with" in caplog.text


def test_letters_that_are_right_wrong_and_none() -> None:
    """Invalid answers are wrong ones; a letter beyond the choices is invalid."""
    questions = [asked(n, "?", "B", choices=count) for n, count in enumerate((2, 3, 2, 0))]
    found = score_all(Task.multiple_choice, questions, ["B", "A. a cat", "C", "B"])
    assert {key: found[key] for key in ("accuracy", "right", "invalid")} == {"accuracy": 0.5, "right": 2, "invalid": 1}
    assert {name: own["questions"] for name, own in found["groups"]["picture"].items()} == {"without": 4}


def test_numbers_of_a_table() -> None:
    """Rates are in percent; there is a row for all and for each group, and a column for each score that there is."""
    numbers = {"questions": 2, "accuracy": 0.5, "f1": 0.125, "right": 1}
    table = table_of({**numbers, "questions": 1234, "groups": {"category": {"rare": numbers}}})
    assert [column.header for column in table.columns] == ["", "questions", "accuracy", "f1"]
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["all", "category: rare"], ["1,234", "2"], ["50.00", "50.00"], ["12.50", "12.50"]]
    assert (number_text(1.0), number_text(1)) == ("100.00", "1")


def test_what_is_submitted() -> None:
    assert submission_of([asked(0, "?"), asked(1, "?")], ["The Dog.", "two"]) == [
        {"question_id": "id 0", "answer": "dog"}, {"question_id": "id 1", "answer": "2"},
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "fits"), [(0, True), (10, True), (9, False), (11, False)])
def test_ten_people_answer_a_question_of_textvqa(count: int, fits: bool) -> None:
    questions = [asked(0, "?", *["a"] * 10), asked(1, "?", *["a"] * count)]
    if fits:
        check_ten(questions, "file")
    else:
        with pytest.raises(DataError, match=f"q 1 has {count} right answers in file; task=textvqa needs 10"):
            check_ten(questions, "file")


def test_an_answer_in_a_file_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    own = answers(path, QuestionShard())
    row = json.loads(own.line(own.questions[0], "yes"))
    for text in (5, None, ["yes"]):
        path.write_text(json.dumps(row | {"text": text}) + "\n")
        with pytest.raises(ConfigError):
            answers(path, QuestionShard())


def choice_record(*turns: tuple[str, str], **more: Any) -> BenchmarkQuestion:
    said = [{"from": who, "value": text} for who, text in turns]
    return read_choice_record(Path("q.json"), 3, None, {"id": "9", "conversations": said, **more})


def test_a_record_of_scienceqa_is_a_question_with_choices() -> None:
    """Its image stands first, and its answer is right if it names a choice."""
    found = choice_record(("human", "Which? <image>\n"), ("gpt", "The answer is B."), image="1.png")
    assert (found.number, found.id, found.prompt, found.text) == (3, "9", "<image>\nWhich?", "<image>\nWhich?")
    assert (found.images, found.references, found.choices) == (("1.png",), ("B",), 5)
    found = choice_record(("human", "Why?"), ("gpt", "I do not know."))
    assert (found.prompt, found.images, found.references) == ("Why?", (), ())
    assert choice_record(("human", "Why?")).references == ()
    with pytest.raises(DataError):
        choice_record(("gpt", "The answer is B."))


def test_questions_of_vqav2_are_known_by_their_form(tmp_path: Path) -> None:
    """Whatever the case of the file's ending; other tasks have no such files."""
    content = {"data_subtype": "val2014", "questions": [{"image_id": 1, "question_id": 2, "question": "Is it?"}]}
    for name in ("q.json", "q.JSON"):
        (tmp_path / name).write_text("\n " + json.dumps(content))
        [found] = read_file(tmp_path / name, Task.vqa, 1 << 20)
        assert (found.id, found.prompt) == (2, "Is it?")
        with pytest.raises(DataError):
            list(read_file(tmp_path / name, Task.textvqa, 1 << 20))


def test_answers_whose_thought_was_cut_are_marked(tmp_path: Path) -> None:
    """In the files of all processes, and in the one that is made of them."""
    path = tmp_path / "a.jsonl"
    for rank in range(2):
        own = answers(path, QuestionShard(rank, 2))
        asked = own.missing_questions()
        own.thoughts_cut |= {n for n in (2, 3) if n % 2 == rank}
        with own.open_for_writing() as add:
            add(asked, ["" if question.number in own.thoughts_cut else "yes" for question in asked])
    merged = answers(path, QuestionShard(0, 2))
    assert merged.thoughts_cut == {2, 3} and merged.finish().count("") == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["metadata"].get("thought_cut", False) for line in lines] == [n in (2, 3) for n in range(7)]
    assert answers(path, QuestionShard()).thoughts_cut == {2, 3}


def test_answers_that_were_written_in_another_order_are_put_in_theirs(tmp_path: Path) -> None:
    """Where one process has all of them, too; a file that is in order is not written again."""
    path = tmp_path / "a.jsonl"
    own = answers(path, QuestionShard())
    with own.open_for_writing() as add:
        add(own.questions[::-1], [f"{number}" for number in reversed(range(7))])
    again = answers(path, QuestionShard())
    assert again.finish() == [f"{number}" for number in range(7)]
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [f"{n}" for n in range(7)]
    before = path.stat().st_ino
    assert answers(path, QuestionShard()).finish() == again.finish() and path.stat().st_ino == before
