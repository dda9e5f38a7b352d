"""A step is a set of samples; cutting it loses none and gives every rank the same number of micro-batches."""

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from llava_fsdp.config import AspectRatio, PatchMerge
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import Assignment, balance, pack_step, place_by_cost, split_step
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.model.flops import Flops


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
@pytest.mark.parametrize("samples", [0, 1, 5, 16, 37])
def test_every_sample_once_and_ranks_in_step(samples: int, world_size: int, micro_batch_size: int) -> None:
    dice = random.Random(samples)
    lengths = [dice.randrange(5, 500) for _ in range(samples)]
    cut = split_step(lengths, world_size, micro_batch_size)
    assert sorted(i for rank in cut for micro in rank for i in micro) == list(range(samples))
    assert len(cut) == world_size and len({len(rank) for rank in cut}) == 1
    assert all(len(micro) <= micro_batch_size for rank in cut for micro in rank)
    sizes = [len(micro) for rank in cut for micro in rank]
    assert max(sizes) - min(sizes) <= 1


def test_a_bin_is_filled_to_its_last_token() -> None:
    """By cost too: it is not left to the packing by length, which does not look at costs."""
    place = place_by_cost(np.array([5, 3, 5, 3]), np.array([4.0, 3.0, 2.0, 1.0]), bins=2, most_tokens=8)
    assert place is not None and np.bincount(place, [5, 3, 5, 3]).tolist() == [8, 8]
    assert place_by_cost(np.array([5, 4]), np.array([2.0, 1.0]), bins=1, most_tokens=8) is None


def test_balancing_ranks_empties_no_micro_batch() -> None:
    """The first rank has more work, and could give away all that its second micro-batch has."""
    place = np.arange(4)
    balance(place, np.array([10.0, 1.0, 1.0, 1.0]), np.ones(4, dtype=np.int64), np.array([0, 0, 1, 1]), 100)
    assert sorted(place.tolist()) == [0, 1, 2, 3]


def test_rows_of_a_micro_batch_have_like_lengths() -> None:
    """Sorting pays: fewer padded positions than cutting in the order that samples came in."""
    dice = random.Random(0)
    lengths = [dice.randrange(10, 1000) for _ in range(128)]

    def padded(rows: list[list[int]]) -> int:
        return sum(len(r) * max(lengths[i] for i in r) for r in rows)

    ours = padded([micro for rank in split_step(lengths, 4, 8) for micro in rank])
    as_they_come = padded([list(range(i, i + 8)) for i in range(0, 128, 8)])
    assert ours < 1.1 * sum(lengths) < 0.75 * as_they_come


LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "light tail": lambda dice: 576 + dice.lognormvariate(5.3, 0.5),
    "medium": lambda dice: (576 if dice.random() < 0.94 else 0) + dice.lognormvariate(5.2, 0.9),
    "heavy tail": lambda dice: (576 if dice.random() < 0.9 else 0) + dice.lognormvariate(4.9, 1.4),
    "alike": lambda dice: 600,
    "two kinds": lambda dice: dice.choice([20, 2048]),
}


def drawn(kind: str, count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Lengths up to 2048, and costs with a quadratic part."""
    dice = random.Random(seed)
    lengths = [max(4, min(2048, int(LENGTHS[kind](dice)))) for _ in range(count)]
    return lengths, [40_000 * n + n * n for n in lengths]


def excess(cuts: Assignment, costs: list[int]) -> float:
    """The heaviest rank's cost over the mean."""
    totals = [sum(costs[i] for micro in rank for i in micro) for rank in cuts]
    return max(totals) / (sum(totals) / len(totals))


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("samples", "world_size"), [(0, 2), (1, 1), (3, 8), (37, 4), (128, 8), (256, 3)])
@pytest.mark.parametrize("room", [2048, 3000, 32768])
def test_packed_rows_hold_every_sample_once(kind: str, samples: int, world_size: int, room: int) -> None:
    lengths, costs = drawn(kind, samples)
    cut = pack_step(lengths, costs, world_size, room)
    rows = [micro for rank in cut for micro in rank]
    assert sorted(i for row in rows for i in row) == list(range(samples))
    assert all(sum(lengths[i] for i in row) <= room for row in rows)
    assert len(cut) == world_size and len({len(rank) for rank in cut}) == 1
    assert all(rows) or samples < len(rows), "empty while another row holds two"
    least = max(1, math.ceil(sum(lengths) / (world_size * room)))
    first_fit = math.ceil(first_fit_decreasing(lengths, room) / world_size)
    assert least <= len(cut[0]) <= max(1, first_fit)
    assert pack_step(lengths, costs, world_size, room) == cut


