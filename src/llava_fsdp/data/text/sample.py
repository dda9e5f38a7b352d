"""A sample: a record, or a part of its answers, encoded as token ids and labels."""

from dataclasses import dataclass, replace

import numpy as np

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.records.clip import Shape
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Stretch


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
    """Labels, int64 [length], not shifted: for a supervised token its own id, else IGNORE. The label of a token that
    ends an answer is the one that a model generates, where the prompts of later turns show another one."""
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
    record_positions: tuple[int, ...] | None = None
    """For each image, its index among those of the record; None: they have the order of the record."""
    processor_text: ProcessorText | None = None
    """Only for models whose images are prepared by their processor."""
    prompt: int = 0
    """With a model's own chat template: number of tokens before the last answer that has labels."""
    kinds: np.ndarray | None = None
    """Which part of an answer each token is (`AnswerPart`), int8 [length]; None: it is not known."""
    weights: np.ndarray | None = None
    """Weight of each token's label, above 0, in units of 1 / FULL_WEIGHT, int32 [length]; it means nothing where there
    is no label. None: all are 1."""
    turns: tuple[int, int] | None = None
    """Indices of the turns of the first and the last answer that have labels, if the record gives several samples."""
    rejected: "Sample | None" = None
    """The prompt with the rejected answer, if the sample is a pair. The other fields are then those of the prompt with
    the chosen answer, except `positions_cut` and `labels_cut`, which count both."""
    shared_prompt_tokens: int = 0
    """Number of tokens at the beginning of both samples of a pair that a row has only once (`data.prompt_once`); all
    images are in them."""

    @property
    def answers(self) -> "list[Sample]":
        """Return this sample; if it is a pair, its two samples instead: the whole prompt with the chosen answer, and
        the whole prompt with the rejected one. (`shared_prompt_tokens`: tokens that both have in common.)"""
        return (
            [self] if self.rejected is None else [replace(self, rejected=None, shared_prompt_tokens=0), self.rejected]
        )

    @property
    def parts(self) -> "list[Sample]":
        """Return what is put into a row of a batch: this sample or, if it is a pair, the sample of the chosen answer
        and that of the rejected one, without the first `shared_prompt_tokens` tokens, which the row has once for
        both."""
        first, *others = self.answers
        return [first, *(other.without_beginning(self.shared_prompt_tokens) for other in others)]

    @property
    def length(self) -> int:
        """Number of tokens in a row, of both answers of a pair."""
        return sum(len(part.input_ids) for part in self.parts)

    @property
    def longest(self) -> int:
        """Number of tokens; of a pair, of the longer one of its two samples."""
        return max(len(part.input_ids) for part in self.answers)

    @property
    def is_image(self) -> np.ndarray:
        """Whether each token is one of an image, bool [length]."""
        return self.input_ids == IMAGE_ID if self.processor_text is None else self.processor_text.is_image

    @property
    def image_spans(self) -> list[Stretch]:
        """For each image, the range [begin, end) of tokens that truncation must not split: its own tokens, and those
        that its processor puts around them."""
        if self.processor_text is not None:
            return list(self.processor_text.image_spans)
        ends = np.cumsum([len(rows) for rows in self.image_rows], dtype=np.int64)
        last = np.flatnonzero(self.is_image)[ends - 1].tolist() if len(ends) else []
        return [(end + 1 - len(rows), end + 1) for end, rows in zip(last, self.image_rows, strict=True)]

    @property
    def num_labels(self) -> int:
        """Number of labels in the loss, of both answers of a pair; the first token's, never predicted, is left out."""
        return sum(int((part.labels[1:] != IGNORE).sum()) for part in self.parts)

    @property
    def weight(self) -> int:
        """Sum of the labels' weights, in units of 1 / FULL_WEIGHT, without the label of the first token, which no token
        predicts. `weights` is None if all are 1, as for a pair, of which the labels of both answers count."""
        if self.weights is None:
            return self.num_labels * FULL_WEIGHT
        return int(self.weights[1:][self.labels[1:] != IGNORE].sum(dtype=np.int64))

    def without_beginning(self, count: int) -> "Sample":
        """Return the rest of this sample behind its first `count` tokens, which must contain all images."""
        if not count:
            return self
        text = self.processor_text
        return replace(
            self,
            input_ids=self.input_ids[count:],
            labels=self.labels[count:],
            images=(),
            image_rows=(),
            kinds=None if self.kinds is None else self.kinds[count:],
            weights=None if self.weights is None else self.weights[count:],
            processor_text=text and replace(text, image_spans=(), is_image=text.is_image[count:]),
        )

    def place(self, number: int) -> int:
        """Return the index of an image among those of the record."""
        return number if self.record_positions is None else self.record_positions[number]


@dataclass(frozen=True)
class MeasuredSample:
    """A record encoded in several ways: as in training (`sample`), not truncated (`whole`), and truncated (`at`)."""

    sample: Sample
    whole: Sample
    at: dict[int, Sample]
    """Truncated samples by those maximum lengths that are below the length of the whole sample."""
