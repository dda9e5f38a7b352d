"""Replace linear layers by torchao's layers for INT8 mixed-precision training, which multiply in int8.

Scaling is dynamic, one scale per row: before each of a layer's three products (output, gradient of the input, gradient
of the weight) both factors are cast to int8, and the product is cast back to bf16. Weights stay bf16 between the
products, so that FSDP gathers them as for any other layer. Master weights, gradients and Adam's moments keep their
dtypes. Source: torchao/prototype/quantized_training/int8_mixed_precision.py.
"""

import importlib.util

import torch
from torch import nn

from llava_fsdp.distributed.fp8 import CURE, MULTIPLE, takes_fp8
from llava_fsdp.runtime.errors import ConfigError


def check_int8_mixed(device: torch.device) -> None:
    """Raise ConfigError if this machine cannot train with int8 products on `device`: torchao or its prototype is
    missing, or the GPU has no int8 tensor cores."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"precision.linear=int8_mixed needs torchao: pip install llava-fsdp[fp8], or {CURE}")
    try:
        from torchao.prototype.quantized_training import int8_mixed_precision  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"precision.linear=int8_mixed needs a prototype of torchao (prototype.quantized_training), which the "
            f"installed version lacks: {error}; pip install 'torchao>=0.18,<0.20', or {CURE}"
        ) from error
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"precision.linear=int8_mixed needs a GPU of compute capability 8.0 (A100, RTX 30 or later), and "
            f"{torch.cuda.get_device_name(device)} is older; {CURE}"
        )


def multiply_in_int8(blocks: nn.ModuleList) -> None:
    """Replace the linear layers of a stack of blocks on the meta device by int8 layers, in place. Parameters keep their
    names.

    Layers whose weight is frozen, or has a size that is not a multiple of 16, are not replaced.

    Raises:
        ConfigError: no layer can be replaced.
    """
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    if not any(takes_fp8(module) for module in blocks.modules()):
        raise ConfigError(
            f"precision.linear=int8_mixed: no linear layer of the language model has sizes that are multiples of "
            f"{MULTIPLE}; {CURE}"
        )
    quantize_(blocks, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=lambda module, _: takes_fp8(module))
