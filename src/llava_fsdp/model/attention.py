"""Attention for packed rows, in which each sample attends only to itself; and checks that a language model supports it.

The implementations are registered with transformers' `AttentionInterface` under llava_fsdp's own names. For these names
transformers builds no mask (masking_utils.py, `_preprocess_mask_arguments`). The sample boundaries are passed as
keyword arguments through the language model to the attention of every layer.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_MAPPING, AttentionInterface, AutoModel, Cache, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llava_fsdp.config import Attention
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.safe_load import foreign

Segments = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]
"""Sample boundaries of a packed row: position_ids int64 [1, tokens], cu_seqlens int32 [samples + 1], and the samples'
lengths."""


@dataclass(frozen=True, eq=False)
class Continued:
    """Input for generation: new tokens of rows whose earlier tokens are in a key-value cache. Rows are padded on the
    left."""

    position_ids: torch.Tensor
    """Positions of the new tokens, int64 [rows, length]."""
    mask: torch.Tensor
    """False at padding tokens, bool [rows, cached + length]."""
    kept: Cache

    @property
    def allowed(self) -> torch.Tensor:
        """Attention mask, bool [rows, 1, length, cached + length]: True at the token itself and at earlier tokens that
        are not padding.

        A padding token attends to itself too, because attending to nothing gives NaN.
        """
        length, total = self.position_ids.shape[1], self.mask.shape[1]
        keys = torch.arange(total, device=self.mask.device)
        queries = keys[total - length :, None]
        return ((keys <= queries) & self.mask[:, None] | (keys == queries))[:, None]


NAMES = {
    Attention.sdpa: "llava_fsdp_each_alone",
    Attention.varlen: "llava_fsdp_varlen",
    Attention.flash: "llava_fsdp_dao",  # transformers would look up a name with "flash" on the hub
}
"""Names under which llava_fsdp's attention implementations for packed rows are registered in transformers'
AttentionInterface."""
PADDED = "llava_fsdp_padded"
"""Name of llava_fsdp's attention implementation for padded rows. It calls transformers' SDPA, but transformers builds
no mask for it."""
OURS = frozenset({PADDED, *NAMES.values()})
"""Names of llava_fsdp's attention implementations, for which transformers builds no mask."""


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
    one that can run this model on this device in this dtype.

    Raises:
        ConfigError: the named implementation cannot run this model here.
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
    """Return why torch's varlen_attn cannot run this model on this device in this dtype; None if it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "varlen_attn")
    if lack is None and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen_attn"
    return lack


def flash_missing(language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Return why the flash-attn package cannot run this model on this device in this dtype; None if it can."""
    lack = flash_kernel_missing(language, device, compute_dtype, "flash-attn")
    if lack is None and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install llava-fsdp[flash])"
    return lack


def flash_kernel_missing(
    language: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype, what: str
) -> str | None:
    """Return why FlashAttention-2 cannot run this model on this device in this dtype; None if it can. The message names
    `what`: varlen_attn or flash-attn, which both run FlashAttention-2."""
    if device.type != "cuda":
        return f"{what} needs CUDA, and this run is on {device.type}"
    lack = not_for_flash(language, compute_dtype, what)
    if lack is None and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{what} needs a GPU of compute capability 8.0"
    return lack


def not_for_flash(language: PretrainedConfig, compute_dtype: torch.dtype, what: str) -> str | None:
    """Return why FlashAttention-2 cannot run this model in this dtype on any GPU; None if it can. The message names
    `what`: varlen_attn or flash-attn, which both run FlashAttention-2; only flash-attn has dropout."""
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


def register_attention() -> None:
    """Register llava_fsdp's attention implementations with transformers; calling this again changes nothing."""
    varlen = make_varlen() if importlib.util.find_spec("torch.nn.attention.varlen") is not None else None
    kernels = {Attention.sdpa: each_alone, Attention.varlen: varlen, Attention.flash: flash}
    for attention, kernel in kernels.items():
        if kernel is not None:
            AttentionInterface.register(NAMES[attention], attend_with(kernel))


