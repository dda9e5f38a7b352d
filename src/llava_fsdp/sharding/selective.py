"""Selective recompute: what matrix products and attention gave is kept, everything else of a block runs again.

The products are nearly all of a block's work, so that little runs again; norms, rotations and activation functions are
most of what a block would otherwise keep. For a block of width h, with k key and value channels, a feed-forward of f
channels, in bf16: 2 * (h + h + 2k + h + h + 2f + h) bytes a position for input, queries, keys and values, attention,
its projection, the two inner products and the last one, and 4 for each head, the attention's normaliser.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

KEPT = (
    # matrix products
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm",
    # attention, by every kernel that scaled_dot_product_attention chooses from
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    # attention of packed rows: torch's, its 2.11 name among them, flash-attn's, and ours of compiled blocks
    "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out", "flash_attn::_flash_attn_varlen_forward",
    "llava_fsdp::each_alone",
)  # fmt: skip
"""THE table: operations whose results are kept."""


def keep_products_and_attention() -> tuple[Any, Any]:
    """The two contexts of `torch.utils.checkpoint`: of the forward pass, and of what runs again."""
    return create_selective_checkpoint_contexts(policy)


def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention with dropout runs again: if it did not, what comes behind it would draw its random numbers."""
    named = isinstance(operation, torch._ops.OpOverload) and operation._schema.name in KEPT
    if named and not draws(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def draws(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is asked for dropout."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False
