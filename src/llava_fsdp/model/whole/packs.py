"""Tell whether a whole model of transformers keeps the samples of a packed row apart."""

from __future__ import annotations

import copy
import functools

from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.packed_attention.packs import keep_frequencies, layers_out_of_reach, other_attention
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.whole.structure import base_of, language_of


def why_whole_not_packed(parts: Parts) -> str | None:
    """Return the reason why a model of transformers cannot be trained on packed rows: its language model would let the
    samples of a row see each other. Return None if it keeps them apart. To find out, the configuration is read
    (`parts.class_config`), and the language model runs once on the meta device, where its calls of attention are
    noted."""
    assert parts.class_config is not None
    return why_class_mixes_samples(ConfigKey(parts.class_config))


@functools.lru_cache(maxsize=64)
def why_class_mixes_samples(whole: ConfigKey) -> str | None:
    """Return why the language model of a whole model would mix the samples of a packed row, found out by building the
    model on the meta device; None if it keeps them apart. The answers for the last 64 configurations are cached:
    `whole` is a configuration that can be hashed. Raises ModelError if transformers cannot build the model."""
    tried = copy.deepcopy(whole.config)
    keep_frequencies(tried.get_text_config())
    model = language_of(base_of(whole_model_of(tried)).module)
    return other_attention(model.config, type(model)) or layers_out_of_reach(model)
