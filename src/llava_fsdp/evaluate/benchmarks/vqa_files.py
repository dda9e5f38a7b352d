"""Read the benchmarks VQAv2 (questions and annotations) and TextVQA (annotations), in the formats of their releases."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import shown
from llava_fsdp.evaluate.benchmarks.references import rows_of, texts_of
from llava_fsdp.evaluate.question import SHORT, BenchmarkQuestion, with_image_tag
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.files.safe_load import LARGE, read_json

TEXTVQA_ANSWERS = 10
OCR = "Reference OCR token:"
"""Beginning of the line of words recognized in the image (OCR), which every question in the original LLaVA's file for
TextVQA has."""


def read_vqa_questions(path: Path, content: dict[str, Any]) -> Iterator[BenchmarkQuestion]:
    """Yield the questions in the content of VQAv2's `v2_OpenEnded_mscoco_*_questions.json`, about images of COCO."""
    subset = content.get("data_subtype")
    if not isinstance(subset, str):
        raise DataError(f"questions={path}: data_subtype is {shown(subset)}; it must be COCO's part, such as val2014")
    for number, row in enumerate(rows_of(content["questions"], f"questions={path}: questions")):
        where = f"{path}, question {number} (id {row.get('question_id')})"
        if [type(row.get(key)) for key in ("image_id", "question_id", "question")] != [int, int, str]:
            raise DataError(f"{where} is {shown(row)}; it must have question, and the numbers question_id and image_id")
        images = (f"COCO_{subset}_{row['image_id']:012d}.jpg",)
        text = row["question"]
        yield BenchmarkQuestion(number, row["question_id"], text, with_image_tag(text, images), images, where)


def annotate_vqa(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Return questions of VQAv2 with the right answers from an annotations file, found by `question_id`. Each
    question's answer type and question type become groups.

    Raises:
        DataError: the file has the wrong form, or has no annotation for a question.
    """
    by_id = {str(row.get("question_id")): row for row in annotation_rows(path, "annotations")}
    annotated = []
    for question in questions:
        row = annotation_of(question, by_id.get(str(question.id)), path)
        kinds = [(name.replace("_", " "), row.get(name)) for name in ("answer_type", "question_type")]
        groups = tuple((name, str(value)) for name, value in kinds if value is not None)
        references = texts_of(row.get("answers"), f"annotations={path}: {question.id}")
        annotated.append(replace(question, references=references, groups=question.groups + groups))
    return annotated


def annotate_textvqa(questions: list[BenchmarkQuestion], path: Path) -> list[BenchmarkQuestion]:
    """Return questions of TextVQA with the right answers from an annotations file. An annotation belongs to the
    question with the same text whose id is the annotation's image id (as in the original LLaVA's file) or its question
    id. Raise DataError if the file has the wrong form, or has no annotation for a question."""
    by_id_and_text: dict[tuple[str, str], dict[str, Any]] = {}
    for row in annotation_rows(path, "data"):
        question = str(row.get("question")).lower()
        by_id_and_text[str(row.get("image_id")), question] = by_id_and_text[str(row.get("question_id")), question] = row
    annotated = []
    for question in questions:
        row = annotation_of(question, by_id_and_text.get((str(question.id), bare_question(question.prompt))), path)
        annotated.append(
            replace(question, references=texts_of(row.get("answers"), f"annotations={path}: {question.id}"))
        )
    return annotated


def annotation_rows(path: Path, key: str) -> list[dict[str, Any]]:
    return rows_of(read_json(path, DataError, LARGE).get(key), f"annotations={path}: {key}")


def annotation_of(question: BenchmarkQuestion, row: dict[str, Any] | None, path: Path) -> dict[str, Any]:
    """Return a question's annotation `row`. Raise DataError if it is None: the annotations file `path` lacks it."""
    if row is None:
        raise DataError(
            f"{question.where}: annotations={path} has no such question with the id {question.id}; are they of the "
            "same split?"
        )
    return row


def check_ten(questions: list[BenchmarkQuestion], path: str) -> None:
    """Raise DataError if a question has right answers, but not exactly the ten that the original's TextVQA asserts."""
    for question in questions:
        if len(question.references) not in (0, TEXTVQA_ANSWERS):
            raise DataError(
                f"{question.where} has {len(question.references)} right answers in {path}; task=textvqa needs "
                f"{TEXTVQA_ANSWERS}, as the original's evaluator does; task=vqa takes any number"
            )


def bare_question(prompt: str) -> str:
    """Return a TextVQA question's text in lower case, without the line of OCR words and the instruction (SHORT)."""
    lines = [line for line in prompt.split("\n") if not line.startswith(OCR) and line.strip() != SHORT]
    return "\n".join(lines).strip().lower()
