"""Random permutations whose values are computed one by one, so that a permutation takes no memory, however long it is.

The permutation is a Feistel network, as in block ciphers. It permutes 4^k integers, at most four times as many as
needed. A value that is too large goes through the network again until it is in range (cycle walking). All arithmetic is
that of unsigned 64-bit integers, which is the same on every machine and in every version of NumPy.
"""

import numpy as np

from llava_fsdp.runtime.seeds import derive

ROUNDS = 8
VERSION = 1
"""Version of the permutations, increased whenever the same arguments give another one, so that a run which began with
another version is not resumed."""
FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
"""Constants of the 64-bit finaliser of MurmurHash3."""
SHIFT = np.uint64(33)


def permuted(positions: np.ndarray, count: int, *purpose: str | int) -> np.ndarray:
    """Return the values of a random permutation of range(count) at the given positions, int64 [positions]. It depends
    on `count` and on `purpose`, words and numbers that seed it."""
    keys = np.array([derive(*purpose, count, number) for number in range(ROUNDS)], dtype=np.uint64)
    bits = half_bits(count)
    values = network(positions.astype(np.uint64), keys, bits)
    # the network permutes a larger range: a value outside of range(count) is mapped again until it is inside
    while len(outside := np.flatnonzero(values >= np.uint64(count))):
        values[outside] = network(values[outside], keys, bits)
    return values.astype(np.int64)


def half_bits(count: int) -> int:
    """Return the number of bits of each half of the integers that the network permutes. There are at least `count` and
    at most 4 * `count` such integers."""
    return max(1, ((count - 1).bit_length() + 1) // 2)


def network(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Apply a Feistel network to each value of 2 * `bits` bits, uint64 [values], with a key for each round, uint64
    [rounds]. It is a bijection: no two values have the same result."""
    half, low = np.uint64(bits), np.uint64((1 << bits) - 1)
    left, right = values >> half, values & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & low)
    return (left << half) | right


def mix(values: np.ndarray) -> np.ndarray:
    """Return a hash of each value, uint64 [values]: the 64-bit finaliser of MurmurHash3, with products modulo 2**64."""
    for factor in FACTORS:
        values = (values ^ (values >> SHIFT)) * factor
    return values ^ (values >> SHIFT)
