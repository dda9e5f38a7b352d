"""What a sample costs: text, pictures, labels and attention, in whole numbers."""

import numpy as np

from llava_fsdp.data.cost import UNIT, CostModel
from llava_fsdp.data.encode import Sample
from llava_fsdp.data.vocabulary import IGNORE


def sample(length: int, labels: int, tiles: list[int]) -> Sample:
    """`tiles` of each picture, four rows of features a tile, its last position the end of a line."""
    wanted = np.full(length, IGNORE)
    wanted[length - labels :] = 5
    rows = tuple(np.append(np.arange(4 * count), -1) for count in tiles)
    return Sample(np.ones(length, dtype=np.int64), wanted, tuple("ab"[: len(tiles)]), rows, 0, 0)


def test_every_part_counts() -> None:
    cost = CostModel(position=2 * UNIT, pair=3 * UNIT, label=5 * UNIT, tile=7 * UNIT)
    assert cost(sample(10, 0, []), 4) == 20 + 300
    assert cost(sample(10, 4, []), 4) == 20 + 300 + 20
    assert cost(sample(10, 0, [1, 3]), 4) == 20 + 300 + 28


def test_without_a_model_positions_count() -> None:
    assert CostModel()(sample(10, 3, [1]), 4) == 10


def test_nothing_is_free() -> None:
    assert CostModel(position=0.001)(sample(1, 0, []), 4) == 1
