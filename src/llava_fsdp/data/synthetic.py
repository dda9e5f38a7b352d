"""Make synthetic micro-batches of the largest size that the configuration allows, for a dry run without a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.loader import Loader, ModelShape


@dataclass(frozen=True)
class Contents:
    """How many samples, tokens, images, tiles and labels a synthetic micro-batch has."""

    lengths: tuple[int, ...]
    """Number of tokens of each sample."""
    images: int
    tiles: int
    labels: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def fullest(cfg: Config, shape: ModelShape) -> Contents:
    """Return the largest numbers of tokens, images and labels that a micro-batch can have. A real micro-batch never
    reaches all three at once.

    Tokens: all rows are full. Images: as many as fit, each with a short caption. Labels: samples of `data.max_length`
    tokens with one image each, in which each token after the image is a label.
    """
    length = cfg.data.max_length
    tokens = cfg.row_tokens if cfg.packs else cfg.micro_batch_size * length
    lengths = (length,) * (tokens // length) + ((tokens % length,) if tokens % length else ())
    tiles = tiles_of_an_image(cfg, shape)
    images = max(1, tokens // (tiles * shape.image_tokens + 1)) if cfg.packs else cfg.micro_batch_size
    image_tokens = sum(min(n - 1, shape.image_tokens) for n in lengths)
    return Contents(lengths, images, images * tiles, tokens - len(lengths) - image_tokens)


def tiles_of_an_image(cfg: Config, shape: ModelShape) -> int:
    """Return the largest number of tiles of an image: 1, or with anyres the number of tiles of the largest grid plus
    1."""
    rule = ImageTokens.of_config(cfg, shape.image_size, shape.image_tokens)
    return max(rule.count_tiles(size, 1) for size in rule.sizes)


def synthetic_micro_batch(contents: Contents, shape: ModelShape, pack: bool) -> MicroBatch:
    """Return a micro-batch with token ids 0 and black images. Each sample begins with image tokens; the tokens after
    them are labels."""
    begins = torch.tensor(contents.lengths).cumsum(0) - torch.tensor(contents.lengths)
    images, labels = [], []
    for begin, length in zip(begins.tolist(), contents.lengths, strict=True):
        image = min(length - 1, shape.image_tokens)
        images.append(torch.arange(begin, begin + image))
        labels.append(torch.arange(begin + image, begin + length - 1))
    image_positions = torch.cat(images)
    label_positions = torch.cat(labels)[: contents.labels]
    rows = 1 if pack else len(contents.lengths)
    side = shape.image_size
    return MicroBatch(
        input_ids=torch.zeros((rows, contents.tokens // rows), dtype=torch.int64),
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
    """Return how many micro-batches of a step a dry run computes. There are at most two, because each later one would
    be like the second."""
    return min(2, math.ceil(cfg.global_batch_size / (len(contents.lengths) * world_size)))


def synthetic_step(number: int, contents: Contents, shape: ModelShape, cfg: Config, world_size: int) -> Step:
    """Return this rank's part of a synthetic training step."""
    count = micro_batches_of(contents, cfg, world_size)
    times = count * world_size
    facts = StepFacts(
        number,
        samples=times * len(contents.lengths),
        tokens=times * contents.tokens,
        pairs=times * sum(length**2 for length in contents.lengths),
        label_tokens=times * contents.labels,
        images=times * contents.images,
        tiles=times * contents.tiles,
    )
    return Step(facts, [synthetic_micro_batch(contents, shape, cfg.packs) for _ in range(count)])


class SyntheticLoader(Loader):
    """Replaces Loader in a dry run without a dataset: it only copies micro-batches to the device."""

    def __init__(self, device: torch.device, steps: int):
        self.device = device
        self.total_steps = steps
        self.table = torch.zeros((3, 256), device=device)
