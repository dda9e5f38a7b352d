"""Losses that stand out from those before them: said, and nothing more. Imports no torch."""

import math
import statistics
from collections import deque

WINDOW = 128
"""Steps that a loss is compared with."""
FEWEST = 16
"""Before so many steps nothing stands out."""


class Spikes:
    """The mean and the deviation of the last losses."""

    def __init__(self, sigma: float | None):
        self.sigma = sigma
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def stands_out(self, loss: float) -> tuple[float, float] | None:
        """Mean and deviation of the losses before, where this one lies `sigma` deviations or more above; else None.

        It then is one of them: a loss that stays high is the new normal after a while.
        """
        found = None
        if self.sigma is not None and math.isfinite(loss):
            if len(self.losses) >= FEWEST:
                mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
                found = (mean, deviation) if loss > mean + self.sigma * deviation else None
            self.losses.append(loss)
        return found
