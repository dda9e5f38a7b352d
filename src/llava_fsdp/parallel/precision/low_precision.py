"""Replace linear layers by layers that multiply in another way."""

import torch
from torch import nn

from llava_fsdp.config import LinearKind, MasterDType, PrecisionConfig
from llava_fsdp.parallel.precision.fp8 import multiply_in_fp8
from llava_fsdp.parallel.precision.int8_mixed import PADDED_TO, multiply_in_int8
from llava_fsdp.parallel.precision.summed_linear import add_in_products


def multiply_in(cfg: PrecisionConfig, blocks: nn.ModuleList, sharded: bool, device: torch.device) -> None:
    """Replace linear layers of blocks on the meta device, in place, by those that `precision.linear` names: layers that
    multiply in fp8 or int8, or that add gradients within products. `same` replaces none.

    Args:
        sharded: whether the model will run under FSDP.
        device: on which it will run.

    Raises:
        ConfigError: no layer can be replaced, or this kind does not run under FSDP or on this device.
    """
    if cfg.linear is LinearKind.fp8:
        multiply_in_fp8(blocks, sharded, has_copies=not sharded and cfg.master_dtype is MasterDType.fp32)
    elif cfg.linear is LinearKind.int8_mixed:
        multiply_in_int8(blocks, PADDED_TO[device.type])
    elif cfg.linear is LinearKind.fp32_sums:
        add_in_products(blocks, sharded)
