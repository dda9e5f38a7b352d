"""Attention within each sample of a packed row, and checks that a language model can use it.

The implementations are registered with transformers' `AttentionInterface` under our own names, for which transformers
builds no mask (masking_utils.py, `_preprocess_mask_arguments`). The boundaries of samples are passed as keyword
arguments through the language model to the attention of every layer.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import MODEL_MAPPING, AttentionInterface, Cache, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llava_fsdp.config import Attention
from llava_fsdp.runtime.errors import ConfigError

Segments = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]
"""position_ids int64 [1, tokens], cu_seqlens int32 [samples + 1], lengths of the samples"""


@dataclass(frozen=True, eq=False)
class Continued:
    """Continuation of rows, padded on the left, whose earlier keys and values are in a cache."""

    position_ids: torch.Tensor
    """int64 [rows, length]"""
    mask: torch.Tensor
    """bool [rows, cached + length]: False at padding"""
    kept: Cache

    @property
    def allowed(self) -> torch.Tensor:
        """Causal mask without padding, bool [rows, 1, length, cached + length].

        A padding token attends to itself, because attending to nothing gives NaN.
        """
        length, total = self.position_ids.shape[1], self.mask.shape[1]
        keys = torch.arange(total, device=self.mask.device)
        queries = keys[total - length :, None]
        return ((keys <= queries) & self.mask[:, None] | (keys == queries))[:, None]


NAMES = {
    Attention.sdpa: "llava_fsdp_sdpa",
    Attention.varlen: "llava_fsdp_varlen",
    Attention.flash: "llava_fsdp_dao",  # transformers takes a name with "flash" for a kernel of the hub
}
"""Names in transformers' AttentionInterface."""
CURE = "set pack=false"
PADDED = "llava_fsdp_padded"
"""SDPA of transformers for padded rows, without its masks."""
OURS = frozenset({PADDED, *NAMES.values()})
"""Implementations for which transformers builds no mask."""


@dataclass(frozen=True)
class Kernel:
    """The chosen attention implementation, and the reason."""

    attention: Attention
    reason: str

    @property
    def name(self) -> str:
        return NAMES[self.attention]


def choose_kernel(
    attention: Attention, language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype
) -> Kernel:
    """The kernel that `attention=` names, or with `auto` the best one for this machine.

    Raises:
        ConfigError: the named kernel cannot run here.
    """
    if attention is Attention.auto:
        lack = varlen_missing(language, device, compute_dtype)
        if lack is None:
            return Kernel(Attention.varlen, "torch's varlen_attn")
        return Kernel(Attention.sdpa, f"SDPA a sample at a time: {lack}")
    missing = {Attention.varlen: varlen_missing, Attention.flash: flash_missing}.get(attention)
    lack = missing(language, device, compute_dtype) if missing is not None else None
    if lack is not None:
        raise ConfigError(f"attention={attention.value}: {lack}; set attention=auto")
    return Kernel(attention, "as configured")


def varlen_missing(language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why torch's varlen_attn cannot run; None if it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "varlen_attn")
    if lack is None and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen_attn"
    return lack


def flash_missing(language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot run; None if it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "flash-attn")
    if lack is None and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install llava-fsdp[flash])"
    return lack


def flash_kernel_missing(
    language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype, what: str
) -> str | None:
    """Why FlashAttention-2, which both wrap, cannot run; None if it can."""
    if device.type != "cuda":
        return f"{what} needs CUDA, and this run is on {device.type}"
    lack = not_for_flash(language, compute_dtype, what)
    if lack is None and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{what} needs a GPU of compute capability 8.0"
    return lack


def not_for_flash(language: PretrainedConfig, compute_dtype: torch.dtype, what: str) -> str | None:
    """Why FlashAttention-2 cannot run this model on any device; None if it can."""
    if compute_dtype not in (torch.bfloat16, torch.float16):
        return f"{what} computes in 16 bits, and this run in {str(compute_dtype).removeprefix('torch.')}"
    head = head_size(language)
    if head % 8 or head > 256:
        return f"{what} takes heads of a multiple of 8 up to 256, and this model's are {head} wide"
    if getattr(language, "attention_dropout", 0.0) and what == "varlen_attn":
        return f"varlen_attn has no dropout, and this model an attention_dropout of {language.attention_dropout}"
    return None


