"""Replace linear layers by torchao's float8 layers, which multiply in fp8 and whose weights FSDP gathers in fp8.

Scaling is tensorwise and dynamic: input, weight and output gradient of a layer are each scaled by their largest element
and cast to fp8 (e4m3; gradients e5m2), and the product is bf16. Master weights, their gradients and Adam's moments keep
their dtypes.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

from llava_fsdp.runtime.errors import ConfigError

MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this number for torch's scaled fp8 matrix product."""
CURE = "choose precision=bf16"


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if this machine cannot multiply matrices in fp8 on `device`."""
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
    multiple of 16, so that any number of tokens is allowed.

    Args:
        sharded: whether FSDP shards the weights; it then all-gathers them in fp8.
    """
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, pad_inner_dim=True)


def multiply_in_fp8(blocks: nn.ModuleList, sharded: bool) -> None:
    """Replace the linear layers of a stack of blocks on the meta device by fp8 layers, in place. Parameters keep their
    names.

    Layers whose weight is frozen, or has a size that is not a multiple of 16, are not replaced.

    Args:
        sharded: whether FSDP shards the weights; it then all-gathers them in fp8.

    Raises:
        ConfigError: no layer can be replaced.
    """
    from torchao.float8 import convert_to_float8_training

    if not weights_in_fp8(blocks):
        raise ConfigError(
            f"precision.linear=fp8: no linear layer of the language model has sizes that are multiples of {MULTIPLE}; "
            f"{CURE}"
        )
    convert_to_float8_training(
        blocks, module_filter_fn=lambda module, _: takes_fp8(module), config=fp8_settings(sharded)
    )


def weights_in_fp8(blocks: nn.ModuleList) -> set[torch.Tensor]:
    """Return the weights of the layers of a stack of blocks that `multiply_in_fp8` would replace by fp8 layers. Call
    this before `multiply_in_fp8`."""
    return {module.weight for module in blocks.modules() if isinstance(module, nn.Linear) and takes_fp8(module)}


def takes_fp8(module: nn.Module) -> bool:
    """Return whether a module is a trainable linear layer whose sizes are multiples of 16, as fp8 products need. A
    class derived from `nn.Linear`, such as a router, may compute something else, and is not taken."""
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def prepare_scales(model: nn.Module) -> None:
    """Compute the fp8 scales of all sharded weights of a model in one all-reduce; otherwise the forward pass would run
    one all-reduce per weight. Collective: all ranks must call it."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
