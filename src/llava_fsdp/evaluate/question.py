"""Questions of a benchmark as they are asked and scored, whatever file they come from."""

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
"""What the original ends a question with, on a line of its own (its docs/Evaluation.md)."""
CATEGORY = "category"
"""Kind of the group that a line of a question file names."""


@dataclass(frozen=True)
class BenchmarkQuestion:
    """A question, its images, and its right answers."""

    number: int
    """Place in its file, from 0."""
    id: str | int
    prompt: str
    """As the file of answers has it, where the original's scorers look at it."""
    text: str
    """As the model gets it, with a tag for every image."""
    images: tuple[str, ...]
    """Paths relative to `data.images`."""
    where: str
    """Name of the question in messages."""
    references: tuple[str, ...] = ()
    """Right answers: texts, `yes` or `no`, or a letter; empty if they are not known."""
    choices: int = 0
    """Number of choices, with multiple choice."""
    groups: tuple[tuple[str, str], ...] = ()
    """Kinds and names of groups that are scored separately, such as (category, adversarial)."""


def with_image_tag(text: str, images: Sequence[str]) -> str:
    """The text with a tag in front if there is one image and no tag."""
    return f"{IMAGE_TAG}\n{text}" if len(images) == 1 and IMAGE_TAG not in text else text


def image_names(raw: object, where: str) -> tuple[str, ...]:
    """Image paths of a record's `image`: a path, a list of paths, or nothing.

    Raises:
        DataError: it is something else, or a path leads out of the images' folder.
    """
    names = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{where}: image is {shown(raw)}; it must be a path, or a list of paths")
    found = tuple(str(name) for name in names)
    for name in found:
        check_name(name, where)
    return found


def check_unread(where: str, unread: str | None) -> None:
    """Raises DataError if a question has media other than images."""
    if unread is not None:
        raise DataError(unread_reason(where, unread), Kind.media_not_read)


def with_suffix(questions: list[BenchmarkQuestion], task: Task, add: bool) -> list[BenchmarkQuestion]:
    """Add the task's last line to every question, or log that the first one lacks it.

    Raises:
        ConfigError: a question already has the line that is to be added.
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
