"""Replace linear layers by layers that multiply in fp8.

Layers that train become torchao's float8 layers, whose weights FSDP gathers in fp8. Scaling is tensorwise and dynamic:
input, weight and output gradient of a layer are each scaled by their largest element and cast to fp8 (e4m3; gradients
e5m2), and the product is bf16. Master weights, their gradients and Adam's moments keep their dtypes.

If no block trains, as in stage 1, the layers become `FrozenFp8Linear`, whose scales are rowwise. torchao would also
compute the gradients of frozen weights.
"""

import importlib.util
from typing import Any, TypeGuard

import torch
from torch import nn

from llava_fsdp.runtime.errors import ConfigError

MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this number for torch's scaled fp8 matrix product."""
CURE = "choose precision=bf16"
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if this machine cannot multiply matrices in fp8. Whether an AMD GPU can is not checked."""
    if device.type != "cuda":
        raise ConfigError(f"precision.linear=fp8 needs a CUDA GPU, and this run is on {device.type}; {CURE}")
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and (major, minor) < (8, 9):
        raise ConfigError(
            f"precision.linear=fp8 needs a GPU of compute capability 8.9 (L40S, 4090, H100 or later), and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; {CURE}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"precision.linear=fp8 needs torchao: pip install llava-fsdp[fp8], or {CURE}")


def fp8_settings(sharded: bool) -> Any:
    """Return torchao's settings for float8 layers (`Float8LinearConfig`). torchao pads the number of tokens to a
    multiple of 16, so that any number is allowed. If FSDP shards the weights, it all-gathers them in fp8."""
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, pad_inner_dim=True)


def multiply_in_fp8(blocks: nn.ModuleList, sharded: bool) -> None:
    """Replace the linear layers of blocks on the meta device by fp8 layers, in place. Parameters keep their names.
    `sharded`: whether FSDP is used.

    Only layers whose sizes are multiples of 16 are replaced. Frozen layers are replaced only if all layers are frozen.
    Raises ConfigError if no layer can be replaced."""
    from torchao.float8 import convert_to_float8_training

    fitting = [module for module in blocks.modules() if has_fp8_sizes(module)]
    if fitting and not any(parameter.requires_grad for parameter in blocks.parameters()):
        for layer in fitting:
            layer.__class__ = FrozenFp8Linear  # its parameters stay: a new module would have to be put into its parent
        return
    if not weights_in_fp8(blocks):
        raise ConfigError(
            f"precision.linear=fp8: no linear layer of the language model has sizes that are multiples of {MULTIPLE}; "
            f"{CURE}"
        )
    convert_to_float8_training(
        blocks, module_filter_fn=lambda module, _: takes_fp8(module), config=fp8_settings(sharded)
    )


def weights_in_fp8(blocks: nn.ModuleList) -> set[torch.Tensor]:
    """Return the weights of blocks that will train in fp8 and that FSDP gathers in it; empty if all are frozen."""
    return {module.weight for module in blocks.modules() if isinstance(module, nn.Linear) and takes_fp8(module)}


def takes_fp8(module: nn.Module) -> bool:
    """Return whether a module is a trainable linear layer with sizes that fp8 products need."""
    return has_fp8_sizes(module) and module.weight.requires_grad


def has_fp8_sizes(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose sizes are multiples of 16, as fp8 products need. A class derived
    from `nn.Linear`, such as a router, may compute something else, and is not taken."""
    return type(module) is nn.Linear and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


class FrozenFp8Linear(nn.Linear):
    """A linear layer with a frozen weight that multiplies in fp8: its input by the weight, and in the backward pass the
    output gradient by the weight. Each row of a factor has a scale of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input.reshape(-1, self.in_features)
        output = FrozenProduct.apply(x, self.weight).reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class FrozenProduct(torch.autograd.Function):
    """Multiply `x` [tokens, in] by a frozen weight [out, in], transposed, in fp8. Backward keeps only the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return fp8_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return fp8_product(grad, weight.T), None


def fp8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left` [m, k] times the transpose of `right` [n, k] in the dtype of `left`. Each row has a scale."""
    (rows, row_scales), (columns, column_scales) = cast_rows(left), cast_rows(right)
    row_scales, column_scales = row_scales.view(-1, 1), column_scales.view(1, -1)
    return torch._scaled_mm(rows, columns.T, scale_a=row_scales, scale_b=column_scales, out_dtype=left.dtype)


def cast_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix [m, k] to fp8, contiguous. Also return a scale for each row, float32 [m]: row = values * scale."""
    scales = matrix.abs().amax(1).float().clamp(min=1e-12) / LARGEST
    return (matrix.float() / scales[:, None]).to(FP8).contiguous(), scales


def prepare_scales(model: nn.Module) -> None:
    """Compute the fp8 scales of all sharded weights in one all-reduce and not one per weight. Collective."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
