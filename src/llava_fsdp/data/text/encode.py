"""Encode records (conversations about images) as token ids and labels."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.clip import Shape
from llava_fsdp.data.records.record import IMAGE_TAG, Record
from llava_fsdp.data.text.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.conversation import Segment, image_order, render
from llava_fsdp.data.text.encode_chat import encode_chat, is_chat
from llava_fsdp.data.text.jinja_template import ChatTemplate
from llava_fsdp.data.text.llava_v1_5 import Original, check_images, check_like_original, encode_like_original
from llava_fsdp.data.text.templates import Template
from llava_fsdp.data.text.tokenizer import Stretch, Token, Tokenizer
from llava_fsdp.runtime.errors import DataError

UNLIMITED = 1 << 40
LONG = 1 << 18
"""From a question or an answer of more characters than this, only the beginning is tokenized, if it alone has more
tokens than are asked for. The whole text would take minutes and gigabytes."""
LEAST_CHARACTERS = 8
"""Number of characters per token that is assumed first; few texts have more."""
MARGIN = 1024
"""Number of tokens of a shortened text beyond those asked for, because the tokens near its end may differ from those of
the whole text."""
ImageRows = Callable[[Record, int], np.ndarray]
"""Function (record, index of an image) -> index of the vision feature of each of its tokens, int64 [tokens]."""


@dataclass(frozen=True)
class ProcessorText:
    """The text of a sample for a processor of transformers, which puts the tokens of its images into it."""

    texts: tuple[str, ...]
    """The text before the first image or video; then, for each of the record, the placeholder that the processor
    replaces, and the text behind it up to the next one."""
    image_spans: tuple[Stretch, ...]
    """For each image or video of the sample, the range of tokens in the place of its placeholder, which may have tokens
    that stand for text at its ends and, of a video, between frames."""
    shapes: tuple[Shape, ...]
    """For each image or video of the record, in the order of the text, what its tokens depend on."""
    is_image: np.ndarray
    """Whether the model replaces the embedding of a token by a vision feature, bool [length]."""
    is_whole: bool
    """Whether the processor tokenizes the joined texts as the whole record is tokenized here. False: only the images'
    placeholders can be compared, because a text of the record contains special tokens that are read as text; then
    `texts` has nothing but placeholders."""
    is_prompt: bool
    """Whether `texts` end before the last answer, whose tokens here are those that follow the prompt."""
    where: str
    """Name of the record in messages."""


@dataclass(frozen=True)
class Sample:
    """A record encoded as token ids and labels; its images are not read yet."""

    input_ids: np.ndarray
    """Token ids, int64 [length]; IMAGE_ID at image tokens, unless `processor_text` is set."""
    labels: np.ndarray
    """Labels, int64 [length], not shifted: for a supervised token its own id, else IGNORE."""
    images: tuple[str, ...]
    """Names of the images whose tokens are in `input_ids`, in order."""
    image_rows: tuple[np.ndarray, ...]
    """For each image, the index of the vision feature of each of its tokens, int64 [tokens]."""
    positions_cut: int
    """Number of tokens removed by truncation."""
    labels_cut: int
    """Number of supervised tokens removed by truncation."""
    unlearnt: int = 0
    """Number of answers without labels, because a model's own chat template, or its tokenizer, writes them in the
    prompts of later answers in another way than a model generates them."""
    places: tuple[int, ...] | None = None
    """For each image, its index among those of the record; None: they have the order of the record."""
    processor_text: ProcessorText | None = None
    """Only for models whose images are prepared by their processor."""

    @property
    def is_image(self) -> np.ndarray:
        """Whether each token is one of an image, bool [length]."""
        return self.input_ids == IMAGE_ID if self.processor_text is None else self.processor_text.is_image

    @property
    def image_spans(self) -> list[Stretch]:
        """For each image, the range of tokens that must not be split: its own tokens, and those that come with them."""
        if self.processor_text is not None:
            return list(self.processor_text.image_spans)
        ends = np.cumsum([len(rows) for rows in self.image_rows], dtype=np.int64)
        last = np.flatnonzero(self.is_image)[ends - 1].tolist() if len(ends) else []
        return [(end + 1 - len(rows), end + 1) for end, rows in zip(last, self.image_rows, strict=True)]

    @property
    def num_labels(self) -> int:
        """Number of labels that count in the loss. The first token is never predicted, so its label does not count."""
        return int((self.labels[1:] != IGNORE).sum())

    def place(self, number: int) -> int:
        """Return the index of an image among those of the record."""
        return number if self.places is None else self.places[number]


@dataclass(frozen=True)
class MeasuredSample:
    """A record encoded in several ways: as in training (`sample`), not truncated (`whole`), and truncated (`at`)."""

    sample: Sample
    whole: Sample
    at: dict[int, Sample]
    """Truncated samples by those maximum lengths that are below the length of the whole sample."""


class AnswerEncoder(ABC):
    """Encodes records with labels for exactly the answers, including the text that ends an answer (`labels=exact`)."""

    tokenizer: Tokenizer
    template: Template | ChatTemplate
    max_length: int
    too_long: TooLong
    special_tokens: SpecialTokens

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that changes with all settings that affect the token ids and labels, except the order of vision
        features."""

    @abstractmethod
    def whole(self, record: Record, longest: int) -> Sample:
        """Encode a record without truncation. Texts of more than LONG characters may be shortened; then the first
        `longest` tokens are right, and there are more."""

    def cut(self, record: Record, whole: Sample) -> Sample:
        """Truncate the sample of a record to `max_length` tokens. Raise DataError if this cannot be done."""
        return truncate(whole, self.max_length)

    def __call__(self, record: Record) -> Sample | None:
        """Encode a record; return None if it is skipped because it is too long (`data.too_long=skip`). Raise DataError
        if the record is invalid, or is too long with `data.too_long=fail`."""
        whole = self.whole(record, self.max_length)
        if len(whole.input_ids) <= self.max_length:
            return whole
        if self.too_long is TooLong.fail:
            raise DataError(
                f"{record.where} is {len(whole.input_ids)} positions long, over data.max_length={self.max_length}; "
                "raise it, or set data.too_long=truncate or skip",
                Kind.too_long,
            )
        return None if self.too_long is TooLong.skip else self.cut(record, whole)

    def measure(self, record: Record, limits: Sequence[int]) -> MeasuredSample:
        """Encode a record as in training, without truncation, and truncated to each of several lengths that it exceeds.
        Raise DataError if it is invalid. What is much longer than all of these lengths is shortened also without
        truncation."""
        whole = self.whole(record, max(*limits, self.max_length))
        length = len(whole.input_ids)
        over = {n: truncate(whole, n) for n in limits if n < length}
        if self.max_length < length:
            over[self.max_length] = self.cut(record, whole)
        return MeasuredSample(over.get(self.max_length, whole), whole, over)

    def shortened(self, segments: list[Segment], longest: int) -> list[Segment]:
        """Return segments of which texts of more than LONG characters keep only their beginning, if this alone has more
        than `longest` tokens."""
        special = None if self.special_tokens is SpecialTokens.parse else []
        return [
            replace(own, text=beginning(own.text, self.tokenizer, special, longest)) if len(own.text) > LONG else own
            for own in segments
        ]


