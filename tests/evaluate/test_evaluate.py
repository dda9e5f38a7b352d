"""The evaluate entry: what it reads, that its answers are kept, continued and in order, and its scores."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import TORCHRUN
from forged import forge_notes
from PIL import Image
from small import command_config, write_json
from tiers import slow_after
from transformers import AutoProcessor, LlavaForConditionalGeneration

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.config import AspectRatio, EvaluateConfig, Format
from llava_fsdp.data.records.record import Call, Record, Turn
from llava_fsdp.evaluate.answers_file import AnswersFile, QuestionShard
from llava_fsdp.evaluate.check_images import check_images
from llava_fsdp.evaluate.main import BenchmarkAnswerer, evaluate, with_paths
from llava_fsdp.evaluate.question import LETTER, SHORT
from llava_fsdp.evaluate.read_questions import first_question, read_questions
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, DataError

WORDS = "what colour is the circle", "is the square left of the triangle", "how many", "red or blue", "is it small"
Reply = Callable[[EvaluateConfig, list[str]], dict[str, Any]]


def config(*overrides: str) -> EvaluateConfig:
    return command_config(EvaluateConfig, "evaluate", *overrides)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(folder: Path, **more: list[Any]) -> Path:
    """Five questions as the original's files have them; `more` are further keys, a value for each."""
    rows = [
        {"question_id": 100 + n, "image": f"{n}.{'png' if n % 2 else 'jpg'}", "text": f"{text}?\n{SHORT}"}
        | {key: values[n] for key, values in more.items()}
        for n, text in enumerate(WORDS)
    ]
    del rows[3]["image"]
    return write_lines(folder / "questions.jsonl", rows)


@pytest.fixture
def reply(capsys: pytest.CaptureFixture[str]) -> Reply:
    """Scores of given answers: the file of answers is complete, so that no model is asked."""

    def score(cfg: EvaluateConfig, texts: list[str]) -> dict[str, Any]:
        asked = read_questions(cfg)
        settings = BenchmarkAnswerer(cfg, asked, QuestionShard()).settings | {"blank": False}
        assert cfg.answers is not None
        with AnswersFile(Path(cfg.answers), asked, settings, "model").open_for_writing() as add:
            add(asked[: len(texts)], texts)
        capsys.readouterr()
        evaluate(cfg)
        return json.loads(capsys.readouterr().out)

    return score


@pytest.fixture
def keys(noise: Path, dataset: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.checkpoint={noise}", f"data.images={dataset / 'images'}", f"answers={tmp_path / 'answers.jsonl'}",
        "format=json", "max_new_tokens=4", "batch_size=1",
    ]  # fmt: skip


def test_vqa_by_types(reply: Reply, keys: list[str], tmp_path: Path) -> None:
    """By hand: 1 (ten of ten, prepared), 0.6 (two of ten), 0.3, 1 (a comma in a number), 0."""
    truth = [["yes"] * 10, ["2"] * 2 + ["3"] * 8, ["red"] + ["blue"] * 9, ["1000"] * 4 + ["many"] * 6, ["left"] * 10]
    rows = [
        {
            "question_id": 100 + n,
            "question_type": "how many" if n == 1 else "what",
            "answer_type": "other",
            "answers": [{"answer": a, "answer_id": i} for i, a in enumerate(own)],
        }
        for n, own in enumerate(truth)
    ]
    write_json(tmp_path / "annotations.json", {"annotations": rows[::-1]})
    cfg = config(
        *keys, "task=vqa", f"questions={questions(tmp_path)}", f"annotations={tmp_path / 'annotations.json'}",
        f"submission={tmp_path / 'upload.json'}",
    )  # fmt: skip
    found = reply(cfg, ["Yes.", "two", "a red", "1,000", "right"])
    assert found["accuracy"] == pytest.approx((1 + 0.6 + 0.3 + 1 + 0) / 5)
    how_many = found["groups"]["question type"]["how many"]
    assert (how_many["questions"], how_many["accuracy"]) == (1, pytest.approx(0.6))
    assert how_many["accuracy_blind_guess"] == 1 and found["question_texts"] == 5, "3, as eight of ten people say"
    assert found["groups"]["question type"]["what"]["accuracy"] == pytest.approx(2.3 / 4)
    assert found["questions"] == 5 and "accuracy_blank_pictures" not in found
    upload = json.loads((tmp_path / "upload.json").read_text())
    assert [row["answer"] for row in upload] == ["yes", "2", "red", "1000", "right"]
    assert [row["question_id"] for row in upload] == [100, 101, 102, 103, 104]


