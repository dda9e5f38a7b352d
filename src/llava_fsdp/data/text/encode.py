"""Encode records (conversations about images) as token ids and labels."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llava_fsdp.config import FULL_WEIGHT, SpecialTokens, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, Record
from llava_fsdp.data.text.answer_segments import AnswerSegments, AnswerWriter
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.conversation import Segment, image_order, render
from llava_fsdp.data.text.encode_chat import ChatIds, character_weights, encode_chat, is_chat, token_weights
from llava_fsdp.data.text.join_samples import join_samples
from llava_fsdp.data.text.llava_v1_5 import Original, check_images, check_like_original, encode_like_original
from llava_fsdp.data.text.sample import MeasuredSample, Sample
from llava_fsdp.data.text.teaching import DEFAULT, Teaching
from llava_fsdp.data.text.templates import Template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Stretch, Token, Tokenizer
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


class AnswerEncoder(ABC):
    """Encodes records with labels for exactly the answers, including the text that ends an answer (`labels=exact`)."""

    tokenizer: Tokenizer
    template: Template | ChatTemplate
    max_length: int
    too_long: TooLong
    special_tokens: SpecialTokens
    teaching: Teaching
    prompt_once: bool
    """Whether both answers of a pair attend to one copy of their prompt."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Text that changes with all settings that affect the token ids and labels, except the order of vision
        features."""

    @abstractmethod
    def whole(self, record: Record, longest: int) -> Sample:
        """Encode a record as one sample, without truncation. Texts of more than LONG characters may be shortened; then
        the first `longest` tokens are right, and there are more."""

    @abstractmethod
    def answer(self, answer: AnswerSegments, record: Record, longest: int) -> Sample:
        """Encode one answer of a record with its prompt, without truncation. `longest` is as in `whole`."""

    @property
    @abstractmethod
    def writer(self) -> AnswerWriter:
        """Writes the answers of records with the model's own chat template."""

    def samples(self, record: Record, longest: int, turns: tuple[int, int] | None = None) -> list[Sample]:
        """Encode a record without truncation. It gives one sample, or several if the model's own chat template writes
        earlier turns in another way once other turns follow. A pair is one sample, with both answers in it.

        Args:
            longest: number of tokens at the beginning of each sample that are surely right; of very long texts, the
                rest may be missing.
            turns: indices of the first and the last answer of the sample that is to be encoded; None: all.

        Raises:
            DataError: the record is invalid, or cannot be learnt as the settings say.
        """
        if record.rejected is not None:
            return [self.pair(record, longest)]
        form = self.template
        # `teaching.record` marks the answers that the settings leave without labels, and moves or drops thoughts
        if not isinstance(form, ChatTemplate):  # one of LLaVA's templates, which never rewrite earlier turns
            return [self.whole(self.teaching.record(record, None), longest)]
        record = self.teaching.record(record, form.features)
        # a fast way, for most records: the whole conversation is rendered once, and is one sample. It is not taken for
        # tools, calls, thoughts and empty thoughts without labels. If it fails because of the template, or leaves an
        # answer without labels (unlearnt), each answer is encoded with its own prompt below.
        if turns is None and is_plain(record) and not self.teaching.hides_empty(form):
            try:
                sample = self.whole(record, longest)
            except DataError as error:
                if error.kind is not Kind.chat_template:
                    raise
            else:
                if not sample.unlearnt:
                    return [sample]
        answers = self.writer.answers(record, turns)
        found = join_samples(
            ((answer.turn, self.answer(answer, record, longest)) for answer in answers), self.tokenizer
        )
        if not found:
            raise DataError(f"{record.where}: none of its answers is to be learnt; take it out", Kind.no_labels)
        return found

    def pair(self, record: Record, longest: int) -> Sample:
        """Encode a record with a chosen and a rejected answer, without truncation: the prompt with the chosen one, and
        in `rejected` the prompt with the other. With `data.prompt_once`, the result says how many tokens of the prompt
        a row needs only once. Raise DataError if the record is invalid, if both answers have the same tokens, or if
        they have weights."""
        (chosen,), (rejected,) = (
            self.samples(record_of_answer, longest)
            for record_of_answer in (without_rejected(record), record.with_rejected)
        )
        if np.array_equal(chosen.input_ids, rejected.input_ids):
            raise DataError(
                f"{record.where}: chosen and rejected have equal tokens; take the record out", Kind.bad_form
            )
        if chosen.weights is not None or rejected.weights is not None:
            raise DataError(
                f"{record.where}: its answers have weights, and the loss of a pair has none; take them out",
                Kind.key_not_obeyed,
            )
        shared = shared_tokens(chosen, rejected) if self.prompt_once else 0
        return replace(chosen, rejected=rejected, shared_prompt_tokens=shared)

    def cut(self, record: Record, whole: Sample) -> Sample:
        """Truncate the sample of a record to `max_length` tokens. Raise DataError if this cannot be done."""
        return truncate(whole, self.max_length)

    def __call__(self, record: Record, turns: tuple[int, int] | None = None) -> Sample | None:
        """Encode a record as one sample or, with `turns`, the one of its samples whose first and last answer are at
        these indices (`Sample.turns`). Return None if it is skipped because it is too long (`data.too_long=skip`).
        Raise DataError if the record is invalid, or is too long with `data.too_long=fail`."""
        whole = self.samples(record, self.max_length, turns)[0]
        if whole.longest <= self.max_length:
            return whole
        if self.too_long is TooLong.fail:
            raise DataError(
                f"{record.where} is {whole.longest} positions long, over data.max_length={self.max_length}; "
                "raise it, or set data.too_long=truncate or skip",
                Kind.too_long,
            )
        return None if self.too_long is TooLong.skip else self.cut(record, whole)

    def measure(self, record: Record, limits: Sequence[int]) -> list[MeasuredSample]:
        """Encode each sample of a record as in training, without truncation, and truncated to each of the lengths
        `limits` that it exceeds, to find what other settings of `data.max_length` would lose. A text much longer than
        all of these lengths is always cut to its beginning. Raise DataError if the record is invalid."""
        found = []
        for whole in self.samples(record, max(*limits, self.max_length)):
            length = whole.longest
            over = {n: truncate(whole, n) for n in limits if n < length}
            if self.max_length < length:
                over[self.max_length] = self.cut(record, whole)
            found.append(MeasuredSample(over.get(self.max_length, whole), whole, over))
        return found

    def shortened(self, segments: list[Segment], longest: int) -> list[Segment]:
        """Return segments with each text of more than LONG characters cut to its beginning, if this beginning alone has
        more than `longest` tokens. It saves the time of tokenizing the rest."""
        # None: special tokens in a text are read as such; []: as ordinary text
        special = None if self.special_tokens is SpecialTokens.parse else []
        return [
            replace(segment, text=beginning(segment.text, self.tokenizer, special, longest))
            if len(segment.text) > LONG
            else segment
            for segment in segments
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
    teaching: Teaching = DEFAULT
    prompt_once: bool = False

    @property
    def fingerprint(self) -> str:
        """Text that changes with all settings that affect the token ids and labels, except the order of vision
        features."""
        form = f"{self.template} {self.start_end} {self.special_tokens.value} {self.teaching}"
        form += " prompt_once" * self.prompt_once
        return f"exact {self.tokenizer.fingerprint} {form} {self.max_length}"

    @property
    def writer(self) -> AnswerWriter:
        assert isinstance(self.template, ChatTemplate)
        return AnswerWriter(self.template, self.teaching, self.special_tokens, self.start_end)

    def answer(self, answer: AnswerSegments, record: Record, longest: int) -> Sample:
        return self.encode(self.shortened(answer.segments, longest), record, answer.images)

    def whole(self, record: Record, longest: int) -> Sample:
        """Encode a record without truncation; of a very long text only enough for its first `longest` tokens."""
        segments = self.shortened(render(record, self.template, self.start_end), longest)
        if isinstance(self.template, ChatTemplate):
            return self.encode(segments, record, len(record.images))
        rows = [self.image_rows(record, n) for n in range(len(record.images))]
        made = encode_segments(segments, self.tokenizer, [len(r) for r in rows], self.special_tokens)
        return Sample(
            made.ids, made.labels, record.images, tuple(rows), positions_cut=0, labels_cut=0, weights=made.weights
        )

    def encode(self, segments: list[Segment], record: Record, count: int) -> Sample:
        """Encode the segments that the model's own chat template has written. `count`: number of images in them, the
        first ones of the record."""
        form, special = self.template, self.special_tokens
        assert isinstance(form, ChatTemplate)
        rows = [self.image_rows(record, n) for n in range(count)]
        made = encode_chat(segments, self.tokenizer, [len(r) for r in rows], special, form.adds_bos, form.prompt_ends)
        order = image_order(segments, count)
        return Sample(
            made.ids,
            made.labels,
            images=tuple(record.images[n] for n in order),
            image_rows=tuple(rows[n] for n in order),
            positions_cut=0,
            labels_cut=0,
            unlearnt=made.unlearnt,
            record_positions=tuple(order) if order != sorted(order) else None,  # None: the record's order
            prompt=made.prompt,
            kinds=made.kinds,
            weights=made.weights,
        )


def without_rejected(record: Record) -> Record:
    """Return the record of a pair with its chosen answer alone."""
    return replace(record, rejected=None)


def shared_tokens(chosen: Sample, rejected: Sample) -> int:
    """Return how many first tokens the samples of a pair can share in a row: the prompt without its last token, which
    predicts the first one of each answer. 0 if an image of the prompt is not wholly among them."""
    labels = [place for sample in (chosen, rejected) for place in np.flatnonzero(sample.labels != IGNORE)[:1].tolist()]
    end = min([*(place - 1 for place in labels), common_length(chosen.input_ids, rejected.input_ids)])
    return max(0, end) if all(last <= end for _, last in chosen.image_spans) else 0


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common beginning of two int64 arrays."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def is_plain(record: Record) -> bool:
    """Return whether a record has no tools, calls and thoughts."""
    return not record.tools and all(turn.thought is None and not turn.calls for turn in record.turns)


def beginning(text: str, tokenizer: Tokenizer, special: list[Stretch] | None, longest: int) -> str:
    """Return a beginning of the text that surely has more than `longest` tokens, so that the rest need not be
    tokenized; the whole text if no such beginning is found. It has MARGIN tokens more, because its last tokens may
    differ from those of the whole text. `special`: ranges of characters with special tokens; None: all in the text."""
    size = max(LONG, LEAST_CHARACTERS * (longest + MARGIN))
    while size < len(text):
        if len(tokenizer.encode(text[:size], special)) > longest + MARGIN:
            return text[:size]
        size *= 4
    return text


def truncate(sample: Sample, max_length: int) -> Sample:
    """Truncate a sample to `max_length` tokens, or to fewer if an image would be split: then it ends before this image.
    The samples of a pair are both truncated, only to count what would be lost: truncated pairs are not trained on."""
    if sample.rejected is not None:
        chosen, rejected = (truncate(part, max_length) for part in sample.answers)
        cuts = chosen.positions_cut + rejected.positions_cut, chosen.labels_cut + rejected.labels_cut
        return replace(chosen, rejected=rejected, positions_cut=cuts[0], labels_cut=cuts[1])
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
        kinds=None if sample.kinds is None else sample.kinds[:cut],
        weights=None if sample.weights is None else sample.weights[:cut],
    )


