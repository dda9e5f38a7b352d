"""Replace linear layers by layers that multiply in 8 bits."""

import torch
from torch import nn

from llava_fsdp.config import LinearKind, MasterDType, PrecisionConfig
from llava_fsdp.parallel.precision.fp8 import multiply_in_fp8
from llava_fsdp.parallel.precision.int8_mixed import PADDED_TO, multiply_in_int8


def multiply_in(cfg: PrecisionConfig, blocks: nn.ModuleList, sharded: bool, device: torch.device) -> None:
    """Replace linear layers of blocks on the meta device, in place, by layers that multiply in fp8 or int8, as
    `precision.linear` says; `same` replaces none. They will run on `device`, and under FSDP if `sharded`. Raises
    ConfigError if no layer can be replaced."""
    if cfg.linear is LinearKind.fp8:
        multiply_in_fp8(blocks, sharded, has_copies=not sharded and cfg.master_dtype is MasterDType.fp32)
    elif cfg.linear is LinearKind.int8_mixed:
        multiply_in_int8(blocks, PADDED_TO[device.type])