@dataclass(frozen=True)
class ExactEncoder(AnswerEncoder):
    """An AnswerEncoder for models whose images are tiles."""

    tokenizer: Tokenizer
    template: Template | ChatTemplate
    image_rows: ImageRows
    max_length: int
    too_long: TooLong
    start_end: bool = False
    """Whether to put `<im_start>` and `<im_end>` around each image."""
    special_tokens: SpecialTokens = SpecialTokens.text

    @property
    def fingerprint(self) -> str:
        form = f"{self.template} {self.start_end} {self.special_tokens.value}"
        return f"exact {self.tokenizer.fingerprint} {form} {self.max_length}"

    def whole(self, record: Record, longest: int) -> Sample:
        """Encode a record without truncation; of very long texts, only so much that its first `longest` tokens are
        right."""
        rows = [self.image_rows(record, n) for n in range(len(record.images))]
        segments = self.shortened(render(record, self.template, self.start_end), longest)
        lengths = [len(r) for r in rows]
        if not isinstance(self.template, ChatTemplate):
            ids, labels = encode_segments(segments, self.tokenizer, lengths, self.special_tokens)
            return Sample(ids, labels, record.images, tuple(rows), positions_cut=0, labels_cut=0)
        form, special = self.template, self.special_tokens
        made = encode_chat(segments, self.tokenizer, lengths, special, form.adds_bos, form.prompt_ends)
        order = image_order(segments, len(rows))
        return Sample(
            made.ids,
            made.labels,
            images=tuple(record.images[n] for n in order),
            image_rows=tuple(rows[n] for n in order),
            positions_cut=0,
            labels_cut=0,
            unlearnt=made.unlearnt,
            places=tuple(order) if order != sorted(order) else None,
        )


