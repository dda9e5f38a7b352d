"""Third pass over a dataset: encode each record as in training, and count what truncation at several maximum lengths
would lose."""

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
from llava_fsdp.data.text.conversation import asked_turns
from llava_fsdp.data.text.encode import LONG, Encoder, MeasuredSample

LIMITS = (512, 1024, 2048, 4096, 8192)
"""Maximum lengths in tokens for which truncation is counted, in addition to the configured maximum length."""
LOSSES = ("records", "positions", "labels", "unlabelled")
"""Names of the counts for each maximum length: truncated records, lost tokens, lost label tokens, and records that lose
all their labels."""
LOSSES_COLUMN = "losses"
"""Column with the LOSSES of a chunk for each maximum length, int64 [lengths * LOSSES]."""


@dataclass(frozen=True)
class EncodeRecords(DatasetPass):
    """Third pass: encode each record, and store its numbers of tokens, labels, images and tiles.

    Columns with an int32 value per record: length, labels, images, tiles, image_tokens, positions_cut, labels_cut, and
    full (length before truncation). All are 0 for a record that cannot be encoded. Column LOSSES_COLUMN, the sums over
    the chunk.
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
        """Encode records. Return {name of a column: counts of each record, int32 [records]}, 0 for a record that makes
        no sample, and under LOSSES_COLUMN the sums over all records of what truncation to each of `limits` loses.
        `found` gets the records' problems."""
        names = ("length", "labels", "images", "tiles", "image_tokens", "positions_cut", "labels_cut", "full")
        columns = {name: np.zeros(len(numbers), dtype=np.int32) for name in names}
        losses = np.zeros((len(self.limits), len(LOSSES)), dtype=np.int64)
        for number, record in self.records(numbers):
            record = self.sizes.put(record, number)
            measured = self.encode(record, number, found.teller_of(number, record.known_id))
            if measured is None:
                continue
            sample = measured.sample
            lengths = [len(rows) for rows in sample.image_rows]
            tiles = sum(self.reader.count_tiles(record, sample.place(n), tokens) for n, tokens in enumerate(lengths))
            image_tokens = int(sample.is_image.sum())
            counts = (
                len(sample.input_ids), sample.num_labels, len(sample.images), tiles, image_tokens,
                sample.positions_cut, sample.labels_cut, len(measured.whole.input_ids),
            )  # fmt: skip
            for name, value in zip(names, counts, strict=True):
                columns[name][number - numbers.start] = value
            losses += self.count_losses(measured)
        return {**columns, LOSSES_COLUMN: losses.reshape(-1)}

    def encode(self, record: Record, number: int, tell: Tell) -> MeasuredSample | None:
        """Encode a record and report its problems; None if it makes no sample."""
        for position, turn in enumerate(asked_turns(record)):
            tell_special_token(record, position, turn.text, self.encoder, tell)
            if turn.role == "gpt" and not turn.text.strip():
                reason = f"{record.where}: turn {position} is an answer without text; write one, or remove the turns"
                tell(Kind.empty_answer, reason)
        attempt(lambda: self.check_shapes(record, number), tell)
        if record.images and not self.reader.has_image_facts(record):
            return None  # the length is unknown because an image is bad, which the pass over images has reported
        measured = attempt(lambda: self.encoder.measure(record, self.limits), tell)
        if measured is not None:
            tell_if_cut(record, measured, self.encoder.max_length, tell)
            if measured.whole.unlearnt:
                tell(
                    Kind.unlearnt_answer,
                    f"{record.where} has {measured.whole.unlearnt} answers without labels: the prompts of later "
                    "answers show them with other tokens than a model generates; make each answer a record of its own "
                    "to train all",
                )
        return measured

    def check_shapes(self, record: Record, number: int) -> None:
        """Raise DataError if the shape of an image does not work with `data.image_aspect_ratio` and `data.pixels`."""
        for place, name in enumerate(record.images):
            width, height, stored_height = self.sizes.sizes_of(number, place)
            if width and not is_video(name):
                what = f"{record.where}: image {self.reader.path(record, name)}"
                self.reader.check_shape((width, height), stored_height, record.num_images, what)

    def count_losses(self, measured: MeasuredSample) -> np.ndarray:
        """Return what truncation of a record to each of `self.limits` loses, in the columns LOSSES, int64 [limits,
        LOSSES]."""
        lost = np.zeros((len(self.limits), len(LOSSES)), dtype=np.int64)
        labels = measured.whole.num_labels
        for row, limit in enumerate(self.limits):
            cut = measured.at.get(limit)  # None: the record is not longer than this
            if cut is not None:
                labels_lost = labels - cut.num_labels
                lost[row] = 1, cut.positions_cut, labels_lost, cut.num_labels == 0 and labels > 0
        return lost


def tell_special_token(record: Record, position: int, text: str, encoder: Encoder, tell: Tell) -> None:
    """Report to `tell` that the text of the turn with index `position` has a special token."""
    special_tokens = (text[begin:end] for begin, end in encoder.tokenizer.find_special(text))
    found = next((token for token in special_tokens if token != IMAGE_TAG), None)
    if found is not None:
        as_text = encoder.special_tokens is SpecialTokens.text
        how = "tokenized as text" if as_text else "read as that token"
        reason = f"{record.where}: turn {position} has the special token {found} in its text, which is {how}"
        tell(Kind.special_token, f"{reason} (data.special_tokens={encoder.special_tokens.value})")


def tell_if_cut(record: Record, measured: MeasuredSample, max_length: int, tell: Tell) -> None:
    """Report to `tell` that a record is too long, or has no labels after truncation to `max_length` tokens."""
    sample, whole_length = measured.sample, len(measured.whole.input_ids)
    least = "at least " if any(len(turn.text) > LONG for turn in record.turns) else ""  # a long text is shortened
    if sample.positions_cut:
        tell(
            Kind.too_long,
            f"{record.where} is {least}{whole_length} positions long, over data.max_length={max_length}; raise it, or "
            "set data.too_long=truncate or skip",
        )
    if sample.num_labels == 0:
        cut = measured.whole.num_labels > 0
        why = f": all are beyond data.max_length={max_length}; raise it" if cut else ": no answer of it is supervised"
        if not any(turn.learnt for turn in record.turns if turn.role == "gpt"):
            why = ": its keys say of every answer that it is not learnt (weight 0, loss false); take the record out"
        tell(Kind.no_labels, f"{record.where} has no label token to learn from{why}")
