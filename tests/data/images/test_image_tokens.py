"""Which features become the tokens of an image, and in which order."""

import inspect
import math
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiers import slow_after
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from llava_fsdp.config import AspectRatio, PatchMerge
from llava_fsdp.data.images.anyres import best_size, grid_sizes
from llava_fsdp.data.images.image_tokens import NEWLINE_ROW, ImageTokens, join_tokens
from llava_fsdp.model.llava.llava import take_features

TILE, SIDE = 28, 2
SIZES = tuple(grid_sizes([], TILE))
PICTURES = [
    *[(28, 28), (56, 28), (20, 90), (300, 100), (57, 55), (1, 1), (2, 400), (640, 480), (29, 43)],
    (294, 49),  # its line of features comes out as 0.9999999999999999 before rounding
]


def merged(size: tuple[int, int], merge: PatchMerge) -> torch.Tensor:
    """Numbers of the tiles' features, put in order with tensors as LLaVA llava_arch.py:146-201 does; -1 ends a line."""
    across, down = (n // TILE for n in best_size(size, list(SIZES)))
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
    rule = ImageTokens(AspectRatio.anyres, TILE, SIDE**2, SIZES, merge)
    assert rule.of(size, 1).tolist() == merged(size, merge).tolist()


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
        rule = ImageTokens(AspectRatio.anyres, tile, side**2, tuple(sizes), PatchMerge.spatial_unpad)
        rows = rule.of(size, 1)
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
        assert rule.count_tiles(size, 1) == tiles


@pytest.mark.parametrize(("number", "tile", "side"), slow_after(2, [(250, 28, 2), (150, 42, 3), (2000, 384, 27)]))
def test_tokens_of_transformers_llava_onevision(number: int, tile: int, side: int) -> None:
    """Its model makes the same tokens of the same features, shrunk grids too, and its processor counts as many."""
    dice = random.Random(number)
    shrunk = 0
    for _ in range(number):
        most = dice.choice([2, 4, 9])
        grids = [(tile * dice.randrange(1, 7), tile * dice.randrange(1, 7)) for _ in range(dice.randrange(1, 7))]
        sizes = dice.choice([grid_sizes([], tile, AspectRatio.anyres_max), grids])
        size = dice.choice([(dice.randrange(1, 50), dice.randrange(1, 3000)), (dice.randrange(1, 4 * tile),) * 2,
                            (dice.randrange(1, 7 * tile), dice.randrange(1, 7 * tile))])  # fmt: skip
        rule = ImageTokens(AspectRatio.anyres_max, tile, side**2, tuple(sizes), PatchMerge.spatial_unpad, most)
        pinpoints, image = [[height, width] for width, height in sizes], [size[1], size[0]]
        vision = SimpleNamespace(image_size=tile, patch_size=tile // side)
        model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints))
        if min(size) < tile // side and rule.side < 4:
            continue  # a grid of one column would be shrunk to no column, at which transformers fails
        tiles = rule.count_tiles(size, 1)
        assert tiles == image_size_to_num_patches(image, pinpoints, tile)
        features = torch.randn(tiles, side * side, 3, generator=torch.Generator().manual_seed(dice.randrange(1000)))
        newline = torch.tensor([7.0, 8.0, 9.0])
        expected, lengths = LlavaOnevisionModel.pack_image_features(
            model, [features], torch.tensor([image]), newline, f"anyres_max_{most}"
        )
        rows, weights = (torch.from_numpy(a) for a in join_tokens([(rule.of(size, 1), tiles * side**2)]))
        taken = take_features(torch.cat([features.flatten(0, 1), newline[None]]), rows, weights)
        torch.testing.assert_close(taken, expected[0], rtol=0, atol=2e-6)
        shrunk += int((weights[:, 0] < 1).any())
        processor: Any = object.__new__(LlavaOnevisionProcessor)
        processor.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
        processor.num_image_tokens, processor.vision_aspect_ratio = side**2, f"anyres_max_{most}"
        assert processor._get_number_of_features(*image, tile, tile) == lengths.item() == len(rows)
    assert shrunk > number // 10


