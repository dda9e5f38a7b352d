"""Pictures as tiles: which grid, which pixels, and in which order their features come."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiers import slow_after
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

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


@pytest.mark.parametrize(("number", "tile", "side"), slow_after(2, [(250, 28, 2), (250, 42, 3), (2000, 336, 24)]))
def test_order_of_transformers_llava_next(number: int, tile: int, side: int) -> None:
    """Its model packs the features in the same order, and its processor counts as many; sizes and grids there are
    (height, width), and the order of the grids is the same."""
    dice = random.Random(number)
    for _ in range(number):
        grids = [(tile * dice.randrange(1, 5), tile * dice.randrange(1, 5)) for _ in range(dice.randrange(1, 7))]
        sizes = dice.choice([grid_sizes([], tile), grids])
        size = dice.choice([(dice.randrange(1, 50), dice.randrange(1, 3000)), (dice.randrange(1, 900),) * 2,
                            (dice.randrange(1, 2000), dice.randrange(1, 2000))])  # fmt: skip
        rows = feature_rows(size, sizes, tile, side, PatchMerge.spatial_unpad)
        pinpoints, image = [[height, width] for width, height in sizes], [size[1], size[0]]
        vision = SimpleNamespace(image_size=tile, patch_size=tile // side)
        model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints))
        tiles = image_size_to_num_patches(image, pinpoints, tile)
        features = torch.arange(tiles * side * side).view(tiles, side * side, 1).double()
        newline = torch.tensor([float(NEWLINE_ROW)]).double()
        packed, lengths = LlavaNextModel.pack_image_features(model, [features], torch.tensor([image]), "full", newline)
        assert packed[0][:, 0].tolist() == rows.tolist(), (size, sizes)
        processor: Any = object.__new__(LlavaNextProcessor)
        processor.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
        processor.patch_size, processor.num_additional_image_tokens = tile // side, 0
        assert processor._get_number_of_features(*image, tile, tile) == lengths.item() == len(rows)
