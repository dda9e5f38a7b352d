"""Replace linear layers by layers that multiply in fp8.

With FSDP, and with bf16 master weights, layers that train become torchao's float8 layers, whose weights FSDP gathers in
fp8. Scaling is tensorwise and dynamic: input, weight and output gradient of a layer are each scaled by their largest
element and cast to fp8 (e4m3; gradients e5m2), and the product is bf16. Master weights, their gradients and Adam's
moments keep their dtypes.

torchao's layers cast their weight in each forward and each backward pass. On a single rank with separate master weights
the layers become `StoredFp8Linear` instead. They compute the same bits and keep their weight in fp8 between updates.

If no block trains, as in stage 1, the layers become `FrozenFp8Linear`, whose scales are rowwise. torchao would also
compute the gradients of frozen weights.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn

from llava_fsdp.runtime.errors import ConfigError

MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this number for torch's scaled fp8 matrix product."""
CURE = "choose precision=bf16"
FP8 = torch.float8_e4m3fn
FP8_GRADIENT = torch.float8_e5m2
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


def multiply_in_fp8(blocks: nn.ModuleList, sharded: bool, has_copies: bool) -> None:
    """Replace the linear layers of blocks on the meta device by fp8 layers, in place. Parameters keep their names.

    Only layers whose sizes are multiples of 16 are replaced. Frozen layers are replaced only if all layers are frozen.

    Args:
        sharded: whether FSDP is used.
        has_copies: whether the trainable parameters are copies of separate master weights (`MasterWeights`).

    Raises:
        ConfigError: no layer can be replaced.
    """
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
    if has_copies:
        for layer in filter(takes_fp8, fitting):
            layer.__class__ = StoredFp8Linear
            for name in STORED:
                layer.register_buffer(name, None, persistent=False)
        return
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


STORED = ("fp8", "fp8_transposed", "inverse_scale")
"""Names of the buffers of a `StoredFp8Linear`."""

StoreWeight = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Type of a function that casts a weight into the three buffers of a `StoredFp8Linear`, as `store_weight`."""


class StoredFp8Linear(nn.Linear):
    """A trainable linear layer that multiplies in fp8, and whose weight is cast once per update, by `store`.

    Output and gradients have the same bits as those of torchao's `Float8Linear`. Its bf16 weight has no memory after
    the first `store`: autograd needs the parameter only for its shape and its gradient. Two layouts in fp8 take the
    same two bytes per element. `store` writes them in place, so that compiled blocks need not be compiled again."""

    fp8: torch.Tensor | None
    """The weight [out, in] in fp8 (e4m3), divided by `inverse_scale`. None before the first `store`."""
    fp8_transposed: torch.Tensor | None
    """`fp8` transposed, [in, out], contiguous."""
    inverse_scale: torch.Tensor | None
    """float32 []: the weight is `fp8` times this."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer in fp8, [..., in] -> [..., out]. `store` must have been called before."""
        assert self.fp8 is not None, "the weight is not stored in fp8: call MasterWeights.refresh() after loading"
        x = input.reshape(-1, self.in_features)
        output = StoredProducts.apply(x, self.weight, self.fp8, self.fp8_transposed, self.inverse_scale)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @torch.no_grad()
    def store(self, master: torch.Tensor, store_weight: StoreWeight) -> None:
        """Round a master weight [out, in] to the dtype of the parameter, and store it in fp8 in place. The first call
        allocates the buffers, and replaces the parameter's memory by one NaN for all elements, so that a use of its
        values by mistake shows. `store_weight`: see `weight_storer`."""
        if self.fp8 is None:
            self.fp8 = self.weight.new_empty(self.out_features, self.in_features, dtype=FP8)
            self.fp8_transposed = self.weight.new_empty(self.in_features, self.out_features, dtype=FP8)
            self.inverse_scale = self.weight.new_empty((), dtype=torch.float32)
            self.weight.data = self.weight.new_tensor(math.nan).expand_as(self.weight)
        assert self.fp8_transposed is not None and self.inverse_scale is not None
        store_weight(master.to(self.weight.dtype), self.fp8, self.fp8_transposed, self.inverse_scale)


class StoredProducts(torch.autograd.Function):
    """The three products of a linear layer in fp8, with a weight that is stored in fp8. Scales, casts, layouts and
    padding are those of torchao/float8/float8_linear.py and float8_ops.py. Input and output gradient are cast here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        fp8: torch.Tensor,
        fp8_transposed: torch.Tensor,
        inverse_scale: torch.Tensor,
    ) -> torch.Tensor:
        """Return `x` [tokens, in] times the transpose of the weight. `weight` [out, in] receives the gradient, and its
        values are not read; the other arguments are the buffers of `StoredFp8Linear`."""
        ctx.save_for_backward(x, fp8_transposed, inverse_scale)
        values, scale = cast_whole(x, FP8)
        # fast accumulation for the output alone, which is torchao's default
        return torch._scaled_mm(
            values.contiguous(), fp8.t(), scale_a=scale, scale_b=inverse_scale, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
        """Return the gradients of `x`, if it needs one, and of `weight`."""
        x, fp8_transposed, inverse_scale = ctx.saved_tensors
        values, scale = cast_whole(grad, FP8_GRADIENT)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch._scaled_mm(
                values.contiguous(), fp8_transposed.t(), scale_a=scale, scale_b=inverse_scale, out_dtype=grad.dtype
            )
        x_values, x_scale = cast_whole(x, FP8)
        # This product adds over tokens, whose number must be a multiple of 16.
        columns, x_columns = (padded(v, MULTIPLE).t().contiguous() for v in (values, x_values))
        of_weight = torch._scaled_mm(columns, x_columns.t(), scale_a=scale, scale_b=x_scale, out_dtype=grad.dtype)
        return of_x, of_weight, None, None, None


def cast_whole(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a tensor to fp8 (`dtype`) with one scale, by its largest element, as torchao does. Also return the inverse
    of the scale, float32 []: tensor = values * inverse."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(tensor, dtype)
    return to_fp8_saturated(tensor.float() * scale, dtype), scale.reciprocal()


def padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return a matrix with zeros after its last row, so that the number of its rows is a multiple of `multiple`."""
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % multiple)) if multiple > 1 else rows


def store_weight(
    weight: torch.Tensor, fp8: torch.Tensor, fp8_transposed: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Cast a weight [out, in] into the buffers of a `StoredFp8Linear`, in place."""
    values, inverse = cast_whole(weight, FP8)
    fp8.copy_(values)
    fp8_transposed.copy_(values.t())
    inverse_scale.copy_(inverse)


def weight_storer(compiled: bool) -> StoreWeight:
    """Return `store_weight`, compiled by torch.compile if `compiled`, with the same results. Separate kernels of torch
    would read and write about 30 bytes per element, a compiled one about 6. A weight must already be rounded to bf16:
    the compiler drops a cast to bf16 that is followed by a cast to float32."""
    return torch.compile(store_weight, dynamic=False) if compiled else store_weight


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
