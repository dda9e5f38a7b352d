"""Collectives of context parallelism, where several ranks process each packed row together.

They are the differentiable collectives that torch.compile knows (torch.distributed._functional_collectives).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd


def exchange_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-to-all: it sends part i of a tensor [ranks, ...] to rank i of the group, and returns what all ranks
    have sent here, in rank order."""
    counts = [1] * group.size()
    return lambda parts: all_to_all_single_autograd(parts, counts, counts, group)


def gather_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-gather: [n, ...] -> [ranks * n, ...], the tensors of the group's ranks in order. Its backward pass
    sums the gradients of all ranks."""
    return lambda own: all_gather_tensor_autograd(own, 0, group)
