"""A picture of any resolution as several tiles, and the order of their features.

The picture is fitted into the best of a few grids of tiles; the tiles follow the whole picture resized to one tile
(LLaVA mm_utils.py:10-149, llava_arch.py:146-201; LLaVA-NeXT).
"""

import math

import numpy as np
from PIL import Image

from llava_fsdp.config import PatchMerge

NEWLINE_ROW = -1
"""In place of a row of features: the learned vector at the end of a line."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-NeXT's, in tiles: width, height."""
Size = tuple[int, int]
"""(width, height) in pixels"""


def grid_sizes(pinpoints: list[list[int]], tile: int) -> list[Size]:
    """The sizes that a picture may be fitted into; `pinpoints`, or LLaVA-NeXT's for this tower."""
    return [(w, h) for w, h in pinpoints] or [(w * tile, h * tile) for w, h in GRIDS]


def best_size(picture: Size, sizes: list[Size]) -> Size:
    """The size that keeps most of the picture's pixels, and of equal ones the one that wastes least."""

    def rank(size: Size) -> tuple[int, int]:
        scale = min(size[0] / picture[0], size[1] / picture[1])
        kept = min(int(picture[0] * scale) * int(picture[1] * scale), picture[0] * picture[1])
        return kept, kept - size[0] * size[1]

    return max(sizes, key=rank)  # of equal ones the first


def cut_tiles(picture: Image.Image, tile: int, sizes: list[Size]) -> list[Image.Image]:
    """The whole picture as one tile, then the tiles of the grid, line by line; all tile x tile pixels."""
    return [picture.resize((tile, tile)), *cut_grid(fit(picture, best_size(picture.size, sizes)), tile)]


def fit(picture: Image.Image, size: Size) -> Image.Image:
    """The picture as large as it fits, in the middle of black."""
    return on_black(picture.resize(fitted_shape(picture.size, size)), size)


def fitted_shape(picture: Size, size: Size) -> Size:
    """The largest that the picture can be within `size`."""
    scale_w, scale_h = size[0] / picture[0], size[1] / picture[1]
    if scale_w < scale_h:
        return size[0], min(math.ceil(picture[1] * scale_w), size[1])
    return min(math.ceil(picture[0] * scale_h), size[0]), size[1]


def on_black(picture: Image.Image, size: Size) -> Image.Image:
    canvas = Image.new("RGB", size, (0, 0, 0))
    canvas.paste(picture, ((size[0] - picture.width) // 2, (size[1] - picture.height) // 2))
    return canvas


def cut_grid(fitted: Image.Image, tile: int) -> list[Image.Image]:
    corners = [(x, y) for y in range(0, fitted.height, tile) for x in range(0, fitted.width, tile)]
    return [fitted.crop((x, y, x + tile, y + tile)) for x, y in corners]


def feature_rows(picture: Size, sizes: list[Size], tile: int, side: int, merge: PatchMerge) -> np.ndarray:
    """Rows of the tiles' features in the order of the sequence, int64 [positions]; NEWLINE_ROW where a line ends.

    Args:
        side: features on a side of a tile.
    """
    width, height = best_size(picture, sizes)
    across, down = width // tile, height // tile
    whole = np.arange(side * side)
    grid = side * side + np.arange(across * down * side * side)
    if merge is PatchMerge.flat:
        return np.concatenate([whole, grid])
    lines = grid.reshape(down, across, side, side).transpose(0, 2, 1, 3).reshape(down * side, across * side)
    if merge is PatchMerge.spatial_unpad:
        lines = unpad(lines, picture)
        lines = np.concatenate([lines, np.full((len(lines), 1), NEWLINE_ROW)], axis=1)
    return np.concatenate([whole, lines.reshape(-1)])


def unpad(lines: np.ndarray, picture: Size) -> np.ndarray:
    """The features without those of the black bars (llava_arch.py:104-130)."""
    high, wide = lines.shape
    if picture[0] / picture[1] > wide / high:
        kept = int(round(picture[1] * (wide / picture[0]), 7))
        bar = (high - kept) // 2
        return lines[bar : high - bar]
    kept = int(round(picture[0] * (high / picture[1]), 7))
    bar = (wide - kept) // 2
    return lines[:, bar : wide - bar]
