"""What a sample costs to train on, so that ranks can be given equal work."""

from dataclasses import dataclass

import numpy as np

UNIT = 1e6


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a sample, forward and backward, as a polynomial of what it holds."""

    position: float = UNIT
    """Of a position, text or picture alike: the weights of the blocks."""
    pair: float = 0.0
    """Of a position attending to another one of its sample."""
    label: float = 0.0
    """Of a label: the output layer."""
    tile: float = 0.0
    """Of a picture's tile: tower and projector."""

    def __call__(self, lengths: np.ndarray, labels: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """int64 [samples] in units of 1e6 FLOPs, at least 1: whole numbers add up alike in any order.

        Args:
            lengths: positions of each sample; likewise its labels, and the tiles of its pictures.
        """
        long = lengths.astype(np.float64)
        flops = self.position * long + self.pair * long**2 + self.label * labels + self.tile * tiles
        return np.maximum(1, np.rint(flops / UNIT)).astype(np.int64)
