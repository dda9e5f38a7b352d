"""Replace linear layers by layers that add a weight's gradient to a sum in fp32 within the product that makes it.

By default a product writes the gradient in bf16, and a second kernel adds it to the fp32 sum over the micro-batches.
For a 7B on an H200 that second kernel takes about 17 ms a micro-batch. Here the product reads and writes the sum itself
(cuBLAS: C = A B + C with an fp32 C). The gradient is not rounded to bf16, so that results have other bits.

This is for one rank. FSDP reduces gradients over ranks, and takes them from the parameters' own `grad`.
"""

from functools import cache
from typing import Any

import torch
from torch import nn

from llava_fsdp.runtime.errors import ConfigError

KEY = "precision.linear=fp32_sums"
CURE = "choose precision.linear=same"


def add_in_products(blocks: nn.ModuleList, sharded: bool) -> None:
    """Replace the trainable linear layers of blocks on the meta device, in place. Parameters keep their names. A class
    derived from `nn.Linear`, such as a router, may compute something else, and is not replaced.

    Raises:
        ConfigError: FSDP is used (`sharded`), or no layer can be replaced.
    """
    check_one_rank(sharded)
    layers = [module for module in blocks.modules() if type(module) is nn.Linear and module.weight.requires_grad]
    if not layers:
        raise ConfigError(f"{KEY}: no linear layer of the language model's blocks trains; {CURE}")
    add_product()  # torch.compile needs the operation before it traces a block
    for layer in layers:
        layer.__class__ = SummedLinear  # its parameters stay: a new module would have to be put into its parent


def check_one_rank(sharded: bool) -> None:
    """Raise ConfigError if FSDP is used (`sharded`)."""
    if sharded:
        raise ConfigError(f"{KEY} is for one rank without FSDP; {CURE}")


class SummedLinear(nn.Linear):
    """A linear layer whose backward pass adds the gradient of its weight to `gradient_sum`, and returns none for it."""

    gradient_sum: torch.Tensor
    """Sum of the weight's gradients over the micro-batches of a step, fp32 [out, in], which is the gradient of the
    master weight. `MasterWeights` sets it, and its `free_gradients` fills it with zeros after each step."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        return SummedProduct.apply(input, self.weight, self.bias, self.gradient_sum)


class SummedProduct(torch.autograd.Function):
    """Multiply `x` [..., in] by the transpose of `weight` [out, in], and add `bias` [out] if there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gradient_sum: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, gradient_sum)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        """Return the gradients of `x` and of `bias`. That of `weight` is added to `gradient_sum`."""
        x, weight, gradient_sum = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        torch.ops.llava_fsdp.add_product(gradient_sum, rows, x.reshape(-1, x.shape[-1]))
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


@cache
def add_product() -> Any:
    """Register the operation `llava_fsdp::add_product`, once a process, and return it. It is an operation of its own
    because torch.compile would copy the sum, which an `addmm` with `out` changes."""

    @torch.library.custom_op("llava_fsdp::add_product", mutates_args=("total",))
    def add(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Add the transpose of `grad` [tokens, out] times `x` [tokens, in] to `total`, fp32 [out, in], in place."""
        if total.device.type == "cuda":
            torch.ops.aten.addmm.dtype_out(total, grad.T, x, torch.float32, out=total)
        else:  # torch has the product on CUDA alone
            total.addmm_(grad.T.float(), x.float())

    @add.register_fake
    def _(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        return None

    return add
