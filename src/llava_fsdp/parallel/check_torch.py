"""Check that the installed torch is new enough for kinds of parallelism."""

import re

import torch

from llava_fsdp.runtime.errors import ConfigError

OLDEST_TORCH = (2, 13)
"""Oldest release of torch with which context, tensor, expert and pipeline parallelism are tested."""


def check_torch(key: str = "parallel.context") -> None:
    """Raise ConfigError if the installed torch is older than `OLDEST_TORCH`, which `key` needs."""
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if found < OLDEST_TORCH:
        raise ConfigError(
            f"{key} above 1 needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, and this is "
            f"{torch.__version__}; update torch, or set {key}=1"
        )
