"""Encode records for a whole model of transformers: token ids as its processor makes them, and labels for answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.processor.processor import Processor
from llava_fsdp.data.records.record import IMAGE_TAG, Record, Turn
from llava_fsdp.data.text.constants import IGNORE
from llava_fsdp.data.text.conversation import Segment, image_order, render
from llava_fsdp.data.text.encode import AnswerEncoder, ProcessorText, Sample, truncate
from llava_fsdp.data.text.encode_chat import ChatIds, encode_chat
from llava_fsdp.data.text.jinja_template import ChatTemplate
from llava_fsdp.data.text.tokenizer import Tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError

BLANK_SIDES = (16, 28, 56, 112, 224, 448)
"""Sides in pixels of the square images among which the one with the fewest tokens is chosen for a blank sample."""

MOST_EXPANSIONS = 50_000
"""Number of sizes of images whose expansions are remembered. A dataset may have millions; their texts are few."""


@dataclass(frozen=True)
class ProcessorEncoder(AnswerEncoder):
    """An AnswerEncoder for models whose processor puts the tokens of images into the text.

    What the processor writes in the place of an image's placeholder is learnt from black images of the same size. The
    whole text is tokenized with it, because its ends may make one token with their neighbours (Gemma 3 writes line
    breaks around an image).
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    processor: Processor
    size: Callable[[Record, int], Size]
    """Function (record, index of an image) -> (width, height) in pixels."""
    max_length: int
    too_long: TooLong
    special_tokens: SpecialTokens = SpecialTokens.text
    expansions: dict[tuple[Size, int], str] = field(default_factory=dict, compare=False, repr=False)
    """{(size of an image, number of images of its sample): the text in the place of its placeholder}, filled while
    records are encoded."""

    @property
    def fingerprint(self) -> str:
        form = f"{self.template} {self.special_tokens.value}"
        return f"processor {self.tokenizer.fingerprint} {form} {self.max_length} {self.processor.fingerprint}"

    @property
    def placeholder(self) -> str:
        return self.template.placeholders["i"]

    def whole(self, record: Record, longest: int) -> Sample:
        sizes = [self.size(record, n) for n in range(len(record.images))]
        segments = self.shortened(render(record, self.template, start_end=False), longest)
        return self.encode(segments, record.images, sizes, record.where)

    def cut(self, record: Record, whole: Sample) -> Sample:
        """Truncate a sample to `max_length` tokens. Raise DataError if it loses images, and the processor writes other
        tokens for those that are left."""
        made = truncate(whole, self.max_length)
        count, total = len(made.images), len(whole.images)
        sizes = {self.size(record, whole.place(n)) for n in range(count)} if count < total else set()
        for size in sizes:
            if self.expansion(size, count, record.where) != self.expansion(size, total, record.where):
                raise DataError(
                    f"{record.where} is truncated to {count} of its {total} images, and the model's processor prepares "
                    "an image of so many in another way; raise data.max_length, or set data.too_long=skip",
                    Kind.too_long,
                )
        return made

    def encode(self, segments: list[Segment], names: Sequence[str], sizes: Sequence[Size], where: str) -> Sample:
        """Encode the segments of a conversation, or of a prompt, as a sample that is not truncated.

        Args:
            names: the names of the record's images.
            sizes: (width, height) of each in pixels.
            where: name of the record in messages.
        """
        order = image_order(segments, len(names))
        expansions = {n: self.expansion(sizes[n], len(names), where) for n in order}
        shown = [
            own if own.image is None else Segment(expansions[own.image], False, image=own.image) for own in segments
        ]
        form, special = self.template, self.special_tokens
        adds_bos = form.adds_bos or self.adds_bos(segments)
        made = encode_chat(shown, self.tokenizer, None, special, adds_bos, form.prompt_ends)
        text = self.processor_text(segments, made, where)
        rows = tuple(np.arange(text.is_image[begin:end].sum()) for begin, end in text.image_spans)
        if not all(map(len, rows)):
            raise DataError(f"{where}: an image is so small or narrow that it has no tokens; crop it", Kind.image_shape)
        places = tuple(order) if order != sorted(order) else None
        images = tuple(names[n] for n in order)
        return Sample(
            made.ids,
            made.labels,
            images,
            rows,
            positions_cut=0,
            labels_cut=0,
            unlearnt=made.unlearnt,
            places=places,
            processor_text=text,
        )

    def adds_bos(self, segments: Sequence[Segment]) -> bool:
        """Return whether the tokenizer puts its BOS token before a text, as the template does not."""
        bos = self.tokenizer.bos
        text = next((own.text for own in segments if own.text), "")
        return bos is not None and not text.startswith(self.tokenizer.name(bos) or "\0")

    def processor_text(self, segments: Sequence[Segment], made: ChatIds, where: str) -> ProcessorText:
        """Return the texts from which the processor makes the token ids of a sample again, and where its images are.

        Args:
            segments: the conversation, with the expansion of each image in the place of its placeholder.
            made: the ids of the sample.

        Raises:
            DataError: a text of the record contains the token that stands for images.
        """
        is_image = np.zeros(len(made.ids), dtype=bool)
        for begin, end in made.image_spans:
            is_image[begin:end] = made.ids[begin:end] == self.processor.image_id
        if (made.ids == self.processor.image_id).sum() != is_image.sum():
            raise DataError(
                f"{where} has the token in its text that stands for images; take it out, or set "
                "data.special_tokens=text",
                Kind.special_token,
            )
        # if answers are tokenized apart, the processor gets the text before the last one that has labels
        last = max((n for n, own in enumerate(segments) if own.begins_answer and own.supervised), default=0)
        texts = split_at_images(segments[:last] if made.is_apart else segments, self.placeholder)
        is_whole = not made.hides_special and len(texts) == len(made.image_spans) + 1
        if not is_whole:  # the processor would make other ids of these texts: it gets the placeholders alone
            texts = ["", *[self.placeholder] * len(made.image_spans)]
        return ProcessorText(tuple(texts), made.image_spans, is_image, is_whole, made.is_apart and is_whole, where)

    def expansion(self, size: Size, count: int, where: str) -> str:
        """Return the text that the processor puts in the place of an image of a sample with `count` images."""
        known = self.expansions.get((size, count))
        if known is None:
            if len(self.expansions) >= MOST_EXPANSIONS:
                self.expansions.clear()
            known = self.expansions[size, count] = sys.intern(self.expand(size, count, where))  # equal texts are one
        return known

    def expand(self, size: Size, count: int, where: str) -> str:
        """Run the processor for `expansion`. Raises DataError if it fails, or writes another text for each image."""
        try:
            text = self.processor.expand(self.placeholder * count, [size] * count)
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            raise DataError(
                f"{where}: the model's processor cannot prepare {count} images of {size[0]} x {size[1]} pixels: "
                f"{' '.join(str(error).split())[:200]}",
                Kind.image_shape,
            ) from error
        own = text[: len(text) // count]  # all images have one size, so that each has the same text
        if own * count != text:
            raise DataError(
                f"{where}: the model's processor writes different tokens for {count} images of one size, "
                f"{size[0]} x {size[1]} pixels; give each image a record of its own",
                Kind.image_shape,
            )
        return own

    def blank(self) -> tuple[Sample, list[np.ndarray]]:
        """Return a sample of one black image without labels, and the image, uint8 [height, width, 3]. Of several sizes,
        it has the one with the fewest tokens. A rank without images trains on it, so that its vision part runs."""
        image = Segment(self.placeholder, False, image=0)
        made = [self.encode([image], ["blank"], [(side, side)], "a blank sample") for side in BLANK_SIDES]
        length, place = min((len(sample.input_ids), place) for place, sample in enumerate(made))
        side = BLANK_SIDES[place]
        assert (made[place].labels == IGNORE).all() and length
        return made[place], [np.zeros((side, side, 3), dtype=np.uint8)]


def split_at_images(segments: Sequence[Segment], placeholder: str) -> list[str]:
    """Return the text of segments in pieces: the one before the first image, and for each image its placeholder with
    the text behind it."""
    texts = [""]
    for own in segments:
        if own.image is None:
            texts[-1] += own.text
        else:
            texts.append(placeholder)
    return texts


def check_processor(encoder: ProcessorEncoder) -> None:
    """Raise ConfigError if the processor makes other token ids of a conversation than the encoder, with or without
    images."""
    processor, sizes = encoder.processor, [(64, 48), (48, 64)]
    for count in range(len(sizes) + 1):
        question = "".join(f"{IMAGE_TAG}\nWhat is it {n}? " for n in range(count)) or "Who are you?"
        turns = (Turn("human", question), Turn("gpt", "A cat."), Turn("human", "Sure?"), Turn("gpt", "Yes, it is."))
        names = tuple(f"image {n}" for n in range(count))
        record = Record("a trial", 0, "0", names, turns, has_image_key=bool(count), sizes=tuple(sizes[:count]))
        sample = encoder.whole(record, longest=encoder.max_length)
        text = sample.processor_text
        assert text is not None
        joined = "".join(text.texts)
        black = [Image.new("RGB", size) for size in sizes[:count]]
        ids = processor([joined], [black]).ids[0] if black else processor.tokenize(joined)
        if not np.array_equal(ids, sample.input_ids[: len(ids)]) or not (
            text.is_prompt or len(ids) == len(sample.input_ids)
        ):
            raise ConfigError(
                f"{processor.folder}: its processor and its tokenizer.json make different token ids of a conversation "
                f"with {count} images; this model cannot be trained"
            )
