"""VQAv2's questions and annotations, and TextVQA's annotations, as their releases have them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.record import shown
from llava_fsdp.evaluate.question import SHORT, Asked, with_pictures
from llava_fsdp.evaluate.references import rows_of, texts_of
from llava_fsdp.evaluate.scoring import is_out_of_reach, prepare_submission
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.safe_load import LARGE, read_json

TEXTVQA_ANSWERS = 10
OCR = "Reference OCR token:"
"""How the line begins on which the original's file for TextVQA gives words found in the picture."""


def read_vqa_questions(path: Path, whole: dict[str, Any]) -> Iterator[Asked]:
    """VQAv2's `v2_OpenEnded_mscoco_*_questions.json`; pictures have the names that COCO's releases give them."""
    subset = whole.get("data_subtype")
    if not isinstance(subset, str):
        raise DataError(f"questions={path}: data_subtype is {shown(subset)}; it must be COCO's part, such as val2014")
    for number, row in enumerate(rows_of(whole["questions"], f"questions={path}: questions")):
        where = f"{path}, question {number} (id {row.get('question_id')})"
        if not (
            type(row.get("image_id")) is int
            and type(row.get("question_id")) is int
            and type(row.get("question")) is str
        ):
            raise DataError(f"{where} is {shown(row)}; it must have question, and the numbers question_id and image_id")
        images = (f"COCO_{subset}_{row['image_id']:012d}.jpg",)
        text = row["question"]
        yield Asked(number, row["question_id"], text, with_pictures(text, images), images, where)


def annotate_vqa(asked: list[Asked], path: Path) -> list[Asked]:
    """With the answers of VQAv2's `annotations`, found by `question_id`, and its types of questions and answers.

    Raises:
        DataError: the file is no such one, or a question is not in it.
    """
    whole = read_json(path, DataError, LARGE)
    rows = rows_of(whole.get("annotations"), f"annotations={path}: annotations")
    by_id = {str(row.get("question_id")): row for row in rows}
    found = []
    for own in asked:
        row = by_id.get(str(own.id))
        if row is None:
            raise DataError(f"{own.where}: annotations={path} has no question_id {own.id}; are they of the same split?")
        kinds = [(name.replace("_", " "), row.get(name)) for name in ("answer_type", "question_type")]
        groups = tuple((name, str(value)) for name, value in kinds if value is not None)
        references = texts_of(row.get("answers"), f"annotations={path}: question_id {own.id}")
        found.append(replace(own, references=references, groups=own.groups + groups))
    return found


def annotate_textvqa(asked: list[Asked], path: Path) -> list[Asked]:
    """With the answers of TextVQA's `data`, found by picture and question: the original's ids are those of pictures.

    Raises:
        DataError: the file is no such one, or a question is not in it.
    """
    whole = read_json(path, DataError, LARGE)
    rows = rows_of(whole.get("data"), f"annotations={path}: data")
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        question = str(row.get("question")).lower()
        known[str(row.get("image_id")), question] = known[str(row.get("question_id")), question] = row
    found = []
    for own in asked:
        row = known.get((str(own.id), bare_question(own.prompt)))
        if row is None:
            raise DataError(
                f"{own.where}: annotations={path} has no question {bare_question(own.prompt)!r} of the picture or "
                f"question_id {own.id}; are they of the same split?"
            )
        found.append(replace(own, references=texts_of(row.get("answers"), f"annotations={path}: {own.id}")))
    return found


def check_ten(asked: list[Asked], annotations: str | None) -> None:
    """Raises DataError for right answers that are not ten; the original's evaluator of TextVQA asserts that."""
    for own in asked:
        if own.references and len(own.references) != TEXTVQA_ANSWERS:
            given = f" in annotations={annotations}" if annotations else ""
            raise DataError(
                f"{own.where} has {len(own.references)} right answers{given}; task=textvqa needs those of "
                f"{TEXTVQA_ANSWERS} people, as the original's evaluator does; "
                "score them with task=vqa, which takes any number"
            )


def warn_of_unreachable(asked: list[Asked]) -> None:
    """One line about questions that VQAv2's own rule lets nobody answer."""
    found = [own for own in asked if is_out_of_reach(own.references)]
    if found:
        log().warning(
            "%d of %d questions count as wrong whatever is answered: all people wrote the same, which VQAv2 compares "
            "as it was written, and an answer is prepared before (%s: %s is never %s; docs/evaluation.md)",
            len(found), len(asked), found[0].where, shown(prepare_submission(found[0].references[0])),
            shown(found[0].references[0]),
        )  # fmt: skip


def bare_question(prompt: str) -> str:
    """In lower case, without the line of words found in the picture and without the suffix."""
    lines = [line for line in prompt.split("\n") if not line.startswith(OCR) and line.strip() != SHORT]
    return "\n".join(lines).strip().lower()
