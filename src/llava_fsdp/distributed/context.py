"""Collectives of context parallelism, where several ranks process each packed row together.

They are the differentiable collectives that torch.compile knows (torch.distributed._functional_collectives).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives


def exchange_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-to-all: it sends part i of a tensor [ranks, ...] to rank i of the group, and returns what all ranks
    have sent here, in rank order."""
    counts = [1] * group.size()
    return lambda parts: _functional_collectives.all_to_all_single_autograd(parts, counts, counts, group)


def gather_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-gather: [n, ...] -> [ranks * n, ...], the tensors of the group's ranks in order. Its backward pass
    sums the gradients of all ranks."""
    names = "all_gather_single_autograd", "all_gather_tensor_autograd"  # the second before torch 2.13
    gather = next(getattr(_functional_collectives, name) for name in names if hasattr(_functional_collectives, name))
    return lambda own: gather(own, 0, group)