def first_fit_decreasing(lengths: list[int], room: int) -> int:
    """Rows that a plain heuristic needs."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((n for n, held in enumerate(rows) if held + length <= room), None)
        if place is None:
            rows.append(length)
        else:
            rows[place] += length
    return len(rows)


@pytest.mark.parametrize("kind", ["light tail", "medium", "heavy tail"])
@pytest.mark.parametrize(("samples", "world_size"), [(128, 2), (128, 8), (256, 16), (512, 64)])
@pytest.mark.parametrize("room", [4096, 32768])
def test_ranks_get_the_same_work(kind: str, samples: int, world_size: int, room: int) -> None:
    for seed in range(5):
        lengths, costs = drawn(kind, samples, seed)
        bound = 1.0003 if samples >= 16 * world_size else 1.01
        assert excess(pack_step(lengths, costs, world_size, room), costs) <= bound


def test_swapping_is_what_balances() -> None:
    """The costliest first alone leaves the heaviest rank about a percent above the mean."""
    found = []
    for seed in range(10):
        lengths, costs = drawn("heavy tail", 128, seed)
        totals = [0] * 8
        for cost in sorted(costs, reverse=True):
            totals[totals.index(min(totals))] += cost
        found.append((max(totals) / (sum(totals) / 8), excess(pack_step(lengths, costs, 8, 32768), costs)))
    assert sum(ours for _, ours in found) / 10 < 1.0002 < sum(plain for plain, _ in found) / 10


def test_ranks_run_rows_of_like_cost_at_the_same_time() -> None:
    """They wait for each other in every layer: a step lasts as long as the heaviest row of each micro-batch."""
    lengths, costs = drawn("medium", 128)
    cut = pack_step(lengths, costs, 8, 4096)
    assert len(cut[0]) > 2
    lasts = sum(max(sum(costs[i] for i in rank[n]) for rank in cut) for n in range(len(cut[0])))
    assert lasts <= 1.03 * sum(costs) / 8


def test_room_is_found_where_cost_and_length_pull_apart() -> None:
    """By cost the two long ones would be parted, and the rest would not fit."""
    lengths = [50, 50, 40, 30, 30]
    for costs in itertools.permutations([1, 5, 9, 20, 80]):
        cut = pack_step(lengths, list(costs), 2, 100)
        assert [len(rank) for rank in cut] == [1, 1], costs


@pytest.mark.parametrize("seed", range(10))
def test_rows_hold_no_more_where_short_samples_cost_most(seed: int) -> None:
    """As with images of many tiles: swapping to even out costs must look at the room on both sides."""
    dice = random.Random(seed)
    lengths = [dice.randrange(10, 400) for _ in range(60)]
    costs = [dice.randrange(1, 1000) for _ in lengths]
    cut = pack_step(lengths, costs, 3, 1000)
    rows = [micro for rank in cut for micro in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 1000 for row in rows)


ONEVISION_7B = Flops(token=39_151_730_688, pair=602_112, label=3_269_984_256, vision=1_998_660_178_944)
"""Of model=llava_onevision_7b with all parts trained (`count_flops`)."""
ONEVISION = ImageTokens(
    AspectRatio.anyres_max, 384, 729, tuple(grid_sizes([], 384, AspectRatio.anyres_max)), PatchMerge.spatial_unpad
)


def mixed_step(dice: random.Random, count: int) -> list[tuple[int, int, int]]:
    """Length, labels and tiles of samples with no image, one of any size up to 36 tiles, or several of one tile."""
    samples = []
    for _ in range(count):
        text = 4 + min(6000, int(dice.lognormvariate(5.3, 0.9)))
        images = dice.choice([0, 1, 1, 1, 1, 1, dice.randrange(2, 6)])
        sizes = [(dice.randrange(20, 2400), dice.randrange(20, 2400)) for _ in range(images)]
        tokens = sum(len(ONEVISION.of(size, images)) for size in sizes)
        samples.append((text + tokens, text // 2, sum(ONEVISION.count_tiles(size, images) for size in sizes)))
    return samples


def rank_flops(cuts: Assignment, samples: list[tuple[int, int, int]]) -> list[int]:
    """FLOPs of what each rank gets."""
    found = []
    for rank in cuts:
        own = [samples[i] for micro in rank for i in micro]
        lengths, labels, tiles = (list(column) for column in zip(*own, strict=True))
        found.append(round(ONEVISION_7B.of(sum(lengths), sum(n**2 for n in lengths), sum(labels), sum(tiles))))
    return found


@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_compute_as_much_with_images_of_many_tiles(world_size: int) -> None:
    """By the costs that samples are packed with, and by the FLOPs of what each rank gets. Not so by tokens alone: a
    tile of an image that is shrunk costs as much as any other, and has fewer tokens."""
    dice, by_tokens = random.Random(world_size), []
    for _ in range(4):
        samples = mixed_step(dice, 128)
        lengths, labels, tiles = (np.array(column) for column in zip(*samples, strict=True))
        costs = CostModel(*ONEVISION_7B)(lengths, labels, tiles).tolist()
        cuts = pack_step(lengths.tolist(), costs, world_size, 32768)
        flops = rank_flops(cuts, samples)
        assert excess(cuts, costs) <= 1.02 and max(flops) <= 1.02 * sum(flops) / world_size
        plain = rank_flops(pack_step(lengths.tolist(), lengths.tolist(), world_size, 32768), samples)
        by_tokens.append(max(plain) / (sum(plain) / world_size))
    assert max(by_tokens) > 1.02
