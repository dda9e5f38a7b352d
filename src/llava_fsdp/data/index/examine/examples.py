"""Draw records of a dataset at random and encode them as training does, to show them on the dataset's report page."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.thumbnails import tile_thumbnail
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.processor.images import ProcessorImages
from llava_fsdp.data.records.record import INLINE, Record, is_video
from llava_fsdp.data.text.conversation import AnswerPart, asked_turns
from llava_fsdp.data.text.encode import AnswerEncoder, Encoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.data.text.tokens.detokenize import spell
from llava_fsdp.report.examples import Example, Gap, Images, Text
from llava_fsdp.runtime.errors import DataError

SHOWN, SEED = 20, 0
HEAD, TAIL = 700, 300
"""Numbers of text tokens at the beginning and at the end of a long sample that are shown."""
TILES = 40
"""Greatest number of image tiles of a record that are shown, so that the page has at most two megabytes."""
SIDES = {1: 160, 6: 128, 12: 96, TILES: 64}
"""{greatest number of tiles of a record: width and height of their thumbnails in pixels}."""


def draw_examples(records: Records, encoder: Encoder, reader: ImageSource) -> list[Example]:
    """Return up to SHOWN records that are trained on, as the dataset's report page shows them. They are drawn at
    random, with the same result at each call."""
    return [make_example(records, number, encoder, reader) for number in draw_numbers(records.source_counts, SHOWN)]


def draw_numbers(counts: list[int], most_records: int) -> list[int]:
    """Draw at most `most_records` samples at random, in about equal numbers from each data source. `counts`: number of
    samples of each source. Return the numbers of the drawn samples in the dataset, sorted."""
    dice = random.Random(SEED)
    sources = [source for source, count in enumerate(counts) if count]
    dice.shuffle(sources)  # with more sources than records to draw, any of them may be left out
    shares = [0] * len(counts)
    while sum(shares) < min(most_records, sum(counts)):
        not_exhausted = [source for source in sources if shares[source] < counts[source]]
        for source in not_exhausted[: most_records - sum(shares)]:
            shares[source] += 1
    firsts = itertools.accumulate(counts, initial=0)
    drawn = zip(firsts, counts, shares, strict=False)
    return [first + number for first, count, share in drawn for number in sorted(dice.sample(range(count), share))]


def make_example(records: Records, number: int, encoder: Encoder, reader: ImageSource) -> Example:
    """Encode the sample with this number as training does, and return the parts that the page shows, or the error."""
    store, index_number = records.index.store, records.number_in_index(number)
    file, index = store.locate(index_number)
    example = Example(file.name, file.path, store.line(index_number), index, store.id_of(index_number))
    try:
        record = records[number]
        sample = encoder(record, records.turns(number))
        assert sample is not None, "a record that is too long is not trained on"
        parts = (*parts_of(record, sample.answers[0], encoder, reader), *rejected_text(sample, encoder))
    except DataError as error:
        if error.kind is None:  # the fault is not the record's: the dataset's files or the index cannot be read
            raise
        return replace(example, error=str(error))
    return replace(
        example,
        length=sample.length,
        labels=sample.num_labels,
        parts=parts,
        cut=sample.positions_cut,
        labels_cut=sample.labels_cut,
        images_cut=len(record.images) - len(sample.images),
    )


def parts_of(record: Record, sample: Sample, encoder: Encoder, reader: ImageSource) -> Iterator[Text | Images | Gap]:
    """Yield the parts of an encoded record in order: images, and runs of text tokens that are all labels or all not.
    The middle of a long record is left out."""
    ids, spans = sample.input_ids, sample.image_spans
    is_image = np.zeros(len(ids), dtype=bool)
    for begin, end in spans:
        is_image[begin:end] = True
    counts_in_loss = sample.labels != IGNORE
    counts_in_loss[:1] = False  # the first token is never predicted, so its label does not count
    ends = np.array([end for _, end in spans], dtype=np.int64)
    kinds = np.zeros(len(ids), dtype=np.int8) if sample.kinds is None else sample.kinds
    weights = np.full(len(ids), FULL_WEIGHT) if sample.weights is None else sample.weights
    # a run of tokens ends where its label, its kind (text or image), its part of the answer or its weight changes
    changes = np.diff(counts_in_loss + 2 * is_image.astype(np.int8) + 4 * kinds) != 0
    changes = np.flatnonzero(changes | (np.diff(weights * counts_in_loss) != 0)) + 1
    hidden, roles, room = hidden_range(is_image), Roles(record, sample, counts_in_loss, encoder), TILES
    bounds = sorted({0, *ends.tolist(), *changes.tolist(), *hidden, len(ids)})
    for begin, end in itertools.pairwise(bounds):
        image = int(np.searchsorted(ends, begin, side="right"))
        if begin == hidden[0]:
            last = int(np.searchsorted(ends, hidden[1], side="right"))
            yield Gap(hidden[1] - begin, int(counts_in_loss[begin : hidden[1]].sum()), last - image)
        if hidden[0] <= begin < hidden[1]:
            continue
        if is_image[begin]:
            shown = show_images(record, sample.images, image, end - begin, reader, room)
            room -= len(shown.tiles)
            yield shown
        else:
            pieces = [(piece.text, piece.is_special) for piece in spell(encoder.tokenizer, ids[begin:end].tolist())]
            part = AnswerPart(int(kinds[begin]))
            role = roles.role_of(begin) if part is AnswerPart.other else f"gpt, {part.name}"
            if counts_in_loss[begin] and weights[begin] != FULL_WEIGHT:
                role += f", weight {weights[begin] / FULL_WEIGHT:.3g}"
            yield Text(role, bool(counts_in_loss[begin]), end - begin, pieces, part.name)


def rejected_text(sample: Sample, encoder: Encoder) -> Iterator[Text]:
    """Yield the rejected answer of a pair, which the page shows below the chosen one; nothing if it is no pair."""
    if sample.rejected is None:
        return
    places = np.flatnonzero(sample.rejected.labels != IGNORE)
    ids = sample.rejected.input_ids[places[0] : places[-1] + 1].tolist()
    pieces = [(piece.text, piece.is_special) for piece in spell(encoder.tokenizer, ids)]
    yield Text("gpt, rejected", True, len(ids), pieces, AnswerPart.text.name)


def hidden_range(is_image: np.ndarray) -> tuple[int, int]:
    """Return the range [begin, end) of tokens in the middle of a long record that are not shown. The first HEAD and the
    last TAIL tokens of text are shown, with the images among them. If the record is shown completely, the range is
    empty and at its end. `is_image`: bool [tokens]."""
    text = np.flatnonzero(~is_image)
    if len(text) <= HEAD + TAIL:
        return len(is_image), len(is_image)
    return int(text[HEAD]), int(text[-TAIL])


class Roles:
    """Finds the role (human, gpt, ...) of the text tokens of an encoded record. With `labels=exact`, each answer is one
    run of tokens with labels, so that the number of runs before a token tells its role."""

    def __init__(self, record: Record, sample: Sample, counts_in_loss: np.ndarray, encoder: Encoder):
        """Find the runs of tokens with labels, and whether the roles of tokens are known from them (`are_known`): they
        are if each answer is one run. `counts_in_loss`: whether each token has a label that counts in the loss, bool
        [tokens]."""
        turns = asked_turns(record)
        # the first token of each run with labels
        self.starts = np.flatnonzero(counts_in_loss[1:] & ~counts_in_loss[:-1]) + 1
        self.answers = sum(turn.role == "gpt" for turn in turns)
        self.counts_in_loss = counts_in_loss
        self.first = "system, human" if turns and turns[0].role == "system" else "human"
        # each answer is a run, but for those that truncation has cut off
        is_whole = len(self.starts) == self.answers or (sample.positions_cut > 0 and len(self.starts) < self.answers)
        self.are_known = isinstance(encoder, AnswerEncoder) and is_whole

    def role_of(self, place: int) -> str:
        """Return the role (human, gpt, ...) of the token with index `place`; empty if it is not known."""
        if not self.are_known:
            return ""
        if self.counts_in_loss[place]:
            return "gpt"
        answers_before = int(np.searchsorted(self.starts, place))  # `starts`: index of each answer's first token
        if answers_before == self.answers:
            return "template"  # what the template writes after the last answer
        return "human" if answers_before else self.first  # before the first answer there may also be a system turn


def show_images(
    record: Record, names: Sequence[str], number: int, count: int, reader: ImageSource, room: int
) -> Images:
    """Read an image or a video of a record as training does, and return what the page shows of it.

    Args:
        names: names of the record's images and videos that truncation has left; the one at index `number` is read,
            which has `count` tokens.
        room: number of tiles of this record that may still be shown. If it is above 0, up to TILES tiles are shown.
    """
    name = names[number]
    kind, tile = ("video", "frame") if is_video(name) else ("image", "tile")
    shown_file = "in the record or in its file" if name.startswith(INLINE) else name
    title = f"{kind} {number + 1}"
    if room <= 0:
        return Images(title, shown_file, count, tile, [], f"Not shown, as {TILES} tiles of this record are.")
    tiles = reader.tiles(record, name)
    if isinstance(reader, ProcessorImages):  # an image or frames that are not cut here: [..., height, width, 3]
        tiles = np.moveaxis(tiles if tiles.ndim == 4 else tiles[None], -1, 1)
    tiles_of_all = min(len(tiles) * len(names), max(SIDES))  # the other images may have other numbers of tiles
    # the more tiles there are, the smaller are their thumbnails
    side = next(side for most, side in SIDES.items() if tiles_of_all <= most)
    shown = [tile_thumbnail(tile, side) for tile in tiles[:TILES]]
    note = f"{len(tiles) - TILES} more are not shown." if len(tiles) > TILES else ""
    return Images(title, shown_file, count, tile, shown, note, side)
