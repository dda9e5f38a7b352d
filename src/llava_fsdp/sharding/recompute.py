"""Activation checkpointing: what is kept from the forward pass and what runs again in the backward pass.

All modes but `budget` give the bits of `none` where blocks are not compiled: the same operations run again on the same
inputs, with the random numbers that they drew at first. Checkpointing is the non-reentrant kind throughout, so that
inputs need not require a gradient.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llava_fsdp.config import RecomputeConfig, RecomputeMode
from llava_fsdp.sharding.compiled import Compilations, compile_blocks
from llava_fsdp.sharding.inputs_on_host import BlockFromHost, HostInputs
from llava_fsdp.sharding.selective import keep_products_and_attention

WRAPPED = "_checkpoint_wrapped_module."


def apply_recompute(
    stacks: list[nn.ModuleList],
    cfg: RecomputeConfig,
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
        RecomputeMode.full: checkpoint_wrapper,
        RecomputeMode.selective: selective,
        RecomputeMode.offload: lambda block: BlockFromHost(block, host),
    }
    compiles = count is not None or cfg.mode is RecomputeMode.budget
    if compiles and cfg.mode is not RecomputeMode.selective:
        compile_blocks(stacks[0], cfg.budget, count, one_row)
    for number, stack in enumerate(stacks):
        around = wrap.get(cfg.mode)
        if cfg.mode is RecomputeMode.budget and number:
            around = selective
        for index, block in enumerate(stack if around is not None else ()):
            assert around is not None
            stack[index] = around(block)
    if compiles and cfg.mode is RecomputeMode.selective:
        compile_blocks(stacks[0], None, count, one_row)


def clean_name(name: str) -> str:
    """A parameter's name as it is without activation checkpointing."""
    return name.replace(WRAPPED, "")
