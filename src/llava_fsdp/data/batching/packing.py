"""Assign the samples of a training step to ranks and micro-batches.

A bin is a micro-batch of one rank. `tokens` and `work` are the numbers of tokens and the costs of the samples, `bins`
is the number of bins, and `most_tokens` the most tokens of a bin. `place` is the bin of each sample, int64 [samples].
"""

import heapq
import itertools
import math
from collections.abc import Callable

import numpy as np

Assignment = list[list[list[int]]]
"""Samples as [rank][micro-batch][sample]."""

Rounding = Callable[[int], int]
"""Function from the number of micro-batches per rank that is needed to the number that is used, such as the next
multiple of 4."""
GOOD_ENOUGH = 1e-4
"""Balancing stops once the costliest micro-batch or rank is above the mean cost by no more than this fraction."""
LIGHTEST = 8
"""Number of the cheapest bins or ranks to which balancing moves samples. With all, a step of 4096 samples would take a
second."""


def split_step(lengths: list[int], world_size: int, micro_batch_size: int, rounded: Rounding = int) -> Assignment:
    """Assign a step's samples to ranks and padded micro-batches of at most `micro_batch_size` samples, as
    [rank][micro-batch] lists of indices into `lengths`, the tokens of each sample.

    Samples are sorted by length, so that there is little padding, and all ranks process samples of similar length at
    the same time. Every rank gets the same number of micro-batches, which `rounded` raises to a number that is allowed;
    with few samples some micro-batches are empty.
    """
    count = rounded(num_micro_batches(len(lengths), world_size, micro_batch_size))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    total = world_size * count
    bounds = [len(order) * s // total for s in range(total + 1)]
    pieces = [order[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [[pieces[micro * world_size + rank] for micro in range(count)] for rank in range(world_size)]


def num_micro_batches(samples: int, world_size: int, micro_batch_size: int) -> int:
    """Return how many padded micro-batches each rank processes for `samples` samples of all ranks."""
    return max(1, math.ceil(samples / (world_size * micro_batch_size)))


def pack_step(
    lengths: list[int], costs: list[int], world_size: int, most_tokens: int, rounded: Rounding = int
) -> Assignment:
    """Assign the samples of a training step to ranks and packed micro-batches, which have at most `most_tokens` tokens
    and nearly equal cost; return indices into `lengths`, the tokens of each sample, as [rank][micro-batch][sample].

    Each sample, the costliest first, goes to the micro-batch of least cost (longest-processing-time rule). Then samples
    are swapped between the costliest micro-batch and the cheapest ones, and at last between ranks, to equalize the
    total cost of the ranks. Micro-batches of similar cost run at the same time on the ranks, because with FSDP the
    ranks wait for each other in every layer. Every rank gets the same number of micro-batches, the smallest into which
    all samples fit. None is empty if there are enough samples. The result depends on the arguments alone.

    Args:
        lengths: at most `most_tokens` each.
        costs: of each sample, whole numbers from 1 in any unit.
        rounded: raises the number of micro-batches of a rank to one that is allowed, such as a multiple of 4.
    """
    assert max(lengths, default=0) <= most_tokens, "a sample is never split"
    tokens, work = np.array(lengths, dtype=np.int64), np.array(costs, dtype=np.float64)
    count = rounded(max(1, math.ceil(sum(lengths) / (world_size * most_tokens))))
    while (place := place_all(tokens, work, world_size * count, most_tokens)) is None:
        count = rounded(count + 1)
    bins = world_size * count
    balance(place, work, tokens, np.arange(bins), most_tokens)
    place = seats_of_bins(np.bincount(place, work, bins), world_size)[place]  # now a bin is rank * count + micro-batch
    balance(place, work, tokens, np.arange(bins) // count, most_tokens)
    rows = [np.flatnonzero(place == number).tolist() for number in range(bins)]
    return [rows[rank * count : (rank + 1) * count] for rank in range(world_size)]


def place_all(tokens: np.ndarray, work: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """Distribute samples over bins with `place_by_cost` or, if that finds no room for a sample, with `place_by_length`.
    Then move a sample from a bin with several to each empty bin.

    Args:
        tokens, work: number of tokens (int64) and cost (float64) of each sample, [samples].
        most_tokens: the most tokens that fit into one of the `bins` bins.

    Returns:
        The bin of each sample, int64 [samples]; None if neither way finds room for all samples.
    """
    place = place_by_cost(tokens, work, bins, most_tokens)
    if place is None:
        place = place_by_length(tokens, bins, most_tokens)
    return None if place is None else fill_empty(place, work, bins)


def place_by_cost(tokens: np.ndarray, work: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """Put each sample, the costliest first (`work`), into the bin of least cost that has room for it. Return the bin of
    each sample, int64 [samples]; None if a sample fits into no bin."""
    place, room = np.zeros(len(tokens), dtype=np.int64), [most_tokens] * bins
    heap = [(0.0, number) for number in range(bins)]
    for sample in np.argsort(-work, kind="stable").tolist():
        full_bins = []
        while heap and room[heap[0][1]] < tokens[sample]:
            full_bins.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        place[sample] = number
        room[number] -= int(tokens[sample])
        for entry in (*full_bins, (load + float(work[sample]), number)):
            heapq.heappush(heap, entry)
    return place


def place_by_length(tokens: np.ndarray, bins: int, most_tokens: int) -> np.ndarray | None:
    """Put each sample, the longest first, into the fullest bin that has room for it. Return the bin of each sample,
    int64 [samples]; None if a sample fits into no bin."""
    place, room = np.zeros(len(tokens), dtype=np.int64), np.full(bins, most_tokens, dtype=np.int64)
    for sample in np.argsort(-tokens, kind="stable").tolist():
        room_left = np.where(room >= tokens[sample], room - tokens[sample], most_tokens + 1)
        best = int(room_left.argmin())
        if room_left[best] > most_tokens:
            return None
        place[sample] = best
        room[best] -= tokens[sample]
    return place


def fill_empty(place: np.ndarray, work: np.ndarray, bins: int) -> np.ndarray:
    """Move a sample to each empty bin: the cheapest one (`work`) of the bin with the most samples, if that has at least
    two. `place`, the bin of each sample, is changed in place and returned."""
    num_samples = np.bincount(place, minlength=bins)
    for empty in np.flatnonzero(num_samples == 0):
        fullest = int(num_samples.argmax())
        if num_samples[fullest] < 2:
            break
        inside = np.flatnonzero(place == fullest)
        place[inside[work[inside].argmin()]] = empty
        num_samples[fullest] -= 1
        num_samples[empty] += 1
    return place


def seats_of_bins(load: np.ndarray, world_size: int) -> np.ndarray:
    """Assign bins with the costs `load` to ranks as their micro-batches. Return for each bin rank * (micro-batches per
    rank) + micro-batch, int64 [bins].

    The `world_size` costliest bins become the first micro-batch of the ranks, the next ones the second, and so on.
    Among the bins of one such group, the costliest goes to the rank with the least total cost so far.
    """
    count = len(load) // world_size
    seat, total = np.zeros(len(load), dtype=np.int64), np.zeros(world_size)
    for micro, bins in enumerate(np.argsort(-load, kind="stable").reshape(count, world_size)):
        for number, rank in zip(bins, np.argsort(total, kind="stable"), strict=True):
            seat[number] = rank * count + micro
            total[rank] += load[number]
    return seat


def balance(place: np.ndarray, work: np.ndarray, tokens: np.ndarray, owner: np.ndarray, most_tokens: int) -> None:
    """Even out the cost of owners (bins or ranks): move samples from the costliest owner to cheap ones, or swap them,
    as long as that helps. `place`, the bin of each sample, is changed in place; `owner` is the owner of each bin.
    `work` and `tokens`: cost and number of tokens of each sample."""
    bins, owners = len(owner), int(owner.max()) + 1
    for _ in range(20 * owners):
        load = np.bincount(owner[place], work, owners)
        heaviest = int(load.argmax())
        if load[heaviest] <= (1 + GOOD_ENOUGH) * load.mean():
            return
        room = most_tokens - np.bincount(place, tokens, bins).astype(np.int64)
        num_samples = np.bincount(place, minlength=bins)
        is_light = np.isin(owner, np.argsort(load, kind="stable")[:LIGHTEST]) & (owner != heaviest)
        # matrices: a row for each sample to give away, a column for each sample to take for it, or bin to move into
        given_samples = np.flatnonzero(owner[place] == heaviest)
        taken_samples = np.flatnonzero(is_light[place])
        target_bins = np.concatenate([place[taken_samples], np.flatnonzero(is_light)])
        taken_work = np.concatenate([work[taken_samples], np.zeros(is_light.sum())])
        taken_tokens = np.concatenate([tokens[taken_samples], np.zeros(is_light.sum(), dtype=np.int64)])
        added_tokens = tokens[given_samples, None] - taken_tokens
        work_given = work[given_samples, None] - taken_work
        # half the decrease of the sum of squared loads
        gain = work_given * ((load[heaviest] - load[owner[target_bins]]) - work_given)
        has_no_room = (added_tokens > room[target_bins]) | (-added_tokens > room[place[given_samples], None])
        gain[has_no_room] = 0  # in one of the two bins
        gain[:, len(taken_samples) :][num_samples[place[given_samples]] < 2] = 0  # the move would leave a bin empty
        best, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[best, other] <= 0:
            return
        home = place[given_samples[best]]
        place[given_samples[best]] = target_bins[other]
        if other < len(taken_samples):
            place[taken_samples[other]] = home
