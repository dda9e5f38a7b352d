"""Activation checkpointing: what is kept from the forward pass and what runs again in the backward pass.

All modes but `budget` give the bits of `none` where blocks are not compiled: the same operations run again on the same
inputs, with the random numbers that they drew at first. Checkpointing is the non-reentrant kind throughout, so that
inputs need not require a gradient.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig
from llava_fsdp.distributed.activation_offload import BlockFromHost, HostInputs
from llava_fsdp.distributed.compile import Compilations, compile_blocks

WRAPPED = "_checkpoint_wrapped_module."

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


def apply_activation_checkpointing(
    stacks: list[nn.ModuleList],
    cfg: ActivationCheckpointingConfig,
    device: torch.device,
    count: Compilations | None = None,
    one_row: bool = False,
) -> None:
    """Wrap every block of every stack, in place, and compile those of the first, the language model's.

    A compiled block lies inside of its checkpoint. With `selective` it is the other way round: what is kept is chosen
    by operation, and the compiler, which leaves none of them, does the choosing.

    Args:
        count: blocks are compiled, and this is told of it; None: they are not, but with `budget`.
        one_row: `compile_blocks`.
    """
    host = HostInputs(device)  # of all stacks: what comes back first was sent last
    selective = partial(checkpoint_wrapper, context_fn=keep_products_and_attention)
    wrap = {
        ActivationCheckpointing.full: checkpoint_wrapper,
        ActivationCheckpointing.selective: selective,
        ActivationCheckpointing.offload: lambda block: BlockFromHost(block, host),
    }
    compiles = count is not None or cfg.mode is ActivationCheckpointing.budget
    if compiles and cfg.mode is not ActivationCheckpointing.selective:
        compile_blocks(stacks[0], cfg.budget, count, one_row)
    for number, stack in enumerate(stacks):
        around = wrap.get(cfg.mode)
        if cfg.mode is ActivationCheckpointing.budget and number:
            around = selective
        for index, block in enumerate(stack if around is not None else ()):
            assert around is not None
            stack[index] = around(block)
    if compiles and cfg.mode is ActivationCheckpointing.selective:
        compile_blocks(stacks[0], None, count, one_row)


def clean_name(name: str) -> str:
    """A parameter's name as it is without activation checkpointing."""
    return name.replace(WRAPPED, "")


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
