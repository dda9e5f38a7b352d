"""Estimate the cost of training on a sample, so that every rank gets samples of about equal total cost."""

from dataclasses import dataclass

import numpy as np

UNIT = 1e6


@dataclass(frozen=True)
class CostModel:
    """Estimates the FLOPs of the forward and backward pass of a sample."""

    token: float = UNIT
    """FLOPs of a token in the linear layers of the transformer blocks."""
    pair: float = 0.0
    """FLOPs of one token attending to one token of the same sample."""
    label: float = 0.0
    """FLOPs of a label in the output layer."""
    tile: float = 0.0
    """FLOPs of an image tile in the vision tower and the projector."""

    def __call__(self, lengths: np.ndarray, labels: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Return the cost of each sample in units of 1e6 FLOPs, int64 [samples], at least 1, from its tokens, labels
        and image tiles.

        The costs are integers, so that sums of them do not depend on the order of addition.
        """
        long = lengths.astype(np.float64)
        flops = self.token * long + self.pair * long**2 + self.label * labels + self.tile * tiles
        return np.maximum(1, np.rint(flops / UNIT)).astype(np.int64)
