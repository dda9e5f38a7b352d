"""Third pass over a dataset: encode each record as in training, and count what truncation at several maximum lengths
would lose."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_hexdigest

from llava_fsdp.config import SpecialTokens
from llava_fsdp.data.columns import Columns
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.index.examine.examine_passes import DatasetPass, Findings, PictureSizes, Tell, attempt
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import IMAGE_TAG, Record, is_video
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate
from llava_fsdp.data.text.conversation import AnswerPart, asked_turns
from llava_fsdp.data.text.encode import LONG, Encoder, common_length
from llava_fsdp.data.text.sample import MeasuredSample
from llava_fsdp.data.text.tokens.constants import IGNORE

LIMITS = (512, 1024, 2048, 4096, 8192)
"""Maximum lengths in tokens for which truncation is counted, in addition to the configured maximum length."""
LOSSES = ("records", "positions", "labels", "unlabelled")
"""Names of the counts for each maximum length: truncated records, lost tokens, lost label tokens, and records that lose
all their labels."""
TAUGHT = ("answers", "proven", "split", "repeated", "thought", "calls", "text")
"""Names of counts of what is learnt: answers with labels; those whose prompt was proven to be that of the model's own
chat template; records that give several samples; tokens at the beginning of their samples that the sample before has,
too; label tokens of thoughts, of calls, and of texts with what ends them."""
TAUGHT_COLUMN = "taught"
"""Column with the counts TAUGHT of a chunk, int64 [TAUGHT]."""
ROW_COUNTS, FIRST_TURN, LAST_TURN = "samples", "first_turn", "last_turn"
"""Column with the number of samples of each record, int32 [records]. A record without a sample has one of length 0. And
columns with the turns of the first and the last answer of each sample, int32 [samples]; -1 for the only sample of its
record. They are stored if a record has several samples."""
LABEL_WEIGHT = "label_weight"
"""Column with the sum of the weights of each sample's labels in units of 1 / FULL_WEIGHT, int64 [samples]. It is stored
if any weight is not 1."""
LOSSES_COLUMN = "losses"
"""Column with the LOSSES of a chunk for each maximum length, int64 [lengths * LOSSES]."""


COUNTS = (
    "length", "labels", "images", "tiles", "image_tokens", "positions_cut", "labels_cut", "full", FIRST_TURN, LAST_TURN
)  # fmt: skip
"""Names of the columns with a value for each sample."""
Row = tuple[int, ...]
"""The values of a sample in the columns COUNTS."""
NO_ROW: Row = (*[0] * 8, -1, -1)


@dataclass(frozen=True)
class EncodeRecords(DatasetPass):
    """Third pass: encode each record, and store its samples' numbers of tokens, labels, images and tiles.

    Columns with an int32 value per sample: length, labels, images, tiles, image_tokens, positions_cut, labels_cut, and
    full (length before truncation). All are 0 for a record that cannot be encoded. Columns ROW_COUNTS, FIRST_TURN,
    LAST_TURN and LABEL_WEIGHT. Columns LOSSES_COLUMN and TAUGHT_COLUMN, the sums over the chunk.
    """

    records_folder: Path
    """Folder of the columns of the pass ReadRecords; `pictures_folder` likewise of ExaminePictures."""
    pictures_folder: Path
    encoder: Encoder
    reader: ImageSource

    @cached_property
    def sizes(self) -> PictureSizes:
        return PictureSizes(self.records_folder, self.pictures_folder)

    def key_of(self, numbers: range) -> str:
        """Return a text that changes with the records of a chunk, and with their images' sizes and videos' lengths."""
        begin, end = self.sizes.first[numbers.start], self.sizes.first[numbers.stop]
        sizes = self.sizes
        columns = (
            c for c in (sizes.width, sizes.height, sizes.stored_height, sizes.frames, sizes.rate) if c is not None
        )
        digest = xxh3_64_hexdigest(b"".join(column[begin:end].tobytes() for column in columns))
        return f"{super().key_of(numbers)}-{digest}"

    @property
    def limits(self) -> list[int]:
        return sorted({*LIMITS, self.encoder.max_length})

    def columns(self, numbers: range, found: Findings) -> Columns:
        """Encode the records with these numbers, and return columns of counts. Per sample: COUNTS (int32: tokens, ...)
        and LABEL_WEIGHT; per record: ROW_COUNTS (its samples); sums over all: LOSSES_COLUMN (what is lost to truncation
        at each length in `limits`), TAUGHT_COLUMN (what is learnt). A record without a sample gets one of zeros, and
        its problem goes into `found`."""
        rows: list[list[Row]] = [[NO_ROW] for _ in numbers]
        weights = [[0] for _ in numbers]
        losses = np.zeros((len(self.limits), len(LOSSES)), dtype=np.int64)
        taught = np.zeros(len(TAUGHT), dtype=np.int64)
        for number, record in self.records(numbers):
            record = self.sizes.put(record, number)
            measured = self.encode(record, number, found.teller_of(number, record.known_id))
            if not measured:
                continue
            rows[number - numbers.start] = self.rows(record, measured)
            weights[number - numbers.start] = [encoded.sample.weight for encoded in kept_samples(measured)]
            losses += sum(map(self.count_losses, measured))
            taught += count_taught(record, measured, self.encoder)
        values = np.array([row for rows_of_record in rows for row in rows_of_record], dtype=np.int32).reshape(
            -1, len(COUNTS)
        )
        columns: Columns = {name: np.ascontiguousarray(column) for name, column in zip(COUNTS, values.T, strict=True)}
        counts = np.array([len(rows_of_record) for rows_of_record in rows], dtype=np.int32)
        columns[LABEL_WEIGHT] = np.array(
            [weight for weights_of_record in weights for weight in weights_of_record], dtype=np.int64
        )
        return {**columns, ROW_COUNTS: counts, LOSSES_COLUMN: losses.reshape(-1), TAUGHT_COLUMN: taught}

    def rows(self, record: Record, measured: Sequence[MeasuredSample]) -> list[Row]:
        """Return the columns COUNTS of the index (number of tokens, of labels, of images, ...) for each sample of a
        record. Samples that truncation leaves without labels are left out (`kept_samples`); their labels count as lost
        by the last kept sample. `measured`: each sample as in training (`sample`) and not truncated (`whole`)."""
        kept = kept_samples(measured)
        lost = sum(encoded.whole.num_labels for encoded in measured) - sum(encoded.whole.num_labels for encoded in kept)
        rows = []
        for encoded in kept:
            sample = encoded.sample
            lengths = [len(rows) for rows in sample.image_rows]  # number of tokens of each image
            tiles = sum(self.reader.count_tiles(record, sample.place(n), tokens) for n, tokens in enumerate(lengths))
            first, last = sample.turns or (-1, -1)  # indices of the first and the last answer; -1: it has all answers
            cut = sample.labels_cut + (lost if encoded is kept[-1] else 0)
            rows.append((
                sample.length, sample.num_labels, len(sample.images), tiles,
                sum(int(part.is_image.sum()) for part in sample.parts), sample.positions_cut, cut, encoded.whole.length,
                first, last,
            ))  # fmt: skip
        return rows

    def encode(self, record: Record, number: int, tell: Tell) -> list[MeasuredSample]:
        """Encode a record, and report its problems to `tell`. Return its samples; none if it cannot be encoded."""
        for position, turn in enumerate(asked_turns(record)):
            tell_special_token(record, position, turn.text, self.encoder, tell)
            if turn.role == "gpt" and not turn.text.strip() and not turn.calls:
                reason = f"{record.where}: turn {position} is an answer without text; write one, or remove the turns"
                tell(Kind.empty_answer, reason)
        attempt(lambda: self.check_shapes(record, number), tell)
        if record.images and not self.reader.has_image_facts(record):
            return []  # the length is unknown because an image is bad, which the pass over images has reported
        measured = attempt(lambda: self.encoder.measure(record, self.limits), tell) or []
        for encoded in measured:
            tell_if_cut(record, encoded, self.encoder.max_length, tell)
        if measured and not any(encoded.sample.num_labels for encoded in measured):
            tell_unlabelled(record, measured, self.encoder.max_length, tell)
        return measured

    def check_shapes(self, record: Record, number: int) -> None:
        """Raise DataError if the shape of an image does not work with `data.image_aspect_ratio` and `data.pixels`."""
        for place, name in enumerate(record.images):
            width, height, stored_height = self.sizes.sizes_of(number, place)  # stored_height: before EXIF turns it
            if width and not is_video(name):
                what = f"{record.where}: image {self.reader.path(record, name)}"
                self.reader.check_shape((width, height), stored_height, record.num_images, what)

    def count_losses(self, measured: MeasuredSample) -> np.ndarray:
        """Return what truncation of a sample to each of `self.limits` loses, in the columns LOSSES (samples truncated,
        tokens, labels, samples that lose all labels), int64 [limits, LOSSES]."""
        lost = np.zeros((len(self.limits), len(LOSSES)), dtype=np.int64)
        labels = measured.whole.num_labels
        for row, limit in enumerate(self.limits):
            cut = measured.at.get(limit)  # None: the record is not longer than this
            if cut is not None:
                labels_lost = labels - cut.num_labels
                lost[row] = 1, cut.positions_cut, labels_lost, cut.num_labels == 0 and labels > 0
        return lost


def kept_samples(measured: Sequence[MeasuredSample]) -> Sequence[MeasuredSample]:
    """Return the samples of a record without those that truncation leaves without labels; the first if none has
    labels."""
    return [own for own in measured if own.sample.num_labels] or measured[:1]


def tell_special_token(record: Record, position: int, text: str, encoder: Encoder, tell: Tell) -> None:
    """Report to `tell` that the text of the turn with index `position` has a special token."""
    special_tokens = (text[begin:end] for begin, end in encoder.tokenizer.find_special(text))
    found = next((token for token in special_tokens if token != IMAGE_TAG), None)
    if found is not None:
        as_text = encoder.special_tokens is SpecialTokens.text
        how = "tokenized as text" if as_text else "read as that token"
        reason = f"{record.where}: turn {position} has the special token {found} in its text, which is {how}"
        tell(Kind.special_token, f"{reason} (data.special_tokens={encoder.special_tokens.value})")


def count_taught(record: Record, measured: Sequence[MeasuredSample], encoder: Encoder) -> np.ndarray:
    """Return counts of a record's samples, int64 [7], in the order of TAUGHT: answers with labels; those of them whose
    prompts are checked; 1 if the record gives several samples; tokens that a sample repeats from the one before; label
    tokens of thoughts, of calls of tools, and of other text. `measured`: the record's samples, each encoded as in
    training (`sample`) and without truncation (`whole`)."""
    answers = sum(turn.role == "gpt" and turn.learnt for turn in encoder.teaching.chosen(asked_turns(record)))
    # the prompt before an answer is checked only if the model's own chat template has written it
    proven = answers if isinstance(encoder.template, ChatTemplate) else 0
    wholes = [encoded.whole.input_ids for encoded in measured]
    repeated = sum(common_length(one, other) for one, other in itertools.pairwise(wholes))
    parts = np.zeros(len(AnswerPart), dtype=np.int64)
    for sample in (part for encoded in measured for part in encoded.sample.parts):
        labels = sample.labels[1:] != IGNORE
        kinds = np.full(len(labels), AnswerPart.text) if sample.kinds is None else sample.kinds[1:]
        parts += np.bincount(kinds[labels], minlength=len(parts))
    thought, calls = parts[AnswerPart.thought], parts[AnswerPart.calls]
    return np.array([answers, proven, len(measured) > 1, repeated, thought, calls, parts.sum() - thought - calls])


def tell_if_cut(record: Record, measured: MeasuredSample, max_length: int, tell: Tell) -> None:
    """Report to `tell` that a sample of a record is longer than `max_length` tokens."""
    sample, whole_length = measured.sample, measured.whole.longest
    least = "at least " if any(len(turn.text) > LONG for turn in record.turns) else ""  # a long text is shortened
    if sample.positions_cut:
        tell(
            Kind.too_long,
            f"{record.where} is {least}{whole_length} positions long, over data.max_length={max_length}; raise it, or "
            "set data.too_long=truncate or skip",
        )


def tell_unlabelled(record: Record, measured: Sequence[MeasuredSample], max_length: int, tell: Tell) -> None:
    """Report to `tell` that the samples of a record have no labels after truncation to `max_length` tokens."""
    cut = any(encoded.whole.num_labels for encoded in measured)
    why = f": all are beyond data.max_length={max_length}; raise it" if cut else ": no answer of it is supervised"
    if not any(turn.learnt for turn in record.turns if turn.role == "gpt"):
        why = ": its keys say of every answer that it is not learnt (weight 0, loss false); take the record out"
    tell(Kind.no_labels, f"{record.where} has no label token to learn from{why}")
