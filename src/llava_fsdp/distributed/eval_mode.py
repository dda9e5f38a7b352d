"""A model used in the middle of its training, and nothing of the training different behind it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Without dropout and gradients, and with random numbers of its own; behind it the model trains again."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            model.train()
            forget_passes(model)


def forget_passes(model: nn.Module) -> None:
    """Free gathered weights, and FSDP's list of which units ran.

    FSDP notes every unit that runs forward until a backward pass is over, without gradients too, and its next backward
    pass would gather what ran before it once more.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            if (group := state._fsdp_param_group) is not None:
                group._post_forward_indices.clear()
