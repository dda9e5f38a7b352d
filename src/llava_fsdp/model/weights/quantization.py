"""Frozen linear layers whose weights are stored in 4 or 8 bits by bitsandbytes, and dequantized for each matrix
product.

The bits of a quantized weight are stored in an ordinary parameter of the compute dtype, which FSDP2 shards, gathers and
frees like every frozen weight. A parameter of another dtype would be cast by FSDP2's mixed precision before an
all-gather, which would destroy the bits. The scales are buffers, which every rank holds whole.

The weight is dequantized and multiplied in the compute dtype, also with 8 bits, so that the result at a token does not
depend on other tokens. bitsandbytes' `LLM.int8()` would also quantize the inputs, except columns in which any token of
the micro-batch has a large value. Here the inputs are never quantized, as in bitsandbytes' training on a CPU
(`MatMul8bitFp`).

peft's `prepare_model_for_kbit_training` is not needed: `Llava.freeze` freezes the parameters, norms compute in
`precision.norm_dtype`, lm_head stays in the compute dtype, and activation checkpointing is non-reentrant, so that no
input needs to require a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from llava_fsdp.config import QuantizeConfig, Quantizer
from llava_fsdp.runtime.errors import ConfigError, ModelError

BITS = {Quantizer.nf4: 4, Quantizer.fp4: 4, Quantizer.int8: 8}
"""Number of bits in which a weight is stored."""
BLOCK = 64
"""Number of 4-bit weights that share a scale (QLoRA, arXiv 2305.14314, section 3)."""
NESTED_BLOCK = 256
"""Number of scales that share a second scale, if scales are quantized too (`model.quantize.double`)."""
CODES = 256
"""Number of different values of a scale that is quantized to 8 bits."""
OLDEST = (6, 0)
"""Minimum CUDA compute capability for bitsandbytes' 4-bit kernels (its installation guide)."""