def padded_attention(language: PretrainedConfig) -> str:
    """Return the name of the attention implementation for padded rows: `PADDED`, for which transformers builds no mask,
    where every layer has full causal attention and leaves it to the implementation; otherwise transformers' "sdpa" or,
    where a model has none, "eager".

    With "sdpa" and "eager", transformers searches the position ids of every micro-batch for packed samples, for which
    the host waits for the device.
    """
    if attention_of_transformers(language) == "eager":
        return "eager"
    if layers_with_window(language) or packing_refused(language) is not None:
        return "sdpa"
    AttentionInterface.register(PADDED, attend_padded)
    return PADDED


class NothingPacked(TorchDispatchMode):
    """Dispatch mode for running a language model with padded rows on the meta device, whose tensors have no values.
    Transformers asks whether all positions follow each other, so that a row has no packed samples
    (masking_utils.py, `find_packed_sequence_indices`). The answer, as to any question of yes or no, is yes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def attention_of_transformers(language: PretrainedConfig) -> str:
    """Return the name of transformers' own attention implementation for a language model: "sdpa", or "eager" if it has
    no SDPA for it."""
    has_softcap = getattr(language, "attn_logit_softcapping", None) is not None  # older releases' SDPA ignores it
    has_sdpa = getattr(MODEL_MAPPING[type(language)], "_supports_sdpa", False)
    return "sdpa" if has_sdpa and not has_softcap else "eager"


def attend_padded(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    allowed: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention with transformers' SDPA, for padded rows or for generation with a key-value cache.

    Args:
        allowed: the mask for generation (`Continued.allowed`); None for padded rows.
    """
    return sdpa_attention_forward(module, query, key, value, attention_mask if allowed is None else allowed, **others)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the samples in a packed row, kept on the host so that no layer waits for the device.

    This is a class, because torch.compile would recompile a layer for every number of samples if it got a tuple.
    """

    each: tuple[int, ...]
    longest: int


@dataclass(frozen=True)
class Form:
    """How a layer's attention is computed, besides being causal."""

    scaling: float | None = None
    """Factor of the scores; None: one over the square root of the head's size."""
    dropout: float = 0.0
    window: int | None = None
    """Number of latest tokens, the token itself included, that a token attends to; None: all."""
    softcap: float | None = None
    """Scores are limited to this size by tanh (Gemma 2, arXiv:2408.00118 section 2); None: no limit."""
    sinks: torch.Tensor | None = None
    """Scores of a further token without a value, [heads], which takes part in each softmax (GPT-OSS); None: none."""

    @property
    def is_plain(self) -> bool:
        """Whether transformers' SDPA, given a mask, can compute it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Row:
    """Sample boundaries of a packed row, and the form of a layer's attention."""

    cu_seqlens: torch.Tensor
    """Cumulative sample lengths, int32 [samples + 1]."""
    lengths: Lengths
    form: Form


Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Row], torch.Tensor]
"""Attention over a packed row: (module, query, key, value, row) -> [1, tokens, heads, size]; query, key and value are
[1, heads, tokens, size]."""