def head_size(language: PretrainedConfig) -> int:
    return getattr(language, "head_dim", None) or language.hidden_size // language.num_attention_heads


def register_attention() -> None:
    """Register our implementations with transformers; calling it again does no harm."""
    varlen = make_varlen() if importlib.util.find_spec("torch.nn.attention.varlen") is not None else None
    kernels = {Attention.sdpa: each_alone, Attention.varlen: varlen, Attention.flash: flash}
    for attention, kernel in kernels.items():
        if kernel is not None:
            AttentionInterface.register(NAMES[attention], attend_with(kernel))


def padded_attention(language: PretrainedConfig) -> str:
    """Name of the implementation for padded rows: SDPA, under a name for which transformers builds no mask.

    Under the name "sdpa" transformers searches the positions of every micro-batch for packed samples, for which the
    host waits for the device. A model whose attention is not causal over the whole sample keeps "sdpa".
    """
    try:
        check_full_attention(language)
    except ConfigError:
        return "sdpa"
    AttentionInterface.register(PADDED, attend_padded)
    return PADDED


def attend_padded(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    allowed: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """
    Args:
        allowed: `Continued.allowed`.
    """
    return sdpa_attention_forward(module, query, key, value, attention_mask if allowed is None else allowed, **others)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a row's samples, on the host, so that no layer waits for the device.

    An object, because a tuple in the arguments of a compiled layer would recompile it for every number of samples.
    """

    each: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class Row:
    """Sample boundaries of a packed row, and options of the layer's attention."""

    cu_seqlens: torch.Tensor
    """int32 [samples + 1]"""
    lengths: Lengths
    scaling: float | None
    dropout: float


Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Row], torch.Tensor]
"""(module, query, key, value, row) -> [1, tokens, heads, size]; query, key and value are [1, heads, tokens, size]"""


def attend_with(kernel: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        cu_seqlens: torch.Tensor | None = None,
        segment_lengths: Lengths | None = None,
        visits: list[nn.Module] | None = None,
        allowed: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """One layer's attention, causal within every sample; padded rows are plain causal attention.

        Args:
            allowed: `Continued.allowed`.
            visits: collects the modules that are called, for `check_reaches_all_layers`.
        """
        refuse_other_attention(module, others, attention_mask)
        if cu_seqlens is None or segment_lengths is None:
            return sdpa_attention_forward(module, query, key, value, allowed, dropout=dropout, scaling=scaling)
        if visits is not None:
            visits.append(module)
        return kernel(module, query, key, value, Row(cu_seqlens, segment_lengths, scaling, dropout)), None

    return attend


CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "sinks")
"""Arguments that layers of some models pass to their attention, and that ours does not support."""


def refuse_other_attention(module: nn.Module, others: dict[str, Any], mask: torch.Tensor | None) -> None:
    if mask is not None:  # transformers builds none for an implementation of our names
        raise ConfigError(f"pack=true: {type(module).__name__} attends with a mask of its own; {CURE}")
    for name in CHANGES_ATTENTION:
        if others.get(name) is not None:
            raise ConfigError(f"pack=true: {type(module).__name__} attends with {name}, which packed rows lack; {CURE}")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ConfigError(f"pack=true: {type(module).__name__} attends to later tokens; {CURE}")


