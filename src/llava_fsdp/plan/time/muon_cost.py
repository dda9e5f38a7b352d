"""Predict what an update by Muon (`parallel/muon.py`) costs a rank: FLOPs, communication and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.parallel.muon import ITERATIONS, ROUND_ELEMENTS

COPIES = 7
"""Number of tensors of a round's size that exist at once: parts that are sent and received, whole matrices, results,
and those of one iteration."""


@dataclass(frozen=True)
class MuonCost:
    """What an update by Muon costs a rank."""

    flops: float = 0.0
    received: float = 0.0
    """Bytes that the rank receives from others."""
    calls: int = 0
    """Number of collectives."""
    buffers: int = 0
    """Bytes of temporary tensors on the device."""


def muon_cost(weights: Sequence[Weight], shards: int, ranks: int, width: int) -> MuonCost:
    """Predict what an update costs one of `ranks` ranks, which together hold the matrices, and share the work evenly.

    Args:
        weights: parameters of the model, as a rank has them; those that Muon does not update are ignored.
        shards: number of ranks over which FSDP shards.
        width: bytes of an element of the matrices that are sent.
    """
    flops, received, elements, largest, most_copies = 0.0, 0.0, 0, 0, 1.0
    for weight in weights:
        if not weight.muon:
            continue
        *experts, rows, columns = weight.whole_shape or weight.shape
        small, large = sorted((rows, columns))
        total, held = math.prod(weight.whole_shape or weight.shape), weight.local(shards, 0)
        elements += total
        # an iteration has products of n x m by m x n, m x m by m x m, and m x m by m x n matrices, m the smaller side
        flops += ITERATIONS * math.prod(experts) * (4 * small**2 * large + 2 * small**3) / ranks
        holds_whole = held == total or (bool(experts) and weight.dimension(shards) == 0)
        largest = max(largest, held if holds_whole else rows * columns)
        if holds_whole:  # results alone are sent, to the ranks that hold the same matrices
            copies = max(1.0, ranks * held / total)
            most_copies = max(most_copies, copies)
            received += held * (copies - 1) / copies
        else:
            received += total / ranks * (1 - held / total) + held * (ranks - 1) / ranks
            most_copies = max(most_copies, ranks * held / total)
    round_elements = min(max(largest, ROUND_ELEMENTS), max(largest, math.ceil(elements / ranks)))
    calls = 2 * math.ceil(elements / ranks / ROUND_ELEMENTS) if received else 0
    # results are sent to all ranks that hold copies of a part, and received from all owners
    return MuonCost(
        flops, width * received, calls, math.ceil((COPIES + 2 * (most_copies - 1)) * width * round_elements)
    )
