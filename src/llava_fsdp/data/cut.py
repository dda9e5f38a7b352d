"""The one place where a step's samples are cut into ranks, micro-batches and rows."""

import itertools
import math


def cut_step(lengths: list[int], world_size: int, micro_batch_size: int) -> list[list[list[int]]]:
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
    """Micro-batches that every rank runs in a step of that many samples."""
    return max(1, math.ceil(samples / (world_size * micro_batch_size)))
