"""What a model's processor must know of a video to make its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Clip:
    """The frames of a video that are used."""

    size: tuple[int, int]
    """(width, height) in pixels of its frames, as a video player shows them."""
    frames: int
    """Number of frames in the file."""
    rate: float
    """Frames per second in the file."""
    numbers: tuple[int, ...]
    """Numbers, from 0, of the frames that are used. They ascend; a frame may be used twice."""
    read: Callable[[], np.ndarray] | None = field(default=None, compare=False, repr=False)
    """Function that reads these frames, uint8 [frames, height, width, 3]; None: they are all black."""


Shape = tuple[int, int] | Clip
"""What the tokens of an image or a video depend on. An image has its size."""
