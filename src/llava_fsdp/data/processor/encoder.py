"""Encode records for a whole model of transformers: token ids as its processor makes them, and labels for answers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.processor.images import Row
from llava_fsdp.data.processor.processor import FAILURES, SMALL_VIDEO, Processor, VideoNeeds, frames_of
from llava_fsdp.data.records.clip import Clip, Shape
from llava_fsdp.data.records.record import IMAGE_TAG, Record, Turn
from llava_fsdp.data.text.answer_segments import AnswerSegments, AnswerWriter
from llava_fsdp.data.text.chat_template.chat_layout import Unfit
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.chat_template.message_parts import IMAGE, VIDEO
from llava_fsdp.data.text.conversation import Segment, image_order, render
from llava_fsdp.data.text.encode import AnswerEncoder, truncate
from llava_fsdp.data.text.encode_chat import ChatIds, encode_chat
from llava_fsdp.data.text.sample import ProcessorText, Sample
from llava_fsdp.data.text.teaching import DEFAULT, Teaching
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError

BLANK_SIDES = (16, 28, 56, 112, 224, 448)
"""Sides in pixels of the square images among which the one with the fewest tokens is chosen for a blank sample."""

MOST_EXPANSIONS = 50_000
"""Number of sizes of images, and of videos, whose expansions are remembered. A dataset may have millions; their texts
are few."""
BLANK_FRAMES = (2, 4, 8)
"""Numbers of frames of the videos, of BLANK_SIDES, among which a blank sample is chosen."""


@dataclass(frozen=True)
class ProcessorEncoder(AnswerEncoder):
    """An AnswerEncoder for models whose processor puts the tokens of images and videos into the text.

    What the processor writes in the place of an image's placeholder is learnt from black images of the same size; of a
    video's, from as many frames of the same size, without values if it reads none (`Processor.needs`). The whole text
    is tokenized with it, because its ends may make one token with their neighbours (Gemma 3 writes line breaks around
    an image).
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    processor: Processor
    shape: Callable[[Record, int], Shape]
    """Function (record, index of an image or a video) -> what its tokens depend on."""
    max_length: int
    too_long: TooLong
    special_tokens: SpecialTokens = SpecialTokens.text
    teaching: Teaching = DEFAULT
    prompt_once: bool = False
    expansions: dict[tuple[Size, int] | tuple[Clip, ...], tuple[str, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """{(size of an image, number of images of its sample): the text in the place of its placeholder}, and {the videos
    of a sample: these texts}, filled while records are encoded."""

    @property
    def fingerprint(self) -> str:
        form = f"{self.template} {self.special_tokens.value} {self.teaching}" + " prompt_once" * self.prompt_once
        return f"processor {self.tokenizer.fingerprint} {form} {self.max_length} {self.processor.fingerprint}"

    def placeholder(self, shape: Shape) -> str:
        """Return what the chat template writes for an image or a video."""
        return self.template.placeholders[VIDEO if isinstance(shape, Clip) else IMAGE]

    @property
    def writer(self) -> AnswerWriter:
        return AnswerWriter(self.template, self.teaching, self.special_tokens)

    def whole(self, record: Record, longest: int) -> Sample:
        segments = self.shortened(render(record, self.template, start_end=False), longest)
        return self.encode_first(segments, record, len(record.images))

    def answer(self, answer: AnswerSegments, record: Record, longest: int) -> Sample:
        return self.encode_first(self.shortened(answer.segments, longest), record, answer.images)

    def encode_first(self, segments: list[Segment], record: Record, count: int) -> Sample:
        """Encode segments that have the first `count` images and videos of a record."""
        shapes = [self.shape(record, n) for n in range(count)]
        return self.encode(segments, record.images[:count], shapes, record.where)

    def cut(self, record: Record, whole: Sample) -> Sample:
        """Truncate the sample `whole` of a record to `max_length` tokens. Raise DataError if it loses images, and the
        processor writes other tokens for the images that are left than it writes for them with the lost ones."""
        made = truncate(whole, self.max_length)
        assert whole.processor_text is not None
        count, shapes = len(made.images), whole.processor_text.shapes
        if (
            count < len(shapes)
            and self.expanded(shapes[:count], record.where) != self.expanded(shapes, record.where)[:count]
        ):
            raise DataError(
                f"{record.where} is truncated to {count} of its {len(shapes)} images and videos, and the model's "
                "processor prepares one of so many in another way; raise data.max_length, or set data.too_long=skip",
                Kind.too_long,
            )
        return made

    def encode(self, segments: list[Segment], names: Sequence[str], shapes: Sequence[Shape], where: str) -> Sample:
        """Encode the segments of a conversation, or of a prompt, as a sample that is not truncated. `names`: the
        record's images and videos. `shapes`: for each, what its tokens depend on. `where`: the record in messages."""
        image_numbers = image_order(segments, len(names))
        shapes = tuple(shapes[n] for n in image_numbers)
        texts = dict(zip(image_numbers, self.expanded(shapes, where), strict=True))
        # the segments, with what the processor writes in the place of each placeholder
        shown = [
            segment if segment.image is None else Segment(texts[segment.image], supervised=False, image=segment.image)
            for segment in segments
        ]
        template, special = self.template, self.special_tokens
        adds_bos = template.adds_bos or self.adds_bos(segments)
        made = encode_chat(shown, self.tokenizer, None, special, adds_bos, template.prompt_ends)
        text = self.processor_text(segments, made, shapes, where)
        # for each image, the index of the vision feature of each of its tokens
        feature_indices = tuple(np.arange(text.is_image[begin:end].sum()) for begin, end in text.image_spans)
        if not all(map(len, feature_indices)):
            raise DataError(f"{where}: an image is so small or narrow that it has no tokens; crop it", Kind.image_shape)
        # only stored if the text has the images in another order than the record's list of images
        positions = tuple(image_numbers) if image_numbers != sorted(image_numbers) else None
        images = tuple(names[n] for n in image_numbers)
        return Sample(
            made.ids,
            made.labels,
            images,
            feature_indices,
            positions_cut=0,
            labels_cut=0,
            unlearnt=made.unlearnt,
            record_positions=positions,
            processor_text=text,
            prompt=made.prompt,
            kinds=made.kinds,
            weights=made.weights,
        )

    def adds_bos(self, segments: Sequence[Segment]) -> bool:
        """Return whether the BOS token must be put before the segments: the tokenizer has one, and the text that the
        template has written does not begin with it."""
        bos = self.tokenizer.bos
        text = next((segment.text for segment in segments if segment.text), "")
        # a BOS token without a text (`name` returns None) cannot have been written: "\0" begins no text
        return bos is not None and not text.startswith(self.tokenizer.name(bos) or "\0")

    def processor_text(
        self, segments: Sequence[Segment], made: ChatIds, shapes: tuple[Shape, ...], where: str
    ) -> ProcessorText:
        """Return the texts from which the processor makes the token ids of a sample again, and where its images are.

        Args:
            segments: the conversation, with the placeholders of images and videos.
            made: the ids of the sample. If its last answer was tokenized apart (`is_apart`), the texts end before it.
            shapes: what the tokens of each image and video depend on, in the order of the text.
            where: name of the record in messages.

        Raises:
            DataError: a text of the record contains a token that stands for images or videos.
        """
        is_media, is_image = np.isin(made.ids, self.processor.media_ids), np.zeros(len(made.ids), dtype=bool)
        for begin, end in made.image_spans:
            is_image[begin:end] = is_media[begin:end]
        if is_media.sum() != is_image.sum():
            raise DataError(
                f"{where} has the token in its text that stands for images or videos; take it out, or set "
                "data.special_tokens=text",
                Kind.special_token,
            )
        # index of the segment that begins the last answer with labels
        last = max((n for n, segment in enumerate(segments) if segment.begins_answer and segment.supervised), default=0)
        places = [self.placeholder(shape) for shape in shapes]
        texts = split_at_images(segments[:last] if made.is_apart else segments, places)
        # whether the processor makes the ids of the sample from these texts; it does not if special tokens in the text
        # of the record are tokenized as ordinary text (`hides_special`)
        is_whole = not made.hides_special and len(texts) == len(made.image_spans) + 1
        if not is_whole:  # it gets the placeholders alone
            texts = ["", *places]
        is_prompt = made.is_apart and is_whole
        return ProcessorText(tuple(texts), made.image_spans, shapes, is_image, is_whole, is_prompt, where)

    def expanded(self, shapes: Sequence[Shape], where: str) -> list[str]:
        """Return the text that the processor puts in the place of each image and video of a sample. Raise DataError if
        it cannot prepare them, if it writes different texts for images of one size, or if the text of a video depends
        on the other videos."""
        clips = tuple(shape for shape in shapes if isinstance(shape, Clip))
        if clips and len(clips) < len(shapes) and self.processor.shares_tokens:
            raise DataError(
                f"{where} has images and videos, and this model takes only one of both in a sample; make several "
                "records of it",
                Kind.image_shape,
            )
        count = len(shapes) - len(clips)
        videos = iter(self.of_videos(clips, where) if clips else ())
        return [next(videos) if isinstance(shape, Clip) else self.of_image(shape, count, where) for shape in shapes]

    def of_image(self, size: Size, count: int, where: str) -> str:
        """Return the text that the processor puts in the place of an image of a sample with `count` images. Raise
        DataError if it fails, or if it writes different texts for `count` images of this size."""
        known = self.expansions.get((size, count))
        if known is None:
            expansion, *others = self.expand([size] * count, where)
            if any(other != expansion for other in others):
                raise DataError(
                    f"{where}: the model's processor writes different tokens for {count} images of one size, "
                    f"{size[0]} x {size[1]} pixels; give each image a record of its own",
                    Kind.image_shape,
                )
            known = self.expansions[size, count] = self.remembered([expansion])  # one string object for equal texts
        return known[0]

    def of_videos(self, clips: tuple[Clip, ...], where: str) -> tuple[str, ...]:
        """Return the texts that the processor puts in the places of all videos of a sample. Raise DataError if it
        fails, or if a video's text depends on the videos beside it: an answer between two videos would be trained with
        a text that depends on the second one, which a model has not got when it answers. Texts are remembered in
        `expansions`, where clips are equal if their shapes and frame numbers are."""
        known = self.expansions.get(clips)
        if known is None:
            texts = self.expand(clips, where)
            if len(clips) > 1 and texts != [text for clip in clips for text in self.of_videos((clip,), where)]:
                raise DataError(
                    f"{where}: the model's processor writes other tokens for videos of "
                    f"{', '.join(map(shown_shape, clips))} together than for each alone; give each a record of its own",
                    Kind.image_shape,
                )
            # the texts depend on what the frames show, so they are not valid for other videos of the same shapes
            if self.processor.needs is VideoNeeds.content:
                return tuple(texts)
            key = tuple(replace(clip, read=None) for clip in clips)  # the function may hold a record
            known = self.expansions[key] = self.remembered(texts)
        return known

    def remembered(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return texts in the form in which `expansions`, the cache of the texts that the processor writes for images
        and videos, keeps them: equal texts are one object. If the cache is full, it is emptied before."""
        if len(self.expansions) >= MOST_EXPANSIONS:
            self.expansions.clear()
        return tuple(map(sys.intern, texts))

    def expand(self, shapes: Sequence[Shape], where: str) -> list[str]:
        """Run the processor, and return the text that it puts for each image or video. Raise DataError if it fails."""
        try:
            return self.processor.expand([self.placeholder(shape) for shape in shapes], shapes)
        except FAILURES as error:
            what = ", ".join(map(shown_shape, dict.fromkeys(shapes)))
            raise DataError(
                f"{where}: the model's processor cannot prepare {len(shapes)} images or videos of {what}: "
                f"{' '.join(str(error).split())[:200]}",
                Kind.image_shape,
            ) from error

    def blanks(self, has_videos: bool) -> dict[str, Row]:
        """Return blank samples, which have one black image or one black video, and no labels: {letters of kinds of
        media: the sample that a micro-batch without media of these kinds gets}. With them, the vision part runs on each
        rank, and equally often: once for images and, if the dataset `has_videos`, once for videos. One blank image is
        enough for both if a model's tokens of videos are those of images."""
        image = self.smallest([(side, side) for side in BLANK_SIDES])
        if not has_videos:
            return {IMAGE: image}
        if self.processor.shares_tokens:
            return {IMAGE + VIDEO: image}
        lengths = itertools.product(BLANK_SIDES, BLANK_FRAMES)
        clips = [Clip((side, side), count, 1.0, tuple(range(count))) for side, count in lengths]
        return {IMAGE: image, VIDEO: self.smallest(clips)}

    def smallest(self, shapes: Sequence[Shape]) -> Row:
        """Return the sample with the fewest tokens among those of one black image or video of each shape, without
        labels, and its pixel values. Raise DataError if the processor can prepare none of the shapes."""
        made: list[tuple[Sample, Shape]] = []
        for shape in shapes:
            name, segment = "blank", Segment(self.placeholder(shape), supervised=False, image=0)
            try:
                made.append((self.encode([segment], [name], [shape], "a blank sample"), shape))
            except DataError:
                # the processor can prepare none of the shapes
                if shape is shapes[-1] and not made:
                    raise
        sample, shape = min(made, key=lambda sample_and_shape: len(sample_and_shape[0].input_ids))
        assert (sample.labels == IGNORE).all() and len(sample.input_ids)
        size, frames = (shape.size, (len(shape.numbers),)) if isinstance(shape, Clip) else (shape, ())
        return sample, [np.zeros((*frames, *size[::-1], 3), dtype=np.uint8)]


def shown_shape(shape: Shape) -> str:
    size = shape.size if isinstance(shape, Clip) else shape
    return f"{f'{len(shape.numbers)} frames of ' if isinstance(shape, Clip) else ''}{size[0]} x {size[1]} pixels"


def split_at_images(segments: Sequence[Segment], placeholders: Sequence[str]) -> list[str]:
    """Return the text of segments in pieces: the text before the first image or video; then for each image or video its
    placeholder, with the text behind it up to the next one."""
    texts, places = [""], iter(placeholders)
    for segment in segments:
        if segment.image is None:
            texts[-1] += segment.text
        else:
            texts.append(next(places))
    return texts


def check_processor(encoder: ProcessorEncoder, has_videos: bool = False) -> None:
    """Raise ConfigError if no sample can be made of a conversation, or if the processor makes other token ids of it
    than the encoder. Conversations with and without images are tried, and with a video if the model takes videos. That
    several images cannot be read is found in records that have them."""
    # a video of 9 frames, 2 a second, of which four are used
    processor, clip = encoder.processor, Clip(SMALL_VIDEO, 9, 2.0, (0, 2, 5, 8))
    cases: list[list[Shape]] = [[], [(64, 48)], [(64, 48), (48, 64)], *([[clip]] if has_videos else [])]
    for shapes in cases:
        question = "".join(f"{IMAGE_TAG}\nWhat is it {n}? " for n in range(len(shapes))) or "Who are you?"
        turns = (Turn("human", question), Turn("gpt", "A cat."), Turn("human", "Sure?"), Turn("gpt", "Yes, it is."))
        names = tuple(f"{n}.mp4" if isinstance(shape, Clip) else str(n) for n, shape in enumerate(shapes))
        record = Record("a trial", 0, "0", names, turns, has_image_key=bool(names))
        shown = ", ".join(map(shown_shape, shapes)) or "text alone"
        try:
            samples = replace(encoder, shape=lambda _, n, case=shapes: case[n]).samples(record, encoder.max_length)
        except DataError as error:
            if len(shapes) > 1:
                continue
            why = error.__cause__ if isinstance(error.__cause__, Unfit) else error
            raise ConfigError(
                f"{processor.folder} cannot be trained: its chat template or its processor fails with a conversation "
                f"of two questions with {shown}: {why}"
            ) from error
        black = [Image.new("RGB", shape) for shape in shapes if not isinstance(shape, Clip)]
        videos = [(frames_of(shape, VideoNeeds.values), shape) for shape in shapes if isinstance(shape, Clip)]
        for sample in samples:
            text = sample.processor_text
            assert text is not None
            joined = "".join(text.texts)
            # with `is_prompt`, the texts end before the last answer, so the processor makes only the first of the
            # sample's ids
            ids = processor([joined], [black], videos).ids[0] if shapes else processor.tokenize(joined)
            is_same = np.array_equal(ids, sample.input_ids[: len(ids)])
            if not is_same or not (text.is_prompt or len(ids) == len(sample.input_ids)):
                pairs = itertools.zip_longest(ids, sample.input_ids)
                number = next(n for n, (their, our_id) in enumerate(pairs) if their != our_id)
                theirs, ours = (
                    processor.tokens_of(some_ids[number : number + 1]) for some_ids in (ids, sample.input_ids)
                )
                raise ConfigError(
                    f"{processor.folder}: its processor and its tokenizer.json make different token ids of a "
                    f"conversation with {shown}: token {number} is {theirs} of the processor and {ours} of "
                    "tokenizer.json; this model cannot be trained"
                )