def test_vqav2s_own_questions(keys: list[str], tmp_path: Path) -> None:
    rows = [{"image_id": 42, "question": "Is it?", "question_id": 42000}]
    write_json(tmp_path / "q.json", {"data_subtype": "val2014", "questions": rows})
    cfg = config(*keys, "task=vqa", f"questions={tmp_path / 'q.json'}", "suffix=true")
    [asked] = read_questions(cfg)
    assert asked.images == ("COCO_val2014_000000000042.jpg",) and asked.prompt == f"Is it?\n{SHORT}"
    assert asked.text == f"<image>\nIs it?\n{SHORT}" and asked.id == 42000 and asked.references == ()


def test_a_limit_leaves_questions_of_a_file_out(keys: list[str], tmp_path: Path) -> None:
    """The first of them are asked; without a limit all are."""
    words = [*keys, "task=vqa", f"questions={questions(tmp_path)}"]
    assert [asked.id for asked in read_questions(config(*words, "limit=2"))] == [100, 101]
    assert len(read_questions(config(*words))) == 5


def test_textvqa_is_found_by_image_and_question(reply: Reply, keys: list[str], tmp_path: Path) -> None:
    """The original's ids are those of images: two questions have one."""
    rows = [
        {"question_id": "a1", "image": "0.jpg", "text": f"What IS it?\nReference OCR token: x, y\n{SHORT}"},
        {"question_id": "a1", "image": "0.jpg", "text": f"How many?\n{SHORT}"},
    ]
    data = [
        {"image_id": "a1", "question_id": 7, "question": "how many?", "answers": ["2"] * 10},
        {"image_id": "a1", "question_id": 8, "question": "What is it?", "answers": ["dog's"] * 3 + ["cat"] * 7},
    ]
    write_json(tmp_path / "t.json", {"data": data})
    cfg = config(
        *keys,
        "task=textvqa",
        f"questions={write_lines(tmp_path / 'q.jsonl', rows)}",
        f"annotations={tmp_path / 't.json'}",
    )
    assert reply(cfg, ["dog's", "Two"])["accuracy"] == pytest.approx((0.9 + 1) / 2)


@pytest.mark.parametrize("number", [9, 11])
def test_textvqa_needs_ten_answers(number: int, keys: list[str], tmp_path: Path) -> None:
    """The original asserts it; fewer would score an answer that is right as wrong."""
    rows = [{"question_id": "a1", "image": "0.jpg", "text": "What?", "answers": ["dog"] * number}]
    path = write_lines(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError, match=rf"has {number} right answers in .*q\.jsonl; task=textvqa"):
        read_questions(config(*keys, "task=textvqa", f"questions={path}"))
    assert len(read_questions(config(*keys, "task=vqa", f"questions={path}"))) == 1


def test_pope_by_category(reply: Reply, keys: list[str], tmp_path: Path) -> None:
    """By hand. random: yes/yes, no/yes, no/no: precision 1, recall 1/2, F1 2/3. popular: yes/no, yes/yes: F1 2/3."""
    path = questions(tmp_path, category=["random", "popular", "random", "popular", "random"])
    labels = {"random": [(0, "yes"), (2, "yes"), (4, "no")], "popular": [(1, "no"), (3, "yes")]}
    (tmp_path / "coco").mkdir()
    for category, own in labels.items():
        rows = [{"question_id": n, "text": WORDS[at], "label": label} for n, (at, label) in enumerate(own, 1)]
        write_lines(tmp_path / "coco" / f"coco_pope_{category}.json", rows)
    cfg = config(*keys, "task=yes_no", f"questions={path}", f"annotations={tmp_path / 'coco'}")
    found = reply(cfg, ["Yes", "Yes, it is. Or not", "No", "yes", "There is no circle"])
    groups = found["groups"]["category"]
    assert {k: groups["random"][k] for k in ("questions", "accuracy", "precision", "recall", "yes_ratio")} == {
        "questions": 3, "accuracy": 2 / 3, "precision": 1, "recall": 1 / 2, "yes_ratio": 1 / 3,
    }  # fmt: skip
    assert groups["random"]["f1"] == groups["popular"]["f1"] == found["mean_f1"] == 2 / 3
    assert (found["true_yes"], found["false_yes"], found["true_no"], found["false_no"]) == (2, 1, 1, 1)


