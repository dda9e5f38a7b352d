"""Tell whether a language model keeps the samples of a packed row apart, by its configuration and by a run on the meta
device."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

from llava_fsdp.config import Attention
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.experts import check_widths
from llava_fsdp.model.packed_attention.attention import (
    NAMES,
    RowSegments,
    attention_of_transformers,
    layers_with_window,
)
from llava_fsdp.model.packed_attention.dispatch_mode import CompilingMode
from llava_fsdp.model.packed_attention.row_mask import AttendedLayers, BoundaryMask, register_attention
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import library_errors


class NothingPacked(CompilingMode):
    """Dispatch mode for running a language model with padded rows on the meta device: every conversion of a tensor to a
    Python bool gives True. transformers makes such a conversion to find out whether the positions of a row are
    consecutive, so that the row has no packed samples (masking_utils.py, `find_packed_sequence_indices`)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def padded_attention(language: PretrainedConfig) -> str:
    """Return the name of the attention implementation for padded rows (one sample in each row): the one for packed rows
    if the model supports them, else transformers' own.

    With its own, transformers searches the position ids of every micro-batch for packed samples, and the host waits for
    the device.
    """
    return attention_of_transformers(language) if packing_refused(language) is not None else NAMES[Attention.sdpa]


def packing_refused(language: PretrainedConfig) -> str | None:
    """Return why a language model would mix the samples of a packed row; None if it keeps them apart. Its configuration
    is read, and it runs on the meta device. Raises ModelError if transformers cannot build it."""
    return other_attention(language) or why_samples_mix(ConfigKey(language))


@functools.lru_cache(maxsize=64)
def why_samples_mix(language: ConfigKey) -> str | None:
    """Return why a language model would mix the samples of a packed row, found by running it on the meta device; None
    if it keeps them apart. The answers for the last 64 configurations are cached: `language` can be hashed. Raises
    ModelError if transformers cannot build the model, or torch cannot multiply its experts."""
    register_attention()
    config = copy.deepcopy(language.config)
    keep_frequencies(config)
    with torch.device("meta"), library_errors(f"transformers cannot build a {config.model_type} model"):
        # set when the model is built, because some models choose the classes of their layers by it
        model = AutoModel.from_config(config, attn_implementation=NAMES[Attention.sdpa], trust_remote_code=False)
    check_widths(model)
    return layers_out_of_reach(model)


def refuse_packing(reason: str | None) -> None:
    """Raise ConfigError if there is a reason why a language model would mix the samples of a packed row."""
    if reason is not None:
        raise ConfigError(f"pack=true: {reason}; set pack=false, or auto")


def other_attention(language: PretrainedConfig, kind: type | None = None) -> str | None:
    """Return why, by its configuration, a language model would mix the samples of a packed row; None if it would not.
    Reasons: its attention is not computed through transformers' AttentionInterface, or is neither full causal attention
    nor causal attention in a sliding window. `kind`: the class of the language model; None: that of its
    configuration."""
    if not getattr(kind or MODEL_MAPPING[type(language)], "_supports_attention_backend", False):
        return (
            f"transformers' {language.model_type} does not attend through its AttentionInterface, so the samples of a "
            "row could not be kept apart"
        )
    supported = ("full_attention", "sliding_attention")
    kinds = sorted({kind for kind in getattr(language, "layer_types", None) or [] if kind not in supported})
    other = None
    if kinds:
        other = f"layers of {', '.join(kinds)}"
    elif getattr(language, "attention_chunk_size", None) is not None:
        other = f"chunks of {language.attention_chunk_size}"
    elif getattr(language, "alibi", False):
        other = "ALiBi biases"
    elif longrope_limit(language) is not None:
        other = "rotary frequencies (longrope) that depend on the longest sample of a batch"
    if other is None:
        return None
    return f"{language.model_type} has {other}, and a packed row needs causal attention within each sample"


def longrope_limit(language: PretrainedConfig) -> int | None:
    """Return the length in tokens above which a language model has other rotary frequencies (`rope_type=longrope`);
    None if they are the same for all lengths. transformers chooses the frequencies of a whole batch by its longest row.
    The configuration may have rotary embeddings for each kind of layer."""
    given = getattr(language, "rope_parameters", None) or {}
    kinds = [given, *(rope for rope in given.values() if isinstance(rope, dict))]
    limits = [
        rope.get("original_max_position_embeddings") or getattr(language, "original_max_position_embeddings", None) or 0
        for rope in kinds
        if rope.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def keep_frequencies(language: PretrainedConfig) -> None:
    """Change `rope_type=dynamic` in the configuration of a language model, in place, to `default`, for a run on the
    meta device.

    Both have the same rotary frequencies up to `max_position_embeddings` tokens (transformers modeling_rope_utils.py,
    `_compute_dynamic_ntk_parameters`), and samples are not longer. But `dynamic` reads the number of tokens from the
    positions, which have no values on the meta device.
    """
    given = getattr(language, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"
            rope.pop("factor", None)


def check_lengths(language: PretrainedConfig, longest: int, is_alone: bool) -> None:
    """Raise ConfigError if what a language model computes of a sample depends on the other samples of its micro-batch.
    `longest` is `data.max_length`; `is_alone` says whether each micro-batch has one sample."""
    limit = longrope_limit(language)
    if limit is not None and longest > limit and not is_alone:
        raise ConfigError(
            f"data.max_length={longest}: a {language.model_type} with rope_type=longrope has other rotary frequencies "
            f"above {limit} tokens (original_max_position_embeddings), and transformers chooses them by the longest "
            f"sample of a micro-batch, for all its samples; set data.max_length={limit} or less, or "
            "micro_batch_size=1"
        )


def in_bf16(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers, floats in bf16, which some kernels of mixtures of experts require."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in named}


def layers_out_of_reach(model: PreTrainedModel) -> str | None:
    """Run a language model on the meta device, on a packed row. Return why a layer would mix the samples: it mixes
    tokens outside llava_fsdp's attention implementation, or does not get the mask of the row. None if all layers keep
    the samples apart. The model cannot be used afterwards with another attention implementation."""
    config: Any = model.config
    mixers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)})
    if mixers:
        return f"{config.model_type} mixes neighbouring tokens ({', '.join(mixers)})"
    register_attention()
    config._attn_implementation = NAMES[Attention.sdpa]
    attended_layers: AttendedLayers = []
    try:
        with torch.no_grad(), torch.device("meta"):
            # one row of two tokens with two samples; tensors have no values on meta
            segments = RowSegments(torch.zeros((1, 2), dtype=torch.int64), torch.zeros(3, dtype=torch.int32), (1, 1))
            inputs = {
                "inputs_embeds": torch.zeros((1, 2, config.hidden_size), dtype=torch.bfloat16),
                "attention_mask": BoundaryMask.of(torch.ones((1, 2), dtype=torch.bool), segments, attended_layers),
                "position_ids": segments.position_ids,
                "use_cache": False,
            }
            functional_call(model, in_bf16(model), kwargs=inputs)
    except (ConfigError, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        return f"{config.model_type} does not run on a packed row ({' '.join(str(error).split())[:300]})"
    windows, expected = sum(window is not None for _, window in attended_layers), layers_with_window(config)
    if windows != expected:
        return f"{expected} layers of {config.model_type} attend in a sliding window, and {windows} of them do so here"
    if len({id(module) for module, _ in attended_layers}) != config.num_hidden_layers:
        return (
            f"{len(attended_layers)} of the {config.num_hidden_layers} layers of {config.model_type} attend through "
            "transformers' AttentionInterface, and the others would mix the samples of a row"
        )
    return None
