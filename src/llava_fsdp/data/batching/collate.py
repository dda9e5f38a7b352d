"""Collate samples and their images into a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llava_fsdp.config import Normalize
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.data.images.image_tokens import join_tokens
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.text.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.encode import Sample

Row = tuple[Sample, list[np.ndarray]]
"""An encoded sample, and for each of its images the tiles, uint8 [tiles, 3, size, size]."""


class Collator:
    """Makes a micro-batch (inputs and labels of one forward pass) from encoded samples and the tiles of their
    images."""

    def __init__(self, image_reader: ImageReader, normalize: Normalize, pack: bool):
        self.image_reader = image_reader
        self.normalize = normalize
        self.pack = pack

    def __call__(
        self,
        rows: list[Row],
        facts: StepFacts,
        micro_batches: int,
        seeds: Sequence[int] = (),
        sources: Sequence[int] = (),
    ) -> MicroBatch:
        """Return a micro-batch of the given samples, as one packed row or as padded rows; without samples, a
        micro-batch of one token and no label.

        Args:
            rows: encoded samples, each with the tiles of each of its images, uint8 [tiles, 3, size, size].
            facts: counts of the whole step over all ranks, from which the scale of the loss is computed.
            micro_batches: number of micro-batches of the whole step, over all ranks.
            seeds: dropout seed of each sample, below 2**31; empty without dropout.
            sources: index of each sample's data source in `data.sources`; empty with a single source.
        """
        ids, labels = (packed if self.pack else padded)([sample for sample, _ in rows])
        lengths = tuple(len(s.input_ids) for s, _ in rows) or (1,)
        image_positions = np.flatnonzero(ids == IMAGE_ID)
        label_positions = np.flatnonzero(labels != IGNORE)
        ids[ids == IMAGE_ID] = 0
        images, image_rows, image_weights = self.lay_out(rows)
        if self.normalize is Normalize.step:
            scale = 1 / max(1, facts.label_tokens)
        else:
            scale = 1 / (max(1, len(label_positions)) * micro_batches)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            image_positions=torch.from_numpy(image_positions),
            image_rows=torch.from_numpy(image_rows),
            image_weights=aligned(image_weights),
            images=torch.from_numpy(images),
            label_positions=torch.from_numpy(label_positions),
            label_ids=torch.from_numpy(labels.reshape(-1)[label_positions]),
            scale=scale,
            **(boundaries(lengths) if self.pack else {}),
            **(dropout_seeds(seeds, rows) if seeds else {}),
            **(label_sources(sources, rows) if sources else {}),
        )

    def lay_out(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Concatenate the images of a micro-batch.

        Args:
            rows: encoded samples, each with the tiles of each of its images, uint8 [tiles, 3, size, size].

        Returns:
            (tiles of all images, uint8 [tiles, 3, size, size]; for each image token the index of its vision feature
            among the features of all tiles, or of the four features of which it is a weighted sum, int64 [image tokens]
            or [image tokens, 4]; the weights of the four, float32 [image tokens, 4], or empty)
        """
        found = [pair for sample, images in rows for pair in zip(images, sample.image_rows, strict=True)]
        per_tile = self.image_reader.tokens.features
        joined = join_tokens([(tokens, len(tiles) * per_tile) for tiles, tokens in found])
        return np.concatenate([self.image_reader.no_tiles(), *(tiles for tiles, _ in found)]), *joined


def aligned(values: np.ndarray) -> torch.Tensor:
    """Copy float32 values into memory that torch allocates, which is aligned to 64 bytes. With NumPy's memory, kernels
    may give results that differ in the last bits."""
    made = torch.empty(values.shape)
    made.numpy()[...] = values
    return made


def padded(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels of encoded samples as padded rows, both int64 [samples, length of the longest
    sample].

    Labels are shifted: each is at the position of the token that predicts it. Rows are padded on the right, token ids
    with 0 and labels with IGNORE (-100).
    """
    length = max((len(s.input_ids) for s in samples), default=1)
    ids = np.zeros((max(1, len(samples)), length), dtype=np.int64)
    labels = np.full((max(1, len(samples)), length), IGNORE, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
        labels[row, : len(sample.labels) - 1] = sample.labels[1:]
    return ids, labels


def packed(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels of all encoded samples, one after the other in one row, both int64 [1, tokens].

    Labels are shifted: each is at the position of the token that predicts it. The last position of a sample has IGNORE
    (-100).
    """
    if not samples:
        return padded(samples)
    end = np.array([IGNORE])
    labels = [part for s in samples for part in (s.labels[1:], end)]
    return np.concatenate([s.input_ids for s in samples])[None], np.concatenate(labels)[None]


def boundaries(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the MicroBatch fields that separate the samples of a packed row (position_ids, cu_seqlens and lengths),
    given the number of tokens of each sample."""
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "lengths": lengths,
    }


def dropout_seeds(seeds: Sequence[int], rows: list[Row]) -> dict[str, Any]:
    """Return the MicroBatch fields `seeds` and `tile_seeds`, the seeds of dropout. The seeds of a sample's image tiles
    are derived from the seed of the sample.

    Args:
        seeds: dropout seed of each sample.
        rows: encoded samples, each with the tiles of each of its images.
    """
    tiles = [
        (seed + number) % 2**31
        for seed, (_, images) in zip(seeds, rows, strict=True)
        for number in range(1, 1 + sum(len(image) for image in images))
    ]
    return {"seeds": torch.tensor(seeds), "tile_seeds": torch.tensor(tiles, dtype=torch.int64)}


def label_sources(sources: Sequence[int], rows: list[Row]) -> dict[str, Any]:
    """Return the MicroBatch field `label_sources`: for each label of the samples, the index of its data source.

    Args:
        sources: index of the data source of each sample.
        rows: encoded samples, each with its images, which are not used.
    """
    labels = [sample.num_labels for sample, _ in rows]
    return {"label_sources": torch.from_numpy(np.repeat(np.array(sources, dtype=np.int64), labels))}
