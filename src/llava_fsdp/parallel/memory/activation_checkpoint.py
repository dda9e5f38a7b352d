"""Wrap a model's blocks for activation checkpointing: activations are computed again in the backward pass, not kept.

Without compilation, every mode of the setting `activation_checkpointing` trains bit for bit the same weights as the
mode `none`, except `budget`, in which torch.compile chooses what is kept: the same operations run again on the same
inputs and with the same random numbers. All modes use torch's non-reentrant checkpoint, so that the inputs of a block
need not require a gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig
from llava_fsdp.parallel.compile import Compilations, compile_blocks
from llava_fsdp.parallel.memory.activation_offload import BlockFromHost, HostInputs
from llava_fsdp.parallel.memory.dynamic_checkpoint import DynamicBlock

KEPT = (
    # matrix products
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm",
    "aten::_int_mm", "torchao::scaled_int8_mm",
    # attention, by every kernel that scaled_dot_product_attention chooses from
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    # attention of packed rows: torch's op (and its name in torch 2.11), and flash-attn's
    "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out", "flash_attn::_flash_attn_varlen_forward",
)  # fmt: skip
"""Names of the operations whose results the mode `selective` keeps for the backward pass."""


def apply_activation_checkpointing(
    stacks: list[nn.ModuleList],
    cfg: ActivationCheckpointingConfig,
    device: torch.device,
    count: Compilations | None = None,
    one_row: bool = False,
    has_units: bool = False,
) -> None:
    """Wrap every block of every stack in place, and compile the blocks of the first stack, the language model's.

    A block is compiled first and then wrapped, except in the mode `selective`, which keeps the results of single
    operations. In this mode the wrapper is compiled together with the block: a compiled block runs as one operation, so
    that only the compiler can keep results within it.

    Args:
        count: counts the compiled graphs; None: blocks are not compiled, except with the mode `budget`.
        one_row: whether every batch has exactly one row.
        has_units: whether blocks contain FSDP units of their own, such as experts that ranks share.
    """
    mode = cfg.mode
    host = HostInputs(device)  # one for all stacks, because the input that was offloaded last is fetched first
    contexts = partial(create_selective_checkpoint_contexts, keep_products_and_attention)
    # a unit in a block sets one more profiler mark when the block runs again: `without_marks` hides marks from torch
    selective = partial(checkpoint_wrapper, context_fn=partial(without_marks, contexts) if has_units else contexts)
    wrappers: dict[ActivationCheckpointing, Callable[[nn.Module], nn.Module]] = {
        ActivationCheckpointing.full: checkpoint_wrapper,
        ActivationCheckpointing.selective: selective,
        ActivationCheckpointing.offload: partial(BlockFromHost, host=host),
        ActivationCheckpointing.dynamic: partial(DynamicBlock, device=device),
        ActivationCheckpointing.budget: selective,  # for the stacks that are not compiled
    }
    compiles = count is not None or mode is ActivationCheckpointing.budget
    if compiles and mode is not ActivationCheckpointing.selective:
        share = cfg.budget if mode is ActivationCheckpointing.budget else None
        compile_blocks(stacks[0], share, count, one_row)
    if wrapper := wrappers.get(mode):
        for stack in stacks[1:] if mode is ActivationCheckpointing.budget else stacks:
            for index, block in enumerate(stack):
                if next(block.parameters(), None) is not None:  # other stages of a pipeline have the block
                    stack[index] = wrapper(block)
    if compiles and mode is ActivationCheckpointing.selective:
        compile_blocks(stacks[0], None, count, one_row)


def without_marks(
    contexts: Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts of selective activation checkpointing, for a block's forward pass and for its repetition in
    the backward pass, that do not see the profiler's marks. `contexts`: makes the two modes that record operations.

    torch ends the run if an operation runs more often in the repetition. FSDP sets a profiler's mark around each of its
    hooks. For a unit within the block it sets one more in the repetition, where the unit is the root of FSDP
    (`FSDP::root_pre_forward`).
    """

    @contextmanager
    def below(mode: TorchDispatchMode) -> Iterator[None]:
        with mode, Unmarked():
            yield

    forward, backward = contexts()
    return below(forward), below(backward)


class Unmarked(TorchDispatchMode):
    """Dispatch mode that runs the profiler's marks, and hides them from the modes that were entered before it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation. Marks of the profiler run outside of all dispatch modes, so that no mode sees them."""
        if func.namespace == "profiler":
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: otherwise torch would run compiled functions uncompiled while this mode is active."""
        return True


def keep_products_and_attention(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Policy that torch calls for every operation in a block: the results of operations in `KEPT` are kept, and all
    others are computed again. Attention with dropout is computed again too: if it did not draw its random numbers in
    the backward pass, later operations would draw other ones than in the forward pass."""
    named = isinstance(operation, torch._ops.OpOverload) and operation._schema.name in KEPT
    if named and not has_dropout(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def has_dropout(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call has a dropout probability above 0."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False
