"""A benchmark's question, into which all file formats are converted, and helper functions for reading such files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llava_fsdp.config import Task
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, check_name, shown, unread_reason
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.text.log import log

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
SUFFIXES = {Task.vqa: SHORT, Task.textvqa: SHORT, Task.yes_no: SHORT, Task.multiple_choice: LETTER}
"""The last line that the original LLaVA adds to every question of a task (see its docs/Evaluation.md)."""
CATEGORY = "category"
"""Kind of group (see `BenchmarkQuestion.groups`) that the key `category` of a question file defines."""


@dataclass(frozen=True)
class BenchmarkQuestion:
    """A question with its images and its right answers."""

    number: int
    """Number of the question in its file, from 0."""
    id: str | int
    prompt: str
    """Text in the answers file, where the original LLaVA's scorers read it."""
    text: str
    """Text for the model, with an `<image>` tag for every image."""
    images: tuple[str, ...]
    """Image paths relative to `data.images`, or to `images_folder`."""
    where: str
    """File and place in it, for error messages."""
    references: tuple[str, ...] = ()
    """Right answers: texts, `yes` or `no`, or a choice's letter, depending on the task; empty if not known."""
    choices: int = 0
    """Number of choices of a multiple-choice question; 0 for other tasks."""
    groups: tuple[tuple[str, str], ...] = ()
    """(kind, name) of each group that is also scored separately, such as (category, adversarial)."""
    inline: Mapping[str, ImageFile] = field(default_factory=dict, compare=False, repr=False)
    """Images that are in the question's record or file itself, by the names in `images`."""
    images_folder: str | None = None
    """Path or URL that the image paths are relative to; None: `data.images`."""
    system: str | None = None
    """Replaces the system text of the model's conversation template; None: that is kept."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the answer may call (see `Record.tools`)."""


def with_image_tag(text: str, images: Sequence[str]) -> str:
    """Return a text with an `<image>` tag in front of it if there is one image and the text has no tag."""
    return f"{IMAGE_TAG}\n{text}" if len(images) == 1 and IMAGE_TAG not in text else text


def image_names(raw: object, where: str) -> tuple[str, ...]:
    """Return the image paths in the value of the key `image`: a path, a list of paths, or None.

    Raises:
        DataError: the value has another form, or a path leads out of the image folder.
    """
    names = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{where}: image is {shown(raw)}; it must be a path, or a list of paths")
    paths = tuple(str(name) for name in names)
    for name in paths:
        check_name(name, where)
    return paths


def check_unread(where: str, unread: str | None) -> None:
    """Raise DataError if a question has media that llava_fsdp cannot read, such as video, which `unread` describes."""
    if unread is not None:
        raise DataError(unread_reason(where, unread), Kind.media_not_read)


def with_instruction(questions: list[BenchmarkQuestion], task: Task, adds: bool) -> list[BenchmarkQuestion]:
    """Add the task's instruction (`SUFFIXES`) to every question as its last line. If `adds` is false, log a message if
    the first question lacks that line.

    Raises:
        ConfigError: `adds` is true, and a question ends with that line already.
    """
    suffix, first = SUFFIXES[task], questions[0]
    if not adds:
        if suffix not in first.prompt and env_rank() == 0:
            log().info(
                '%s does not end with "%s", as the original\'s do; if training had it, suffix=true adds it',
                first.where, suffix,
            )  # fmt: skip
        return questions
    already = next((q for q in questions if q.prompt.rstrip().endswith(suffix)), None)
    if already is not None:
        raise ConfigError(f'suffix=true: {already.where} ends with "{suffix}" already; set suffix=false')
    return [replace(q, prompt=f"{q.prompt}\n{suffix}", text=f"{q.text}\n{suffix}") for q in questions]
