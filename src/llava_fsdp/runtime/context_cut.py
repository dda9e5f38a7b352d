"""Context parallelism: divide the tokens of each packed row among several ranks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ContextCut:
    """Says which positions of packed rows one rank processes, where `size` ranks process each row together.

    A row is divided into chunks of equal length, and is first padded at its end so that it can be.
    """

    size: int
    """Number of ranks that share a row."""
    index: int
    """Number of this rank among them, from 0."""
    head_tail: bool
    """False: a rank processes one chunk of `size`, in order. True: a rank processes two chunks of `2 * size`, one from
    each half of the row: `index` and `2 * size - 1 - index`. With causal attention over gathered keys, a later query
    attends to more keys; this pairing gives all ranks about the same work (Llama 3, arXiv 2407.21783 section 3.3.2)."""

    @property
    def multiple(self) -> int:
        """The length of a row must be a multiple of this number of tokens."""
        return self.size * (2 if self.head_tail else 1)

    def padding(self, tokens: int) -> int:
        """Return how many tokens of padding a row of `tokens` tokens needs."""
        return -tokens % self.multiple

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        """Return this rank's chunks of a row, each as the range [begin, end) of its positions, in ascending order.

        Args:
            tokens: length of the row with padding.
        """
        assert tokens % self.multiple == 0, "a row is padded to a multiple of the number of chunks"
        length = tokens // self.multiple
        numbers = (self.index, self.multiple - 1 - self.index) if self.head_tail else (self.index,)
        return [(number * length, (number + 1) * length) for number in numbers]

    def positions(self, tokens: int) -> np.ndarray:
        """Return the positions of a row that this rank processes, int64 [tokens / size], in ascending order.

        Args:
            tokens: length of the row with padding.
        """
        return np.concatenate([np.arange(begin, end) for begin, end in self.chunks(tokens)])
