"""Attention for packed rows (sequences in which several samples follow one another), where the tokens of a sample
attend only to tokens of the same sample. How the sample boundaries reach a model's layers: row_mask.py."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llava_fsdp.config import Attention
from llava_fsdp.runtime.errors import ConfigError


class RowSegments(NamedTuple):
    """Sample boundaries of a packed row. `data.batching.batch` has a class with the same fields, as neither of the
    packages `data` and `model` imports the other."""

    position_ids: torch.Tensor
    """int64 [1, tokens]; they begin at 0 in every sample or, if it shares tokens, at their number."""
    cu_seqlens: torch.Tensor
    """Cumulative sample lengths, int32 [samples + 1]."""
    lengths: tuple[int, ...]
    """The samples' lengths."""
    shared: tuple[int, ...] = ()
    """For each sample, how many of the first tokens of the sample before it are its own first tokens, too; empty if
    samples share none."""
    key_offsets: torch.Tensor | None = None
    """Cumulative lengths, int32 [samples + 1], in which such tokens count for each sample."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Input for generation: for each row of a batch, padded on the left, the new tokens, and a key-value cache with the
    earlier tokens."""

    position_ids: torch.Tensor
    """Positions of the new tokens, int64 [rows, length]."""
    mask: torch.Tensor
    """False at padding tokens, bool [rows, cached + length]."""
    cache: Cache
    """The key-value cache."""


NAMES = {
    Attention.sdpa: "llava_fsdp_each_alone",
    Attention.varlen: "llava_fsdp_varlen",
    Attention.flash: "llava_fsdp_dao",  # transformers would look up a name with "flash" on the hub
}
"""Names of the attention implementations for packed rows in transformers' AttentionInterface."""


@dataclass(frozen=True)
class Kernel:
    """The attention implementation that was chosen for packed rows, and why."""

    attention: Attention
    reason: str

    @property
    def name(self) -> str:
        return NAMES[self.attention]


def choose_kernel(
    attention: Attention, language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype
) -> Kernel:
    """Choose the attention implementation for packed rows: the one that `attention` names or, if it is `auto`, the best
    one that can run this model on this device in this dtype. Raises ConfigError if the named one cannot."""
    if attention is Attention.auto:
        lack = kernel_missing(Attention.varlen, language, device, compute_dtype)
        if lack is None:
            return Kernel(Attention.varlen, "torch's varlen_attn")
        return Kernel(Attention.sdpa, f"SDPA a sample at a time: {lack}")
    lack = kernel_missing(attention, language, device, compute_dtype)
    if lack is not None:
        raise ConfigError(f"attention={attention.value}: {lack}; set attention=auto")
    return Kernel(attention, "as configured")


