"""Read and write the `config.json` of the original LLaVA, the code of Liu et al. (llava_arch.py:60-104,
model/builder.py:26-167). The argument `raw` of functions is its content; `folder` is its folder, for messages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, CLIPVisionConfig, PretrainedConfig

from llava_fsdp.config import Feature, ModelConfig, PatchMerge
from llava_fsdp.runtime.errors import ConfigError, ModelError

TOWER = "vision_tower"
"""Name of a subfolder that llava_fsdp adds to model folders for the original LLaVA, with the configuration and
preprocessing settings of the vision tower, because the original's config.json contains only the tower's name."""
FIRST_NAME = "llava"
"""`model_type` of the first models of the original LLaVA; later ones have llava_llama. transformers uses it for a class
of its own."""
FEATURES = {Feature.patch: "patch", Feature.full: "cls_patch"}
"""`model.select_feature` -> the original LLaVA's name for it."""
NEEDED = {"s2": False}
"""Fields of the original LLaVA's config.json -> the only value that is supported."""
LANGUAGE_KEYS = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""Fields of the original LLaVA's config.json that are fields of the language model's configuration."""
CLIP_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "image_size": 336,
    "patch_size": 14,
}
"""Configuration of LLaVA 1.5's vision tower, openai/clip-vit-large-patch14-336."""


def is_original(raw: dict[str, Any]) -> bool:
    """Return whether a config.json was written by the original LLaVA, and not by transformers for its own LLaVA
    models."""
    return "mm_vision_tower" in raw or str(raw.get("model_type")) in ("llava_llama", "llava_mpt", "llava_mistral")


@dataclass(frozen=True)
class Selection:
    """Which features of the vision tower a model was trained with, and how they become image tokens."""

    projector_type: str
    select_layer: int
    select_feature: Feature
    patch_merge: PatchMerge
    image_start_end: bool


def read_selection(raw: dict[str, Any], folder: Path) -> Selection:
    """Read the settings of projector and vision features in a config.json of the original LLaVA (content `raw`), with
    the original's defaults. Raises ModelError if the model is not supported, or names no layer of the vision tower."""
    check_supported(raw, folder)
    if "mm_vision_select_layer" not in raw:
        raise ModelError(f"{folder / 'config.json'} has no mm_vision_select_layer; add the layer it was trained with")
    return Selection(
        projector_type=raw.get("mm_projector_type", "linear"),
        select_layer=raw["mm_vision_select_layer"],
        select_feature=read_feature(raw, folder),
        patch_merge=PatchMerge(raw.get("mm_patch_merge_type") or "flat"),
        image_start_end=bool(raw.get("mm_use_im_start_end")),
    )


def read_feature(raw: dict[str, Any], folder: Path) -> Feature:
    """Return with which tokens of the vision tower a model was trained: all (`full`), or all except the CLS token
    (`patch`, the default). Raises ModelError at an unknown value."""
    names = {name: feature for feature, name in FEATURES.items()}
    feature = raw.get("mm_vision_select_feature", "patch")
    if feature not in names:
        raise ModelError(f"{folder / 'config.json'} has mm_vision_select_feature={feature}; known: {', '.join(names)}")
    return names[feature]


def check_supported(raw: dict[str, Any], folder: Path) -> None:
    """Raise ModelError if a config.json of the original LLaVA (content `raw`) has values that are not supported. NEEDED
    has the only supported values of some keys; FIRST_NAME is the model type of the first LLaVA models."""
    if raw.get("model_type") not in ("llava_llama", FIRST_NAME):
        raise ModelError(
            f"{folder / 'config.json'} has model_type={raw.get('model_type')}; of the original's models, llava_llama "
            "is supported"
        )
    for key, needed in NEEDED.items():
        if (raw.get(key) or needed) != needed:
            raise ModelError(f"{folder / 'config.json'} has {key}={raw[key]}; only {needed} is supported")
    merge, merges = raw.get("mm_patch_merge_type") or "flat", [m.value for m in PatchMerge]
    if merge not in merges:
        raise ModelError(f"{folder / 'config.json'} has mm_patch_merge_type={merge}; supported: {', '.join(merges)}")