@pytest.mark.slow
def test_scienceqa_as_the_original_converts_it(reply: Reply, keys: list[str], tmp_path: Path) -> None:
    rows = [
        {"id": "9", "image": "1.png", "conversations": [
            {"from": "human", "value": "Which?\n<image>"}, {"from": "gpt", "value": "The answer is B."}]},
        {"id": "3", "conversations": [
            {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "The answer is A."}]},
    ]  # fmt: skip
    write_json(tmp_path / "llava.json", rows)
    base = [*keys, "task=multiple_choice", f"questions={tmp_path / 'llava.json'}"]
    cfg = config(*base)
    assert [a.prompt for a in read_questions(cfg)] == ["<image>\nWhich?", "Why?"]
    assert reply(cfg, ["B", "B. y"])["accuracy"] == 0.5
    problems = {
        "9": {"choices": ["x", "y", "z"], "answer": 2, "subject": "natural science", "grade": "grade2"},
        "3": {"choices": ["x", "y"], "answer": 0, "subject": "social science"},
    }
    write_json(tmp_path / "problems.json", problems)
    cfg = config(*base, f"annotations={tmp_path}", f"answers={tmp_path / 'other.jsonl'}", "suffix=true")
    assert read_questions(cfg)[1].text == f"Why?\n{LETTER}"
    found = reply(cfg, ["The answer is C.", "C"])
    assert (found["accuracy"], found["right"], found["invalid"]) == (0.5, 1, 1)
    shares = {"accuracy": 1, "accuracy_blind_guess": 1}
    assert found["groups"]["picture"]["with"] == {"questions": 1, "right": 1, "invalid": 0, **shares}
    assert found["groups"]["subject"]["social science"]["accuracy"] == 0 and len(found["groups"]["grade"]) == 1


def test_own_right_answers(reply: Reply, keys: list[str], tmp_path: Path) -> None:
    path = questions(tmp_path, answer=["A", 1, "C", 0, "B"], choices=[["x", "y", "z"]] * 5)
    found = reply(config(*keys, "task=multiple_choice", f"questions={path}"), ["A", "B", "C", "A", "E"])
    assert (found["accuracy"], found["invalid"]) == (0.8, 1)


def test_answers_whose_thought_was_cut_are_counted(
    reply: Reply, keys: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And said: by the file of answers of an evaluation that is read again."""
    cfg = config(*keys, "task=multiple_choice", f"questions={questions(tmp_path, answer=list('ABCAB'))}")
    assert "thoughts_cut" not in reply(cfg, ["A", "B", "", "A", ""])
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for line in lines:
        line["metadata"] |= {"thought_cut": True} if not line["text"] else {}
    write_lines(tmp_path / "answers.jsonl", lines)
    assert reply(cfg, [])["thoughts_cut"] == 2 and "max_new_tokens=4" in caplog.text


def test_all_questions_have_right_answers_or_none_has(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    cfg = config("model.checkpoint=x", "answers=x", "task=yes_no", f"questions={path}")
    without: dict[str, Any] = {"question_id": 1, "text": "Is it?"}
    given = without | {"label": "no"}
    for rows in ([given, given], [without, without]):
        write_lines(path, rows)
        assert len(read_questions(cfg)) == 2
    write_lines(path, [given, without, given])
    with pytest.raises(DataError, match=r"q\.jsonl, line 2, record 1"):
        read_questions(cfg)


def ask(cfg: EvaluateConfig, monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """The entry as a process of torchrun's, here."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    evaluate(cfg)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every question that a model is really asked."""
    seen: list[str] = []
    real = Assistant.answers

    def answers(self: Assistant, questions: list, *rest: Any, **more: Any) -> list[str]:
        seen.extend(q.turns[-1].text for q in questions)
        return real(self, questions, *rest, **more)

    monkeypatch.setattr(Assistant, "answers", answers)
    return seen


def test_answers_are_kept_in_order_and_continued(keys: list[str], tmp_path: Path, counted: list[str]) -> None:
    file = tmp_path / "answers.jsonl"
    cfg = config(*keys, "task=vqa", f"questions={questions(tmp_path)}", "batch_size=2")
    evaluate(cfg)
    whole = file.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["question_id"] for row in rows] == [100, 101, 102, 103, 104] and len(counted) == 5
    assert set(rows[0]) == {"question_id", "prompt", "text", "answer_id", "model_id", "metadata"}
    assert rows[0]["prompt"] == f"{WORDS[0]}?\n{SHORT}"

    lines = whole.splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1] + lines[2][:30])
    counted.clear()
    evaluate(cfg)
    assert file.read_bytes() == whole
    assert [text.removeprefix("<image>\n").partition("?")[0] for text in counted] == list(WORDS[2:])

    counted.clear()
    evaluate(cfg)
    assert file.read_bytes() == whole and not counted, "all is answered: no model is needed"