def beginning(text: str, tokenizer: Tokenizer, special: list[Stretch] | None, longest: int) -> str:
    """Return the beginning of a text that has more than `longest` tokens; the whole text if it is not known to have
    more. `special`: ranges of characters that are special tokens; None: all special tokens in the text are read."""
    size = max(LONG, LEAST_CHARACTERS * (longest + MARGIN))
    while size < len(text):
        if len(tokenizer.encode(text[:size], special)) > longest + MARGIN:
            return text[:size]
        size *= 4
    return text


def truncate(sample: Sample, max_length: int) -> Sample:
    """Truncate a sample to `max_length` tokens, or to fewer if an image would be split: then it ends before this
    image."""
    ids, labels, spans = sample.input_ids, sample.labels, sample.image_spans
    whole = sum(end <= max_length for _, end in spans)
    cut = min([max_length, *(begin for begin, _ in spans[whole:])])
    text = sample.processor_text
    if text is not None:
        text = replace(text, image_spans=text.image_spans[:whole], is_image=text.is_image[:cut])
    return replace(
        sample,
        input_ids=ids[:cut],
        labels=labels[:cut],
        images=sample.images[:whole],
        image_rows=sample.image_rows[:whole],
        positions_cut=len(ids) - cut,
        labels_cut=int((labels[cut:] != IGNORE).sum()),
        processor_text=text,
    )


@dataclass(frozen=True)
class OriginalEncoder:
    """Encodes records with the token ids, labels and truncation of the original LLaVA trainer (`labels=llava_v1_5`)."""

    own: Original
    image_rows: ImageRows
    special_tokens: ClassVar[SpecialTokens] = SpecialTokens.parse

    @property
    def tokenizer(self) -> Tokenizer:
        return self.own.tokenizer

    @property
    def template(self) -> Template:
        return self.own.form

    @property
    def max_length(self) -> int:
        return self.own.max_length

    @property
    def fingerprint(self) -> str:
        own = self.own
        return f"llava_v1_5 {own.tokenizer.fingerprint} {own.form} {own.pad_id} {own.start_end} {own.max_length}"

    def __call__(self, record: Record) -> Sample:
        """Encode a record as LLaVA's dataset, collator and model do (LLaVA train.py:743-773, llava_arch.py:226-279)."""
        made = encode_like_original(record, self.own)
        # LLaVA drops padding after collation, and with it text tokens that have the id of padding
        kept = made.ids[: self.own.max_length] != self.own.pad_id
        ids, labels = made.ids[: self.own.max_length][kept], made.labels[: self.own.max_length][kept]
        check_images(ids, record)
        # the original reads only the first image of a record
        rows = [self.image_rows(record, 0)] if (ids == IMAGE_ID).any() else []
        ids, labels = spliced(ids, labels, [len(r) for r in rows])
        cut = self.own.max_length
        shown = int((ids[:cut] == IMAGE_ID).sum())
        rows = [r[:shown] for r in rows if shown]
        lost = int((made.labels != IGNORE).sum() - (labels[:cut] != IGNORE).sum())
        beyond = made.cut + max(0, len(made.ids) - self.own.max_length) + max(0, len(ids) - cut)
        images = record.images[: len(rows)]
        return Sample(ids[:cut], labels[:cut], images, tuple(rows), positions_cut=beyond, labels_cut=lost)

    def measure(self, record: Record, limits: Sequence[int]) -> MeasuredSample:
        """Encode a record as in training, without truncation, and truncated to each of several lengths that it exceeds.
        Raise DataError if LLaVA would fail at it."""
        check_like_original(record, self.own)
        sample = self(record)
        whole = self._at(record, UNLIMITED) if sample.positions_cut else sample
        over = {n: self._at(record, n) for n in limits if n < len(whole.input_ids) and n != self.max_length}
        return MeasuredSample(sample, whole, {**over, **({self.max_length: sample} if sample.positions_cut else {})})

    def _at(self, record: Record, max_length: int) -> Sample:
        """Encode a record with another maximum length. This may also change labels, because LLaVA makes them after
        truncation."""
        return replace(self, own=replace(self.own, max_length=max_length))(record)