def kernel_missing(
    attention: Attention, language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Return why an attention implementation cannot run this model on this device in this dtype; None if it can. SDPA
    runs every model everywhere. `attention` is not `auto`."""
    if attention is Attention.sdpa:
        return None
    what, module, cure = {  # name in messages, Python module, message if the module is not installed
        Attention.varlen: ("varlen_attn", "torch.nn.attention.varlen", f"torch {torch.__version__} has no varlen_attn"),
        Attention.flash: ("flash-attn", "flash_attn", "flash-attn is not installed (pip install llava-fsdp[flash])"),
    }[attention]
    lack = flash_kernel_missing(language, device, compute_dtype, what)
    return cure if lack is None and importlib.util.find_spec(module) is None else lack


def flash_kernel_missing(
    language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype, what: str
) -> str | None:
    """Return why FlashAttention-2 cannot run this model on this device in this dtype; None if it can. `what` is its
    name in the message: varlen_attn or flash-attn."""
    if device.type != "cuda":
        return f"{what} needs CUDA, and this run is on {device.type}"
    lack = not_for_flash(language, compute_dtype, what)
    if lack is None and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{what} needs a GPU of compute capability 8.0"
    return lack


def not_for_flash(language: PretrainedConfig, compute_dtype: torch.dtype, what: str) -> str | None:
    """Return why FlashAttention-2 cannot run this model in this dtype, on whatever GPU; None if it can. `what` is
    varlen_attn or flash-attn; only flash-attn has dropout."""
    if compute_dtype not in (torch.bfloat16, torch.float16):
        return f"{what} computes in 16 bits, and this run in {str(compute_dtype).removeprefix('torch.')}"
    head = head_size(language)
    if getattr(language, "v_head_dim", None) is not None:
        return f"{what} takes keys and values of one width, and this model has two"
    if head % 8 or head > 256:
        return f"{what} takes heads of a multiple of 8 up to 256, and this model's are {head} wide"
    if getattr(language, "attention_dropout", 0.0) and what == "varlen_attn":
        return f"varlen_attn has no dropout, and this model an attention_dropout of {language.attention_dropout}"
    return None


def head_size(language: PretrainedConfig) -> int:
    return getattr(language, "head_dim", None) or language.hidden_size // language.num_attention_heads


def kernel_of(attention: Attention) -> Attend | None:
    """Return the function of an attention implementation; None if it is varlen and the installed torch does not have
    it. That of flash-attn imports its package only when it is called."""
    if attention is Attention.varlen:
        return make_varlen() if importlib.util.find_spec("torch.nn.attention.varlen") is not None else None
    return {Attention.sdpa: each_alone, Attention.flash: flash}[attention]


def attention_of_transformers(language: PretrainedConfig, kind: type | None = None) -> str:
    """Return the name of transformers' own attention implementation for a language model: "sdpa", or "eager". `kind`:
    the class of the language model; None: that of its configuration."""
    has_softcap = getattr(language, "attn_logit_softcapping", None) is not None  # older releases' SDPA ignores it
    has_sdpa = getattr(kind or MODEL_MAPPING[type(language)], "_supports_sdpa", False)
    return "sdpa" if has_sdpa and not has_softcap else "eager"


@dataclass(frozen=True)
class Lengths:
    """Sample lengths of a packed row, as Python ints, so that no layer waits for the device. This is a class and not a
    tuple, because torch.compile would recompile a layer for every length of a tuple."""

    each: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class AttentionForm:
    """Options of a layer's causal attention."""

    scaling: float | None = None
    """Factor by which scores are multiplied; None: one over the square root of the head's size."""
    dropout: float = 0.0
    window: int | None = None
    """Number of latest tokens, including the token itself, that a token attends to; None: all tokens."""
    softcap: float | None = None
    """Magnitude to which tanh limits the scores (Gemma 2, arXiv:2408.00118 section 2); None: no limit."""
    sinks: torch.Tensor | None = None
    """Scores, [heads], of an additional token without a value that takes part in each softmax (GPT-OSS); None: no such
    token."""

    @property
    def is_plain(self) -> bool:
        """Whether transformers' SDPA, given a mask, supports these options: no soft cap and no attention sinks."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Boundaries:
    """Where the samples of a packed row begin and end."""

    cu_seqlens: torch.Tensor
    """Cumulative sample lengths, int32 [samples + 1]."""
    lengths: Lengths


@dataclass(frozen=True)
class SharedTokens:
    """Tokens of a packed row that belong to two samples: the first ones of a sample are the first ones of the next."""

    counts: tuple[int, ...]
    """For each sample, the number of tokens that it shares with the sample before it."""
    keys: Boundaries
    """Boundaries of the samples in a row where each has a copy of all of its tokens."""


@dataclass(frozen=True)
class PackedRow:
    """Sample boundaries of a packed row, and the options of a layer's attention."""

    queries: Boundaries
    form: AttentionForm
    keys: Boundaries | None = None
    """Boundaries of the keys and values, if there are more of them than queries: the queries of a sample are then its
    last tokens. None: there are as many."""
    masks: tuple[torch.Tensor, ...] | None = None
    """For each sample, which of its tokens attend to which, bool [1, 1, length, length]; None: a token attends to all
    earlier tokens, or to those in its window."""


Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, PackedRow], torch.Tensor]
"""Type of a function that computes attention over a packed row: (module, query, key, value, row) -> [1, tokens, heads,
size]. Query, key and value are [1, heads, tokens, size]."""


