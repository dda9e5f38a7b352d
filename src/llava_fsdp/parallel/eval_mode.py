"""Evaluate a model during training without changing the course of the training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(model: nn.Module, device: torch.device, stages: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Context manager that turns off dropout and gradients, and at its end restores training mode and the states of the
    random generators of the CPU and of `device`. `stages`: this rank's stages, called in place of the model."""
    models = stages or [model]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for model in models:
                model.train()
                reshard_and_forget_order(
                    model
                )  # else the next backward pass would gather the weights of the evaluation again


def reshard_and_forget_order(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered, and clear FSDP's list of the units that ran a forward pass.

    FSDP lists every unit that runs forward, also without gradients, and clears the list only after a backward pass. If
    the list contained the units of an evaluation, the next backward pass would gather their weights a second time.
    """
    units = units_of(model)
    for unit in units:
        unit.reshard()
    forget_order(units)


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose weights FSDP gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def forget_order(units: Sequence[FSDPModule]) -> None:
    """Clear FSDP's list of the units that ran a forward pass."""
    for unit in units:
        state = unit._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if (group := state._fsdp_param_group) is not None:
            group._post_forward_indices.clear()
