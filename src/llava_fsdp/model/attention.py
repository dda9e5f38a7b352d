"""Attention that keeps the samples of a packed row apart, and which models it can be had for.

Registered under our own names through transformers' `AttentionInterface`; an implementation that transformers has no
mask for gets none built (masking_utils.py, `_preprocess_mask_arguments`). Where each sample lies travels as keyword
arguments through the language model to every layer's attention.
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
    """Rows that go on behind what was read of them before: padded on the left, with keys and values kept."""

    position_ids: torch.Tensor
    """int64 [rows, length]"""
    mask: torch.Tensor
    """bool [rows, kept + length]: no padding, of what was read and of what comes now"""
    kept: Cache

    @property
    def allowed(self) -> torch.Tensor:
        """bool [rows, 1, length, kept + length]: which positions each attends to.

        Padding attends to itself: to nothing would be a division by zero, which its keys and values would spread.
        """
        length, whole = self.position_ids.shape[1], self.mask.shape[1]
        places = torch.arange(whole, device=self.mask.device)
        own = places[whole - length :, None]
        return ((places <= own) & self.mask[:, None] | (places == own))[:, None]


NAMES = {
    Attention.sdpa: "llava_fsdp_sdpa",
    Attention.varlen: "llava_fsdp_varlen",
    Attention.flash: "llava_fsdp_dao",  # a name with "flash" in it transformers takes for a kernel of the hub's
}
"""As transformers knows them."""
CURE = "set pack=false"


PADDED = "llava_fsdp_padded"
"""transformers' own SDPA for padded rows."""
OURS = frozenset({PADDED, *NAMES.values()})
"""For these transformers builds no mask."""


@dataclass(frozen=True)
class Kernel:
    """What attends, and why this."""

    attention: Attention
    reason: str

    @property
    def name(self) -> str:
        return NAMES[self.attention]


def choose_kernel(
    asked: Attention, language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype
) -> Kernel:
    """The kernel that `attention=` names, or the best that this machine has.

    Raises:
        ConfigError: the one that was asked for cannot run here.
    """
    missing = {Attention.varlen: varlen_missing, Attention.flash: flash_missing}
    if asked is Attention.auto:
        lack = varlen_missing(language, device, compute_dtype)
        if lack is None:
            return Kernel(Attention.varlen, "torch's varlen_attn")
        return Kernel(Attention.sdpa, f"SDPA a sample at a time: {lack}")
    lack = missing[asked](language, device, compute_dtype) if asked in missing else None
    if lack is not None:
        raise ConfigError(f"attention={asked.value}: {lack}; set attention=auto")
    return Kernel(asked, "as asked for")


def varlen_missing(language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why torch's varlen_attn cannot run; None where it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "varlen_attn")
    if lack is None and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen_attn"
    return lack


def flash_missing(language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot run; None where it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "flash-attn")
    if lack is None and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install llava-fsdp[flash])"
    return lack


def flash_kernel_missing(
    language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype, what: str
) -> str | None:
    """Why FlashAttention-2, which both wrap, cannot run."""
    if device.type != "cuda":
        return f"{what} needs CUDA, and this run is on {device.type}"
    lack = not_for_flash(language, compute_dtype, what)
    if lack is None and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{what} needs a GPU of compute capability 8.0"
    return lack


def not_for_flash(language: PretrainedConfig, compute_dtype: torch.dtype, what: str) -> str | None:
    """Why it cannot run this model, on any device."""
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
    """Make our names known to transformers; once or again is the same."""
    varlen = make_varlen() if importlib.util.find_spec("torch.nn.attention.varlen") is not None else None
    kernels = {Attention.sdpa: each_alone, Attention.varlen: varlen, Attention.flash: flash}
    for attention, kernel in kernels.items():
        if kernel is not None:
            AttentionInterface.register(NAMES[attention], attend_with(kernel))


def padded_attention(language: PretrainedConfig) -> str:
    """The implementation for padded rows: SDPA, under a name for which transformers builds no mask.

    Under its own name transformers looks at every micro-batch's positions for packed samples, for which the host waits
    for the device, to find that causal attention needs no mask. A model that attends otherwise keeps it.
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
    """Of a row's samples, on the host, so that no layer waits for the device.

    An object: a tuple among the arguments of a compiled layer would compile it anew for every number of samples.
    """

    each: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class Row:
    """How the samples of a packed row lie, and how its layer attends."""

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
            visits: takes the module, for `check_reaches_all_layers`.
        """
        refuse_other_attention(module, others, attention_mask)
        if cu_seqlens is None or segment_lengths is None:
            return sdpa_attention_forward(module, query, key, value, allowed, dropout=dropout, scaling=scaling)
        if visits is not None:
            visits.append(module)
        return kernel(module, query, key, value, Row(cu_seqlens, segment_lengths, scaling, dropout)), None

    return attend


CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "sinks")
"""What layers of some models hand to their attention, and ours does not do."""


