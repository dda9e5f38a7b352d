"""Collate samples and their images into a micro-batch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from llava_fsdp.config import FULL_WEIGHT, Normalize
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.batching.tile_inputs import Row, TileInputs
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.image_tokens import needed_tiles
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.processor.images import ProcessorImages
from llava_fsdp.data.processor.inputs import ProcessorInputs
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID


@dataclass(frozen=True)
class SampleKeys:
    """What is known of the samples of a micro-batch beside their content, in their order."""

    seeds: Sequence[int] = ()
    """Dropout seed of each sample, below 2**31; empty without dropout."""
    sources: Sequence[int] = ()
    """Index of each sample's data source in `data.sources`; empty with a single source."""
    records: Sequence[int] = ()
    """Number of each sample's record, to be stored for each label; empty if it is not needed."""
    numbers: Sequence[int] = ()
    """Number of each sample among those that are trained on; only needed of pairs."""
    tile_numbers: Sequence[Sequence[int]] | None = None
    """For each sample, the numbers of its tiles among all its tiles, from 0; None: all tiles are given."""


NO_KEYS = SampleKeys()
ImageInputs = TileInputs | ProcessorInputs


def image_inputs(reader: ImageSource) -> ImageInputs:
    """Return the object that makes the image inputs of micro-batches from the images that this reader reads."""
    if isinstance(reader, ProcessorImages):
        return ProcessorInputs(reader)
    assert isinstance(reader, ImageReader)
    return TileInputs(reader)


class Collator:
    """Makes a micro-batch from samples and the tiles of their images.

    Args:
        pack: whether the samples are packed into one row.
        cut: which positions of a packed row this rank processes; None: all.
    """

    def __init__(self, image_reader: ImageSource, normalize: Normalize, pack: bool, cut: ContextCut | None = None):
        """Make a collator.

        Args:
            image_reader: decides in what form the model gets the images.
            normalize: whether the loss is a mean over the step's labels (`step`), or a mean over micro-batches of the
                mean of each (`micro_batch`).
            pack: whether samples are packed into one row.
            cut: which positions of a packed row this rank processes; None: all.
        """
        assert pack or cut is None, "only packed rows are divided among ranks"
        self.images = image_inputs(image_reader)
        self.normalize = normalize
        self.pack = pack
        self.cut = cut

    def __call__(self, rows: list[Row], facts: StepFacts, micro_batches: int, keys: SampleKeys = NO_KEYS) -> MicroBatch:
        """Return a micro-batch, as one packed row or as padded rows; without samples, one of one token and no label.
        With `cut`, samples keep all tokens and labels, but have only the image tokens and tiles that this rank needs
        (`shown_images`), unless the model divides the row itself.

        Args:
            rows: the samples, each with its images.
            facts: counts of the whole step over all ranks, from which the scale of the loss is computed.
            micro_batches: number of micro-batches of the whole step, counting once what several ranks process together.
            keys: what is known of each sample beside its content, such as its dropout seed and data source.
        """
        # where only other micro-batches have images, some models get a blank sample
        given, rows = len(rows), self.images.completed(rows, facts.images > 0)
        blanks = len(rows) - given
        records = [sample for sample, _ in rows]
        samples = [part for sample in records for part in sample.parts]  # the two answers of a pair are neighbours
        ids, labels = (packed if self.pack else padded)(samples)
        lengths = tuple(len(sample.input_ids) for sample in samples) or (1,)
        label_rows = np.repeat(np.arange(len(records)), [sample.num_labels for sample in records])
        # dropout seeds: both answers of a pair have that of the pair, and blank samples have 0
        drops = bool(len(keys.seeds))
        of_records = zip((*keys.seeds, *[0] * blanks), records, strict=True) if drops else ()
        seeds = [seed for seed, sample in of_records for _ in sample.parts]
        token_seeds = per_token(seeds, lengths, self.pack) if drops else np.zeros((1, 1), dtype=np.int64)
        weights = shifted_weights(samples, self.pack)
        if self.normalize is Normalize.step:  # the mean over all labels of the step
            scale = facts.scale
        else:  # the mean over the micro-batches of the mean loss of each
            total = sum(sample.weight for sample in samples)
            # weights of labels are integers in units of 1 / FULL_WEIGHT
            scale = FULL_WEIGHT / ((total or FULL_WEIGHT) * micro_batches)
        shared = shared_of(records)
        assert self.pack or not any(shared), "only in a packed row do samples share tokens"
        edges = boundaries(lengths, shared) if self.pack else {}
        if self.cut is not None:
            padding = self.cut.padding(ids.shape[1])
            edges = boundaries((*lengths, padding) if padding else lengths)
            here = self.cut.positions(ids.shape[1] + padding)  # those of this rank
            label_rows = label_rows[np.isin(np.flatnonzero(labels != IGNORE), here)]
            ids, labels = padded_to(ids, padding, 0), padded_to(labels, padding, IGNORE)[:, here]
            weights = padded_to(weights, padding, 0)[:, here] if weights.size else weights
            token_seeds = padded_to(token_seeds, padding, 0) if drops else token_seeds
            if self.images.divides:  # else the model gets the whole row, and divides it itself
                edges["position_ids"] = edges["position_ids"][:, here]
                ids = ids[:, here]
                token_seeds = token_seeds[:, here] if drops else token_seeds
        label_positions = np.flatnonzero(labels != IGNORE)
        of_weights = weights.reshape(-1)[label_positions if weights.size else slice(0)]
        images = self.images.collate(rows, ids, keys.seeds, keys.tile_numbers)
        ids[ids == IMAGE_ID] = 0
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            images=images,
            label_positions=torch.from_numpy(label_positions),
            label_ids=torch.from_numpy(labels.reshape(-1)[label_positions]),
            scale=scale,
            **edges,
            seeds=torch.from_numpy(token_seeds),
            sample_lengths=torch.tensor([*lengths[: len(samples) - blanks], *[0] * blanks] if samples else (0,)),
            **of_labels("label_sources", keys.sources, label_rows),
            **of_labels("label_records", keys.records, label_rows),
            label_weights=torch.from_numpy(of_weights),
            **(of_pairs(records[:given], keys) if facts.has_pairs else {}),
        )


