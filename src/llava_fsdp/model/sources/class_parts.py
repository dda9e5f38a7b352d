"""Read the folder of a vision-language model that is trained as its class in transformers has it."""

import copy
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from llava_fsdp.model.logit_change import VISION_LANGUAGE
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.weights.conversions import has_tied_weights, is_vision_language_model, whole_model_of
from llava_fsdp.runtime.errors import ModelError


def class_parts(config: PretrainedConfig, folder: Path) -> Parts:
    """Return the folders and configurations (`Parts`) of a vision-language model that is trained as its class in
    transformers has it. Raises ModelError if the folder has another kind of model, or one whose images do not take the
    places of tokens in a language model."""
    what = f"model.checkpoint={folder} is a {config.model_type} model"
    if not is_vision_language_model(config):
        raise ModelError(
            f"{what}, which transformers does not know as a vision-language one; a language model alone goes into "
            "model.language"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{what}, an encoder with a decoder; only models whose images take places of tokens train")
    language: Any = copy.deepcopy(config.get_text_config())
    language.tie_word_embeddings = has_tied_weights(whole_model_of, config, folder)
    vision = getattr(config, "vision_config", None) or config
    # whether the logits are the output of the output layer; some classes multiply or cap it
    bare = config.model_type not in VISION_LANGUAGE
    return Parts(
        language_folder=folder,
        vision_folder=folder,
        language=language,
        vision=vision,
        whole=folder,
        bare_logits=bare,
        class_config=config,
    )
