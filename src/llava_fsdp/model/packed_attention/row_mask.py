"""Packed rows in whole models of transformers, whose code passes no keyword arguments from the model to its layers.

What every model does pass on is its attention mask. Here the mask carries the boundaries of a row's samples:

1. `BoundaryMask`, a mask with two dimensions, goes into the model.
2. transformers calls `make_row_mask` with it and with the model's own rule of which token attends to which. The result
   is a `RowMask`, which has four dimensions, so that models hand it to their layers as it is.
3. Each layer calls the function of `attend_rows` with the `RowMask`.

So there is no state outside of a forward pass, and a block that runs again in the backward pass gets the same mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from llava_fsdp.config import Attention
from llava_fsdp.model.packed_attention.attention import (
    NAMES,
    Attend,
    AttentionForm,
    Boundaries,
    Lengths,
    PackedRow,
    Segments,
    attend_alone,
    each_alone,
    kernel_of,
    refuse_other_attention,
)
from llava_fsdp.runtime.errors import ConfigError

PASSED_ON = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default,
)
"""Operations that models apply to a mask before they hand it to their layers; a `RowMask` stays as it is."""


class BoundaryMask(torch.Tensor):
    """The attention mask of rows, bool [rows, tokens], True everywhere, with the boundaries of the samples in a packed
    row. A tensor that is computed from it is no BoundaryMask, except by `to`."""

    boundaries: Boundaries | None
    """None: each row is one sample."""
    visits: list[nn.Module] | None
    """List to which every layer that attends is appended; None: they are not recorded."""

    @staticmethod
    def of(ids: torch.Tensor, segments: Segments | None, visits: list[nn.Module] | None = None) -> BoundaryMask:
        """Make the mask of rows of token ids, [rows, tokens]. `segments`: None: each row is one sample."""
        mask = torch.ones_like(ids, dtype=torch.bool).as_subclass(BoundaryMask)
        mask.boundaries, mask.visits = None, visits
        if segments is not None:
            _, cu_seqlens, lengths = segments
            mask.boundaries = Boundaries(cu_seqlens, Lengths(lengths, max(lengths)))
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as on a plain tensor. The result of `to` alone is a BoundaryMask again."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.to:
            return found
        moved = found.as_subclass(cls)
        moved.boundaries, moved.visits = args[0].boundaries, args[0].visits
        return moved


class RowMask(torch.Tensor):
    """Which tokens of rows attend to which: a mask for the layers of a model. It has the shape [rows, 1, tokens,
    tokens] and no memory of that size."""

    boundaries: Boundaries | None
    masks: list[torch.Tensor] | None
    """For each sample of a packed row, which of its tokens attend to which, bool [1, 1, length, length]; without
    boundaries, one mask for all rows, bool [rows or 1, 1, tokens, tokens]. None: a token attends to itself and to all
    earlier ones of its sample."""
    visits: list[nn.Module] | None

    @staticmethod
    def __new__(cls, given: BoundaryMask, masks: list[torch.Tensor] | None, device: torch.device) -> RowMask:
        rows, tokens = given.shape
        shape = (rows, 1, tokens, tokens)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.boundaries, mask.masks, mask.visits = given.boundaries, masks, given.visits
        return mask

    def __init__(self, *_: Any):
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"RowMask({self.boundaries})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PASSED_ON:
            return args[0]
        raise ConfigError(f"a model computes {func} with the attention mask of a packed row; set pack=false")


def make_row_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    device: torch.device,
    use_vmap: bool = False,
    **_: Any,
) -> RowMask:
    """Make the mask of rows: a function for transformers' AttentionMaskInterface.

    The model's rule is evaluated for each sample alone, so that the masks grow with the sum of the squares of the
    samples' lengths, and not with the square of the row's. If the rule is that of causal attention, no mask is made,
    and the kernels for packed rows compute the attention.

    Args:
        mask_function: the model's rule: (row, head, query, key) -> whether the query attends to the key. Queries and
            keys are numbered in the whole row.
        attention_mask: the mask that the model was called with.
        use_vmap: whether the rule takes single numbers only.
    """
    if not isinstance(attention_mask, BoundaryMask):
        raise ConfigError("a model replaces its attention mask, so that packed samples would be mixed; set pack=false")
    if mask_function is causal_mask_function:
        return RowMask(attention_mask, None, device)
    rows, tokens = attention_mask.shape
    boundaries, masks, begin = attention_mask.boundaries, [], 0
    for length in (tokens,) if boundaries is None else boundaries.lengths.each:
        own = sdpa_mask(
            batch_size=rows,
            q_length=length,
            kv_length=length,
            q_offset=begin,
            kv_offset=begin,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert own is not None
        masks.append(own)
        begin += length
    return RowMask(attention_mask, masks, device)


def attend_rows(kernel: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return a function for transformers' AttentionInterface that computes attention within the samples of a packed
    row: with `kernel` where it is plainly causal, else with the model's own mask for each sample."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        row = attention_mask
        if not isinstance(row, RowMask):
            got = "no mask" if row is None else "a mask of its own"
            raise ConfigError(f"{type(module).__name__} attends with {got}, which would mix packed samples")
        refuse_other_attention(module, others, None, is_causal=True)
        if row.visits is not None:
            row.visits.append(module)
        form = AttentionForm(scaling, dropout, None, softcap, s_aux)  # windows are in the masks
        if row.boundaries is None:
            allowed = None if row.masks is None else row.masks[0]
            return attend_alone(module, query, key, value, form, allowed), None
        if row.masks is None:
            chosen = kernel if form.is_plain else each_alone
            return chosen(module, query, key, value, PackedRow(row.boundaries, form)), None
        each = row.boundaries.lengths.each
        parts = zip(query.split(each, 2), key.split(each, 2), value.split(each, 2), row.masks, strict=True)
        return torch.cat([attend_alone(module, q, k, v, form, mask) for q, k, v, mask in parts], dim=1), None

    return attend


def rows_name(attention: Attention) -> str:
    """Return the name of an attention implementation for packed rows of whole models, and register it in transformers'
    AttentionInterface and AttentionMaskInterface."""
    name, kernel = f"{NAMES[attention]}_rows", kernel_of(attention)
    assert kernel is not None, "choose_kernel refuses it"
    AttentionInterface.register(name, attend_rows(kernel))
    AttentionMaskInterface.register(name, make_row_mask)
    return name
