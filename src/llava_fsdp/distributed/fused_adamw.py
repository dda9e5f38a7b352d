"""Call torch's fused AdamW kernel, after a check of the memory layout of its tensors. No other module may call this
kernel.

On a CPU the kernel checks neither strides nor shapes (torch 2.13). It treats a view with gaps, or a gradient whose
dimensions have another order in memory, as if it were contiguous. It writes past the end of a moment that is too small.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from llava_fsdp.distributed.local_shards import unwrapped

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's two moments in an optimizer's state."""


def fused_adamw(tensors: list[torch.Tensor], step: torch.Tensor, group: dict[str, Any]) -> None:
    """Update one weight and its two moments in place by AdamW (arXiv 1711.05101).

    Args:
        tensors: weight, gradient, first and second moment; contiguous, all of one shape and dtype.
        step: the number of this update, counted from 1: float32 [] on the device of the tensors.
        group: hyperparameters (lr, betas, ...), as in `torch.optim.AdamW.param_groups`.
    """
    check_layout(tensors)
    weights, gradient, first, second = tensors
    torch._fused_adamw_(
        [weights], [gradient], [first], [second], [], [step],
        lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


def build_fused_adamw(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """Create torch's own fused AdamW, with a hook that checks the layout of its tensors before every step. `groups` are
    parameter groups, as `torch.optim.AdamW` takes them."""
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
    optimizer.register_step_pre_hook(check_before_step)
    return optimizer


@torch.no_grad()
def check_before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook that torch calls before an optimizer's step: assert that the tensors of each parameter (weight, gradient,
    moments) are contiguous and have one shape and dtype. Takes a few microseconds per parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state.get(parameter, {})  # empty before the first step
                tensors = parameter, parameter.grad, *(state[name] for name in MOMENTS if name in state)
                # not `local`, which detaches and so takes longer
                check_layout([unwrapped(t.to_local() if isinstance(t, DTensor) else t) for t in tensors])


def check_layout(tensors: list[torch.Tensor]) -> None:
    """Assert that all tensors are contiguous and have the shape and dtype of the first one, as the fused AdamW kernel
    needs."""
    first = tensors[0]
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.shape == first.shape and tensor.dtype == first.dtype, (
            f"the fused AdamW reads contiguous tensors of one shape and dtype, but got {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} in {tensor.dtype}, beside weights of {tuple(first.shape)} in {first.dtype}"
        )
