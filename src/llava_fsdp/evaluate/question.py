"""A question as it is asked and scored, whatever file it came from."""

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
"""The kind of group that a line of a question file names."""


@dataclass(frozen=True)
class Asked:
    """A question; `number` is its place in its file, from 0."""

    number: int
    id: str | int
    prompt: str
    """As the file of answers has it, where the original's scorers look at it."""
    text: str
    """As the model gets it, with a tag for every picture."""
    images: tuple[str, ...]
    """Paths below the folder of pictures."""
    where: str
    """What a message calls it."""
    references: tuple[str, ...] = ()
    """Right answers: texts, `yes` or `no`, or a letter; none where they are not known."""
    choices: int = 0
    """Of multiple choice: how many there are."""
    groups: tuple[tuple[str, str], ...] = ()
    """What it is also counted under: (category, adversarial)."""


def with_pictures(text: str, images: Sequence[str]) -> str:
    """The tag of a single picture goes before the text where it has none."""
    return f"{IMAGE_TAG}\n{text}" if len(images) == 1 and IMAGE_TAG not in text else text


def picture_names(raw: object, where: str) -> tuple[str, ...]:
    """What a record's `image` says: a path, a list of them, or nothing.

    Raises:
        DataError: it is something else, or leaves the folder of pictures.
    """
    names = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{where}: image is {shown(raw)}; it must be a path, or a list of paths")
    found = tuple(str(name) for name in names)
    for name in found:
        check_name(name, where)
    return found


def check_unread(where: str, unread: str | None) -> None:
    """Raises DataError where a question names media that are not read."""
    if unread is not None:
        raise DataError(unread_reason(where, unread), Kind.media_not_read)


def with_suffix(asked: list[Asked], task: Task, wanted: bool) -> list[Asked]:
    """Every question with its task's last line, where that is wanted; else a word where the first one lacks it.

    Raises:
        ConfigError: a question has it already.
    """
    suffix = SUFFIXES[task]
    if not wanted:
        if suffix not in asked[0].prompt and env_rank() == 0:
            log().info('%s does not end with "%s", as the original\'s do; suffix=true adds it', asked[0].where, suffix)
        return asked
    has = next((a for a in asked if a.prompt.rstrip().endswith(suffix)), None)
    if has is not None:
        raise ConfigError(f'suffix=true: {has.where} ends with "{suffix}" already; set suffix=false')
    return [replace(a, prompt=f"{a.prompt}\n{suffix}", text=f"{a.text}\n{suffix}") for a in asked]
