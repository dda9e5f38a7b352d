"""Compare the configuration of a LoRA adapter's base model with that of the base model with which the adapter was
trained.

Models with equal weights compute different values if their configurations differ, such as in the type of model, the
rotary embedding or a divisor of the logits. The fingerprint of a base model covers its weights alone, so the notes of
an adapter folder (`llava_fsdp.json`) also record its configuration.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from llava_fsdp.model.parts import Parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import NOTES, read_notes
from llava_fsdp.runtime.files.safe_load import library_errors

BASE_CONFIG = "base_config"
"""Key of `llava_fsdp.json` in an adapter folder: the configuration of the adapter's base model."""
WITHOUT_EFFECT = frozenset({
    # where the model came from, and how it is run
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "pretraining_tp",
    "quantization_config", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
    "chunk_size_feed_forward", "use_bfloat16", "torchscript", "use_flash_attn",
    # training from the start, and other tasks
    "router_aux_loss_coef", "router_z_loss_coef", "id2label", "label2id", "problem_type", "finetuning_task",
    "task_specific_params", "classifier_activation",
    # the tokenizer
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix",
    # parts of CLIP and SigLIP that LLaVA does not use
    "projection_dim", "logit_scale_init_value", "vision_use_head",
    # shapes and equality of weights, which the fingerprint of the weights covers; an export may add rows or untie
    "vocab_size", "tie_word_embeddings", "tie_encoder_decoder",
})  # fmt: skip
"""Keys of a model's configuration that do not change what the frozen model computes from given weights."""
BASE_OPTION = "base=PATH"
"""Option of `llava-fsdp export` that names an adapter's base model, as error messages write it."""
STRETCHED = frozenset({"dynamic", "longrope", "yarn"})
"""Types of rotary embedding that use the number of positions (`max_position_embeddings`)."""


def base_config(parts: Parts) -> dict[str, Any]:
    """Return those values of a base model's configuration that change what the model computes, as they are after being
    written to JSON and read again: of the language model (`language`), of the vision tower (`vision`), how logits are
    made (`logits`), and what a whole model of transformers says outside of its parts (`class`)."""
    values = {
        "language": of_part(parts.language),
        "vision": of_part(parts.vision),
        "logits": asdict(parts.logit_change),
    }
    if parts.class_config is not None:
        values["class"] = {key: v for key, v in of_part(parts.class_config).items() if not key.endswith("_config")}
    return json.loads(json.dumps(values, default=str))


def of_part(config: PretrainedConfig) -> dict[str, Any]:
    """Return those values of the configuration of one part of a model that change what the part computes, by key. The
    number of positions is one of them only with types of rotary embedding that use it (STRETCHED)."""
    values = {key: value for key, value in config.to_dict().items() if has_effect(key)}
    if not STRETCHED & rope_types(values):
        values.pop("max_position_embeddings", None)
    return values | {"model_type": config.model_type}


def has_effect(key: str) -> bool:
    """Return whether a key of a configuration may change what a model computes outside of training."""
    return not (key.startswith(("_", "initializer_")) or key in WITHOUT_EFFECT or "drop" in key)


def rope_types(value: Any) -> set[str]:
    """Return all values of `rope_type` in nested dictionaries; there is one for each type of layer in some models."""
    if not isinstance(value, dict):
        return set()
    types = {str(value["rope_type"])} if "rope_type" in value else set()
    return types.union(*(rope_types(inner) for inner in value.values()))


def check_base_config(folder: Path, parts: Parts, base: str, key: str) -> None:
    """Check that a LoRA adapter is used with a base model of the configuration with which it was trained. Keys that
    only one of the two configurations has are not compared: other versions of transformers have other keys. An adapter
    folder that does not record the configuration is not checked.

    Args:
        folder: folder of the adapter.
        parts: the base model with which it is used now.
        base: folder or hub name of the base's language model, or of the whole model, for the error message.
        key: configuration key that names `base`, for the error message.

    Raises:
        ModelError: a value differs.
    """
    with library_errors(f"{folder / NOTES} is not what was written"):
        differing = differences(read_notes(folder).get(BASE_CONFIG, {}), base_config(parts))
    if differing:
        # a difference of the model's type is reported before any other
        name, (then, now) = min(differing.items(), key=lambda item: (not item[0].endswith(".model_type"), item[0]))
        if name.startswith("vision.") and parts.whole is None:
            base, key = str(parts.vision_folder), "vision=PATH" if key == BASE_OPTION else "model.vision"
        and_more = f" ({len(differing) - 1} more values differ)" if len(differing) > 1 else ""
        raise ModelError(
            f"{folder} is for another base: it was trained with {name}={json.dumps(then)}, as {NOTES} in it says, and "
            f"{base} has {json.dumps(now)}{and_more}; give the base that it was trained on, with its own "
            f"config.json: {key}"
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: both values} for the keys that two nested dictionaries share with different values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in then.keys() & now.keys():
        before, after = then[key], now[key]
        if isinstance(before, dict) and isinstance(after, dict):
            differing |= differences(before, after, f"{prefix}{key}.")
        elif before != after:
            differing[prefix + key] = before, after
    return differing
