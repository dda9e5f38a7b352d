"""ScienceQA's problems.json and pid_splits.json, and the records that the original makes of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import parse_record, shown
from llava_fsdp.evaluate.question import Asked, check_unread, picture_names, with_pictures
from llava_fsdp.evaluate.references import count_choices, letter_of
from llava_fsdp.evaluate.scoring import chosen
from llava_fsdp.evaluate.scoring.multiple_choice import LETTERS
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.safe_load import LARGE, read_json

PROBLEMS, SPLITS = "problems.json", "pid_splits.json"
KINDS = ("subject", "grade")


def read_problems(path: Path, problems: dict[str, Any], split: str) -> Iterator[Asked]:
    """The problems of a split: the context where there is one, the question, and each choice on a line with its letter.

    Pictures are ID/NAME below the folder of the split's pictures.

    Raises:
        ConfigError: there is no such split.
        DataError: a problem is not of the release's form.
    """
    splits = read_json(path.with_name(SPLITS), DataError)
    if not isinstance(splits.get(split), list):
        raise ConfigError(f"split={split} is not in {path.with_name(SPLITS)}; it has {', '.join(sorted(splits))}")
    for number, identity in enumerate(splits[split]):
        where = f"{path}, problem {identity}"
        problem = problem_of(problems, identity, where)
        picture = problem.get("image")
        images = picture_names(None if picture is None else f"{identity}/{picture}", where)
        choices = [f"{letter}. {text}" for letter, text in zip(LETTERS, problem["choices"], strict=False)]
        hint = str(problem.get("hint") or "").strip()
        text = "\n".join([*([f"Context: {hint}"] if hint else []), str(problem["question"]), *choices])
        text = with_pictures(text, images)
        yield answered(Asked(number, str(identity), text, text, images, where), problem)


def annotate_problems(asked: list[Asked], path: Path) -> list[Asked]:
    """With the answers of problems.json, or of the folder that it lies in, found by id.

    Raises:
        DataError: a question is not in it.
    """
    file = path / PROBLEMS if path.is_dir() else path
    problems = read_json(file, DataError, LARGE)
    return [answered(own, problem_of(problems, own.id, f"{own.where}: {file}, problem {own.id}")) for own in asked]


def problem_of(problems: dict[str, Any], identity: object, where: str) -> dict[str, Any]:
    problem = problems.get(str(identity))
    if not isinstance(problem, dict) or not {"question", "choices", "answer"} <= set(problem):
        raise DataError(f"{where} is {shown(problem)}; it must have question, choices and answer")
    count_choices(problem["choices"], where)
    return problem


def answered(asked: Asked, problem: dict[str, Any]) -> Asked:
    choices = len(problem["choices"])
    groups = tuple((kind, str(problem[kind])) for kind in KINDS if problem.get(kind))
    return replace(
        asked,
        references=(letter_of(problem["answer"], choices, asked.where),),
        choices=choices,
        groups=asked.groups + groups,
    )


def read_choice_record(path: Path, number: int, line: int | None, raw: dict[str, Any]) -> Asked:
    """A LLaVA record; its answer is right, where it names a letter. As in the original the picture comes first."""
    record = parse_record(path, number, raw, line)
    check_unread(record.where, record.unread)
    if not record.turns or record.turns[0].role != "human":
        raise DataError(f"{record.where}: it must begin with a question (from human)")
    text = with_pictures(record.turns[0].text.replace("<image>", "").strip(), record.images)
    picked = chosen(record.turns[1].text, len(LETTERS)) if len(record.turns) > 1 else None
    references = () if picked is None else (LETTERS[picked],)
    return Asked(number, record.id, text, text, record.images, record.where, references, len(LETTERS))