def check_agrees(raw: dict[str, Any], cfg: ModelConfig, folder: Path) -> None:
    """Check that the original LLaVA's config.json `raw` has the projector and vision feature settings of `cfg`.

    Raises:
        ConfigError: a value differs; the message has the key and both values.
        ModelError: the model is not supported.
    """
    check_supported(raw, folder)
    kind = raw.get("mm_projector_type", "linear")
    if kind != cfg.projector_type:
        raise ConfigError(
            f"model.projector_type={cfg.projector_type}, but model.checkpoint={folder} has a {kind} projector; set "
            "model.projector_type to that"
        )
    start_end = bool(raw.get("mm_use_im_start_end"))
    if start_end != cfg.image_start_end:
        raise ConfigError(
            f"model.checkpoint={folder} has mm_use_im_start_end={start_end}; set model.image_start_end="
            f"{str(start_end).lower()}"
        )
    merge = raw.get("mm_patch_merge_type") or "flat"
    if merge not in ("flat", cfg.patch_merge.value):  # a flat one may train on with another: it gets new weights
        raise ConfigError(
            f"model.checkpoint={folder} has mm_patch_merge_type={merge}; set model.patch_merge={merge} and "
            "data.image_aspect_ratio=anyres"
        )
    # compared only if the file has the key; select_feature=auto agrees with every value
    ours: dict[str, Any] = {"mm_vision_select_layer": cfg.select_layer}
    if cfg.select_feature is not Feature.auto:
        ours["mm_vision_select_feature"] = FEATURES[cfg.select_feature]
    for key, value in ours.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"model.checkpoint={folder} has {key}={raw[key]}, and this configuration means {value}")


def language_config(raw: dict[str, Any]) -> PretrainedConfig:
    """Return the language model's configuration, whose fields the original's config.json has at the top level."""
    fields = {key: raw[key] for key in (*LANGUAGE_KEYS, "rope_theta", "pretraining_tp") if key in raw}
    if raw.get("rope_scaling") is not None:
        fields["rope_scaling"] = dict(raw["rope_scaling"])  # transformers writes into it
    return AutoConfig.for_model("llama", **fields)


def original_config(
    language: PretrainedConfig, features: int, cfg: ModelConfig, tower: str, max_length: int, drops_cls: bool
) -> dict[str, Any]:
    """Return the content of a config.json of the original LLaVA, for a model that does not come with one.

    Args:
        features: width of the vision tower's features.
        tower: name or folder from which the original LLaVA will load the vision tower.
        max_length: maximum length of a sample in tokens.
        drops_cls: whether the vision tower's CLS token is left out.

    Raises:
        ModelError: the original LLaVA does not support the language model.
    """
    config = {key: getattr(language, key, None) for key in LANGUAGE_KEYS}
    return {
        **config,
        **rope(language),
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava_llama",
        "pretraining_tp": 1,
        "use_cache": True,
        "mm_hidden_size": features,
        "mm_patch_merge_type": cfg.patch_merge.value,
        "mm_projector_lr": None,
        "mm_projector_type": cfg.projector_type,
        "mm_use_im_patch_token": False,
        "mm_use_im_start_end": cfg.image_start_end,
        "mm_vision_select_feature": FEATURES[Feature.patch if drops_cls else Feature.full],
        "mm_vision_select_layer": cfg.select_layer,
        "mm_vision_tower": tower,
        "use_mm_proj": True,
        "freeze_mm_mlp_adapter": False,
        "tokenizer_model_max_length": max_length,
        "tokenizer_padding_side": "right",
        "transformers_version": "4.37.2",
    }


def rope(language: PretrainedConfig) -> dict[str, Any]:
    """Return the fields for a language model's rotary embeddings in the form of transformers 4, which the original
    LLaVA uses. Raises ModelError if the Llama class of that version does not support the language model."""
    if language.model_type != "llama":
        raise ModelError(f"the original LLaVA has no language model with model_type={language.model_type}")
    plain = {"mlp_bias": False, "head_dim": language.hidden_size // language.num_attention_heads}
    for key, value in plain.items():
        found = getattr(language, key, None)
        if found is not None and found != value:
            raise ModelError(f"the original LLaVA has no language model with {key}={found}")
    fields = {k: v for k, v in language.rope_parameters.items() if k != "type"}  # rope_type's older name
    kind = fields.pop("rope_type", "default")
    theta = fields.pop("rope_theta", 10000.0)
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("linear", "dynamic") or fields.keys() != {"factor"}:
        raise ModelError(f"the original LLaVA has no rotary embedding of type {kind}")
    return {"rope_theta": theta, "rope_scaling": {"type": kind, "factor": fields["factor"]}}


def known_tower(vision: PretrainedConfig) -> str | None:
    """Return the hub name of LLaVA 1.5's vision tower if this is its configuration, else None."""
    same = isinstance(vision, CLIPVisionConfig) and all(getattr(vision, k) == v for k, v in CLIP_336.items())
    return "openai/clip-vit-large-patch14-336" if same else None


def generation_config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a generation_config.json, without sampling values (temperature, ...) if it has no
    `do_sample`: transformers refuses to save such values without it, and Vicuna's file has them (LLaVA#1144)."""
    if given.get("do_sample"):
        return given
    return {k: v for k, v in given.items() if k not in ("temperature", "top_p", "top_k", "typical_p")}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
