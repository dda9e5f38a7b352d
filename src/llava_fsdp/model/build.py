"""Build the model of a training, of whichever kind it is."""

import torch

from llava_fsdp.config import LossConfig, ModelConfig
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.llava.own_parts import NONE, OwnParts
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.parts import Parts


def build_architecture(
    parts: Parts,
    cfg: ModelConfig,
    compute_dtype: torch.dtype,
    kernel: Kernel | None = None,
    loss: LossConfig | None = None,
    own: OwnParts = NONE,
) -> Architecture:
    """Build a model on the meta device, and freeze what does not train. There is one kind today, `Llava`.

    `kernel` is the attention of packed rows; None: rows are padded. Without `loss`, the loss is computed from the
    logits of all labels at once. `own` has the parts that a program gives. Raises ConfigError and ModelError if the
    model cannot be built, or lacks what the configuration asks for.
    """
    return build_llava(parts, cfg, compute_dtype, kernel, loss, own)