def attend_with(kernel: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        segment_lengths: Lengths | None = None,
        visits: list[tuple[nn.Module, int | None]] | None = None,
        allowed: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute a layer's attention: for a packed row, causal attention within each sample; for other rows, causal
        attention.

        Args:
            sliding_window, softcap, s_aux: `window`, `softcap` and `sinks` of `Form`, as transformers calls them.
            allowed: the mask for generation with a key-value cache (`Continued.allowed`).
            visits: list to which `module` and its window are appended if it gets a packed row; None: nothing is
                recorded.
        """
        refuse_other_attention(module, others, attention_mask)
        form = Form(scaling, dropout, sliding_window, softcap, s_aux)
        if cu_seqlens is None or segment_lengths is None:
            return attend_alone(module, query, key, value, form, allowed), None
        if visits is not None:
            visits.append((module, sliding_window))
        chosen = kernel if form.is_plain else each_alone  # no other kernel has soft caps and sinks
        return chosen(module, query, key, value, Row(cu_seqlens, segment_lengths, form)), None

    return attend


def attend_alone(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: Form,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of rows that hold one sample each, [rows, tokens, heads, size].

    Args:
        query: [rows, heads, tokens, size]; of the last tokens only, if `key` and `value` have earlier ones too.
        allowed: mask, bool [rows, 1, tokens, all earlier tokens and these]; a cache may hold fewer of the earlier ones.
    """
    length, total = query.shape[2], key.shape[2]
    if allowed is not None:
        allowed = allowed[..., allowed.shape[-1] - total :]
    if form.window is not None and total > form.window:
        within = in_window(length, total, form.window, query.device)
        allowed = within if allowed is None else allowed & within
    if form.is_plain:
        options = {"dropout": form.dropout, "scaling": form.scaling}
        return sdpa_attention_forward(module, query, key, value, allowed, **options)[0]
    if allowed is None:
        allowed = in_window(length, total, total, query.device)
    return attend_in_steps(query, key, value, form, allowed)


def in_window(length: int, total: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the last `length` of `total` tokens, bool [length, total]: True at the token itself and at the
    `window - 1` tokens before it."""
    keys = torch.arange(total, device=device)
    distance = keys[total - length :, None] - keys
    return (distance >= 0) & (distance < window)


def attend_in_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Form, allowed: torch.Tensor
) -> torch.Tensor:
    """Compute attention as transformers' eager implementations of Gemma 2 and GPT-OSS do, with the softmax in fp32,
    [rows, tokens, heads, size]. It holds the scores of all pairs of tokens."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if form.scaling is None else form.scaling)
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.float().masked_fill(~allowed, -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    shares = nn.functional.dropout(shares.to(value.dtype), p=form.dropout)
    return (shares @ value).transpose(1, 2).contiguous()


CHANGES_ATTENTION = ("position_bias", "sinks")
"""Names of arguments that some models' layers pass to their attention, and that llava_fsdp's implementations do not
support."""


def refuse_other_attention(module: nn.Module, others: dict[str, Any], mask: torch.Tensor | None) -> None:
    if mask is not None:  # transformers builds no mask for our implementations
        raise ConfigError(f"{type(module).__name__} attends with a mask of its own")
    for name in CHANGES_ATTENTION:
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} attends with {name}, which packed rows lack")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ConfigError(f"{type(module).__name__} attends to later tokens")


@torch.compiler.disable(recursive=True)  # it would be recompiled for every combination of lengths
def each_alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row
) -> torch.Tensor:
    """Compute the attention of a packed row sample by sample, with transformers' SDPA where that can compute it.

    The row is divided with `split`: with slices, the backward pass would fill a whole row with zeros for every sample.
    """
    parts = zip(*(part.split(row.lengths.each, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([attend_alone(module, q, k, v, row.form) for q, k, v in parts], dim=1)


def make_varlen() -> Attend:
    """Return an attention implementation that calls torch's varlen_attn, whose arguments depend on torch's version.

    In torch 2.11 it has no `enable_gqa`; in 2.10 it has `is_causal` instead of `window_size`.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    has_window, has_scale, has_groups = "window_size" in known, "scale" in known, "enable_gqa" in known

    def varlen(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: Row
    ) -> torch.Tensor:
        form = row.form
        assert not form.dropout, "choose_kernel refuses it"
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
        dropout_p=row.form.dropout,
        softmax_scale=row.form.scaling,
        causal=True,
        window_size=(-1, -1) if row.form.window is None else (row.form.window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[None]


def attention_arguments(segments: Segments | Continued | None, implementation: str | None = None) -> dict[str, Any]:
    """Return the keyword arguments that a language model's forward pass needs for packed rows or for generation with a
    key-value cache; none for padded rows.

    Args:
        implementation: name of the model's attention implementation. If it is one of llava_fsdp's, the mask for
            generation is built here, otherwise by transformers.
    """
    if segments is None:
        return {}
    if isinstance(segments, Continued):
        masks = {"allowed": segments.allowed} if implementation in OURS else {"attention_mask": segments.mask.long()}
        kept = {"past_key_values": segments.kept, "use_cache": True}
        return {"position_ids": segments.position_ids, **kept, **masks}
    position_ids, cu_seqlens, lengths = segments
    return {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "segment_lengths": Lengths(lengths, max(lengths))}


def packing_refused(language: PretrainedConfig) -> str | None:
    """Return why the samples of a packed row could not be kept apart in a language model; None if they can.

    Reads the configuration, and runs the model once on the meta device.

    Raises:
        ModelError: transformers cannot build the model.
    """
    reason = other_attention(language)
    if reason is not None:
        return reason
    register_attention()
    with torch.device("meta"), foreign(f"transformers cannot build a {language.model_type} model"):
        model = AutoModel.from_config(
            copy.deepcopy(language), attn_implementation=NAMES[Attention.sdpa], trust_remote_code=False
        )
    return layers_out_of_reach(model)


def other_attention(language: PretrainedConfig) -> str | None:
    """Return which attention of a language model's configuration is not causal within each sample, in full or in a
    sliding window, so that the samples of a packed row could not be kept apart; None if there is none."""
    if not getattr(MODEL_MAPPING[type(language)], "_supports_attention_backend", False):
        return (
            f"transformers' {language.model_type} does not attend through its AttentionInterface, so the samples of a "
            "row could not be kept apart"
        )
    known = ("full_attention", "sliding_attention")
    kinds = sorted({kind for kind in getattr(language, "layer_types", None) or [] if kind not in known})
    rope = getattr(language, "rope_parameters", None) or {}
    other = None
    if kinds:
        other = f"layers of {', '.join(kinds)}"
    elif getattr(language, "attention_chunk_size", None) is not None:
        other = f"chunks of {language.attention_chunk_size}"
    elif getattr(language, "alibi", False):
        other = "ALiBi biases"
    elif rope.get("rope_type") == "longrope":
        other = "rotary frequencies (longrope) that depend on the longest sample of a batch"
    if other is None:
        return None
    return f"{language.model_type} has {other}, and a packed row needs causal attention within each sample"


def in_bf16(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers in bf16, which some kernels of mixtures of experts require."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in named}


def layers_with_window(language: PretrainedConfig) -> int:
    """Return how many layers of a language model attend in a sliding window, as its configuration says."""
    kinds = getattr(language, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds)
    has_window = getattr(language, "sliding_window", None) is not None and getattr(language, "use_sliding_window", True)
    return language.num_hidden_layers if has_window else 0


def layers_out_of_reach(model: PreTrainedModel) -> str | None:
    """Run a language model of the meta device on a packed row. Return why a layer would mix the samples of a row: it
    mixes tokens outside llava_fsdp's attention implementation, or does not get the sample boundaries. None if all
    layers keep them apart."""
    config: Any = model.config
    mixers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)})
    if mixers:
        return f"{config.model_type} mixes neighbouring tokens ({', '.join(mixers)})"
    visits: list[tuple[nn.Module, int | None]] = []
    weights = in_bf16(model)
    try:
        with torch.no_grad(), torch.device("meta"):
            segments = torch.zeros((1, 2), dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32), (1, 1)
            embeds = torch.zeros((1, 2, config.hidden_size), dtype=torch.bfloat16)
            inputs = {"inputs_embeds": embeds, "use_cache": False}
            functional_call(model, weights, kwargs={**inputs, **attention_arguments(segments), "visits": visits})
    except (ConfigError, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        return f"{config.model_type} does not run on a packed row ({error})"
    windows, expected = sum(window is not None for _, window in visits), layers_with_window(config)
    if windows != expected:
        return (
            f"{expected} layers of {config.model_type} attend in a sliding window, and {windows} of them pass it to "
            "their attention"
        )
    if len({id(module) for module, _ in visits}) != config.num_hidden_layers:
        return (
            f"{len(visits)} of the {config.num_hidden_layers} layers of {config.model_type} attend through "
            "transformers' AttentionInterface, and the others would mix the samples of a row"
        )
    return None
