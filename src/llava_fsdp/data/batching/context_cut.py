"""Context parallelism: divide the tokens of each packed row among several ranks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ContextCut:
    """Which positions of a packed row one rank processes. The row is padded at its end and divided into chunks of equal
    length."""

    size: int
    """Number of ranks that share a row."""
    index: int
    """Number of this rank among them, from 0."""
    paired: bool
    """False: the row has `size` chunks, and rank i takes chunk i. True: it has `2 * size` chunks, and rank i takes
    chunks i and `2 * size - 1 - i`. Later queries attend to more keys; with this pairing all ranks have about the same
    work (Llama 3, arXiv 2407.21783 section 3.3.2)."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a row. The row's length must be a multiple of this number."""
        return self.size * (2 if self.paired else 1)

    def padding(self, tokens: int) -> int:
        """Return how many tokens of padding a row needs."""
        return -tokens % self.num_chunks

    def chunks(self, tokens: int) -> list[tuple[int, int]]:
        """Return this rank's chunks of a padded row of `tokens` positions, each as a range [begin, end), ascending.
        With `paired`, rank i has chunk i from the beginning and chunk i from the end, so that all ranks have about the
        same work in attention; else rank i has chunk i."""
        assert tokens % self.num_chunks == 0, "a row is padded to a multiple of the number of chunks"
        length = tokens // self.num_chunks
        numbers = (self.index, self.num_chunks - 1 - self.index) if self.paired else (self.index,)
        return [(number * length, (number + 1) * length) for number in numbers]

    def positions(self, tokens: int) -> np.ndarray:
        """Return the positions of a padded row that this rank processes, int64 [tokens / size], ascending."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.chunks(tokens)])