@dataclass(frozen=True)
class Packing:
    """The format in which the quantized weight of a linear layer is stored, and the weight's shape."""

    quantizer: Quantizer
    double: bool
    """Whether the scales are quantized too."""
    out_features: int
    in_features: int

    @property
    def numel(self) -> int:
        """Number of elements of a quantized weight, before quantization."""
        return self.out_features * self.in_features

    @property
    def statistics(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each buffer (such as scales) that dequantizes a weight, by the buffer's name."""
        if self.quantizer is Quantizer.int8:
            return {"scales": ((self.out_features,), torch.float32)}
        blocks = math.ceil(self.numel / BLOCK)
        if not self.double:
            return {"absmax": ((blocks,), torch.float32)}
        return {
            "absmax": ((blocks,), torch.uint8),
            "nested_absmax": ((math.ceil(blocks / NESTED_BLOCK),), torch.float32),
            "nested_code": ((CODES,), torch.float32),
            "offset": ((), torch.float32),
        }


class QuantizedLinear(nn.Module):
    """Linear layer with a quantized weight: a tensor [elements, 1] of the compute dtype, which holds the bits, and
    buffers with the scales and offsets."""

    def __init__(self, linear: nn.Linear, cfg: QuantizeConfig, dtype: torch.dtype):
        """Create the layer that replaces a meta-device linear layer; its bias is kept, its weight is not quantized yet.
        `dtype` is the compute dtype. Raises ValueError if the bits of the weight do not fill whole elements of it."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing = Packing(cfg.mode, cfg.double, linear.out_features, linear.in_features)
        self.per_element = 8 * dtype.itemsize // BITS[cfg.mode]
        # with an odd number of inputs, two rows would share a byte of 4-bit values, which some kernels do not read
        if self.packing.numel % self.per_element or self.in_features % 2:
            raise ValueError(f"{self.out_features} x {self.in_features} weights do not fill whole elements of {dtype}")
        packed = torch.empty((self.packing.numel // self.per_element, 1), dtype=dtype, device=linear.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        # not persistent: `pack` computes them from the files of the model, so that no checkpoint needs them
        for name, (shape, kind) in self.packing.statistics.items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=linear.weight.device), persistent=False)
        self.statistics_bytes = sum(tensor.nbytes for tensor in self.statistics)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply a linear layer whose weight is quantized: [..., in_features] -> [..., out_features]."""
        return UnpackedProduct.apply(x, self.weight, self.bias, self.packing, self.statistics)

    @property
    def statistics(self) -> list[torch.Tensor]:
        """The buffers with which the weight is dequantized, in the order of `Packing.statistics`."""
        return [getattr(self, name) for name in self.packing.statistics]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight before quantization, (out_features, in_features)."""
        return self.out_features, self.in_features

    @torch.no_grad()
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantize a weight on the device of this layer's buffers, and set the buffers. Return its bits with the shape
        and dtype of this layer's parameter.

        The weight is [out_features, in_features], on any device and in any dtype; it is first rounded to the compute
        dtype.
        """
        assert tuple(weight.shape) == self.shape, f"{tuple(weight.shape)} is not {self.shape}"
        dtype = self.weight.dtype
        weight = weight.to(self.statistics[0].device, dtype).contiguous()  # kernels read it without strides
        packed, statistics = quantize(self.packing, weight, dtype)
        for stored, computed in zip(self.statistics, statistics, strict=True):
            stored.copy_(computed)
        return packed

    @torch.no_grad()
    def draw_scales(self, scale: float) -> None:
        """Fill the buffers so that any bits are dequantized to values between -`scale` and `scale`. Used with random
        bits, when only shapes and memory matter."""
        for name, tensor in zip(self.packing.statistics, self.statistics, strict=True):
            is_scale = name in ("scales", "offset") or (name == "absmax" and not self.packing.double)
            tensor.fill_(scale if is_scale else 0)


class UnpackedProduct(torch.autograd.Function):
    """Autograd function of x W^T + b for a quantized weight W. The backward pass dequantizes W again, so that only the
    bits of W are kept between the passes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        packing: Packing,
        statistics: list[torch.Tensor],
    ) -> torch.Tensor:
        """Compute x W^T + b. `packed` has the bits of W, and `statistics` the tensors that dequantize it."""
        ctx.packing = packing
        ctx.save_for_backward(packed, *statistics)
        return functional.linear(x, dequantize(packing, packed, statistics), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x and of the bias; the quantized weight is frozen, and gets none. W is dequantized
        again with the saved scales (`statistics`)."""
        packed, *statistics = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad @ dequantize(ctx.packing, packed, statistics) if needs_x else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, None, grad_bias, None, None


def quantize(packing: Packing, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Quantize the weight of a linear layer.

    Args:
        weight: [out_features, in_features], in the compute dtype.
        dtype: dtype of the tensor in which the bits are returned.

    Returns:
        The bits as a tensor [elements, 1], and the statistics (such as scales) in the order of `Packing.statistics`.

    Raises:
        ModelError: with int8, a value is beyond the range of fp16 or not finite.
    """
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    if packing.quantizer is Quantizer.int8:
        half = weight.to(torch.float16)  # bitsandbytes has no other kernel
        if not half.isfinite().all():
            raise ModelError(
                f"a weight of {list(weight.shape)} has values up to {weight.abs().max():g}, and int8 is made of fp16, "
                "which ends at 65504; choose model.quantize.mode=nf4"
            )
        codes, scales, _ = int8_vectorwise_quant(half)
        return codes.flatten().view(dtype)[:, None], [scales]
    state: Any
    packed, state = quantize_4bit(
        weight,
        blocksize=BLOCK,
        compress_statistics=packing.double,
        quant_type=packing.quantizer.value,
        quant_storage=dtype,
    )
    if not packing.double:
        return packed, [state.absmax]
    inner: Any = state.state2
    return packed, [state.absmax, inner.absmax, inner.code, state.offset]


def dequantize(packing: Packing, packed: torch.Tensor, statistics: Sequence[torch.Tensor]) -> torch.Tensor:
    """Dequantize a weight, [out_features, in_features], in the dtype of the tensor [elements, 1] that holds its bits.
    The statistics are in the order of `Packing.statistics`. On the meta device the bits may have any dtype."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    shape = torch.Size((packing.out_features, packing.in_features))
    if packed.is_meta:
        return packed.new_empty(shape)
    if packing.quantizer is Quantizer.int8:
        codes = packed.view(torch.int8).view(shape)
        # rounded once, as in bitsandbytes' MatMul8bitFp
        return codes.to(packed.dtype).mul_(statistics[0][:, None].mul(1.0 / 127.0))
    absmax, *nested = statistics
    state = QuantState(absmax, shape, None, BLOCK, packing.quantizer.value, packed.dtype)
    if packing.double:
        nested_absmax, code, offset = nested
        inner = QuantState(nested_absmax, None, code, NESTED_BLOCK, None, torch.float32)
        state = QuantState(absmax, shape, None, BLOCK, packing.quantizer.value, packed.dtype, offset, inner)
    return dequantize_4bit(packed, state)


def quantize_layers(model: nn.Module, names: list[str], cfg: QuantizeConfig, dtype: torch.dtype) -> None:
    """Replace linear layers of a meta-device model by quantized ones, in place. Parameters keep their names.

    Args:
        names: full paths of the layers. If a layer has a LoRA adapter, its base layer is replaced.
        dtype: the compute dtype.

    Raises:
        ConfigError: bitsandbytes is not installed, or the bits of a weight do not fill whole elements of `dtype`.
    """
    import_bitsandbytes(cfg.mode)
    if not names:
        raise ConfigError(
            f"model.quantize.mode={cfg.mode.value}: the language model has no linear layers in its blocks; set "
            "model.quantize.mode=none"
        )
    for name in names:
        path = f"{name}.base_layer" if hasattr(model.get_submodule(name), "base_layer") else name
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        try:
            quantized = QuantizedLinear(linear, cfg, dtype)
        except ValueError as error:
            raise ConfigError(
                f"model.quantize.mode={cfg.mode.value}: {name} cannot be packed: {error}; set model.quantize.mode=none"
            ) from error
        model.set_submodule(path, quantized)


def quantized_weights(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return all quantized layers of a model by the names of their weights."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def weight_shape(model: nn.Module, name: str) -> tuple[int, ...]:
    """Return the shape of the parameter `name` of a model; for a quantized one, the shape before quantization."""
    module, _, leaf = name.rpartition(".")
    parent = model.get_submodule(module)
    if isinstance(parent, QuantizedLinear) and leaf == "weight":
        return parent.shape
    return tuple(model.get_parameter(name).shape)


def check_quantizer(cfg: QuantizeConfig, device: torch.device) -> None:
    """Raise ConfigError if bitsandbytes is not installed, or does not support this device. On a CPU it needs only to be
    installed."""
    if cfg.mode is Quantizer.none:
        return
    cure = "set model.quantize.mode=none, which is LoRA over weights in full"
    native = import_bitsandbytes(cfg.mode).cextension.lib
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        raise ConfigError(
            f"model.quantize.mode={cfg.mode.value} needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}, and "
            f"{name} has {capability[0]}.{capability[1]}; {cure}"
        )
    if not native.compiled_with_cuda:
        raise ConfigError(
            f"model.quantize.mode={cfg.mode.value}: the installed bitsandbytes has no kernels for {name} with CUDA "
            f"{torch.version.cuda}; pip install -U bitsandbytes, or {cure}"
        )


def import_bitsandbytes(mode: Quantizer) -> Any:
    """Import bitsandbytes, which takes seconds; raise ConfigError, which names the mode, if it is not installed."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"model.quantize.mode={mode.value} needs bitsandbytes, which cannot be imported ({error}): "
            "pip install 'llava-fsdp[qlora]'"
        ) from error
    return bitsandbytes
