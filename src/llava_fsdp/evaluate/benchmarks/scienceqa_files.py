"""Read the questions of ScienceQA from LLaVA's training format, into which the original LLaVA has converted them, and
the right answers from ScienceQA's problems.json."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.images.check import inline_images
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import IMAGE_TAG, shown
from llava_fsdp.evaluate.benchmarks.references import count_choices, letter_of
from llava_fsdp.evaluate.benchmarks.scoring import LETTERS, named_choice
from llava_fsdp.evaluate.question import BenchmarkQuestion, check_unread, with_image_tag
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.files.safe_load import LARGE, read_json

PROBLEMS = "problems.json"
KINDS = ("subject", "grade")


def read_choice_record(path: Path, number: int, line: int | None, raw: dict[str, Any]) -> BenchmarkQuestion:
    """Return the multiple-choice question in `raw`, an entry in LLaVA's training format. Image tags are taken out of
    its text, and one is put in front if it has one image. If the entry's answer names a choice, that is the right one.

    Args:
        path: the file, for error messages.
        number: number of the entry in the file, from 0.
        line: line number of the entry; None in a JSON list.

    Raises:
        DataError: the entry has the wrong form, has media that cannot be read, or does not begin with a question.
    """
    record = parse_record(path, number, raw, line)
    check_unread(record.where, record.unread)
    if not record.turns or record.turns[0].role != "human":
        raise DataError(f"{record.where}: it must begin with a question (from human)")
    text = with_image_tag(record.turns[0].text.replace(IMAGE_TAG, "").strip(), record.images)
    picked = named_choice(record.turns[1].text, len(LETTERS)) if len(record.turns) > 1 else None
    references = () if picked is None else (picked,)
    return BenchmarkQuestion(
        number=number,
        id=record.id,
        prompt=text,
        text=text,
        images=record.images,
        where=record.where,
        references=references,
        choices=len(LETTERS),
        inline=inline_images(record),
    )


def annotate_problems(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Return questions with the right answers, numbers of choices and groups (subject, grade) from problems.json. A
    question's id is its key in that file. `path` is the file, or the folder that it is in. Raise DataError if a
    question is not in the file, or its entry has the wrong form."""
    file = path / PROBLEMS if path.is_dir() else path
    problems = read_json(file, DataError, LARGE)
    return [with_answer(q, problems.get(str(q.id)), f"{q.where}: {file}, problem {q.id}") for q in questions]


def with_answer(question: BenchmarkQuestion, problem: object, where: str) -> BenchmarkQuestion:
    """Return a question with the right answer, number of choices and groups from its entry `problem` of problems.json.
    Raise DataError, whose message begins with `where`, if the entry is missing or has the wrong form."""
    if not isinstance(problem, dict) or not {"choices", "answer"} <= set(problem):
        raise DataError(f"{where} is {shown(problem)}; it must have choices and answer")
    choices = count_choices(problem["choices"], where)
    groups = tuple((kind, str(problem[kind])) for kind in KINDS if problem.get(kind))
    references = (letter_of(problem["answer"], choices, where),)
    return replace(question, references=references, choices=choices, groups=question.groups + groups)
