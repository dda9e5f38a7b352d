"""Tell whether a whole model of transformers keeps the samples of a packed row apart."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from llava_fsdp.config import Attention
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.packed_attention.attention import in_bf16, keep_frequencies, other_attention
from llava_fsdp.model.packed_attention.row_mask import BoundaryMask, rows_name
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.whole.structure import base_of, language_of
from llava_fsdp.runtime.errors import ConfigError


def packs(parts: Parts) -> str | None:
    """Return why the language model of a whole model would mix the samples of a packed row; None if it keeps them
    apart. Its configuration is read, and it runs on the meta device."""
    assert parts.class_config is not None
    return layers_without_mask(ConfigKey(parts.class_config))


@functools.lru_cache(maxsize=64)
def layers_without_mask(whole: ConfigKey) -> str | None:
    """Run the language model of a whole model on the meta device, on a row of two samples. Return why a layer would mix
    them: it mixes tokens outside of its attention, or does not get the row's mask. None if all layers attend with it.
    The answers for the last 64 configurations are cached. Raises ModelError if transformers cannot build the model."""
    tried = copy.deepcopy(whole.config)
    keep_frequencies(tried.get_text_config())
    model: Any = language_of(base_of(whole_model_of(tried)).module)
    config, visits = model.config, list[nn.Module]()
    refused = other_attention(config, type(model))
    mixers = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)})
    if refused is not None or mixers:
        return refused or f"{config.model_type} mixes neighbouring tokens ({', '.join(mixers)})"
    config._attn_implementation = rows_name(Attention.sdpa)
    try:
        with torch.no_grad(), torch.device("meta"):
            segments = torch.zeros((1, 2), dtype=torch.int64), torch.zeros(3, dtype=torch.int32), (1, 1)
            inputs = {
                "inputs_embeds": torch.zeros((1, 2, config.hidden_size), dtype=torch.bfloat16),
                "attention_mask": BoundaryMask.of(segments[0], segments, visits),
                "position_ids": segments[0],
                "use_cache": False,
            }
            functional_call(model, in_bf16(model), kwargs=inputs)
    except (ConfigError, TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        return f"{config.model_type} does not run on a packed row ({' '.join(str(error).split())[:300]})"
    if len({id(module) for module in visits}) != config.num_hidden_layers:
        return (
            f"{len(visits)} of the {config.num_hidden_layers} layers of {config.model_type} attend with the mask of a "
            "packed row"
        )
    return None
