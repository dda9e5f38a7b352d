"""Permutations that are computed for single positions."""

import hashlib
import itertools

import numpy as np
import pytest

from llava_fsdp.data.keyed_permutation import half_bits, permuted
from llava_fsdp.runtime.seeds import derive

LARGE = 100_000_000


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 10, 16, 17, 127, 1000, 65_537, 300_000])
def test_every_value_has_one_position(count: int) -> None:
    values = permuted(np.arange(count), count, "whole", 7, 0)
    assert values.dtype == np.int64 and np.array_equal(np.sort(values), np.arange(count))


@pytest.mark.parametrize("count", [10, 1000, LARGE, 2**33 + 5])
def test_each_position_is_computed_alone(count: int) -> None:
    """As on several ranks, and as after a resume: which positions are asked for together changes nothing."""
    positions = np.arange(count - 10, count)
    whole = permuted(positions, count, "alone", 7, 0)
    for stride in (2, 3, 8):
        for first in range(stride):
            assert np.array_equal(permuted(positions[first::stride], count, "alone", 7, 0), whole[first::stride])
    assert permuted(positions[:0], count, "alone", 7, 0).tolist() == []


RECORDED = {
    1: [0],
    2: [1, 0],
    3: [2, 0, 1],
    7: [6, 0, 2, 1, 5, 3, 4],
    10: [6, 1, 4, 9, 3, 7, 5, 8, 2, 0],
    127: [105, 121, 35, 18, 58, 96, 95, 79, 123, 6],
    1000: [45, 363, 580, 614, 873, 350, 718, 108, 436, 421],
}


@pytest.mark.parametrize("count", RECORDED)
def test_values_stay_what_they_were(count: int) -> None:
    """Runs are resumed by them on other machines and in later versions. A change needs another VERSION."""
    assert permuted(np.arange(min(count, 10)), count, "recorded", 42, 0).tolist() == RECORDED[count]


def test_values_of_many_records_stay_what_they_were() -> None:
    values = permuted(np.arange(LARGE - 4096, LARGE), LARGE, "recorded", 42, 0)
    assert hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:16] == "545f91e1eb6c5961"


def by_hand(position: int, count: int, *purpose: str | int) -> int:
    """The same in Python's integers, which have no width."""
    bits = half_bits(count)
    low = (1 << bits) - 1
    while True:
        left, right = position >> bits, position & low
        for number in range(8):
            hashed = right ^ derive(*purpose, count, number)
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                hashed = (hashed ^ (hashed >> 33)) * factor % 2**64
            left, right = right, left ^ ((hashed ^ (hashed >> 33)) & low)
        position = (left << bits) | right
        if position < count:
            return position


@pytest.mark.parametrize("count", [5, 127, LARGE, 2**40 + 1])
def test_arithmetic_is_that_of_integers(count: int) -> None:
    positions = np.linspace(0, count - 1, 5, dtype=np.int64)
    assert permuted(positions, count, "by hand", 3).tolist() == [
        by_hand(n, count, "by hand", 3) for n in positions.tolist()
    ]


def test_a_domain_has_at_most_four_times_as_many_values() -> None:
    for count in [*range(1, 1100), LARGE, 4**13 + 1]:
        assert count <= 4 ** half_bits(count) <= 4 * count, count


def test_purpose_and_count_choose_the_permutation() -> None:
    positions = np.arange(16)
    chosen = [(17, "a", 1, 0), (17, "a", 1, 1), (17, "a", 2, 0), (17, "b", 1, 0), (18, "a", 1, 0)]
    made = {tuple(permuted(positions, count, *purpose).tolist()) for count, *purpose in chosen}
    assert len(made) == len(chosen)


def test_every_order_of_few_values_occurs() -> None:
    for count in (2, 3, 4):
        orders = {tuple(permuted(np.arange(count), count, "few", n).tolist()) for n in range(200)}
        assert orders == set(itertools.permutations(range(count)))


def test_values_are_spread_evenly() -> None:
    """Bins of the first values, and neighbours: both as of independent random numbers, within four deviations."""
    count, drawn = 1_000_003, 50_000
    values = permuted(np.arange(drawn), count, "spread", 0)
    expected = drawn / 50
    chi2 = float(((np.bincount(values * 50 // count, minlength=50) - expected) ** 2 / expected).sum())
    assert abs(chi2 - 49) < 4 * np.sqrt(2 * 49)
    for other in (values[1:], permuted(np.arange(drawn), count, "spread", 1)[:-1]):
        assert abs(np.corrcoef(values[:-1], other)[0, 1]) < 4 / np.sqrt(drawn)
