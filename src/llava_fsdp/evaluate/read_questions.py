"""Read a benchmark's questions from files: records in LLaVA's training format, LLaVA's question files, and VQAv2's
questions."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_fsdp.config import EvaluateConfig, Task
from llava_fsdp.data.containers.data_files import CacheFolder
from llava_fsdp.data.images.check import inline_images
from llava_fsdp.data.index.record_store import DataSource, files_of, open_data_files, sources_of
from llava_fsdp.data.records.forms.parse_record import FORMS
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
from llava_fsdp.data.records.record_file import RecordFile, read_records
from llava_fsdp.data.text.conversation import opening_question
from llava_fsdp.evaluate.benchmarks.pope_files import annotate_yes_no
from llava_fsdp.evaluate.benchmarks.references import answers_in_entry
from llava_fsdp.evaluate.benchmarks.scienceqa_files import annotate_problems, read_choice_record
from llava_fsdp.evaluate.benchmarks.vqa_files import annotate_textvqa, annotate_vqa, check_ten, read_vqa_questions
from llava_fsdp.evaluate.question import (
    CATEGORY,
    BenchmarkQuestion,
    check_unread,
    image_names,
    with_image_tag,
    with_instruction,
)
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.files.safe_load import LARGE, read_json
from llava_fsdp.runtime.text.log import log

ANNOTATE = {
    Task.vqa: annotate_vqa,
    Task.textvqa: annotate_textvqa,
    Task.multiple_choice: annotate_problems,
    Task.yes_no: annotate_yes_no,
}


def read_questions(cfg: EvaluateConfig) -> list[BenchmarkQuestion]:
    """Return the questions of the benchmark, with their right answers if the files contain them.

    Raises:
        ConfigError: a file is missing, or a configuration key contradicts another key or the files.
        DataError: an entry of a file has the wrong form, or questions and annotations do not match.
    """
    if cfg.task is Task.conversations:
        return read_conversations(cfg)
    assert cfg.questions is not None, "checked by EvaluateConfig"
    path = Path(cfg.questions)
    if not path.is_file():
        raise ConfigError(f"questions={path} is not a file")
    questions = list(read_file(path, cfg.task, cfg.data.max_record_bytes))
    if not questions:
        raise DataError(f"questions={path} holds no questions")
    if cfg.annotations is not None:
        questions = ANNOTATE[cfg.task](questions, Path(cfg.annotations))
    if cfg.task is Task.textvqa:
        check_ten(questions, cfg.annotations or cfg.questions)
    num_answered = sum(bool(q.references) for q in questions)
    if num_answered not in (0, len(questions)):
        first = next(q for q in questions if not q.references)
        raise DataError(f"{first.where} has no right answer, and {num_answered} others of {path} have; give it one")
    return with_instruction(questions[: cfg.limit], cfg.task, cfg.suffix)


def read_conversations(cfg: EvaluateConfig) -> list[BenchmarkQuestion]:
    """Return the first question of every conversation in the dataset; its answer there is the right answer. The
    questions of several data sources alternate, so that `limit` leaves equally many of each. The questions of a source
    are a group, which is scored separately.

    Raises:
        DataError: a data source has no records, or a record does not begin with a question and its answer.
    """
    several = len(cfg.data.sources) > 1
    asked = (
        replace(
            first_question(record),
            groups=(("source", source.name),) if several else (),
            images_folder=source.images,
        )
        for source, record in records_by_turns(cfg)
    )
    return [replace(question, number=number) for number, question in enumerate(itertools.islice(asked, cfg.limit))]


def records_by_turns(cfg: EvaluateConfig) -> Iterator[tuple[DataSource, Record]]:
    """Yield all records of the dataset, those of its sources by turns. Raise DataError if a source has none."""
    sources = sources_of(cfg.data)
    cache = CacheFolder(cfg.data.cache_folder / "images", cfg.data.cache_gb)
    data_files = open_data_files(files_of(sources), cache)

    def records_in(source: DataSource) -> Iterator[tuple[DataSource, Record]]:
        """Yield the records of a data source, each with the source."""
        files = (RecordFile(file.path, cfg.data.max_record_bytes, file.keys, data_files) for file in source.files)
        record = None
        for record in (file[n] for file in files for n in range(len(file))):
            yield source, record
        if record is None:
            key = f"data.sources.{source.name}.path" if cfg.data.sources else "data.path"
            raise DataError(f"{key}={source.path} holds no records")

    if any(source.weight is not None or source.epochs is not None for source in cfg.data.sources.values()):
        log().info("every record of data.sources is asked once, whatever their epochs and weights")
    turns = itertools.zip_longest(*map(records_in, sources))
    yield from (record for turn in turns for record in turn if record is not None)


def first_question(record: Record) -> BenchmarkQuestion:
    """Return a training record's first question; the record's answer is the right one. The caller sets its number."""
    check_unread(record.where, record.unread)
    system, text, images, answer = opening_question(record)
    names = record.images[:images]
    return BenchmarkQuestion(
        number=0,
        id=record.id,
        prompt=text,
        text=text,
        images=names,
        where=record.where,
        references=(answer,),
        inline=inline_images(record),
        system=system,
        tools=record.tools,
    )


def read_file(path: Path, task: Task, max_bytes: int) -> Iterator[BenchmarkQuestion]:
    """Yield the questions of a file in any of the supported formats.

    Args:
        path: JSON Lines or a JSON list, whose entries have the keys `question_id`, `text`, `image` and `category`, or
            are training records (multiple choice only); or the JSON file of VQAv2's questions.
        max_bytes: maximum size of one question in the file.

    Raises:
        DataError: the file or one of its entries has none of these forms.
    """
    with path.open("rb") as file:
        is_object = file.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")
    if path.suffix.lower() == ".json" and is_object:
        parsed = read_json(path, DataError, LARGE)
        if task is not Task.vqa or "questions" not in parsed:
            raise DataError(
                f"questions={path} is an object with the keys {shown(list(parsed))}; task={task.value} reads JSON "
                "Lines of question_id and text" + (", or VQAv2's questions" if task is Task.vqa else "")
            )
        yield from read_vqa_questions(path, parsed)
        return
    for number, (content, line) in enumerate(read_records(str(path), max_bytes)):
        raw = parse_text(path, number, content, line)
        if not isinstance(raw, dict):
            raise DataError(f"{name_place(path, number, line)} is {shown(raw)}, not an object")
        if task is Task.multiple_choice and any(key in raw for key in FORMS):
            yield read_choice_record(path, number, line, raw)
        else:
            yield read_row(path, number, line, raw, task)


def read_row(path: Path, number: int, line: int | None, raw: dict[str, Any], task: Task) -> BenchmarkQuestion:
    """Return the question in one entry (`raw`, parsed) of a file in the original LLaVA's format, which may contain
    right answers too. `number`: of the entry in the file, from 0; `line`: that where it is; None in a JSON list."""
    identity = raw.get("question_id")
    where = name_record(path, number, line, None if identity is None else str(identity))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise DataError(f"{where}: question_id is {shown(identity)}; it must be a text or a number")
    text = raw.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: text is {shown(text)}; it must be the question, and the keys are {shown(list(raw))}")
    check_text(text, where)
    check_unread(where, unread_media(raw, ("image",)) or unread_tag([Turn("human", text)]))
    images = image_names(raw.get("image"), where)
    category = raw.get("category")
    groups = () if category in (None, "default") else ((CATEGORY, str(category)),)
    references, choices = answers_in_entry(raw, task, where)
    tagged = with_image_tag(text, images)
    # the text in the answers file, in which LLaVA's scorer of multiple-choice answers looks for the image tag
    prompt = tagged if task is Task.multiple_choice else text
    return BenchmarkQuestion(number, identity, prompt, tagged, images, where, references, choices, groups)