def shifted_weights(samples: list[Sample], pack: bool) -> np.ndarray:
    """Return the weight of each label at the position where `packed` or `padded` puts the label, int32, in the shape of
    their rows and in units of 1 / FULL_WEIGHT; an empty array if all weights are 1."""
    if all(sample.weights is None for sample in samples):
        return np.zeros((1, 0), dtype=np.int32)
    full = [
        np.full(len(sample.labels), FULL_WEIGHT) if sample.weights is None else sample.weights for sample in samples
    ]
    as_labels = [replace(sample, labels=weights) for sample, weights in zip(samples, full, strict=True)]
    return (packed if pack else padded)(as_labels)[1].astype(np.int32)


def padded(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels of samples as padded rows, both int64 [samples, length of the longest sample].

    Labels are shifted: each is at the position of the token that predicts it. Rows are padded on the right, token ids
    with 0 and labels with IGNORE.
    """
    length = max((len(s.input_ids) for s in samples), default=1)
    ids = np.zeros((max(1, len(samples)), length), dtype=np.int64)
    labels = np.full((max(1, len(samples)), length), IGNORE, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
        labels[row, : len(sample.labels) - 1] = sample.labels[1:]
    return ids, labels


def packed(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return all samples' token ids and labels in one row, int64 [1, tokens]. Labels are shifted; a sample's last is
    IGNORE."""
    if not samples:
        return padded(samples)
    end = np.array([IGNORE])
    labels = [part for s in samples for part in (s.labels[1:], end)]
    return np.concatenate([s.input_ids for s in samples])[None], np.concatenate(labels)[None]


def padded_to(row: np.ndarray, padding: int, filler: int) -> np.ndarray:
    return np.pad(row, ((0, 0), (0, padding)), constant_values=filler)


def boundaries(lengths: tuple[int, ...], shared: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the MicroBatch fields that separate the samples of a packed row. `shared`: for each sample, how many of
    the first tokens of the sample before it are its first tokens, too; empty or zeros if samples share none."""
    edges = {
        "position_ids": positions_from(lengths, (0,) * len(lengths))[None],
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "lengths": lengths,
    }
    if not any(shared):
        return edges
    keys = map(operator.add, lengths, shared)
    offsets = torch.tensor([0, *itertools.accumulate(keys)], dtype=torch.int32)
    return edges | {
        "position_ids": positions_from(lengths, shared)[None],
        "shared": shared,
        "key_offsets": offsets,
    }


def positions_from(lengths: tuple[int, ...], firsts: tuple[int, ...]) -> torch.Tensor:
    """Return the position ids of samples, int64 [tokens], given their lengths and the first position of each."""
    return torch.cat([torch.arange(first, first + length) for length, first in zip(lengths, firsts, strict=True)])


def shared_of(records: list[Sample]) -> tuple[int, ...]:
    """Return the field `shared` of MicroBatch for samples, of which a pair has two; zeros if nothing is shared."""
    return tuple(
        n for sample in records for n in ((0,) if sample.rejected is None else (0, sample.shared_prompt_tokens))
    ) or (0,)


def per_token(seeds: Sequence[int], lengths: tuple[int, ...], pack: bool) -> np.ndarray:
    """Return the dropout seeds of tokens, int64 [1, tokens] for a packed row; for padded rows, whose tokens all have
    the seed of their row, int64 [rows, 1]."""
    of_samples = np.array(seeds, dtype=np.int64)
    return np.repeat(of_samples, lengths).reshape(1, -1) if pack else of_samples.reshape(-1, 1)


def of_labels(field: str, values: Sequence[int], label_rows: np.ndarray) -> dict[str, Any]:
    """Return a field of MicroBatch that has for each label the value of its row; nothing without values."""
    return {field: torch.from_numpy(np.array(values, dtype=np.int64)[label_rows])} if len(values) else {}


def of_pairs(pairs: Sequence[Sample], keys: SampleKeys) -> dict[str, Any]:
    """Return the fields of MicroBatch that only pairs have: for each label, the index of its answer among those of all
    pairs (chosen, rejected, chosen, ...); for each pair, the index of its data source and its number in training."""
    labels = [part.num_labels for sample in pairs for part in sample.parts]
    of_sources = keys.sources if len(keys.sources) else [0] * len(pairs)
    return {
        "label_answers": torch.from_numpy(np.repeat(np.arange(len(labels)), labels)),
        "pair_sources": torch.tensor(of_sources, dtype=torch.int64),
        "pair_numbers": torch.tensor(keys.numbers, dtype=torch.int64),
    }


def shown_places(sample: Sample, here: np.ndarray) -> dict[int, np.ndarray]:
    """Return which images of a sample have tokens at the positions that a rank processes (`here`, bool [tokens]):
    {index of the image: whether each of its tokens is there, bool [tokens]}."""
    is_here = np.split(here[sample.input_ids == IMAGE_ID], np.cumsum([len(rows) for rows in sample.image_rows]))
    return {place: shown for place, shown in enumerate(is_here[: len(sample.image_rows)]) if shown.any()}


def shown_images(
    sample: Sample, here: np.ndarray, features: int, read: Callable[[int], np.ndarray], first_tiles: Sequence[int]
) -> tuple[Row, list[int]]:
    """Return what a rank needs of a sample if it processes only some positions of it: the sample with only the image
    tokens at these positions and with their tiles, and the numbers of these tiles among all tiles of the sample. The
    sample's token ids and labels stay whole.

    Args:
        here: whether the rank processes each position of the sample, bool [tokens].
        features: number of vision features of a tile.
        read: function (index of an image) -> all its tiles, uint8 [tiles, 3, size, size]. It is called only for images
            that the rank needs.
        first_tiles: for each image, the number of its first tile among all tiles of the sample.
    """
    names, tokens, tiles, numbers = [], [], [], list[int]()
    for place, is_here in shown_places(sample, here).items():
        needed, kept = needed_tiles(sample.image_rows[place][is_here], features)
        names.append(sample.images[place])
        tokens.append(kept)
        tiles.append(read(place)[needed] if len(needed) else np.zeros(0, dtype=np.uint8))
        numbers += [first_tiles[place] + int(tile) for tile in needed]
    return (replace(sample, images=tuple(names), image_rows=tuple(tokens)), tiles), numbers
