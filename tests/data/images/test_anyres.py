"""Pictures as tiles: which grid, which pixels, and in which order their features come."""

import numpy as np
import pytest
import torch
from PIL import Image

from llava_fsdp.config import PatchMerge
from llava_fsdp.data.images.anyres import GRIDS, NEWLINE_ROW, best_size, cut_tiles, feature_rows, fit, grid_sizes

TILE, SIDE = 28, 2
SIZES = grid_sizes([], TILE)
PICTURES = [
    *[(28, 28), (56, 28), (20, 90), (300, 100), (57, 55), (1, 1), (2, 400), (640, 480), (29, 43)],
    (294, 49),  # its line of features comes out as 0.9999999999999999 before rounding
]


def test_the_towers_own_grids() -> None:
    assert SIZES == [(28, 56), (56, 28), (56, 56), (84, 28), (28, 84)] and len(GRIDS) == 5
    assert grid_sizes([[28, 28]], TILE) == [(28, 28)]


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


def merged(size: tuple[int, int], merge: PatchMerge) -> torch.Tensor:
    """Numbers of the tiles' features, put in order with tensors as LLaVA llava_arch.py:146-201 does; -1 ends a line."""
    across, down = (n // TILE for n in best_size(size, SIZES))
    features = torch.arange((1 + across * down) * SIDE * SIDE).view(-1, SIDE * SIDE)
    base, grid = features[0], features[1:]
    if merge is PatchMerge.flat:
        return features.flatten()
    grid = grid.view(down, across, SIDE, SIDE).permute(0, 2, 1, 3).reshape(down * SIDE, across * SIDE)
    if merge is PatchMerge.spatial_unpad:
        high, wide = grid.shape
        if size[0] / size[1] > wide / high:
            bar = (high - int(round(size[1] * wide / size[0], 7))) // 2
            grid = grid[bar : high - bar]
        else:
            bar = (wide - int(round(size[0] * high / size[1], 7))) // 2
            grid = grid[:, bar : wide - bar]
        grid = torch.cat([grid, torch.full((len(grid), 1), NEWLINE_ROW)], dim=1)
    return torch.cat([base, grid.flatten()])


@pytest.mark.parametrize("merge", list(PatchMerge))
@pytest.mark.parametrize("size", PICTURES)
def test_order_of_features(size: tuple[int, int], merge: PatchMerge) -> None:
    assert feature_rows(size, SIZES, TILE, SIDE, merge).tolist() == merged(size, merge).tolist()
