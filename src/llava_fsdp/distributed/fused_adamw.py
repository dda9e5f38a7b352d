"""Call torch's fused AdamW kernel, after a check of the memory layout of its tensors. No other module may call this
kernel.

On a CPU the kernel checks neither strides nor shapes (torch 2.13). It treats a view with gaps, or a gradient whose
dimensions have another order in memory, as if it were contiguous. It writes past the end of a moment that is too small.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llava_fsdp.distributed.local_shards import unwrapped

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's two moments in an optimizer's state."""


def fused_adamw(
    tensors: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor], group: dict[str, Any]
) -> None:
    """Update weights and their two moments in place by AdamW (arXiv 1711.05101).

    Args:
        tensors: for each weight (weight, gradient, first moment, second moment); contiguous, all of one shape and
            dtype.
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
    """torch's fused AdamW, which updates the shards of this rank as plain tensors. A DTensor costs the host ten times
    as long."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        Args:
            closure: must be None; it is an argument of all optimizers of torch.
        """
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            if updated:
                for parameter in updated:
                    if not self.state.get(parameter):
                        self.state[parameter] = self.new_state(parameter)
                states = [self.state[parameter] for parameter in updated]
                tensors = [
                    [plain_shard(tensor) for tensor in (p, p.grad, *(state[name] for name in MOMENTS))]
                    for p, state in zip(updated, states, strict=True)
                ]
                steps = [state["step"] for state in states]
                torch._foreach_add_(steps, 1)
                fused_adamw(tensors, steps, group)

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the initial AdamW state of a parameter: zero moments, which are sharded like the parameter, and a step
        count of 0 on the parameter's device."""
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def plain_shard(tensor: torch.Tensor) -> torch.Tensor:
    # not `local`, which detaches and so takes longer; nor does `unwrapped` search a plain tensor
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard if type(shard) is torch.Tensor else unwrapped(shard)


def check_layout(tensors: Sequence[torch.Tensor]) -> None:
    """Assert that all tensors are contiguous and have the shape and dtype of the first one, as the fused AdamW kernel
    needs."""
    first = tensors[0]
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.shape == first.shape and tensor.dtype == first.dtype, (
            f"the fused AdamW reads contiguous tensors of one shape and dtype, but got {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} in {tensor.dtype}, beside weights of {tuple(first.shape)} in {first.dtype}"
        )
