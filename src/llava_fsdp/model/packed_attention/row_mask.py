"""Packed rows in language models of transformers: their attention mask carries the boundaries of a row's samples.

A mask is what every model passes from its arguments to all its layers:

1. `BoundaryMask`, a mask with two dimensions, goes into the model.
2. transformers calls `make_row_mask` with it and with the model's own rule of which token attends to which. The result
   is a `RowMask`, which the model hands to its layers as it is.
3. Each layer calls the function of `attend_with` with the `RowMask`.

So there is no state outside of a forward pass, and a block that runs again in the backward pass gets the same mask.
Rows with one sample each, and batches for generation, take the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    or_masks,
    padding_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from llava_fsdp.model.packed_attention.attention import (
    NAMES,
    Attend,
    AttentionForm,
    Boundaries,
    CachedRows,
    Lengths,
    PackedRow,
    RowSegments,
    SharedTokens,
    attend_alone,
    each_alone,
    kernel_of,
    refuse_other_attention,
    with_copies,
)
from llava_fsdp.runtime.errors import ConfigError

AttendedLayers = list[tuple[nn.Module, int | None]]
"""The layers that have attended, each with its window."""


class BoundaryMask(torch.Tensor):
    """The attention mask of rows, bool [rows, tokens], False at padding on the left, with the boundaries of the samples
    in a packed row. A tensor that is computed from it is no BoundaryMask, except by `to`."""

    boundaries: Boundaries | None
    """None: each row is one sample."""
    shared_prompt_tokens: SharedTokens | None
    is_cached: bool
    """Whether the rows are a batch for generation, whose keys may be in a cache."""
    attended_layers: AttendedLayers | None
    """List to which every layer that attends is appended; None: they are not recorded."""

    @staticmethod
    def of(
        mask: torch.Tensor,
        segments: RowSegments | None = None,
        attended_layers: AttendedLayers | None = None,
        is_cached: bool = False,
    ) -> BoundaryMask:
        """Return an attention mask, bool [rows, tokens], False at padding, that also carries the boundaries of samples.
        It has the values and the memory of `mask`.

        Args:
            segments: the boundaries of the samples in a packed row. None: each row is one sample.
            attended_layers: list to which every layer that attends is appended; None: they are not recorded.
            is_cached: whether the rows are a batch for generation, whose keys may be in a cache.
        """
        made = mask.as_subclass(BoundaryMask)
        made.boundaries, made.shared_prompt_tokens, made.is_cached, made.attended_layers = (
            None,
            None,
            is_cached,
            attended_layers,
        )
        if segments is not None:
            lengths = segments.lengths
            made.boundaries = Boundaries(segments.cu_seqlens, Lengths(lengths, max(lengths)))
            if segments.key_offsets is not None:
                made.shared_prompt_tokens = shared_tokens(lengths, segments.shared, segments.key_offsets)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as on a plain tensor. Only the result of `to`, which moves a mask to another device or
        dtype, is a mask with sample boundaries (`cls`) again; other results are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.to:
            return found
        moved = found.as_subclass(cls)
        vars(moved).update(vars(args[0]))
        return moved


@dataclass(frozen=True, eq=False)
class RowMask:
    """Which tokens of rows attend to which: what the layers of a model get as their mask. It is no tensor, so that
    torch.compile does not look into it."""

    boundaries: Boundaries | None
    """None: each row is one sample."""
    window: int | None = None
    """Number of latest tokens, including the token itself, that a token attends to; None: all tokens of its sample."""
    masks: tuple[torch.Tensor, ...] | None = None
    """For each sample of a packed row, which of its tokens attend to which, bool [1, 1, length, length]; without
    boundaries, one mask for all rows, bool [rows or 1, 1, tokens, all tokens]. None: `window` says it."""
    attended_layers: AttendedLayers | None = None
    shared_prompt_tokens: SharedTokens | None = None
    chunks: Any = None
    """This rank's chunks of the row, if several ranks share it."""