@torch.compiler.disable(recursive=True)  # it would be recompiled for every combination of lengths
def each_alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row
) -> torch.Tensor:
    """Attention by one SDPA call of transformers for each sample.

    `split`, because the backward pass of a slice would fill a whole row with zeros for every sample.
    """
    options = {"dropout": row.dropout, "scaling": row.scaling}
    parts = zip(*(part.split(row.lengths.each, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in parts], dim=1)


def make_varlen() -> Attend:
    """torch's varlen_attn with the arguments of the installed version.

    2.11 has no `enable_gqa`; 2.10 has `is_causal` instead of a window.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    has_scale, has_groups = "scale" in known, "enable_gqa" in known

    def varlen(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row
    ) -> torch.Tensor:
        assert not row.dropout, "choose_kernel refuses it"
        options = dict(causal)
        if has_scale:
            options["scale"] = row.scaling
        elif row.scaling is not None:
            query = query * (row.scaling * query.shape[-1] ** 0.5)
        groups = query.shape[1] // key.shape[1]
        if has_groups:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [tokens, heads, size]
        longest = row.lengths.longest
        output = varlen_attn(q, k, v, row.cu_seqlens, row.cu_seqlens, longest, longest, **options)
        assert isinstance(output, torch.Tensor)
        return output[None]

    return varlen


def flash(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    parts = [part[0].transpose(0, 1) for part in (query, key, value)]  # [tokens, heads, size]
    longest = row.lengths.longest
    return flash_attn_varlen_func(
        *parts,
        row.cu_seqlens,
        row.cu_seqlens,
        longest,
        longest,
        dropout_p=row.dropout,
        softmax_scale=row.scaling,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[None]


def attention_arguments(segments: Segments | Continued | None, implementation: str | None = None) -> dict[str, Any]:
    """Keyword arguments of a language model's forward pass for packed or continued rows; empty for padded rows.

    Args:
        implementation: name of the model's attention; for ours, we build the mask of continued rows.
    """
    if segments is None:
        return {}
    if isinstance(segments, Continued):
        masks = {"allowed": segments.allowed} if implementation in OURS else {"attention_mask": segments.mask.long()}
        kept = {"past_key_values": segments.kept, "use_cache": True}
        return {"position_ids": segments.position_ids, **kept, **masks}
    position_ids, cu_seqlens, lengths = segments
    return {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "segment_lengths": Lengths(lengths, max(lengths))}


def check_full_attention(language: PretrainedConfig) -> None:
    """Check by the configuration that every layer has full causal attention.

    Raises:
        ConfigError: a layer has another kind of attention.
    """
    if not getattr(MODEL_MAPPING[type(language)], "_supports_attention_backend", False):
        raise ConfigError(
            f"pack=true: transformers' {language.model_type} does not attend through its AttentionInterface, so the "
            f"samples of a row could not be kept apart; {CURE}"
        )
    kinds = sorted({kind for kind in getattr(language, "layer_types", None) or [] if kind != "full_attention"})
    window = getattr(language, "sliding_window", None)
    rope = getattr(language, "rope_parameters", None) or {}
    other = None
    if kinds:
        other = f"layers of {', '.join(kinds)}"
    elif window is not None and getattr(language, "use_sliding_window", True):
        other = f"a sliding window of {window}"
    elif getattr(language, "attention_chunk_size", None) is not None:
        other = f"chunks of {language.attention_chunk_size}"
    elif getattr(language, "alibi", False):
        other = "ALiBi biases"
    elif rope.get("rope_type") == "longrope":
        other = "rotary frequencies (longrope) that depend on the longest sample of a batch"
    if other is not None:
        raise ConfigError(
            f"pack=true: {language.model_type} has {other}, and a packed row needs full attention within each sample; "
            f"{CURE}"
        )


def check_reaches_all_layers(model: PreTrainedModel) -> None:
    """Run a packed row through a language model on the meta device, and count the layers that separate its samples.

    Raises:
        ConfigError: a layer mixes tokens without our attention, or without the boundaries of samples.
    """
    config: Any = model.config
    mixers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)})
    if mixers:
        raise ConfigError(f"pack=true: {config.model_type} mixes neighbouring tokens ({', '.join(mixers)}); {CURE}")
    visits: list[nn.Module] = []
    segments = torch.zeros((1, 2), dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32), (1, 1)
    inputs = {"inputs_embeds": torch.zeros((1, 2, config.hidden_size), dtype=torch.bfloat16), "use_cache": False}
    # in bf16, which some kernels of mixtures of experts require
    weights = {
        n: t.bfloat16() if t.is_floating_point() else t
        for n, t in itertools.chain(model.named_parameters(), model.named_buffers())
    }
    try:
        with torch.no_grad(), torch.device("meta"):
            functional_call(model, weights, kwargs={**inputs, **attention_arguments(segments), "visits": visits})
    except (TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"pack=true: {config.model_type} does not run on a packed row ({error}); {CURE}") from error
    if len({id(module) for module in visits}) != config.num_hidden_layers:
        raise ConfigError(
            f"pack=true: {len(visits)} of the {config.num_hidden_layers} layers of {config.model_type} attend through "
            f"transformers' AttentionInterface, and the others would mix the samples of a row; {CURE}"
        )
