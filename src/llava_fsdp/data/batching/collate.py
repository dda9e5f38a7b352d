"""Samples that a rank runs at once, as one micro-batch of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from llava_fsdp.config import Normalize
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.data.images.anyres import NEWLINE_ROW
from llava_fsdp.data.images.preprocess import PictureReader
from llava_fsdp.data.text.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.encode import Sample

Row = tuple[Sample, list[np.ndarray]]
"""A sample, and by picture its tiles"""


class Collator:
    """Lays samples and their pictures out for one forward pass."""

    def __init__(self, pictures: PictureReader, normalize: Normalize, pack: bool):
        self.pictures = pictures
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
        """Samples end to end, or rows padded to the longest; without any, one position that has no label.

        Args:
            micro_batches: of the whole step, on all ranks together.
            seeds: of the rows, below 2**31, where something is drawn for them.
            sources: of the rows, by number, where there are several.
        """
        ids, labels = (packed if self.pack else padded)([sample for sample, _ in rows])
        lengths = tuple(len(s.input_ids) for s, _ in rows) or (1,)
        image_positions = np.flatnonzero(ids == IMAGE_ID)
        label_positions = np.flatnonzero(labels != IGNORE)
        ids[ids == IMAGE_ID] = 0
        images, image_rows = self.lay_out(rows)
        labels_here = len(label_positions)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            image_positions=torch.from_numpy(image_positions),
            image_rows=torch.from_numpy(image_rows),
            images=torch.from_numpy(images),
            label_positions=torch.from_numpy(label_positions),
            label_ids=torch.from_numpy(labels.reshape(-1)[label_positions]),
            scale=1 / max(1, facts.label_tokens)
            if self.normalize is Normalize.step
            else 1 / (max(1, labels_here) * micro_batches),
            **(boundaries(lengths) if self.pack else {}),
            **(drawn_from(seeds, rows) if seeds else {}),
            **(labelled_by(sources, rows) if sources else {}),
        )

    def lay_out(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """All tiles of the rows' pictures, and which rows of their features the pictures' positions show."""
        tiles, places = [self.pictures.no_tiles()], [np.zeros(0, dtype=np.int64)]
        before = 0  # rows of features
        for sample, pictures in rows:
            for picture, own in zip(pictures, sample.image_rows, strict=True):
                tiles.append(picture)
                places.append(np.where(own == NEWLINE_ROW, NEWLINE_ROW, own + before))
                before += len(tiles[-1]) * self.pictures.image_tokens
        where = np.concatenate(places)
        return np.concatenate(tiles), np.where(where == NEWLINE_ROW, before, where)


def padded(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and what each position predicts, both int64 [rows, length of the longest]."""
    length = max((len(s.input_ids) for s in samples), default=1)
    ids = np.zeros((max(1, len(samples)), length), dtype=np.int64)
    labels = np.full((max(1, len(samples)), length), IGNORE, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
        labels[row, : len(sample.labels) - 1] = sample.labels[1:]
    return ids, labels


def packed(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and what each position predicts, both int64 [1, positions]; the last of a sample predicts nothing."""
    if not samples:
        return padded(samples)
    end = np.array([IGNORE])
    labels = [part for s in samples for part in (s.labels[1:], end)]
    return np.concatenate([s.input_ids for s in samples])[None], np.concatenate(labels)[None]


def boundaries(lengths: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a micro-batch that tell the samples of a packed row apart."""
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "lengths": lengths,
    }


def drawn_from(seeds: Sequence[int], rows: list[Row]) -> dict[str, Any]:
    """The fields of a micro-batch that dropout depends on; a sample's tiles each have a seed of their own."""
    tiles = [
        (seed + number) % 2**31
        for seed, (_, pictures) in zip(seeds, rows, strict=True)
        for number in range(1, 1 + sum(len(picture) for picture in pictures))
    ]
    return {"seeds": torch.tensor(seeds), "tile_seeds": torch.tensor(tiles, dtype=torch.int64)}


def labelled_by(sources: Sequence[int], rows: list[Row]) -> dict[str, Any]:
    """The field of a micro-batch that says the source of each label, in the order of the rows."""
    labels = [sample.num_labels for sample, _ in rows]
    return {"label_sources": torch.from_numpy(np.repeat(np.array(sources, dtype=np.int64), labels))}