def shared_tokens(lengths: tuple[int, ...], counts: tuple[int, ...], offsets: torch.Tensor) -> SharedTokens:
    """Return which tokens the samples of a packed row share.

    Args:
        lengths: for each sample, the number of tokens that the row has for it alone.
        counts: for each sample, the number of tokens that it shares with the sample before it. They come in addition.
        offsets: cumulative lengths in which both kinds of tokens count, int32 [samples + 1].
    """
    whole = tuple(map(operator.add, lengths, counts))
    return SharedTokens(counts, Boundaries(offsets, Lengths(whole, max(whole))))


def has_boundaries(mask: Any) -> bool:
    """Return whether the attention mask with which a language model is called has the boundaries of the samples in a
    packed row. It is a mask, or one for each kind of layer, by name."""
    if isinstance(mask, dict):
        return any(map(has_boundaries, mask.values()))
    return isinstance(mask, BoundaryMask | RowMask) and mask.boundaries is not None


def make_row_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    local_size: int | None = None,
    chunks_of: Callable[[Boundaries], Any] | None = None,
    **given: Any,
) -> RowMask:
    """Make the mask of rows: a function for transformers' AttentionMaskInterface.

    If the model's rule is causal attention, to all tokens or in a window, no mask tensor is made: the kernels for
    packed rows compute it. Other rules give a mask for each sample, so that memory grows with the sum of the squares of
    the samples' lengths, and not with the square of the row's.

    Args:
        mask_function: the model's rule: (row, head, query, key) -> whether the query attends to the key. Queries and
            keys are numbered in the whole row.
        attention_mask: the mask that the model was called with: a BoundaryMask, bool [rows, tokens], False at padding,
            with the boundaries of a packed row's samples. Of any other kind, the model has replaced it.
        local_size: the model's window; None: the rule has none.
        chunks_of: returns the chunks of a row that this rank computes; None: it computes whole rows.
        given: other arguments of transformers' `sdpa_mask`.
    """
    if isinstance(attention_mask, RowMask):  # a model inside of another one, which has made the mask
        return attention_mask
    if not isinstance(attention_mask, BoundaryMask):
        raise ConfigError("a model replaces its attention mask, so that packed samples would be mixed; set pack=false")
    boundaries, layers = attention_mask.boundaries, attention_mask.attended_layers
    shared = attention_mask.shared_prompt_tokens
    if attention_mask.is_cached:  # rows for generation, padded on the left
        # A padding token attends to itself too, because attending to no token gives NaN.
        seen = padding_mask_function(attention_mask.as_subclass(torch.Tensor))
        rule = or_masks(and_masks(mask_function, seen), lambda row, head, query, key: query == key)
        return RowMask(None, masks=(evaluated(rule, given),))
    chunks = chunks_of(boundaries) if chunks_of is not None and boundaries is not None else None
    if mask_function is causal_mask_function:
        return RowMask(boundaries, attended_layers=layers, shared_prompt_tokens=shared, chunks=chunks)
    if local_size is not None and is_same_rule(mask_function, sliding_window_causal_mask_function(local_size)):
        return RowMask(boundaries, local_size, attended_layers=layers, shared_prompt_tokens=shared, chunks=chunks)
    if shared is not None:
        raise ConfigError(
            "data.prompt_once=true needs causal attention, and this model has another rule (which tokens of an image "
            "attend to each other, for instance); set data.prompt_once=false"
        )
    # another rule: a mask for each sample, with the numbers that its tokens have in the row
    masks, begin = [], 0
    for length in (attention_mask.shape[1],) if boundaries is None else boundaries.lengths.each:
        chunk_sizes: dict[str, Any] = {"q_length": length, "kv_length": length, "q_offset": begin, "kv_offset": begin}
        masks.append(evaluated(mask_function, given | chunk_sizes))
        begin += length
    return RowMask(boundaries, masks=tuple(masks), attended_layers=layers, chunks=chunks)