def test_each_of_several_images_is_one_tile_and_a_newline() -> None:
    """As transformers' LlavaOnevisionModel has it for a sample with several images."""
    rule = ImageTokens(AspectRatio.anyres_max, TILE, SIDE**2, SIZES, PatchMerge.spatial_unpad)
    assert rule.needs_size(1) and not rule.needs_size(2) and rule.count_tiles(None, 3) == 1
    rows, weights = join_tokens([(rule.of(None, 2), SIDE**2)] * 2)
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 8, 4, 5, 6, 7, 8]
    assert (weights == np.array([1, 0, 0, 0])).all()


def test_indices_are_those_of_all_images_and_the_newline_is_after_them() -> None:
    rule = ImageTokens(AspectRatio.anyres, TILE, SIDE**2, ((28, 28),), PatchMerge.spatial_unpad)
    rows, weights = join_tokens([(rule.of((28, 28), 1), 8)] * 2)
    one = [0, 1, 2, 3, 4, 5, 16, 6, 7, 16]
    assert rows.tolist() == [*one, *(row if row == 16 else row + 8 for row in one)] and not len(weights)
    assert [len(made) for made in join_tokens([])] == [0, 0]


@pytest.mark.parametrize("size", [(28, 56), (56, 56), (84, 28), (28, 84)])
def test_the_most_tokens_are_those_of_a_full_grid(size: tuple[int, int]) -> None:
    for merge in PatchMerge:
        rule = ImageTokens(AspectRatio.anyres, 28, 4, (size,), merge)
        assert rule.count_tiles(size, 1) == 1 + size[0] * size[1] // 28**2
        assert rule.most_tokens == len(rule.of(size, 1))
    padded = ImageTokens(AspectRatio.pad, 28, 4)
    assert (padded.most_tokens, padded.count_tiles(None, 1)) == (4, 1)


@pytest.mark.parametrize("side", slow_after(4, [1, 2, 3, 7, 27]))
def test_tokens_of_transformers_videos(side: int) -> None:
    """Its model makes the same tokens of the frames' features, and its processor counts as many."""
    rule = ImageTokens(AspectRatio.anyres_max, 14 * side, side**2, (), PatchMerge.spatial_unpad)
    newline = torch.tensor([7.0, 8.0, 9.0])
    for frames in (1, 2, 5):
        features = torch.randn(frames, side * side, 3, generator=torch.Generator().manual_seed(frames))
        vision = SimpleNamespace(image_size=14 * side, patch_size=14)
        tower = SimpleNamespace(hidden_states=[features])
        model: Any = SimpleNamespace(
            config=SimpleNamespace(vision_config=vision, vision_feature_layer=0, vision_feature_select_strategy="full"),
            vision_tower=lambda *_, own=tower, **__: own, multi_modal_projector=lambda found: found,
            image_newline=newline,
        )  # fmt: skip
        model.apply_pooling = partial(LlavaOnevisionModel.apply_pooling, model)
        given = torch.zeros(1, frames, 3, 1, 1)
        pooled = inspect.unwrap(LlavaOnevisionModel.get_video_features)(model, given, 0, "full").pooler_output
        rows, weights = (torch.from_numpy(a) for a in join_tokens([(rule.of_video(frames), frames * side**2)]))
        taken = take_features(torch.cat([features.flatten(0, 1), newline[None]]), rows, weights)
        torch.testing.assert_close(taken, pooled[0], rtol=0, atol=2e-6)
        processor: Any = object.__new__(LlavaOnevisionProcessor)
        processor.num_image_tokens, processor.video_token = side**2, "x"
        assert len(rows) == len(processor.replace_video_token({"pixel_values_videos": [[0] * frames]}, 0))
        assert len(rows) == frames * math.ceil(side / 2) ** 2 + 1
