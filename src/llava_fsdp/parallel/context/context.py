"""Collectives of context parallelism, where several ranks process each packed row together.

They are the differentiable collectives that torch.compile knows (torch.distributed._functional_collectives).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives


def exchange_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-to-all on [ranks, ...]: part i goes to rank i of the group; the result has the parts received from
    rank 0, 1, ... It holds only the group's name, so the group can be freed."""
    counts, name = [1] * group.size(), group.group_name
    return lambda parts: _functional_collectives.all_to_all_single_autograd(parts, counts, counts, name)


def gather_in(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an all-gather: [n, ...] -> [ranks * n, ...], the tensors of the group's ranks in order. Its backward pass
    sums the gradients of all ranks. It holds only the group's name, so the group can be freed."""
    name = group.group_name
    return lambda tensor: _functional_collectives.all_gather_single_autograd(tensor, 0, name)
