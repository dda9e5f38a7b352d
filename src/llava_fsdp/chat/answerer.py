"""What the terminal chat, the web page and `evaluate` use of a model that answers questions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llava_fsdp.chat.answer_scores import AnswerScore
from llava_fsdp.chat.image_process import ImageProcess
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.data.records.record import IMAGE_TAG, READS_IMAGES, Record, Turn
from llava_fsdp.data.text.tokens.detokenize import AnswerText
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError, OutOfMemory


@dataclass(frozen=True)
class Question:
    """A question to a vision-language model, with the conversation before it.

    Attributes:
        turns: the conversation, which ends with the question, or with the results of calls. It has an image tag for
            each of `images`.
        where: beginning of error messages about the question.
        tools: the tools that the answer may call (see `Record.tools`).
    """

    turns: list[Turn]
    images: list[ImageFile]
    where: str
    tools: Sequence[dict[str, Any]] = ()


class ShownImage(Protocol):
    """An image of a conversation, prepared as its model needs it."""

    @property
    def path(self) -> ImageFile: ...


class Answerer(Protocol):
    """A trained vision-language model in memory that answers questions. `Assistant` and `ClassAssistant` are the two
    kinds; the images that one of them loads are only for itself."""

    checkpoint: str
    template_name: str
    device: torch.device
    max_tokens: int
    """Greatest number of tokens of a conversation with its answer."""
    thoughts_cut: list[bool]
    """For each answer of the last call of `answers`, whether it ended within its thought, at the maximum number of
    tokens."""
    text: AnswerText | None
    """The answer that `stream` generates, or has generated last."""
    image_process: ImageProcess | None
    """Reads images in another process, with limits on time and memory; None: they are read in this one."""

    def answers(self, questions: list[Question], max_new_tokens: int, blank: bool = False) -> list[str]:
        """Answer several questions in one batch, with greedy decoding."""
        ...

    def stream(
        self,
        turns: Sequence[Turn],
        images: Sequence[Any],
        sampling: Sampling,
        generator: torch.Generator,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Generator[str, None, bool]:
        """Yield the answer to a conversation's last question in pieces, one after every token. Return whether the model
        ended the answer; False if it was cut at the maximum number of tokens.

        Args:
            turns: the conversation, which ends with the question.
            images: its images as `prepare_images` returns them, in the order of their tags in `turns`.
            sampling: how tokens are chosen, and the maximum number of tokens.
            generator: random numbers for sampling, on the model's device.
            tools: the tools that the answer may call.
        """
        ...

    def scores(self, pairs: Sequence[tuple[Record, list[ImageFile]]], blank: bool = False) -> list[AnswerScore]:
        """Score the answers of pairs in one batch: of each record, with its images, the chosen and the rejected one."""
        ...

    def load_image(self, path: ImageFile, where: str, images: int = 1) -> Any:
        """Read an image and prepare it. Error messages begin with `where`; `images` is the number of images of the
        conversation."""
        ...

    def prepare_images(self, images: Sequence[Any]) -> list[Any]:
        """Return the images of a conversation, prepared in the way that their number demands."""
        ...


def one_by_one(answerer: Answerer, questions: list[Question], max_new_tokens: int, blank: bool) -> list[str]:
    """Let a model answer each question in a batch of its own, and return the answers. `blank`: whether to replace all
    images by images of the mean color. As after one batch, `answerer.thoughts_cut` says for each answer whether it
    ended within a thought."""
    written: list[str] = []
    thoughts_cut: list[bool] = []
    for question in questions:
        written += answerer.answers([question], max_new_tokens, blank)
        thoughts_cut += answerer.thoughts_cut
    answerer.thoughts_cut = thoughts_cut
    return written


def check_tags(turns: Sequence[Turn], images: int, where: str) -> None:
    """Raise DataError (about `where`) if a conversation has images, and the number of image tags differs from theirs.
    Only turns of roles that can show images are counted (READS_IMAGES). Without images, tags are ordinary text."""
    tags = sum(turn.text.count(IMAGE_TAG) for turn in turns if turn.role in READS_IMAGES)
    if images and tags != images:
        raise DataError(f"{where}: {tags} {IMAGE_TAG} tags for {images} images")


def too_long(where: str, tokens: int, image_tokens: int, limit: int) -> DataError:
    """Return the error to raise for a conversation of `tokens` tokens, `image_tokens` of them of images, of which the
    model reads at most `limit`."""
    return DataError(
        f"{where} takes {tokens} tokens, {image_tokens} of them for images, and the model reads {limit}: begin a new "
        "conversation, make it shorter, or show fewer images"
    )


def out_of_memory(device: torch.device, tokens: int) -> OutOfMemory:
    """Return the error to raise if a conversation does not fit into the memory of a device."""
    return OutOfMemory(
        f"{device} has no memory left for a conversation of {tokens} tokens: take back its last questions, or begin a "
        "new one"
    )
