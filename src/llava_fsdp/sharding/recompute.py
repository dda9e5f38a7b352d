"""Activation checkpointing: what is kept from the forward pass and what runs again in the backward pass.

All modes but `budget` give the bits of `none`: the same operations run again on the same inputs, with the random
numbers that they drew at first. Checkpointing is the non-reentrant kind throughout, so that inputs need not require a
gradient.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llava_fsdp.config import RecomputeConfig, RecomputeMode
from llava_fsdp.sharding.compiled import check_compiler, compile_blocks
from llava_fsdp.sharding.inputs_on_host import BlockFromHost, HostInputs
from llava_fsdp.sharding.selective import keep_products_and_attention

WRAPPED = "_checkpoint_wrapped_module."


def check_recompute(cfg: RecomputeConfig, device: torch.device) -> None:
    """Raises ConfigError where this machine cannot do what is asked for."""
    if cfg.mode is RecomputeMode.budget:
        check_compiler(device, "recompute=budget")


def apply_recompute(stacks: list[nn.ModuleList], cfg: RecomputeConfig, device: torch.device) -> None:
    """Wrap or compile every block of every stack, in place."""
    host = HostInputs(device)  # of all stacks: what comes back first was sent last
    wrap = {
        RecomputeMode.full: checkpoint_wrapper,
        RecomputeMode.selective: partial(checkpoint_wrapper, context_fn=keep_products_and_attention),
        RecomputeMode.offload: lambda block: BlockFromHost(block, host),
    }
    if cfg.mode is RecomputeMode.budget:
        compile_blocks(stacks, cfg.budget)
    if cfg.mode in wrap:
        for stack in stacks:
            for index, block in enumerate(stack):
                stack[index] = wrap[cfg.mode](block)


def clean_name(name: str) -> str:
    """A parameter's name as it is without activation checkpointing."""
    return name.replace(WRAPPED, "")
