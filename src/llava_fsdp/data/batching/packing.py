"""The one place where a step's samples are cut into ranks, micro-batches and rows."""

import heapq
import itertools
import math

import numpy as np

Cuts = list[list[list[int]]]
"""[rank][micro_batch] -> numbers of samples"""

GOOD_ENOUGH = 1e-4
"""Excess of the heaviest over the mean at which refining stops."""
LIGHTEST = 8
"""How many of the lightest the heaviest trades with; with all of them a step of 4096 samples would take a second."""


def cut_step(lengths: list[int], world_size: int, micro_batch_size: int) -> Cuts:
    """Deal a step's samples to ranks and micro-batches of at most `micro_batch_size` padded rows.

    Samples are sorted by length and cut into `world_size * num_micro_batches` even stretches, so that a row is padded
    little, and the ranks run rows of nearly the same length at the same time. Every rank gets the same number of
    micro-batches; with fewer samples than stretches some are empty.

    Args:
        lengths: positions of each sample of the step.

    Returns:
        [rank][micro_batch] -> indices into `lengths`.
    """
    count = num_micro_batches(len(lengths), world_size, micro_batch_size)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    stretches = world_size * count
    bounds = [len(order) * s // stretches for s in range(stretches + 1)]
    pieces = [order[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [[pieces[micro * world_size + rank] for micro in range(count)] for rank in range(world_size)]


def num_micro_batches(samples: int, world_size: int, micro_batch_size: int) -> int:
    """Micro-batches that every rank runs in a step of that many samples, padded."""
    return max(1, math.ceil(samples / (world_size * micro_batch_size)))


def pack_step(lengths: list[int], costs: list[int], world_size: int, most_tokens: int) -> Cuts:
    """Deal a step's samples to ranks and micro-batches of at most `most_tokens` positions, each with equal work.

    Samples go to the least loaded micro-batch, the costliest first (longest processing time), then pairs are swapped
    between the heaviest and the lightest ones. Micro-batches of like cost run at the same time, because FSDP makes the
    ranks wait for each other in every layer; what ranks differ in over the whole step is swapped away last. Every rank
    gets the same number of micro-batches, the smallest for which room is found; none is empty where there are samples
    for all. The result depends on the arguments alone.

    Args:
        lengths: positions of each sample of the step, none above `most_tokens`.
        costs: of each sample, whole numbers of any unit, at least 1.

    Returns:
        [rank][micro_batch] -> indices into `lengths`.
    """
    assert max(lengths, default=0) <= most_tokens, "a sample is never split"
    tokens, work = np.array(lengths, dtype=np.int64), np.array(costs, dtype=np.float64)
    count = max(1, math.ceil(sum(lengths) / (world_size * most_tokens)))
    while (place := place_all(tokens, work, world_size * count, most_tokens)) is None:
        count += 1
    bins = world_size * count
    balance(place, work, tokens, np.arange(bins), most_tokens)
    place = seats(np.bincount(place, work, bins), world_size)[place]
    balance(place, work, tokens, np.arange(bins) // count, most_tokens)
    rows = [np.flatnonzero(place == number).tolist() for number in range(bins)]
    return [rows[rank * count : (rank + 1) * count] for rank in range(world_size)]


def place_all(tokens: np.ndarray, work: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """int64 [samples]: a bin for each, by cost, or by length where that leaves no room; None where neither fits."""
    place = place_by_cost(tokens, work, bins, most_tokens)
    if place is None:
        place = place_by_length(tokens, bins, most_tokens)
    return None if place is None else fill_empty(place, work, bins)


def place_by_cost(tokens: np.ndarray, work: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """The costliest first, into the bin of least cost that has room."""
    place, room = np.zeros(len(tokens), dtype=np.int64), [most_tokens] * bins
    heap = [(0.0, number) for number in range(bins)]
    for sample in np.argsort(-work, kind="stable").tolist():
        full = []
        while heap and room[heap[0][1]] < tokens[sample]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        place[sample] = number
        room[number] -= int(tokens[sample])
        for entry in (*full, (load + float(work[sample]), number)):
            heapq.heappush(heap, entry)
    return place


def place_by_length(tokens: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """The longest first, into the bin that it fills best: finds room where bins must be nearly full."""
    place, room = np.zeros(len(tokens), dtype=np.int64), np.full(bins, most_tokens, dtype=np.int64)
    for sample in np.argsort(-tokens, kind="stable").tolist():
        left = np.where(room >= tokens[sample], room - tokens[sample], most_tokens + 1)
        best = int(left.argmin())
        if left[best] > most_tokens:
            return None
        place[sample] = best
        room[best] -= tokens[sample]
    return place


def fill_empty(place: np.ndarray, work: np.ndarray, bins: int) -> np.ndarray:
    """Give every empty bin a sample of the fullest, while any has two."""
    held = np.bincount(place, minlength=bins)
    for empty in np.flatnonzero(held == 0):
        fullest = int(held.argmax())
        if held[fullest] < 2:
            break
        own = np.flatnonzero(place == fullest)
        place[own[work[own].argmin()]] = empty
        held[fullest] -= 1
        held[empty] += 1
    return place


def seats(load: np.ndarray, world_size: int) -> np.ndarray:
    """Where each bin runs, int64 [bins]: rank * micro-batches + micro-batch.

    The `world_size` heaviest run first, one on each rank, and so on; within them the heaviest goes to the rank that has
    least so far.
    """
    count = len(load) // world_size
    seat, total = np.zeros(len(load), dtype=np.int64), np.zeros(world_size)
    for micro, bins in enumerate(np.argsort(-load, kind="stable").reshape(count, world_size)):
        for number, rank in zip(bins, np.argsort(total, kind="stable"), strict=True):
            seat[number] = rank * count + micro
            total[rank] += load[number]
    return seat


def balance(place: np.ndarray, work: np.ndarray, tokens: np.ndarray, owner: np.ndarray, most_tokens: int) -> None:
    """Swap or move samples from the heaviest owner of bins to light ones, until nothing is gained.

    Args:
        place: int64 [samples], the bin of each; changed.
        work: float64 [samples].
        tokens: int64 [samples].
        owner: int64 [bins], whose work is to be equal: each bin its own, or a rank's.
    """
    bins, owners = len(owner), int(owner.max()) + 1
    for _ in range(20 * owners):
        load = np.bincount(owner[place], work, owners)
        heaviest = int(load.argmax())
        if load[heaviest] <= (1 + GOOD_ENOUGH) * load.mean():
            return
        room = most_tokens - np.bincount(place, tokens, bins).astype(np.int64)
        held = np.bincount(place, minlength=bins)
        is_light = np.isin(owner, np.argsort(load, kind="stable")[:LIGHTEST]) & (owner != heaviest)
        given = np.flatnonzero(owner[place] == heaviest)
        taken = np.flatnonzero(is_light[place])
        there = np.concatenate([place[taken], np.flatnonzero(is_light)])  # a sample's bin, or a bin to move into
        got = np.concatenate([work[taken], np.zeros(is_light.sum())])
        shift = tokens[given, None] - np.concatenate([tokens[taken], np.zeros(is_light.sum(), dtype=np.int64)])
        less = work[given, None] - got
        gain = less * ((load[heaviest] - load[owner[there]]) - less)  # half of what the sum of squares loses
        gain[(shift > room[there]) | (-shift > room[place[given], None])] = 0
        gain[:, len(taken) :][held[place[given]] < 2] = 0
        best, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[best, other] <= 0:
            return
        home = place[given[best]]
        place[given[best]] = there[other]
        if other < len(taken):
            place[taken[other]] = home