@dataclass(frozen=True)
class OriginalEncoder:
    """Encodes records with the token ids, labels and truncation of the original LLaVA trainer (`labels=llava_v1_5`)."""

    own: Original
    image_rows: ImageRows
    teaching: Teaching = DEFAULT
    """Only its weights are read."""
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
        """Text that changes with all settings that affect the token ids and labels."""
        encoder = self.own
        form = f"{encoder.form} {encoder.pad_id} {encoder.start_end} {self.teaching.weights.value}"
        return f"llava_v1_5 {encoder.tokenizer.fingerprint} {form} {encoder.max_length}"

    def __call__(self, record: Record, turns: tuple[int, int] | None = None) -> Sample:
        """Encode a record as LLaVA's dataset, collator and model do (LLaVA train.py:743-773, llava_arch.py:226-279). It
        is always one sample, so `turns` is not used."""
        made = encode_like_original(self.teaching.weighted(record), self.own)
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
        # `made.cut`: tokens that LLaVA's dataset itself cuts off a sample without image
        beyond = made.cut + max(0, len(made.ids) - self.own.max_length) + max(0, len(ids) - cut)
        images = record.images[: len(rows)]
        return Sample(ids[:cut], labels[:cut], images, tuple(rows), positions_cut=beyond, labels_cut=lost)

    def measure(self, record: Record, limits: Sequence[int]) -> list[MeasuredSample]:
        """Encode a record as in training, untruncated, and truncated to each length in `limits` that it exceeds, to
        find what other settings of `data.max_length` would lose. Raise DataError if LLaVA would fail at it."""
        check_like_original(self.teaching.weighted(record), self.own)
        sample = self(record)
        whole = self._at(record, UNLIMITED) if sample.positions_cut else sample
        over = {n: self._at(record, n) for n in limits if n < len(whole.input_ids) and n != self.max_length}
        cut = {self.max_length: sample} if sample.positions_cut else {}
        return [MeasuredSample(sample, whole, over | cut)]

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
) -> ChatIds:
    """Return the token ids and labels of a conversation.

    The text between two images is tokenized by itself (LLaVA mm_utils.py:185-204). Without images, `<image>` is
    ordinary text. The text of a model's own chat template is tokenized as `encode_chat` does.

    Args:
        image_lengths: number of tokens of each image.
        special_tokens: whether special tokens such as `</s>` in the text of a record are ordinary text (`text`) or read
            as special tokens (`parse`).
        adds_bos: whether the tokenizer's BOS token, if it has one, is put first.
    """
    if is_chat(segments):
        return encode_chat(segments, tokenizer, image_lengths, special_tokens, adds_bos)
    text = "".join(s.text for s in segments)
    marked = np.repeat([s.supervised for s in segments], [len(s.text) for s in segments])
    before = np.concatenate([[0], np.cumsum(marked)])  # supervised characters before each character
    of_text = character_weights(segments, [s.text for s in segments])
    special = None if special_tokens is SpecialTokens.parse else template_special(segments, tokenizer)
    ids: list[int] = [] if tokenizer.bos is None or not adds_bos else [tokenizer.bos]
    labels: list[int] = [IGNORE] * len(ids)
    weights = [0] * len(ids)
    begin = 0
    for number, chunk in enumerate(text.split(IMAGE_TAG) if image_lengths else [text]):
        if number:
            ids += [IMAGE_ID] * image_lengths[number - 1]
            labels += [IGNORE] * image_lengths[number - 1]
            weights += [0] * image_lengths[number - 1]
            begin += len(IMAGE_TAG)
        end = begin + len(chunk)
        inside = None if special is None else [(a - begin, b - begin) for a, b in special if begin <= a and b <= end]
        tokens = tokenizer.encode(chunk, inside) if chunk else []
        supervised = are_supervised(tokens, before[begin : end + 1])
        if of_text is not None and tokens:
            weights_here = token_weights(
                [t.begin for t in tokens], [t.end for t in tokens], of_text[begin:end]
            ).tolist()
            supervised = [has_label and weight > 0 for has_label, weight in zip(supervised, weights_here, strict=True)]
            weights += weights_here
        ids += [token.id for token in tokens]
        labels += [token.id if has_label else IGNORE for token, has_label in zip(tokens, supervised, strict=True)]
        begin = end
    found, of_labels = (np.array(values, dtype=np.int64) for values in (ids, labels))
    all_weights = None if of_text is None else np.array(weights, dtype=np.int32)
    is_full = all_weights is None or (all_weights[of_labels != IGNORE] == FULL_WEIGHT).all()
    return ChatIds(found, of_labels, unlearnt=0, weights=None if is_full else all_weights)


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
    return encode_segments(segments, tokenizer, image_lengths, special_tokens, adds_bos).ids
