"""A step is a set of samples; cutting it loses none and gives every rank the same number of micro-batches."""

import random

import pytest

from llava_fsdp.data.cut import cut_step


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
@pytest.mark.parametrize("samples", [0, 1, 5, 16, 37])
def test_every_sample_once_and_ranks_in_step(samples: int, world_size: int, micro_batch_size: int) -> None:
    dice = random.Random(samples)
    lengths = [dice.randrange(5, 500) for _ in range(samples)]
    cut = cut_step(lengths, world_size, micro_batch_size)
    assert sorted(i for rank in cut for micro in rank for i in micro) == list(range(samples))
    assert len(cut) == world_size and len({len(rank) for rank in cut}) == 1
    assert all(len(micro) <= micro_batch_size for rank in cut for micro in rank)
    sizes = [len(micro) for rank in cut for micro in rank]
    assert max(sizes) - min(sizes) <= 1


def test_rows_of_a_micro_batch_have_like_lengths() -> None:
    """Sorting pays: fewer padded positions than cutting in the order that samples came in."""
    dice = random.Random(0)
    lengths = [dice.randrange(10, 1000) for _ in range(128)]

    def padded(rows: list[list[int]]) -> int:
        return sum(len(r) * max(lengths[i] for i in r) for r in rows)

    ours = padded([micro for rank in cut_step(lengths, 4, 8) for micro in rank])
    as_they_come = padded([list(range(i, i + 8)) for i in range(0, 128, 8)])
    assert ours < 1.1 * sum(lengths) < 0.75 * as_they_come
