"""Read ScienceQA's problems.json and pid_splits.json, and the LLaVA records that the original makes of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import parse_record, shown
from llava_fsdp.evaluate.question import BenchmarkQuestion, check_unread, image_names, with_image_tag
from llava_fsdp.evaluate.references import count_choices, letter_of
from llava_fsdp.evaluate.scoring import LETTERS, chosen
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.safe_load import LARGE, read_json

PROBLEMS, SPLITS = "problems.json", "pid_splits.json"
KINDS = ("subject", "grade")


def read_problems(path: Path, problems: dict[str, Any], split: str) -> Iterator[BenchmarkQuestion]:
    """Read ScienceQA's questions of a split: the context if there is one, the question, and a line for each choice with
    its letter.

    Images are ID/NAME in the folder of the split's images.

    Raises:
        ConfigError: the split does not exist.
        DataError: a problem lacks a key, or one has the wrong form.
    """
    splits = read_json(path.with_name(SPLITS), DataError)
    if not isinstance(splits.get(split), list):
        raise ConfigError(f"split={split} is not in {path.with_name(SPLITS)}; it has {', '.join(sorted(splits))}")
    for number, identity in enumerate(splits[split]):
        where = f"{path}, problem {identity}"
        problem = problem_of(problems, identity, where)
        image = problem.get("image")
        images = image_names(None if image is None else f"{identity}/{image}", where)
        choices = [f"{letter}. {text}" for letter, text in zip(LETTERS, problem["choices"], strict=False)]
        hint = str(problem.get("hint") or "").strip()
        text = "\n".join([*([f"Context: {hint}"] if hint else []), str(problem["question"]), *choices])
        text = with_image_tag(text, images)
        yield with_answer(BenchmarkQuestion(number, str(identity), text, text, images, where), problem)


def annotate_problems(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Add the right answers in ScienceQA's problems.json to questions, by their ids.

    Args:
        path: problems.json, or its folder.

    Raises:
        DataError: a question is not in the file.
    """
    file = path / PROBLEMS if path.is_dir() else path
    problems = read_json(file, DataError, LARGE)
    return [with_answer(q, problem_of(problems, q.id, f"{q.where}: {file}, problem {q.id}")) for q in questions]


def problem_of(problems: dict[str, Any], identity: object, where: str) -> dict[str, Any]:
    problem = problems.get(str(identity))
    if not isinstance(problem, dict) or not {"question", "choices", "answer"} <= set(problem):
        raise DataError(f"{where} is {shown(problem)}; it must have question, choices and answer")
    count_choices(problem["choices"], where)
    return problem


def with_answer(question: BenchmarkQuestion, problem: dict[str, Any]) -> BenchmarkQuestion:
    choices = len(problem["choices"])
    groups = tuple((kind, str(problem[kind])) for kind in KINDS if problem.get(kind))
    references = (letter_of(problem["answer"], choices, question.where),)
    return replace(question, references=references, choices=choices, groups=question.groups + groups)


def read_choice_record(path: Path, number: int, line: int | None, raw: dict[str, Any]) -> BenchmarkQuestion:
    """Read a multiple-choice question from a LLaVA record, with the right answer if the record's answer names a letter;
    the image tag comes first."""
    record = parse_record(path, number, raw, line)
    check_unread(record.where, record.unread)
    if not record.turns or record.turns[0].role != "human":
        raise DataError(f"{record.where}: it must begin with a question (from human)")
    text = with_image_tag(record.turns[0].text.replace("<image>", "").strip(), record.images)
    picked = chosen(record.turns[1].text, len(LETTERS)) if len(record.turns) > 1 else None
    references = () if picked is None else (LETTERS[picked],)
    return BenchmarkQuestion(number, record.id, text, text, record.images, record.where, references, len(LETTERS))
