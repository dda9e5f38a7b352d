"""A random permutation that is computed for single positions, so that it takes no memory however many values it has.

It is a Feistel network, as in block ciphers, over a domain of 4^k values of which there are at most four times as many
as needed. A value outside of the permutation goes through the network again until it is inside (cycle walking). All of
it is arithmetic of unsigned 64-bit integers, which is the same on every machine and in every version of NumPy.
"""

import numpy as np

from llava_fsdp.runtime.seeds import derive

ROUNDS = 8
VERSION = 1
"""Version of the permutations. It is increased whenever the same arguments give another one, so that a run which began
with another version is not resumed."""
FACTORS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
"""Constants of the 64-bit finaliser of MurmurHash3."""
SHIFT = np.uint64(33)


def permuted(positions: np.ndarray, count: int, *purpose: str | int) -> np.ndarray:
    """Return the values at some positions of a random permutation of range(count), int64 [positions].

    Args:
        positions: integers in range(count), in any order.
        purpose: words and numbers on which, with `count`, the permutation depends, as for `derive`.
    """
    keys = np.array([derive(*purpose, count, number) for number in range(ROUNDS)], dtype=np.uint64)
    bits = half_bits(count)
    values = network(positions.astype(np.uint64), keys, bits)
    while len(outside := np.flatnonzero(values >= np.uint64(count))):
        values[outside] = network(values[outside], keys, bits)
    return values.astype(np.int64)


def half_bits(count: int) -> int:
    """Return half of the number of bits of the network's values: there are at least `count` and at most 4 * `count` of
    them."""
    return max(1, ((count - 1).bit_length() + 1) // 2)


def network(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Apply the Feistel network to values of 2 * `bits` bits, uint64 [values]. No two values have the same result."""
    half, low = np.uint64(bits), np.uint64((1 << bits) - 1)
    left, right = values >> half, values & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & low)
    return (left << half) | right


def mix(values: np.ndarray) -> np.ndarray:
    """Return a hash of each value, uint64 [values]: the 64-bit finaliser of MurmurHash3. Products wrap around."""
    for factor in FACTORS:
        values = (values ^ (values >> SHIFT)) * factor
    return values ^ (values >> SHIFT)
