"""Micro-batches without a dataset, as large as the configuration lets any become."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llava_fsdp.config import AspectRatio, Config
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.loader import Loader, ModelShape


@dataclass(frozen=True)
class Contents:
    """What a micro-batch holds."""

    lengths: tuple[int, ...]
    """Positions of each sample."""
    pictures: int
    tiles: int
    labels: int

    @property
    def positions(self) -> int:
        return sum(self.lengths)


def fullest(cfg: Config, shape: ModelShape) -> Contents:
    """The most of everything that a micro-batch can hold, each by itself: no real one has all of it.

    Positions: the row is full. Pictures: as many as fit into it, as with captions. Labels: all that samples of
    `data.max_length` have behind the one picture of each, were every one of these positions answered.
    """
    length = cfg.data.max_length
    positions = cfg.row_tokens if cfg.pack else cfg.micro_batch_size * length
    lengths = (length,) * (positions // length) + ((positions % length,) if positions % length else ())
    tiles = tiles_of_a_picture(cfg, shape)
    pictures = max(1, positions // (tiles * shape.image_tokens + 1)) if cfg.pack else cfg.micro_batch_size
    shown = sum(min(n - 1, shape.image_tokens) for n in lengths)
    return Contents(lengths, pictures, pictures * tiles, positions - len(lengths) - shown)


def tiles_of_a_picture(cfg: Config, shape: ModelShape) -> int:
    """One, or with anyres those of the largest grid and the whole picture."""
    if cfg.data.trained_aspect is not AspectRatio.anyres:
        return 1
    side = shape.image_size
    return 1 + max(w * h // side**2 for w, h in grid_sizes(cfg.data.grid_pinpoints, side))


def synthetic_micro_batch(contents: Contents, shape: ModelShape, pack: bool) -> MicroBatch:
    """Ids that are all 0 and black pictures, laid out as real samples are: a picture first, labels behind it."""
    begins = torch.tensor(contents.lengths).cumsum(0) - torch.tensor(contents.lengths)
    shown, labels = [], []
    for begin, length in zip(begins.tolist(), contents.lengths, strict=True):
        picture = min(length - 1, shape.image_tokens)
        shown.append(torch.arange(begin, begin + picture))
        labels.append(torch.arange(begin + picture, begin + length - 1))
    image_positions = torch.cat(shown)
    label_positions = torch.cat(labels)[: contents.labels]
    rows = 1 if pack else len(contents.lengths)
    side = shape.image_size
    return MicroBatch(
        input_ids=torch.zeros((rows, contents.positions // rows), dtype=torch.int64),
        image_positions=image_positions,
        image_rows=torch.arange(len(image_positions)) % (contents.tiles * shape.image_tokens),
        images=torch.zeros((contents.tiles, 3, side, side), dtype=torch.uint8),
        label_positions=label_positions,
        label_ids=torch.zeros(len(label_positions), dtype=torch.int64),
        scale=1 / max(1, len(label_positions)),
        seeds=torch.arange(len(contents.lengths)),
        tile_seeds=torch.arange(contents.tiles),
        **(boundaries(contents.lengths) if pack else {}),
    )


def micro_batches_of(contents: Contents, cfg: Config, world_size: int) -> int:
    """One or two: every later one is like the second."""
    return min(2, math.ceil(cfg.global_batch_size / (len(contents.lengths) * world_size)))


def synthetic_step(number: int, contents: Contents, shape: ModelShape, cfg: Config, world_size: int) -> Step:
    """This rank's part of a step; gradients add up over its micro-batches."""
    count = micro_batches_of(contents, cfg, world_size)
    times = count * world_size
    facts = StepFacts(
        number,
        samples=times * len(contents.lengths),
        tokens=times * contents.positions,
        pairs=times * sum(length**2 for length in contents.lengths),
        label_tokens=times * contents.labels,
        images=times * contents.pictures,
        tiles=times * contents.tiles,
    )
    return Step(
        facts,
        [synthetic_micro_batch(contents, shape, cfg.pack) for _ in range(count)],
    )


class SyntheticLoader(Loader):
    """What a step asks of a loader: the device, and the way onto it. No dataset stands behind it."""

    def __init__(self, device: torch.device, steps: int):
        self.device = device
        self.total_steps = steps
        self.table = torch.zeros((3, 256), device=device)
