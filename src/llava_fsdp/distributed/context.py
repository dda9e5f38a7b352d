"""Collectives of context parallelism, where several ranks process each packed row together.

They are the differentiable collectives that torch.compile knows (torch.distributed._functional_collectives).
"""

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from llava_fsdp.runtime.errors import ConfigError

OLDEST_TORCH = (2, 13)
"""Context parallelism was not tried with older releases of torch."""


def check_torch() -> None:
    """Raise ConfigError if the installed torch is older than `OLDEST_TORCH`."""
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if found < OLDEST_TORCH:
        raise ConfigError(
            f"parallel.context above 1 was never tried with torch {torch.__version__}; use "
            f"{'.'.join(map(str, OLDEST_TORCH))} or newer, or set parallel.context=1"
        )


def exchange_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-to-all: it sends part i of a tensor [ranks, ...] to rank i of the group, and returns what all ranks
    have sent here, in rank order."""
    counts = [1] * group.size()
    return lambda parts: _functional_collectives.all_to_all_single_autograd(parts, counts, counts, group)


def gather_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-gather: [n, ...] -> [ranks * n, ...], the tensors of the group's ranks in order. Its backward pass
    sums the gradients of all ranks."""
    return lambda own: _functional_collectives.all_gather_single_autograd(own, 0, group)
