"""Call torch's fused AdamW kernel, after a check of the memory layout of its tensors. No other module of
this project may call this kernel.

On a CPU the kernel checks neither strides nor shapes (torch 2.13). It treats a view with gaps, or a gradient whose
dimensions have another order in memory, as if it were contiguous. It writes past the end of a moment that is too small.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from llava_fsdp.parallel.local_shards import plain_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's two moments in an optimizer's state."""


def fused_adamw(
    tensors: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor], group: dict[str, Any]
) -> None:
    """Update weights and their two moments in place by AdamW (arXiv 1711.05101).

    Args:
        tensors: for each weight (weight, gradient, first moment, second moment); contiguous, of one shape and dtype.
        steps: for each weight the number of this update, counted from 1: float32 [] on the device of the tensors.
        group: hyperparameters (lr, betas, ...), as in `torch.optim.AdamW.param_groups`.
    """
    for of_weight in tensors:
        check_layout(of_weight)
    weights, gradients, first, second = (list(column) for column in zip(*tensors, strict=True))
    torch._fused_adamw_(
        weights, gradients, first, second, [], list(steps),
        lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, which updates this rank's shards as plain tensors. DTensors take the host much longer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert not any(g["amsgrad"] or g["maximize"] or g["differentiable"] for g in self.param_groups), "not supported"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient. `closure`, an argument of all torch optimizers, must be None."""
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            self.update_group(group, group["params"])

    def update_group(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        """Update those of a group's parameters that have a gradient."""
        updated = [p for p in parameters if p.grad is not None]
        if not updated:
            return
        states = [self.state[parameter] for parameter in updated]
        for parameter, state in zip(updated, states, strict=True):
            if not state:
                state.update(self.new_state(parameter))
        gradients = [p.grad for p in updated if p.grad is not None]
        columns = updated, gradients, *([state[name] for state in states] for name in MOMENTS)
        tensors = [[plain_shard(tensor) for tensor in column] for column in columns]
        steps = [state["step"] for state in states]
        # on a CPU torch makes a number into a tensor once for each step count; `alpha` chooses the function that adds
        # one tensor to all
        if steps[0].is_cpu:
            torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
        else:
            torch._foreach_add_(steps, 1.0)
        fused_adamw(list(zip(*tensors, strict=True)), steps, group)

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return zero moments, sharded like the parameter, and a step count of 0 on its device."""
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def check_layout(tensors: Sequence[torch.Tensor]) -> None:
    """Assert that all tensors are contiguous and have the shape and dtype of the first one."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.shape == shape and tensor.dtype == dtype, (
            f"the fused AdamW reads contiguous tensors of one shape and dtype, but got {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} in {tensor.dtype}, beside weights of {tuple(shape)} in {dtype}"
        )