def attend_alone(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: AttentionForm,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention for rows of one sample: [rows, heads, tokens, size] -> [rows, tokens, heads, size].

    Args:
        module: not used.
        query: only of the last tokens if `key` and `value` contain earlier tokens too.
        form: the layer's options: scaling, dropout, sliding window, soft cap of scores and attention sinks; it
            `is_plain` without the last two, which SDPA lacks.
        allowed: mask, bool [rows, 1, tokens, all tokens], True where a token attends to another. `key` and `value` may
            lack the earliest of all tokens. None: a token attends to itself and to earlier ones (in its window).
    """
    length, total = query.shape[2], key.shape[2]
    if allowed is not None:
        allowed = allowed[..., allowed.shape[-1] - total :]
    elif length < total and form.is_plain:
        # SDPA's own causal mask would take the last tokens for the first ones
        return attend_latest(query, key, value, form)
    if form.window is not None and total > form.window:
        within = in_window(length, total, form.window, query.device)
        allowed = within if allowed is None else allowed & within
    if form.is_plain:
        return attend_with_mask(query, key, value, form, allowed)
    if allowed is None:
        allowed = in_window(length, total, total, query.device)
    return attend_in_steps(query, key, value, form, allowed)


QUERIES_AT_ONCE = 256
"""Number of queries for which `attend_latest` has one mask."""


def attend_latest(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Compute causal attention of the latest tokens of a sample with SDPA, for options without a soft cap or sinks:
    queries [1, heads, tokens, size] and keys and values [1, heads, all tokens, size] -> [1, tokens, heads, size].

    QUERIES_AT_ONCE queries are computed at a time, because a mask for all of them would grow with the square of the
    sample's length. The masks of all steps are views of one mask.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))  # SDPA would do it for each part
    total, end = key.shape[2], key.shape[2] - query.shape[2]
    latest = min(QUERIES_AT_ONCE, query.shape[2])
    pairs = query.new_ones((latest, total), dtype=torch.bool)
    hidden = pairs.triu(total - latest + 1)  # the keys that come after a query
    if form.window is not None:
        hidden |= pairs.tril(total - latest - form.window)
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    outputs = []
    for part in query.split(QUERIES_AT_ONCE, dim=2):
        end += part.shape[2]
        part_mask = mask[-part.shape[2] :, total - end :]
        outputs.append(attend_with_mask(part, key[:, :, :end], value[:, :, :end], form, part_mask))
    return torch.cat(outputs, dim=1)


def attend_with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention with transformers' SDPA, for options without a soft cap or sinks: [rows, heads, tokens, size]
    -> [rows, tokens, heads, size]. The mask is bool, or scores to add; None: causal attention."""
    options = {"dropout": form.dropout, "scaling": form.scaling}
    # takes the place of the layer, of which transformers' SDPA reads how many query heads share a key head
    grouped: Any = HeadGroups(query.shape[1] // key.shape[1])
    return sdpa_attention_forward(grouped, query, key, value, as_four(mask), **options)[0]


@dataclass(frozen=True)
class HeadGroups:
    """What transformers' SDPA reads of a layer; the part of a layer that one rank computes may have fewer heads."""

    num_key_value_groups: int
    is_causal: bool = True


def as_four(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return an attention mask with four dimensions, as transformers' SDPA needs it for a single query."""
    return mask if mask is None or mask.ndim == 4 else mask[None, None]


def in_window(length: int, total: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of a sliding window for the last `length` of `total` tokens, bool [length, total]: True at the
    token itself and at the `window - 1` tokens before it."""
    keys = torch.arange(total, device=device)
    distance = keys[total - length :, None] - keys
    return (distance >= 0) & (distance < window)


def attend_in_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm, allowed: torch.Tensor
) -> torch.Tensor:
    """Compute attention as transformers' eager implementations of Gemma 2 and GPT-OSS do, with the softmax in fp32:
    [rows, heads, tokens, size] -> [rows, tokens, heads, size]. All scores are in memory at once.

    `allowed` is a bool mask, broadcast to [rows, heads, queries, keys]: True where a query may attend to a key. A
    sliding window must be part of it, because that of `form` is not used.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if form.scaling is None else form.scaling)
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.float().masked_fill(~allowed, -torch.inf)
    if form.sinks is not None:
        rows, heads, queries, _ = scores.shape
        sinks = form.sinks.float().view(1, -1, 1, 1).expand(rows, heads, queries, 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    shares = nn.functional.dropout(shares.to(value.dtype), p=form.dropout)
    return (shares @ value).transpose(1, 2).contiguous()


CHANGES_ATTENTION = ("position_bias", "sinks")
"""Names of arguments that layers of some models pass to their attention, and that are not supported here."""


def refuse_other_attention(module: nn.Module, others: dict[str, Any], is_causal: bool) -> None:
    """Raise ConfigError if a layer asks by its arguments for attention that is not supported for packed rows: for one
    of CHANGES_ATTENTION (additional inputs of attention), or for attention to later tokens.

    Args:
        module: the layer.
        others: arguments with which the layer calls its attention and that have no parameter of their own.
        is_causal: whether the row has no mask, so that causal attention is computed.
    """
    for name in CHANGES_ATTENTION:
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} attends with {name}, which packed rows lack")
    if is_causal and (not getattr(module, "is_causal", True) or others.get("is_causal") is False):
        raise ConfigError(f"{type(module).__name__} attends to later tokens")


@torch.compiler.disable(recursive=True)  # it would be recompiled for every combination of lengths
def with_copies(values: torch.Tensor, row: Boundaries, shared: SharedTokens) -> torch.Tensor:
    """Return the keys or values of a packed row, [1, heads, tokens, size], in which each sample has all of its tokens:
    if it shares first tokens with the sample before it (`shared.counts`), they are copied to its beginning.

    Indexing would be shorter, but on CUDA its backward pass adds in an order that is not fixed.
    """
    samples = values.split(row.lengths.each, 2)
    pieces: list[torch.Tensor] = []
    for number, (sample, count) in enumerate(zip(samples, shared.counts, strict=True)):
        pieces += [samples[number - 1].narrow(2, 0, count), sample] if count else [sample]
    return torch.cat(pieces, dim=2)


@torch.compiler.disable(recursive=True)  # it would be recompiled for every combination of lengths
def each_alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """Compute attention for a packed row, sample by sample, with transformers' SDPA if it supports the layer's options:
    query, key, value [1, heads, tokens, size] -> [1, tokens, heads, size].

    The row is divided with `split`: the backward pass of slices would fill a whole row with zeros for every sample.
    """
    keys = (row.keys or row.queries).lengths.each
    queries, keys, values = query.split(row.queries.lengths.each, 2), key.split(keys, 2), value.split(keys, 2)
    parts = zip(queries, keys, values, row.masks or [None] * len(queries), strict=True)
    return torch.cat([attend_alone(module, q, k, v, row.form, mask) for q, k, v, mask in parts], dim=1)


def make_varlen() -> Attend:
    """Return an attention implementation for packed rows that calls torch's varlen_attn. Its arguments depend on
    torch's version: in torch 2.11 it has no `enable_gqa`, and in 2.10 it has `is_causal` instead of `window_size`."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    has_window, has_scale, has_groups = "window_size" in parameters, "scale" in parameters, "enable_gqa" in parameters

    def varlen(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
    ) -> torch.Tensor:
        """Compute attention of a packed row by torch's `varlen_attn`: query, key, value [1, heads, tokens, size] -> [1,
        tokens, heads, size]. What the installed torch has no argument for is computed here, or by `each_alone`."""
        form = row.form
        assert not form.dropout, "choose_kernel refuses dropout"
        if form.window is not None and not has_window:
            return each_alone(module, query, key, value, row)
        before = -1 if form.window is None else form.window - 1
        options: dict[str, Any] = {"window_size": (before, 0)} if has_window else {"is_causal": True}
        if has_scale:
            options["scale"] = form.scaling
        elif form.scaling is not None:
            query = query * (form.scaling * query.shape[-1] ** 0.5)
        groups = query.shape[1] // key.shape[1]
        if has_groups:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [tokens, heads, size]
        output = varlen_attn(q, k, v, *both_boundaries(row), **options)
        assert isinstance(output, torch.Tensor)
        return output[None]

    return varlen


def both_boundaries(row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return a row's boundaries as FlashAttention's functions take them: cumulative lengths of queries and keys, and
    the most of each in a sample. With fewer queries than keys, they are its last tokens (flash-attn since 2.1)."""
    queries, keys = row.queries, row.keys or row.queries
    return queries.cu_seqlens, keys.cu_seqlens, queries.lengths.longest, keys.lengths.longest


def flash(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """Attention of a packed row by the flash-attn package: query, key, value [1, heads, tokens, size] -> [1, tokens,
    heads, size]. `row` has the boundaries of its samples."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    parts = [part[0].transpose(0, 1) for part in (query, key, value)]  # [tokens, heads, size]
    return flash_attn_varlen_func(
        *parts,
        *both_boundaries(row),
        dropout_p=row.form.dropout,
        softmax_scale=row.form.scaling,
        causal=True,
        window_size=(-1, -1) if row.form.window is None else (row.form.window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[None]


def layers_with_window(language: PretrainedConfig) -> int:
    """Return how many layers of a language model attend in a sliding window."""
    kinds = getattr(language, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    has_window = getattr(language, "sliding_window", None) is not None and getattr(language, "use_sliding_window", True)
    return language.num_hidden_layers if has_window else 0


def grows_with_square(attention: Attention, model: nn.Module) -> bool:
    """Return whether attention over packed rows has masks or scores of all pairs of a sample's tokens in memory: for
    attention sinks or a soft cap of scores, which FlashAttention lacks, and with SDPA for a sliding window."""
    config: Any = model.config
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    if has_sinks or getattr(config, "attn_logit_softcapping", None) is not None:
        return True
    return attention is Attention.sdpa and layers_with_window(config) > 0
