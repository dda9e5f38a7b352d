"""A benchmark's questions as they are asked and scored, in one form for all file formats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llava_fsdp.config import Task
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.data.records.record import check_name, shown, unread_reason
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.log import log

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
SUFFIXES = {Task.vqa: SHORT, Task.textvqa: SHORT, Task.yes_no: SHORT, Task.multiple_choice: LETTER}
"""Last line that the original LLaVA adds to every question of a task (its docs/Evaluation.md)."""
CATEGORY = "category"
"""Kind of the groups that question files name with the key `category`."""


@dataclass(frozen=True)
class BenchmarkQuestion:
    """A benchmark's question with its images and right answers."""

    number: int
    """Number of the question in its file, from 0."""
    id: str | int
    prompt: str
    """Question text as written to the answers file, where the original's scorers read it."""
    text: str
    """Question text as given to the model, with a tag for every image."""
    images: tuple[str, ...]
    """Image paths relative to `data.images`."""
    where: str
    """Name of the question in error messages."""
    references: tuple[str, ...] = ()
    """Right answers: texts, `yes` or `no`, or a letter; empty if they are not known."""
    choices: int = 0
    """Number of choices of a multiple-choice question; 0 for other tasks."""
    groups: tuple[tuple[str, str], ...] = ()
    """Groups that are scored separately and that the question belongs to, as (kind, name), such as (category,
    adversarial)."""


def with_image_tag(text: str, images: Sequence[str]) -> str:
    """Put an image tag in front of a question that has one image and no tag; return other texts unchanged."""
    return f"{IMAGE_TAG}\n{text}" if len(images) == 1 and IMAGE_TAG not in text else text


def image_names(raw: object, where: str) -> tuple[str, ...]:
    """Return the image paths in a record's `image`: a path, a list of paths, or nothing.

    Raises:
        DataError: the value is something else, or a path leads out of the images' folder.
    """
    names = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{where}: image is {shown(raw)}; it must be a path, or a list of paths")
    found = tuple(str(name) for name in names)
    for name in found:
        check_name(name, where)
    return found


def check_unread(where: str, unread: str | None) -> None:
    """Raise DataError if a question has media other than images."""
    if unread is not None:
        raise DataError(unread_reason(where, unread), Kind.media_not_read)


def with_suffix(questions: list[BenchmarkQuestion], task: Task, add: bool) -> list[BenchmarkQuestion]:
    """Add the task's last line (such as "Answer the question using a single word or phrase.") to every question;
    without `add`, only log if the first question lacks it.

    Raises:
        ConfigError: a question has the line already.
    """
    suffix, first = SUFFIXES[task], questions[0]
    if not add:
        if suffix not in first.prompt and env_rank() == 0:
            log().info('%s does not end with "%s", as the original\'s do; suffix=true adds it', first.where, suffix)
        return questions
    has = next((q for q in questions if q.prompt.rstrip().endswith(suffix)), None)
    if has is not None:
        raise ConfigError(f'suffix=true: {has.where} ends with "{suffix}" already; set suffix=false')
    return [replace(q, prompt=f"{q.prompt}\n{suffix}", text=f"{q.text}\n{suffix}") for q in questions]
