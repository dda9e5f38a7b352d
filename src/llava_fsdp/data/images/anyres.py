"""Anyres: split an image of any resolution into tiles, and order the vision features of the tiles.

The first tile is the whole image. The others are cut from the image after it was resized to a grid of tiles. Of a few
configured grids, the one that fits the image's shape best is used (LLaVA mm_utils.py:10-149, llava_arch.py:146-201;
LLaVA-NeXT).
"""

import math

import numpy as np
from PIL import Image

from llava_fsdp.config import PatchMerge

NEWLINE_ROW = -1
"""Stands for the learned "newline" vector, which ends each line of features, where other numbers are indices of
features."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-NeXT's default grids, as (width, height) in tiles."""
Size = tuple[int, int]
"""(width, height) in pixels."""


def grid_sizes(pinpoints: list[list[int]], tile: int) -> list[Size]:
    """Return the sizes in pixels that an image may be fitted into: `pinpoints`, or if they are empty LLaVA-NeXT's grids
    of tiles.

    Args:
        tile: width and height of a tile in pixels.
    """
    return [(w, h) for w, h in pinpoints] or [(w * tile, h * tile) for w, h in GRIDS]


def best_size(image: Size, sizes: list[Size]) -> Size:
    """Return the one of `sizes` that keeps the most pixels of an image when the image is fitted into it. Of equal ones,
    return the size with the least padding, then the first."""

    def rank(size: Size) -> tuple[int, int]:
        scale = min(size[0] / image[0], size[1] / image[1])
        kept = min(int(image[0] * scale) * int(image[1] * scale), image[0] * image[1])
        return kept, kept - size[0] * size[1]

    return max(sizes, key=rank)


def cut_tiles(image: Image.Image, tile: int, sizes: list[Size]) -> list[Image.Image]:
    """Return the tiles of an image: the whole image resized to one tile, then the tiles of the grid that fits it best,
    row by row."""
    return [image.resize((tile, tile)), *cut_grid(fit(image, best_size(image.size, sizes)), tile)]


def fit(image: Image.Image, size: Size) -> Image.Image:
    """Return the image resized to fit into `size`, in the middle of a black canvas of that size."""
    return on_black(image.resize(fitted_shape(image.size, size)), size)


def fitted_shape(image: Size, size: Size) -> Size:
    """Return the largest size within `size` that has the aspect ratio of the image."""
    scale_w, scale_h = size[0] / image[0], size[1] / image[1]
    if scale_w < scale_h:
        return size[0], min(math.ceil(image[1] * scale_w), size[1])
    return min(math.ceil(image[0] * scale_h), size[0]), size[1]


def on_black(image: Image.Image, size: Size) -> Image.Image:
    canvas = Image.new("RGB", size, (0, 0, 0))
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas


def cut_grid(fitted: Image.Image, tile: int) -> list[Image.Image]:
    corners = [(x, y) for y in range(0, fitted.height, tile) for x in range(0, fitted.width, tile)]
    return [fitted.crop((x, y, x + tile, y + tile)) for x, y in corners]


def feature_rows(image: Size, sizes: list[Size], tile: int, side: int, merge: PatchMerge) -> np.ndarray:
    """Return for each token of an image the index of its vision feature, int64 [tokens]: first the tokens of the whole
    image, then those of the grid of tiles.

    With `merge=spatial_unpad`, the grid's features that show only padding are left out, and each line ends with
    NEWLINE_ROW.

    Args:
        image: width and height of the image in pixels.
        sizes: sizes in pixels that an image may be fitted into.
        tile: width and height of a tile in pixels.
        side: number of vision features along each side of a tile.
    """
    width, height = best_size(image, sizes)
    across, down = width // tile, height // tile
    whole = np.arange(side * side)
    grid = side * side + np.arange(across * down * side * side)
    if merge is PatchMerge.flat:
        return np.concatenate([whole, grid])
    lines = grid.reshape(down, across, side, side).transpose(0, 2, 1, 3).reshape(down * side, across * side)
    if merge is PatchMerge.spatial_unpad:
        lines = unpad(lines, image)
        lines = np.concatenate([lines, np.full((len(lines), 1), NEWLINE_ROW)], axis=1)
    return np.concatenate([whole, lines.reshape(-1)])


def unpad(lines: np.ndarray, image: Size) -> np.ndarray:
    """Return a two-dimensional array of feature indices without the rows or columns for the black bars beside the image
    (LLaVA llava_arch.py:104-130)."""
    high, wide = lines.shape
    if image[0] / image[1] > wide / high:
        kept = int(round(image[1] * (wide / image[0]), 7))
        bar = (high - kept) // 2
        return lines[bar : high - bar]
    kept = int(round(image[0] * (high / image[1]), 7))
    bar = (wide - kept) // 2
    return lines[:, bar : wide - bar]
