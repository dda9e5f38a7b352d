"""From a record to token ids, labels and exact places for its pictures."""

from dataclasses import dataclass

import numpy as np

from llava_fsdp.config import TooLong
from llava_fsdp.data.conversation import IMAGE_TAG, Segment, Template, render
from llava_fsdp.data.source import Record
from llava_fsdp.data.tokenizer import Token, Tokenizer
from llava_fsdp.errors import DataError

IMAGE_ID = -200
"""Stands in `input_ids` for one position of a picture (LLaVA constants.py:9)."""
IGNORE = -100
"""A label that is not supervised (LLaVA constants.py:8)."""


@dataclass(frozen=True)
class Sample:
    """A record as the model sees it, its pictures still on disk."""

    input_ids: np.ndarray
    """int64 [length]; every picture takes `image_tokens` positions of IMAGE_ID"""
    labels: np.ndarray
    """int64 [length]; the id itself where supervised, else IGNORE. Not shifted."""
    images: tuple[str, ...]
    """Pictures whose positions are in input_ids, in their order."""
    positions_cut: int
    """Positions that did not fit."""
    labels_cut: int

    @property
    def num_labels(self) -> int:
        """Label tokens that a loss can be taken of: the first position is never predicted."""
        return int((self.labels[1:] != IGNORE).sum())


@dataclass(frozen=True)
class Encoder:
    """How records of one dataset become samples for one model."""

    tokenizer: Tokenizer
    template: Template
    image_tokens: int
    """Positions that a picture takes."""
    max_length: int
    too_long: TooLong

    def __call__(self, record: Record) -> Sample | None:
        """The sample; None where it is longer than `max_length` and such records are quarantined.

        Raises:
            DataError: the record is wrong, or is too long and `too_long` says to fail.
        """
        ids, labels = encode_segments(
            render(record, self.template), self.tokenizer, len(record.images), self.image_tokens
        )
        if len(ids) <= self.max_length:
            return Sample(ids, labels, record.images, 0, 0)
        if self.too_long is TooLong.fail:
            raise DataError(
                f"{record.where} is {len(ids)} positions long, over data.max_length={self.max_length}; "
                "raise it, or set data.too_long=truncate or quarantine"
            )
        return None if self.too_long is TooLong.quarantine else self._truncate(ids, labels, record.images)

    def _truncate(self, ids: np.ndarray, labels: np.ndarray, images: tuple[str, ...]) -> Sample:
        """Cut at max_length, or before the picture that would be cut there."""
        whole = int((ids[: self.max_length] == IMAGE_ID).sum()) // self.image_tokens
        cut = self.max_length
        if whole < len(images):
            starts = np.flatnonzero(ids == IMAGE_ID)[:: self.image_tokens]
            cut = min(cut, int(starts[whole]))
        lost = int((labels[cut:] != IGNORE).sum())
        return Sample(ids[:cut], labels[:cut], images[:whole], len(ids) - cut, lost)


def encode_segments(
    segments: list[Segment], tokenizer: Tokenizer, num_images: int, image_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels of a rendered conversation, both int64 [length].

    The text between two pictures is tokenized by itself (LLaVA mm_utils.py:185-204); tags are text where the record
    has no picture. A token is supervised when any of its characters is.
    """
    text = "".join(s.text for s in segments)
    supervised = np.repeat([s.supervised for s in segments], [len(s.text) for s in segments])
    ids: list[int] = [] if tokenizer.bos is None else [tokenizer.bos]
    labels: list[int] = [IGNORE] * len(ids)
    begin = 0
    for number, chunk in enumerate(text.split(IMAGE_TAG) if num_images else [text]):
        if number:
            ids += [IMAGE_ID] * image_tokens
            labels += [IGNORE] * image_tokens
            begin += len(IMAGE_TAG)
        marks = supervised[begin : begin + len(chunk)]
        for token in tokenizer.encode(chunk) if chunk else []:
            ids.append(token.id)
            labels.append(token.id if is_supervised(token, marks) else IGNORE)
        begin += len(chunk)
    return np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)


def is_supervised(token: Token, marks: np.ndarray) -> bool:
    return bool(marks[token.begin : max(token.end, token.begin + 1)].any())


def encode_prompt(text: str, tokenizer: Tokenizer, num_images: int, image_tokens: int) -> np.ndarray:
    """Ids of a prompt, int64 [length]."""
    return encode_segments([Segment(text, False)], tokenizer, num_images, image_tokens)[0]
