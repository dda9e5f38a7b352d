"""Pictures as tiles: which grid, and which pixels."""

import numpy as np
import pytest
from PIL import Image

from llava_fsdp.config import AspectRatio
from llava_fsdp.data.images.anyres import GRIDS, best_size, cut_tiles, fit, grid_sizes

TILE = 28
SIZES = grid_sizes([], TILE)
PICTURES = [
    *[(28, 28), (56, 28), (20, 90), (300, 100), (57, 55), (1, 1), (2, 400), (640, 480), (29, 43)],
    (294, 49),  # its line of features comes out as 0.9999999999999999 before rounding
]


def test_the_towers_own_grids() -> None:
    assert SIZES == [(28, 56), (56, 28), (56, 56), (84, 28), (28, 84)] and len(GRIDS) == 5
    assert grid_sizes([[28, 28]], TILE) == [(28, 28)]
    every = grid_sizes([], TILE, AspectRatio.anyres_max)
    assert len(set(every)) == 36 and every[:2] == [(28, 28), (56, 28)] and every[-1] == (168, 168)


def test_best_size_keeps_most_and_then_wastes_least() -> None:
    assert best_size((300, 100), SIZES) == (84, 28)
    assert best_size((100, 300), SIZES) == (28, 84)
    assert best_size((500, 500), SIZES) == (56, 56)
    assert best_size((10, 20), SIZES) == (28, 56), "of equal ones the smallest, the first of these"


@pytest.mark.parametrize("size", PICTURES)
def test_tiles_are_the_fitted_picture(size: tuple[int, int]) -> None:
    picture = Image.effect_noise(size, 100).convert("RGB")
    tiles = [np.asarray(t) for t in cut_tiles(picture, TILE, SIZES)]
    width, height = best_size(size, SIZES)
    assert all(t.shape == (TILE, TILE, 3) for t in tiles)
    lines = [
        np.concatenate(tiles[1 + n : 1 + n + width // TILE], axis=1) for n in range(0, len(tiles) - 1, width // TILE)
    ]
    assert np.array_equal(np.concatenate(lines), np.asarray(fit(picture, (width, height))))
    assert np.array_equal(tiles[0], np.asarray(picture.resize((TILE, TILE))))
