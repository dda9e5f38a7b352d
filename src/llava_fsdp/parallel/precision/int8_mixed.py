"""Replace linear layers by layers that multiply in int8, through torchao's INT8 mixed-precision training.

Before each of a layer's three products (output, gradient of the input, gradient of the weight) both factors are cast to
int8, with a scale for each row along the dimension that is summed, and the product is cast to bf16. Weights stay bf16
between the products, so that FSDP gathers them as for any other layer. Master weights, gradients and Adam's moments
keep their dtypes. Source: torchao/prototype/quantized_training/int8_mixed_precision.py.
"""

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton

from llava_fsdp.parallel.precision.fp8 import CURE, MULTIPLE, padded, takes_fp8
from llava_fsdp.runtime.errors import ConfigError

PADDED_TO = {"cuda": 512, "cpu": 1}
"""Device type -> number; the tokens of a layer's input are padded to a multiple of it. For each new number of tokens
torchao's kernel for GPUs times 27 variants of itself, which takes seconds, and packed rows have any number of
tokens."""


def check_int8_mixed(device: torch.device) -> None:
    """Raise ConfigError if this machine cannot train with int8 products: torchao or its prototype is missing, the GPU
    is older than compute capability 8.0, or torchao's kernel is for the other device. Where torchao finds Triton and a
    GPU it uses a kernel for GPUs alone, and elsewhere torch's `_int_mm`, which on a GPU refuses most lengths."""
    key = "precision.linear=int8_mixed"
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{key} needs torchao: pip install llava-fsdp[fp8], or {CURE}")
    try:
        from torchao.prototype.quantized_training import int8_mixed_precision  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{key} needs a prototype of torchao (prototype.quantized_training), which the installed version lacks: "
            f"{error}; pip install 'torchao>=0.18,<0.20', or {CURE}"
        ) from error
    if device.type == "cpu" and has_triton():
        raise ConfigError(
            f"{key}: torchao uses a kernel for GPUs where it finds Triton and a GPU, and this run is on the CPU; set "
            f"CUDA_VISIBLE_DEVICES= (empty), or {CURE}"
        )
    if device.type != "cuda":
        return
    if not has_triton():
        raise ConfigError(f"{key} on a GPU needs Triton: pip install triton, or {CURE}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"{key} needs a GPU of compute capability 8.0 (A100, RTX 30 or later), and "
            f"{torch.cuda.get_device_name(device)} is older; {CURE}"
        )


class Int8Products(torch.autograd.Function):
    """Multiply `x` (tokens, in) by the transpose of `weight` (out, in) in int8, forwards and backwards.

    The three products are those of torchao's own function, which torch.compile cannot trace: it would divide a block's
    graph at each linear layer, and cast to int8 in separate kernels. For the products `x` is padded with zeros to a
    multiple of `padded_to` tokens. Padded copies are not kept for the backward pass: layers that read the same input
    would each keep one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, padded_to: int) -> torch.Tensor:
        """Return `x` (tokens, in) times the transpose of `weight` (out, in). Both are cast to int8. `x` is padded with
        zeros to a multiple of `padded_to` tokens for the product."""
        ctx.save_for_backward(x, weight)
        ctx.padded_to = padded_to
        return int8_product(padded(x, padded_to), weight.T)[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of `x` and of `weight`, each a product in int8; None where none is needed."""
        x, weight = ctx.saved_tensors
        grad = padded(grad, ctx.padded_to)
        of_x = int8_product(grad, weight)[: len(x)] if ctx.needs_input_grad[0] else None
        return of_x, int8_product(grad.T, padded(x, ctx.padded_to)) if ctx.needs_input_grad[1] else None, None


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply (m, k) and (k, n), cast to int8 with a scale for each row of `left` and column of `right`."""
    from torchao.prototype.quantized_training.int8_mixed_precision import quantize_int8_rowwise, scaled_int8_mm

    rows, row_scale = quantize_int8_rowwise(left)
    columns, column_scale = quantize_int8_rowwise(right.T)
    # The second matrix column by column in memory: int8 products are fastest so.
    return scaled_int8_mm(rows.contiguous(), columns.contiguous().T, row_scale.contiguous(), column_scale.contiguous())


class Int8Linear(nn.Linear):
    """A linear layer that multiplies in int8, forwards and backwards. A single token, as in generation, is multiplied
    in the weight's dtype: padding it would cost more than the product."""

    padded_to: int
    """The input is padded with zeros to a multiple of this many tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer in int8, [..., in] -> [..., out]. A single token is multiplied in the weight's dtype, because
        padding it would cost more than the product."""
        tokens = input.numel() // self.in_features
        if tokens == 1:
            return super().forward(input)
        x = input.reshape(tokens, self.in_features)
        output = Int8Products.apply(x, self.weight, self.padded_to).reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def multiply_in_int8(blocks: nn.ModuleList, padded_to: int) -> None:
    """Replace the linear layers of blocks on the meta device by int8 layers, in place. Parameters keep their names.
    Layers whose weight is frozen, or has a size that is not a multiple of 16, are not replaced. Inputs are padded to a
    multiple of `padded_to` tokens (`PADDED_TO`), which changes no result. Raises ConfigError if none is replaced."""
    layers = [module for module in blocks.modules() if takes_fp8(module)]
    if not layers:
        raise ConfigError(
            f"precision.linear=int8_mixed: no linear layer of the language model has sizes that are multiples of "
            f"{MULTIPLE}; {CURE}"
        )
    for layer in layers:
        layer.__class__ = Int8Linear  # its parameters stay: a new module would have to be put into its parent
        assert isinstance(layer, Int8Linear)
        layer.padded_to = padded_to
