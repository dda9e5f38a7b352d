"""Activation checkpointing: what is kept from the forward pass and what runs again in the backward pass."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llava_fsdp.config import RecomputeConfig, RecomputeMode

WRAPPED = "_checkpoint_wrapped_module."


def apply_recompute(stacks: list[nn.ModuleList], cfg: RecomputeConfig) -> None:
    """Wrap every block of every stack, in place. Non-reentrant, so that inputs need not require a gradient."""
    if cfg.mode is RecomputeMode.none:
        return
    for stack in stacks:
        for index, block in enumerate(stack):
            stack[index] = checkpoint_wrapper(block)


def clean_name(name: str) -> str:
    """A parameter's name as it is without activation checkpointing."""
    return name.replace(WRAPPED, "")