Encoder = AnswerEncoder | OriginalEncoder


def spliced(ids: np.ndarray, labels: np.ndarray, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels, int64 [length], in which each IMAGE_ID is repeated for each token of the image,
    without a label. `counts` has the number of tokens of each image."""
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[ids == IMAGE_ID] = counts
    labels = np.where(ids == IMAGE_ID, IGNORE, labels)
    return np.repeat(ids, repeats), np.repeat(labels, repeats)


def encode_segments(
    segments: list[Segment],
    tokenizer: Tokenizer,
    image_lengths: list[int],
    special_tokens: SpecialTokens = SpecialTokens.text,
    adds_bos: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids and labels of a conversation, both int64 [length].

    The text between two images is tokenized by itself (LLaVA mm_utils.py:185-204). Without images, `<image>` is
    ordinary text. The text of a model's own chat template is tokenized as `encode_chat` does.

    Args:
        image_lengths: number of tokens of each image.
        special_tokens: whether special tokens such as `</s>` in the text of a record are ordinary text (`text`) or read
            as special tokens (`parse`).
        adds_bos: whether the tokenizer's BOS token, if it has one, is put first.
    """
    if is_chat(segments):
        made = encode_chat(segments, tokenizer, image_lengths, special_tokens, adds_bos)
        return made.ids, made.labels
    text = "".join(s.text for s in segments)
    marked = np.repeat([s.supervised for s in segments], [len(s.text) for s in segments])
    before = np.concatenate([[0], np.cumsum(marked)])  # supervised characters before each character
    special = None if special_tokens is SpecialTokens.parse else template_special(segments, tokenizer)
    ids: list[int] = [] if tokenizer.bos is None or not adds_bos else [tokenizer.bos]
    labels: list[int] = [IGNORE] * len(ids)
    begin = 0
    for number, chunk in enumerate(text.split(IMAGE_TAG) if image_lengths else [text]):
        if number:
            ids += [IMAGE_ID] * image_lengths[number - 1]
            labels += [IGNORE] * image_lengths[number - 1]
            begin += len(IMAGE_TAG)
        end = begin + len(chunk)
        inside = None if special is None else [(a - begin, b - begin) for a, b in special if begin <= a and b <= end]
        tokens = tokenizer.encode(chunk, inside) if chunk else []
        supervised = are_supervised(tokens, before[begin : end + 1])
        ids += [token.id for token in tokens]
        labels += [token.id if has_label else IGNORE for token, has_label in zip(tokens, supervised, strict=True)]
        begin = end
    return np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64)


def template_special(segments: list[Segment], tokenizer: Tokenizer) -> list[Stretch]:
    """Return the ranges of characters, in the joined text of all segments, of the special tokens that come from the
    conversation template and not from a record."""
    found: list[Stretch] = []
    at = 0
    for from_record, stretch in itertools.groupby(segments, lambda s: s.from_record):
        text = "".join(s.text for s in stretch)
        found += [] if from_record else [(at + begin, at + end) for begin, end in tokenizer.find_special(text)]
        at += len(text)
    return found


def are_supervised(tokens: list[Token], before: np.ndarray) -> list[bool]:
    """Return for each token of a text whether it has a label, which it has if one of its characters is supervised. A
    token without characters counts as if it had the next character. `before`: number of supervised characters before
    each character, int64 [characters + 1]."""
    begin = np.array([token.begin for token in tokens], dtype=np.int64)
    end = np.array([token.end for token in tokens], dtype=np.int64)
    end = np.minimum(np.maximum(end, begin + 1), len(before) - 1)
    return (before[end] > before[np.minimum(begin, end)]).tolist()


def encode_prompt(
    segments: list[Segment],
    tokenizer: Tokenizer,
    image_lengths: list[int],
    special_tokens: SpecialTokens = SpecialTokens.text,
    adds_bos: bool = True,
) -> np.ndarray:
    """Return the token ids, int64 [length], of a prompt from which a model generates an answer. The arguments are those
    of `encode_segments`: numbers of tokens of the images, how special tokens are read, whether BOS is put first."""
    return encode_segments(segments, tokenizer, image_lengths, special_tokens, adds_bos)[0]