def refuse_other_attention(module: nn.Module, others: dict[str, Any], mask: torch.Tensor | None) -> None:
    if mask is not None:  # transformers builds none for an implementation of our names
        raise ConfigError(f"pack=true: {type(module).__name__} attends with a mask of its model's own; {CURE}")
    for name in CHANGES_ATTENTION:
        if others.get(name) is not None:
            raise ConfigError(f"pack=true: {type(module).__name__} attends with {name}, which packed rows lack; {CURE}")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ConfigError(f"pack=true: {type(module).__name__} attends to what comes later; {CURE}")


@torch.compiler.disable(recursive=True)  # else it would be compiled anew for all lengths of samples
def each_alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row
) -> torch.Tensor:
    """Exact: transformers' own SDPA call for every sample.

    Split once: the backward of a slice fills a whole row with zeros, for every sample again.
    """
    options = {"dropout": row.dropout, "scaling": row.scaling}
    parts = zip(*(part.split(row.lengths.each, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in parts], dim=1)


def make_varlen() -> Attend:
    """torch's varlen_attn with the arguments that this version has.

    2.11 lacks `enable_gqa`, 2.10 had `is_causal` where later ones have a window that looks back alone.
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
        found = varlen_attn(q, k, v, row.cu_seqlens, row.cu_seqlens, longest, longest, **options)
        assert isinstance(found, torch.Tensor), "it gives more only where it is asked for more"
        return found[None]

    return varlen


def flash(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row) -> torch.Tensor:
    """flash-attn's kernel."""
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


def told(segments: Segments | Continued | None, attention: str | None = None) -> dict[str, Any]:
    """Keyword arguments of a language model's forward pass; none for padded rows.

    Args:
        attention: the model's implementation: one of ours takes a mask from us, for another transformers makes it.
    """
    if segments is None:
        return {}
    if isinstance(segments, Continued):
        masks = {"allowed": segments.allowed} if attention in OURS else {"attention_mask": segments.mask.long()}
        kept = {"past_key_values": segments.kept, "use_cache": True}
        return {"position_ids": segments.position_ids, **kept, **masks}
    position_ids, cu_seqlens, lengths = segments
    return {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "segment_lengths": Lengths(lengths, max(lengths))}


def check_full_attention(language: PretrainedConfig) -> None:
    """Every layer attends to the whole sample and to nothing beside it, as far as the configuration says.

    Raises:
        ConfigError: naming what the model has instead.
    """
    if not getattr(MODEL_MAPPING[type(language)], "_supports_attention_backend", False):
        raise ConfigError(
            f"pack=true: transformers' {language.model_type} does not attend through its AttentionInterface, so the "
            f"samples of a row could not be kept apart; {CURE}"
        )
    kinds = sorted({kind for kind in getattr(language, "layer_types", None) or [] if kind != "full_attention"})
    window = getattr(language, "sliding_window", None)
    rope = getattr(language, "rope_parameters", None) or {}
    found = None
    if kinds:
        found = f"layers of {', '.join(kinds)}"
    elif window is not None and getattr(language, "use_sliding_window", True):
        found = f"a sliding window of {window}"
    elif getattr(language, "attention_chunk_size", None) is not None:
        found = f"chunks of {language.attention_chunk_size}"
    elif getattr(language, "alibi", False):
        found = "ALiBi biases"
    elif rope.get("rope_type") == "longrope":
        found = "rotary frequencies (longrope) that depend on the longest sample of a batch"
    if found is not None:
        raise ConfigError(
            f"pack=true: {language.model_type} has {found}, and a packed row needs full attention within each sample; "
            f"{CURE}"
        )


def check_reaches_all_layers(model: PreTrainedModel) -> None:
    """Run two samples of a position each through a language model on the meta device, and count the layers told.

    Raises:
        ConfigError: a layer mixes positions without our attention, or without being told where samples lie.
    """
    config: Any = model.config
    mixers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)})
    if mixers:
        raise ConfigError(f"pack=true: {config.model_type} mixes neighbouring positions ({', '.join(mixers)}); {CURE}")
    visits: list[nn.Module] = []
    segments = torch.zeros((1, 2), dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32), (1, 1)
    shown = {"inputs_embeds": torch.zeros((1, 2, config.hidden_size), dtype=torch.bfloat16), "use_cache": False}
    # in bf16, which some kernels of mixtures of experts insist on
    weights = {
        n: t.bfloat16() if t.is_floating_point() else t
        for n, t in itertools.chain(model.named_parameters(), model.named_buffers())
    }
    try:
        with torch.no_grad(), torch.device("meta"):
            functional_call(model, weights, kwargs={**shown, **told(segments), "visits": visits})
    except (TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"pack=true: {config.model_type} could not be tried on a packed row ({error}); {CURE}"
        ) from error
    if len({id(module) for module in visits}) != config.num_hidden_layers:
        raise ConfigError(
            f"pack=true: {len(visits)} of the {config.num_hidden_layers} layers of {config.model_type} attend through "
            f"transformers' AttentionInterface, and the others would mix the samples of a row; {CURE}"
        )
