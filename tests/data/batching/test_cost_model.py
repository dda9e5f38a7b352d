"""What a sample costs: text, pictures, labels and attention, in whole numbers."""

import numpy as np

from llava_fsdp.data.batching.cost_model import UNIT, CostModel


def costs(model: CostModel, *samples: tuple[int, int, int]) -> list[int]:
    """Of (length, labels, tiles)."""
    lengths, labels, tiles = (np.array(column, dtype=np.int32) for column in zip(*samples, strict=True))
    return model(lengths, labels, tiles).tolist()


def test_every_part_counts() -> None:
    model = CostModel(token=2 * UNIT, pair=3 * UNIT, label=5 * UNIT, tile=7 * UNIT)
    assert costs(model, (10, 0, 0), (10, 4, 0), (10, 0, 4)) == [20 + 300, 20 + 300 + 20, 20 + 300 + 28]


def test_without_a_model_positions_count() -> None:
    assert costs(CostModel(), (10, 3, 1)) == [10]


def test_nothing_is_free_and_nothing_overflows() -> None:
    assert costs(CostModel(token=0.001), (1, 0, 0)) == [1]
    assert costs(CostModel(pair=UNIT), (2_000_000, 0, 0)) == [2_000_000 + 4_000_000_000_000]
