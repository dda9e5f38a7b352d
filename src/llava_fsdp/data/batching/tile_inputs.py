"""Make the image inputs of a micro-batch: tensors by name, in which nobody but the model looks.

This is the half of the data; the other half is `Llava.forward`, where the names are explained. The trainer moves the
tensors to the device, and hands them to the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from llava_fsdp.data.images.image_tokens import join_tokens
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IMAGE_ID

Row = tuple[Sample, list[np.ndarray]]
"""A sample, and for each of its images the tiles, uint8 [tiles, 3, size, size]."""


@dataclass(frozen=True)
class TileInputs:
    """Makes the image inputs of a model whose images are square tiles."""

    image_reader: ImageReader
    divides: ClassVar[bool] = True
    """Whether a rank that has some positions of a row gets the ids and images of these alone; False: of the whole row,
    and the model divides it when the embeddings are made."""

    def completed(self, rows: list[Row], others_show: bool) -> list[Row]:
        """Return the samples of a micro-batch unchanged: the model runs its vision part without images, too."""
        return rows

    def collate_prompts(self, rows: list[Row], ids: np.ndarray) -> dict[str, torch.Tensor]:
        """Do the same as `collate` for rows padded on the left."""
        return self.collate(rows, ids)

    def collate(
        self,
        rows: list[Row],
        ids: np.ndarray,
        seeds: Sequence[int] = (),
        tile_numbers: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Concatenate the images of a micro-batch. Both answers of a pair show the same features, so that the vision
        tower runs once.

        Args:
            ids: the token ids of the rows, int64 [rows, length]; IMAGE_ID at image tokens.
            seeds: dropout seed of each row; empty without dropout.
            tile_numbers: for each row, the numbers of its tiles among all tiles of the sample, from 0; None: all tiles.

        Returns:
            Image inputs by their names in `Llava.forward`: `positions` of the image tokens, `rows` (index of each one's
            vision feature, or of four with `weights`), `tiles` (uint8) and their dropout `seeds`.
        """
        per_tile, shown, firsts, begin = self.image_reader.tokens.features, [], list[int](), 0
        # `shown`: tokens of each image and the number of features that it adds; `firsts`: index of its first feature
        for sample, images in rows:
            counts = [len(tiles) * per_tile for tiles in images]
            # of a pair, both answers; if they share the prompt, the images are only in the first one
            for part in sample.parts[: 1 if sample.shared_prompt_tokens else None]:
                new = [0] * len(counts) if part is sample.rejected else counts  # the rejected one adds no features
                shown += zip(part.image_rows, new, strict=True)
                firsts += [*itertools.accumulate(counts, initial=begin)][:-1]
            begin += sum(counts)
        image_rows, weights = join_tokens(shown, firsts)
        all_tiles = [tiles for _, images in rows for tiles in images if len(tiles)]
        tiles = np.concatenate([self.image_reader.no_tiles(), *all_tiles])
        return {
            "positions": torch.from_numpy(np.flatnonzero(ids == IMAGE_ID)),
            "rows": torch.from_numpy(image_rows),
            "tiles": torch.from_numpy(tiles),
            "weights": copy_aligned(weights),
            "seeds": tile_seeds(seeds, rows, tile_numbers),
        }


def with_normalized_tiles(inputs: Mapping[str, torch.Tensor], table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return image inputs with normalised tiles, float32. `table`: the `pixel_table`, on the device of the inputs."""
    return {**inputs, "tiles": normalize(inputs["tiles"], table)} if "tiles" in inputs else dict(inputs)


def normalize(images: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Normalise uint8 images [n, 3, height, width] with a `pixel_table`; return float32."""
    channel = torch.arange(3, device=images.device).view(1, 3, 1, 1)
    return table[channel, images.long()]


def copy_aligned(values: np.ndarray) -> torch.Tensor:
    """Copy float32 values into memory of torch, aligned to 64 bytes. In NumPy's, kernels may give other last bits."""
    copy = torch.empty(values.shape)
    copy.numpy()[...] = values
    return copy


def tile_seeds(seeds: Sequence[int], rows: list[Row], numbers: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
    """Return the dropout seeds of image tiles, int64 [tiles]: the seed of the tile's sample, plus the tile's number in
    the sample from 1.

    Args:
        seeds: dropout seed of each row; empty without dropout.
        numbers: for each row, the numbers of its tiles among all tiles of the sample, from 0; None: all tiles are here.
    """
    if not len(seeds):
        return torch.zeros(0, dtype=torch.int64)
    if numbers is None:
        numbers = [range(sum(map(len, images))) for _, images in rows]
    all_seeds = [
        (seed + 1 + number) % 2**31
        for seed, tile_numbers in zip(seeds, numbers, strict=True)
        for number in tile_numbers
    ]
    return torch.tensor(all_seeds, dtype=torch.int64)