def evaluated(rule: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
    """Return the mask that a rule gives, bool [rows or 1, 1, queries, keys]. The rule is a function (row, head, query,
    key) -> whether the query attends to the key. `given`: other arguments of transformers' `sdpa_mask`."""
    arguments: dict[str, Any] = given | {"allow_is_causal_skip": False, "mask_function": rule}
    mask = sdpa_mask(**arguments)
    assert mask is not None
    return mask


def is_same_rule(one: Any, other: Any) -> bool:
    """Return whether two rules of which token attends to which are the same: functions with the same code, whose
    closures have the same numbers and functions. Tuples of such values, and numbers, are compared too."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_same_rule, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells, others = (tuple(cell.cell_contents for cell in rule.__closure__ or ()) for rule in (one, other))
        return one.__code__ is other.__code__ and is_same_rule(cells, others)
    return isinstance(one, int) and isinstance(other, int) and one == other


def attend_with(
    kernel: Attend, around: Callable[[Attend, RowMask], Attend] = lambda kernel, row: kernel
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return a function for transformers' AttentionInterface that computes attention within the samples of rows.

    Args:
        kernel: computes causal attention over packed rows.
        around: wraps the kernel, if several ranks share a row.
    """

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | RowMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute a layer's attention within the samples of rows: [rows, heads, tokens, size] -> [rows, tokens, heads,
        size]. `softcap` and `s_aux` are transformers' names for `softcap` and `sinks` of `AttentionForm`."""
        row = attention_mask  # a RowMask says which tokens of a row attend to which
        if not isinstance(row, RowMask):
            got = "no mask" if row is None else "a mask of its own"
            raise ConfigError(f"{type(module).__name__} attends with {got}, which would mix packed samples")
        refuse_other_attention(module, others, is_causal=row.masks is None)
        if row.attended_layers is not None:  # while it is checked that all layers attend through this function
            row.attended_layers.append((module, row.window))
        form = AttentionForm(scaling, dropout, row.window, softcap, s_aux)
        if row.boundaries is None:  # each row is one sample
            allowed = None if row.masks is None else row.masks[0]
            return attend_alone(module, query, key, value, form, allowed), None
        chosen = kernel if form.is_plain and row.masks is None else each_alone  # the others have no caps, sinks, masks
        keys = None
        if (
            row.shared_prompt_tokens is not None
        ):  # samples whose first tokens the row has only once: copy their keys and values
            key, value = (with_copies(states, row.boundaries, row.shared_prompt_tokens) for states in (key, value))
            keys = row.shared_prompt_tokens.keys
        packed = PackedRow(row.boundaries, form, keys, row.masks)
        return around(chosen, row)(module, query, key, value, packed), None

    return attend


def register_attention() -> None:
    """Register with transformers the attention for packed rows, and its masks. Calling this again changes nothing."""
    for attention, name in NAMES.items():
        kernel = kernel_of(attention)
        if kernel is not None:
            AttentionInterface.register(name, attend_with(kernel))
            AttentionMaskInterface.register(name, make_row_mask)


def attention_arguments(
    inputs: torch.Tensor, segments: RowSegments | CachedRows | None, implementation: str
) -> dict[str, Any]:
    """Return the arguments of a language model's forward pass that say which tokens attend to which, and where they are
    in their sample.

    Args:
        inputs: ids or embeddings, [rows, tokens, ...].
        segments: the sample boundaries of a packed row, or the input for generation; None for padded rows.
        implementation: name of the model's attention implementation. This package's get a BoundaryMask, a mask with
            the sample boundaries; with one of transformers', rows are not packed.
    """
    is_ours = implementation in NAMES.values()
    if isinstance(segments, CachedRows):
        mask = BoundaryMask.of(segments.mask, is_cached=True) if is_ours else segments.mask.long()
        cache = {"past_key_values": segments.cache, "use_cache": True}
        return {"position_ids": segments.position_ids, "attention_mask": mask, **cache}
    if not is_ours:
        return {}
    mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    if segments is None:
        return {"attention_mask": BoundaryMask.of(mask)}
    return {"position_ids": segments.position_ids, "attention_mask": BoundaryMask.of(mask, segments)}
