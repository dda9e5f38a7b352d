"""The sizes of the micro-batches that a rank runs in a step, as the planner needs them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class MicroBatchSizes:
    """Sizes of one micro-batch on one rank."""

    rows: int
    length: int
    """Tokens in a row, padding included; if several ranks process the row together, of one rank's part."""
    samples: int
    tiles: int
    labels: int
    image_tokens: int
    context: int = 1
    """Number of ranks that process the row together. All other numbers but `samples` are those of one rank's part."""
    part: int = 0
    """Number of this rank among them. With gathered keys, ranks differ in the keys that their queries attend to."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def whole_rows(self) -> MicroBatchSizes:
        """The sizes of the rows that this rank processes together with others, and the labels of its part."""
        return replace(self, length=self.length * self.context, image_tokens=self.image_tokens * self.context)


class MicroBatches(tuple[MicroBatchSizes, ...]):
    """The micro-batches that a rank runs in a step. A search asks for their sums often, so each is computed once."""

    @cached_property
    def tokens(self) -> int:
        return sum(micro.tokens for micro in self)

    @cached_property
    def samples(self) -> int:
        return sum(micro.samples for micro in self)

    @cached_property
    def labels(self) -> Counter[int]:
        """Number of labels -> number of micro-batches with so many."""
        return Counter(micro.labels for micro in self)

    @cached_property
    def shapes(self) -> Counter[tuple[int, int]]:
        """(Rows, tokens of a row) -> number of micro-batches of this shape."""
        return Counter((micro.rows, micro.length) for micro in self)

    def own_tokens(self, tensor: int) -> int:
        """Return the tokens that the first of `tensor` ranks, which compute layers together, has between layers."""
        return sum(rows * math.ceil(length / tensor) * times for (rows, length), times in self.shapes.items())
