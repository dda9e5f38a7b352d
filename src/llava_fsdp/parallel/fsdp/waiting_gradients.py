"""Add the gradients of a micro-batch to those that wait, unreduced, for the step's last one, with a compiled kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llava_fsdp.parallel.memory.offload import fsdp_parameters
from llava_fsdp.parallel.precision.precision import gradient_adder


def add_with_kernel(root: nn.Module, compiled: bool) -> None:
    """Make the backward pass add each gradient to FSDP's sum of earlier micro-batches with the kernel of
    `gradient_adder`, and free it. FSDP would add it after the unit's backward pass, with torch's slower kernel for two
    dtypes (`accumulate_unsharded_grad_if_needed` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py), and then finds
    nothing to add. The sums have the same bits. FSDP itself adds the gradients of layers that ranks divide, which are
    DTensors.

    Args:
        root: a module to which `fully_shard` was applied, and whose forward is called.
        compiled: whether torch.compile makes the kernel.
    """
    add = gradient_adder(compiled)
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    # without duplicates, because several modules may be in one FSDP unit
    left = dict.fromkeys(p for module in modules for p in fsdp_parameters(module) if p.sharded_param.requires_grad)
    if not left:
        return

    def hook_gathered(*_: Any) -> None:
        """Register a hook on each gathered parameter, which FSDP creates when it gathers a unit for the first time."""
        for parameter in [p for p in left if hasattr(p, "_unsharded_param")]:
            del left[parameter]
            if not isinstance(parameter._unsharded_param, DTensor):
                parameter._unsharded_param.register_post_accumulate_grad_hook(GradientIntoWaiting(parameter, add))

    root.register_forward_hook(hook_gathered)


class GradientIntoWaiting:
    """Gradient hook of a gathered parameter: adds its gradient to those of earlier micro-batches, and frees it."""

    def __init__(self, parameter: Any, add: Callable[[torch.Tensor, torch.Tensor], None]):
        """`parameter`: the object by which FSDP represents the parameter (`FSDPParam`)."""
        self.parameter = parameter
        self.add = add

    def __call__(self, gathered: torch.Tensor) -> None:
        """Add the gradient if FSDP keeps a sum in another dtype; otherwise, leave it to FSDP."""
        total = self.parameter.unsharded_accumulated_grad
        if total is not None and gathered.grad is not None:
            self.add(total, gathered.grad)
            gathered.grad = None