def test_a_model_is_asked_as_it_was_trained(noise: Path, keys: list[str], tmp_path: Path, counted: list[str]) -> None:
    """Template and image fitting are the model's own, whatever the keys say, and so are those that are recorded."""
    shutil.copytree(noise / "export", tmp_path / "export")
    forge_notes(tmp_path / "export", template="chatml", image_aspect_ratio="square")
    words = [*keys, f"model.checkpoint={tmp_path / 'export'}", "task=vqa", f"questions={questions(tmp_path)}"]
    evaluate(config(*words))
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    how = [(row["metadata"]["how"]["template"], row["metadata"]["how"]["image_aspect_ratio"]) for row in rows]
    assert how == [("chatml", "square")] * 5 and len(counted) == 5
    evaluate(config(*words, "data.template=chatml_direct"))
    assert len(counted) == 5, "an alias of the same: it continues"
    with pytest.raises(ConfigError, match=r"data.template=v1: .*export was trained with data.template=chatml"):
        evaluate(config(*words, "data.template=v1"))


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_file(
    keys: list[str],
    tmp_path: Path,
    counted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "answers.jsonl"
    cfg = config(*keys, "task=vqa", f"questions={questions(tmp_path)}")
    evaluate(cfg)
    whole = file.read_bytes()

    first = whole.splitlines(keepends=True)[0]
    file.write_bytes(first)  # begun by one process, continued by three, of which the first one is the last
    counted.clear()
    capsys.readouterr()
    for rank in (2, 1):
        ask(cfg, monkeypatch, rank, 3)
    assert file.read_bytes() == first and len(list(tmp_path.glob("answers.jsonl.part-*"))) == 2
    assert not capsys.readouterr().out
    ask(cfg, monkeypatch, 0, 3)
    assert file.read_bytes() == whole and len(counted) == 4
    assert not list(tmp_path.glob("answers.jsonl.part-*")) and capsys.readouterr().out

    lines = whole.splitlines(keepends=True)
    file.unlink()  # parts of an interrupted evaluation by two, continued by one
    (tmp_path / "answers.jsonl.part-1-of-2").write_bytes(lines[3] + lines[1][:10])
    counted.clear()
    ask(cfg, monkeypatch, 0, 1)
    assert file.read_bytes() == whole and len(counted) == 4


def test_an_answers_file(keys: list[str], tmp_path: Path) -> None:
    """One process writes it; a line counts once it is complete; a wait in vain names the ranks that are missing."""
    asked = read_questions(config(*keys, "task=vqa", f"questions={questions(tmp_path)}"))
    path = tmp_path / "a.jsonl"
    one, other = (AnswersFile(path, asked, {}, "model") for _ in range(2))
    refused = pytest.raises(ConfigError, match="being written by another evaluation")
    with one.open_for_writing(), refused, other.open_for_writing():
        pass
    lines = "".join(one.line(question, "x") + "\n" for question in asked[:3]).encode()
    for end in (len(lines) // 2, len(lines) - 1, len(lines)):
        path.write_bytes(lines[:end])
        one.read_new()
        assert len(one.texts) == lines[:end].count(b"\n")
    of_two = AnswersFile(tmp_path / "b.jsonl", asked, {}, "model", QuestionShard(0, 2))
    with of_two.open_for_writing() as add:
        add(of_two.missing_questions(), ["x", "y", "z"])
    with pytest.raises(CommunicationError, match=r"2 are missing, of ranks \[1\]"):
        of_two.wait(stall=0)


@pytest.mark.parametrize(
    ("change", "said"),
    slow_after(
        1,
        [
            (lambda rows: rows[0].update(prompt="another"), "answers a question 0 .*'another'.* not among these 5"),
            (lambda rows: rows[1]["metadata"].update(number=77), "answers a question 77 .*suffix or limit"),
            (lambda rows: rows[2]["metadata"].update(tools="0"), "answers a question 2 .*other questions or tools"),
            (lambda rows: rows[0]["metadata"]["how"].update(max_new_tokens=9), "max_new_tokens=9 there, 4 here"),
            (lambda rows: rows[0]["metadata"]["how"].update(model="0"), "model=0 there"),
            (lambda rows: rows[0].pop("metadata"), "a line that this program has not written"),
        ],
    ),
)
def test_another_evaluations_file_is_refused(
    change: Callable, said: str, keys: list[str], tmp_path: Path, reply: Reply
) -> None:
    cfg = config(*keys, "task=vqa", f"questions={questions(tmp_path, answers=[['yes'] * 10] * 5)}")
    reply(cfg, ["yes"] * 5)
    file = tmp_path / "answers.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    write_lines(file, rows)
    with pytest.raises(ConfigError, match=f"{file.name} .*{said}.*name another file with answers=FILE"):
        evaluate(cfg)


def test_conversations_with_and_without_images(
    keys: list[str], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], counted: list[str]
) -> None:
    """As without a task: the first questions of LLaVA records, and the same with blank images, each in its file."""
    cfg = config(*keys, "data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.images={dataset / 'images'}",
                 "limit=3", "batch_size=3")  # fmt: skip
    capsys.readouterr()
    evaluate(cfg)
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 3 and {"accuracy", "accuracy_blank_pictures", "checkpoint", "data"} <= set(found)
    assert len(counted) == 6 and {p.name for p in tmp_path.glob("*.jsonl")} == {"answers.jsonl", "answers_blank.jsonl"}
    evaluate(config(*keys, "data=llava_json", f"data.path={dataset / 'mixed.json'}",
                    f"data.images={dataset / 'images'}", "limit=4", "batch_size=3"))  # fmt: skip
    assert len(counted) == 8, "a raised limit asks the rest"


def test_answers_to_blank_images_have_a_score_of_their_own(
    keys: list[str], dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(self: BenchmarkAnswerer, blank: bool) -> list[str]:
        return ["?" if blank and number else question.references[0] for number, question in enumerate(self.questions)]

    monkeypatch.setattr(BenchmarkAnswerer, "answers", given)
    cfg = config(*keys, "data=llava_json", f"data.path={dataset / 'mixed.json'}", "limit=4")
    capsys.readouterr()
    evaluate(cfg)
    found = json.loads(capsys.readouterr().out)
    assert (found["accuracy"], found["accuracy_blank_pictures"]) == (1.0, 0.25)


def two_sources(folder: Path) -> list[str]:
    """Two sources with images of the same names: five cats on red images, in two files, and two dogs on blue ones."""
    words = []
    for name, colour, answers in (("cats", "red", ["cat"] * 4 + ["lion"]), ("dogs", "blue", ["dog", "cat"])):
        (folder / name).mkdir()
        rows = []
        for number, answer in enumerate(answers):
            Image.new("RGB", (9, 9), colour).save(folder / name / f"{number}.png")
            talk = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": answer}]
            rows.append({"id": f"{number}", "image": f"{number}.png", "conversations": talk})
        write_json(folder / f"{name}.json", rows[:3])
        files = [folder / f"{name}.json"]
        if rows[3:]:
            files.append(write_lines(folder / f"{name}.jsonl", rows[3:]))
        words.append(f"++data.sources.{name}.path='{','.join(map(str, files))}'")
        words.append(f"++data.sources.{name}.images={folder / name}")
    return words


def test_every_source_has_a_score_of_its_own(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model says cat, and with blank images dog. Images are read from the source's own folder; a limit leaves
    questions of both sources; the blind guess of all is cat (five of seven), of the dogs' source either."""
    seen: list[tuple[bool, list[tuple[int, int, int]]]] = []

    def say(self: Assistant, asked: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        for question in asked:
            (path,) = question.images
            with Image.open(str(path)) as image:
                seen.append((blank, [image.convert("RGB").getpixel((0, 0))]))  # type: ignore[list-item]
        self.thoughts_cut = [False for _ in asked]
        return ["dog" if blank else "Cat" for _ in asked]

    monkeypatch.setattr(Assistant, "__init__", lambda self, *given, **named: None)
    monkeypatch.setattr(Assistant, "answers", say)
    own = [word for word in keys if not word.startswith("data.images")]
    words = [*own, "data=llava_json", "data.images=null", *two_sources(tmp_path)]
    evaluate(config(*words))
    found = json.loads(capsys.readouterr().out)
    assert (found["questions"], found["question_texts"]) == (7, 1)
    assert (found["accuracy"], found["accuracy_blank_pictures"]) == (5 / 7, 1 / 7)
    assert found["accuracy_blind_guess"] == 5 / 7 and set(found["data"]) == {"cats", "dogs"}
    assert found["groups"]["source"] == {
        "cats": {"questions": 5, "accuracy": 4 / 5, "accuracy_blank_pictures": 0.0, "accuracy_blind_guess": 4 / 5},
        "dogs": {"questions": 2, "accuracy": 1 / 2, "accuracy_blank_pictures": 1 / 2, "accuracy_blind_guess": 1 / 2},
    }
    red, blue = (255, 0, 0), (0, 0, 255)
    assert [pixel for blank, (pixel,) in seen if not blank] == [red, blue, red, blue, red, red, red]
    evaluate(config(*words, "limit=3", f"answers={tmp_path / 'other.jsonl'}"))
    groups = json.loads(capsys.readouterr().out)["groups"]["source"]
    assert {name: own["questions"] for name, own in groups.items()} == {"cats": 2, "dogs": 1}
    evaluate(config(*words, "limit=6", f"answers={tmp_path / 'other.jsonl'}"))
    assert len(seen) == 2 * (7 + 6), "a raised limit asks the rest"


def test_a_source_without_records_is_named(keys: list[str], tmp_path: Path) -> None:
    words = [*keys, "data=llava_json", *two_sources(tmp_path)]
    write_json(tmp_path / "dogs.json", [])
    with pytest.raises(DataError, match=r"dogs\.json"):
        read_questions(config(*words))


@pytest.mark.parametrize(
    ("task", "content"),
    [("vqa", {"images": []}), ("yes_no", {"questions": [], "images": []}), ("yes_no", {"question_id": 1})],
)
def test_an_object_of_another_kind_has_no_questions(task: str, content: dict, keys: list[str], tmp_path: Path) -> None:
    write_json(tmp_path / "q.json", content)
    with pytest.raises(DataError, match=f"q.json is an object with the keys .*task={task} reads JSON Lines"):
        read_questions(config(*keys, f"task={task}", f"questions={tmp_path / 'q.json'}"))


def test_a_record_s_system_text_and_tools_are_asked_with_its_question(tmp_path: Path) -> None:
    turns = (Turn("system", "be kind"), Turn("human", "a"), Turn("gpt", "b"), Turn("human", "c"), Turn("gpt", "d"))
    tools = ({"type": "function", "function": {"name": "look"}},)
    question = first_question(Record("data.json", 0, "0", (), turns, False, tools=tools))
    asked = with_paths(question, Path("."))
    assert (asked.turns, asked.tools) == (list(turns[:2]), tools) and question.references == ("b",)
    called = replace(turns[2], text="", calls=(Call("look", {}),))
    with pytest.raises(DataError):  # there is no text to compare with
        first_question(Record("data.json", 0, "0", (), (*turns[:2], called), False, tools=tools))


def test_a_missing_image_is_named_before_any_model_work(keys: list[str], tmp_path: Path) -> None:
    path = questions(tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["image"] = "gone.jpg"
    write_lines(path, rows)
    with pytest.raises(DataError, match=r"line 3, record 2 \(id 102\): image .*gone.jpg does not exist"):
        evaluate(config(*keys, "task=vqa", f"questions={path}", f"model.checkpoint={tmp_path / 'nowhere'}"))


def test_an_image_outside_of_its_folder_is_not_read(keys: list[str], tmp_path: Path) -> None:
    """Also where a link leads there, unless links are allowed."""
    images, other = tmp_path / "images", tmp_path / "images_private"
    images.mkdir()
    other.mkdir()
    (images / "0.jpg").symlink_to(other / "0.jpg")
    Image.new("RGB", (9, 9)).save(other / "0.jpg")
    words = [*keys, "task=vqa", f"questions={questions(tmp_path)}", "limit=1", f"data.images={images}"]
    data = config(*words).data
    asked = read_questions(config(*words))[:1]
    with pytest.raises(DataError, match=r"0\.jpg is a link to .*images_private"):
        check_images(asked, data)
    check_images(asked, replace(data, allow_links=True))


def test_a_table_has_a_row_for_every_group(
    reply: Reply, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = questions(tmp_path, label=["yes", "no", "no", "yes", "no"], category=["a", "[bold]b", "a", "a", "[bold]b"])
    cfg = config(*keys, "task=yes_no", f"questions={path}")
    reply(cfg, ["yes", "yes", "no", "no", "no"])
    cfg.format = Format.text
    cfg.show = 1
    evaluate(cfg)
    said = capsys.readouterr().out
    assert f"0.jpg: {WORDS[0]}?" in said and "answer: yes" in said and "right:  yes" in said
    names = {line.strip().split("  ")[0] for line in said.splitlines()}
    assert {"all", "category: a", "category: [bold]b"} <= names
    assert next(line for line in said.splitlines() if "category: a" in line).split()[2:] == [
        "3", "66.67", "100.00", "100.00", "50.00", "66.67", "33.33",
    ]  # fmt: skip


def test_mistakes_of_one_process(keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports what it meets itself, as no other process meets that; and several processes need a file."""

    def too_long(*_: object) -> list[str]:
        raise DataError("too long")

    monkeypatch.setattr(Assistant, "answers", too_long)
    words = [*keys, "task=vqa", f"questions={questions(tmp_path)}"]
    with pytest.raises(DataError) as caught:
        ask(config(*words), monkeypatch, 1, 2)
    assert not caught.value.on_every_rank
    with pytest.raises(ConfigError, match="name it with answers=FILE"):
        ask(config(*words, "answers=null"), monkeypatch, 0, 2)


def test_what_lmms_eval_calls_gives_our_answer(noise: Path, dataset: Path, tmp_path: Path) -> None:
    """The calls of its llava_hf, in its chat form and its simple one, on a copy whose template writes no BOS."""
    path, text = dataset / "images" / "0.jpg", f"what colour is it?\n{SHORT}"
    copied = tmp_path / "copy"
    shutil.copytree(noise / "export", copied)
    lines = (copied / "chat_template.jinja").read_text().splitlines()
    (copied / "chat_template.jinja").write_text("\n".join(line for line in lines if "bos_token" not in line))
    processor = AutoProcessor.from_pretrained(copied, revision="main", trust_remote_code=False)
    processor.tokenizer.padding_side = "left"
    with Image.open(path) as file:
        picture = file.convert("RGB")
    parts = [{"type": "image", "url": picture}, {"type": "text", "text": text}]
    said = processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    simple = [{"role": "user", "content": f"<image>\n{text}"}]
    assert said == processor.tokenizer.apply_chat_template(simple, tokenize=False, add_generation_prompt=True)
    inputs = processor(images=[picture], videos=None, text=said, return_tensors="pt")
    ids = AutoProcessor.from_pretrained(noise / "export").apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert inputs["input_ids"].tolist() == ids["input_ids"], "one BOS, as in training"
    theirs = LlavaForConditionalGeneration.from_pretrained(noise / "export", dtype="auto")
    end = processor.tokenizer.eos_token_id
    written = theirs.generate(
        **inputs, do_sample=False, temperature=None, top_p=None, num_beams=1, max_new_tokens=8, use_cache=True,
        pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    answer = processor.tokenizer.batch_decode(written[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)[0]
    ours = Assistant(str(noise), "v1", AspectRatio.pad)
    question = Question([Turn("human", f"<image>\n{text}")], [path], "here")
    assert ours.answers([question], 8) == [answer.strip()] and answer.strip()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "Is it?"}, "question_id is null"),
        ({"question_id": 1}, "text is null"),
        ({"question_id": 1, "text": "?", "image": 5}, "image is 5"),
        ({"question_id": 1, "text": "?", "image": "../x.jpg"}, r"\.\. is not allowed"),
        ({"question_id": 1, "text": "?", "image": ["0.jpg", "1.png"]}, "0 <image> tags for 2 images"),
        ({"question_id": 1, "text": "\ud83d"}, "surrogate"),
        ({"question_id": 1, "text": "?", "Video": "a.mp4"}, 'has the key "Video", "a.mp4", and media are read from'),
        ({"question_id": 1, "text": "?" * (5 << 20)}, "has 5,.* bytes, over data.max_record_bytes=4194304"),
        ({"question_id": 1, "text": "<audio> what"}, "has the tag <audio> in a question"),
        ({"question_id": 1, "text": "?", "answers": []}, "answers is"),
        ([1], "not an object"),
    ],
)
def test_records_of_another_form_are_named(row: object, said: str, keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"q.jsonl, line 1, record 0.*{said}"):
        evaluate(config(*keys, "task=vqa", f"questions={tmp_path / 'q.jsonl'}"))


def test_labels_of_other_questions_are_refused(keys: list[str], tmp_path: Path) -> None:
    path = questions(tmp_path)
    label = tmp_path / "labels.json"
    cfg = config(*keys, "task=yes_no", f"questions={path}", f"annotations={label}")
    rows = [{"question_id": n, "text": text, "label": "yes"} for n, text in enumerate(WORDS)]
    write_lines(label, rows[:4])
    with pytest.raises(DataError, match="4 labels for 5 questions"):
        read_questions(cfg)
    write_lines(label, [*rows[1:], rows[0]])
    with pytest.raises(DataError, match=r"line 1, record 0 .*asks"):
        read_questions(cfg)
    write_lines(label, [*rows[:4], rows[4] | {"label": "maybe"}])
    with pytest.raises(DataError, match=r"label is .*maybe.* it must be yes or no"):
        read_questions(cfg)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task=vqa"], "task=vqa needs questions=FILE"),
        (["questions=x.jsonl"], "questions=x.jsonl is not for task=conversations"),
        (["task=vqa", "questions=nowhere.jsonl"], "questions=nowhere.jsonl is not a file"),
        (["task=yes_no", "questions=QUESTIONS", "submission=x.json"], "submission=x.json"),
        (["task=vqa", "questions=QUESTIONS", "suffix=true"], "already; set suffix=false"),
        (["suffix=true", "limit=1"], "set suffix=false"),
    ],
)
def test_keys_that_cannot_be(overrides: list[str], said: str, keys: list[str], dataset: Path, tmp_path: Path) -> None:
    given = [*keys, "data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.images={dataset / 'images'}"]
    path = str(questions(tmp_path))
    with pytest.raises(ConfigError, match=said):
        evaluate(config(*given, *(override.replace("QUESTIONS", path) for override in overrides)))


@pytest.mark.e2e
@pytest.mark.slow
def test_two_processes_under_torchrun(keys: list[str], tmp_path: Path) -> None:
    words = [k for k in keys if not k.startswith("answers=")] + ["task=vqa", f"questions={questions(tmp_path)}"]
    evaluate(config(*words, f"answers={tmp_path / 'alone.jsonl'}"))
    ran = subprocess.run(
        [*TORCHRUN, "2", "-m", "llava_fsdp.evaluate", *words, f"answers={tmp_path / 'two.jsonl'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert json.loads(ran.stdout)["questions"] == 5, "one process prints"
