"""Files of questions: LLaVA's records and question files, VQAv2's own, and ScienceQA's own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.config import EvaluateConfig, Task
from llava_fsdp.data.index.record_store import sources_of
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.record import (
    BYTE_ORDER_MARK,
    Record,
    Turn,
    check_text,
    name_place,
    name_record,
    parse_text,
    shown,
    unread_media,
    unread_tag,
)
from llava_fsdp.data.records.record_file import RecordFile, texts
from llava_fsdp.data.text.conversation import opening_question
from llava_fsdp.evaluate.pope import annotate_yes_no
from llava_fsdp.evaluate.question import CATEGORY, Asked, check_unread, picture_names, with_pictures, with_suffix
from llava_fsdp.evaluate.references import own_answers
from llava_fsdp.evaluate.scienceqa import annotate_problems, read_choice_record, read_problems
from llava_fsdp.evaluate.vqa import annotate_textvqa, annotate_vqa, check_ten, read_vqa_questions
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.safe_load import LARGE, read_json

ANNOTATE = {
    Task.vqa: annotate_vqa,
    Task.textvqa: annotate_textvqa,
    Task.multiple_choice: annotate_problems,
    Task.yes_no: annotate_yes_no,
}


def read_asked(cfg: EvaluateConfig) -> list[Asked]:
    """What is asked, with the right answers where they are known.

    Raises:
        ConfigError: a file is not there, or keys do not go together.
        DataError: a file is of another form, naming the record; or questions and annotations do not belong together.
    """
    if cfg.task is Task.conversations:
        return read_conversations(cfg)
    assert cfg.questions is not None, "checked by EvaluateConfig"
    path = Path(cfg.questions)
    if not path.is_file():
        raise ConfigError(f"questions={path} is not a file")
    asked = list(read_questions(path, cfg.task, cfg.split, cfg.data.max_record_bytes))
    if not asked:
        raise DataError(f"questions={path} holds no questions")
    if cfg.annotations is not None:
        asked = ANNOTATE[cfg.task](asked, Path(cfg.annotations))
    if cfg.task is Task.textvqa:
        check_ten(asked, cfg.annotations)
    known = sum(bool(a.references) for a in asked)
    if known not in (0, len(asked)):
        first = next(a for a in asked if not a.references)
        raise DataError(f"{first.where} has no right answer, and {known} others of {path} have; give it one")
    return with_suffix(asked[: cfg.limit], cfg.task, cfg.suffix)


def read_conversations(cfg: EvaluateConfig) -> list[Asked]:
    """The first question of every record of `data.path`, and its answer."""
    if cfg.data.sources:
        raise ConfigError("evaluate asks the questions of one file: name it with data.path, without data.sources")
    [source] = sources_of(cfg.data)
    records = RecordFile(Path(source.path), cfg.data.max_record_bytes)
    return [first_question(records[n], n) for n in range(min(len(records), cfg.limit or len(records)))]


def first_question(record: Record, number: int = 0) -> Asked:
    """Raises DataError where the record does not begin with a question and its answer."""
    check_unread(record.where, record.unread)
    text, pictures, answer = opening_question(record)
    return Asked(number, record.id, text, text, record.images[:pictures], record.where, references=(answer,))


def read_questions(path: Path, task: Task, split: str, most: int = MOST_BYTES) -> Iterator[Asked]:
    """All questions of a file.

    Args:
        path: JSON Lines, or a JSON list, of `question_id`, `text`, `image` and `category`, or of LLaVA records
            (multiple choice); VQAv2's questions; or ScienceQA's problems.
        split: of ScienceQA's problems: test, val, minival, ...
        most: bytes of one question in its file.

    Raises:
        DataError: it is none of these, naming file and record.
    """
    if path.suffix.lower() == ".json" and begins_with_object(path):
        yield from read_object(path, task, split)
        return
    for number, (content, line) in enumerate(texts(path, most)):
        raw = parse_text(path, number, content, line)
        if not isinstance(raw, dict):
            raise DataError(f"{name_place(path, number, line)} is {shown(raw)}, not an object")
        if task is Task.multiple_choice and "conversations" in raw:
            yield read_choice_record(path, number, line, raw)
        else:
            yield read_row(path, number, line, raw, task)


def begins_with_object(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")


def read_object(path: Path, task: Task, split: str) -> Iterator[Asked]:
    whole = read_json(path, DataError, LARGE)
    if task is Task.multiple_choice:
        return read_problems(path, whole, split)
    if task is Task.vqa and "questions" in whole:
        return read_vqa_questions(path, whole)
    raise DataError(
        f"questions={path} is an object with the keys {shown(list(whole))}; task={task.value} reads JSON Lines of "
        "question_id and text" + (", or VQAv2's questions" if task is Task.vqa else "")
    )


def read_row(path: Path, number: int, line: int | None, raw: dict[str, Any], task: Task) -> Asked:
    """A line of the original's question files, which may bring its own right answers."""
    identity = raw.get("question_id")
    where = name_record(path, number, line, None if identity is None else str(identity))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise DataError(f"{where}: question_id is {shown(identity)}; it must be a text or a number")
    text = raw.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: text is {shown(text)}; it must be the question, and the keys are {shown(list(raw))}")
    check_text(text, where)
    check_unread(where, unread_media(raw) or unread_tag([Turn("human", text)]))
    images = picture_names(raw.get("image"), where)
    category = raw.get("category")
    groups = () if category in (None, "default") else ((CATEGORY, str(category)),)
    references, choices = own_answers(raw, task, where)
    asked = Asked(number, identity, text, with_pictures(text, images), images, where, references, choices, groups)
    if task is Task.multiple_choice:  # the original's scorer tells by the tag whether there is a picture
        return replace(asked, prompt=asked.text)
    return asked
