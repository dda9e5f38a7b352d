"""The original's `config.json`: every key is read and written, and what another model means is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPVisionConfig

from llava_fsdp.config import Feature, ModelConfig, PatchMerge
from llava_fsdp.model.sources.llava_v1_5_config import (
    Selection,
    check_agrees,
    check_supported,
    generation_config,
    is_original,
    known_tower,
    language_config,
    original_config,
    read_feature,
    read_selection,
)
from llava_fsdp.runtime.errors import ConfigError, ModelError

UNUSUAL: dict[str, Any] = {
    "attention_bias": True, "attention_dropout": 0.125, "bos_token_id": 5, "eos_token_id": 6, "hidden_act": "gelu",
    "hidden_size": 36, "initializer_range": 0.5, "intermediate_size": 50, "max_position_embeddings": 77,
    "num_attention_heads": 6, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 7,
    "rms_norm_eps": 0.25, "tie_word_embeddings": True, "vocab_size": 99, "rope_theta": 50000.0,
}  # fmt: skip
"""Values that no default is."""
CFG = ModelConfig(
    name="a",
    language="b",
    vision="c",
    checkpoint=None,
    projector="random",
    projector_type="mlp3x_gelu",
    select_layer=-3,
    patch_merge=PatchMerge.spatial,
    select_feature=Feature.full,
    image_start_end=True,
    random_weights=False,
    train=["projector"],
)
RAW: dict[str, Any] = {
    "model_type": "llava_llama",
    "mm_projector_type": "mlp3x_gelu",
    "mm_vision_select_layer": -3,
    "mm_patch_merge_type": "spatial",
    "mm_vision_select_feature": "cls_patch",
    "mm_use_im_start_end": True,
}
"""What `CFG` says, in the original's keys."""


def test_every_key_of_a_language_model_is_read_and_written() -> None:
    """Each has a value that is no default; rotary scaling too."""
    for scaling in (None, {"type": "dynamic", "factor": 4.0}):
        raw = {**UNUSUAL, "rope_scaling": scaling}
        language = language_config(raw)
        default = language_config({})
        same = [key for key in UNUSUAL if key != "rope_theta" and getattr(language, key) == getattr(default, key)]
        assert not same
        made = original_config(language, 20, CFG, "a/tower", 55, drops_cls=False)
        assert {key: made[key] for key in raw} == raw
        assert {key: made[key] for key in RAW} == RAW
        assert (made["mm_hidden_size"], made["mm_vision_tower"], made["tokenizer_model_max_length"]) == (
            20,
            "a/tower",
            55,
        )


@pytest.mark.parametrize(
    "values",
    [
        {"mlp_bias": True},
        {"head_dim": 8},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "beta_fast": 3}},
        {"model_type": "qwen2"},
    ],
)
def test_a_language_model_that_the_original_lacks_is_refused(values: dict[str, Any]) -> None:
    language = language_config(UNUSUAL)
    for key, value in values.items():
        setattr(language, key, value)
    with pytest.raises(ModelError):
        original_config(language, 20, CFG, "a/tower", 55, drops_cls=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mm_projector_type", "mlp2x_gelu"),
        ("mm_vision_select_layer", -2),
        ("mm_patch_merge_type", "spatial_unpad"),
        ("mm_vision_select_feature", "patch"),
        ("mm_use_im_start_end", False),
    ],
)
def test_each_key_that_differs_from_the_configuration_is_refused(key: str, value: object, tmp_path: Path) -> None:
    check_agrees(RAW, CFG, tmp_path)
    check_agrees({**RAW, "mm_patch_merge_type": "flat"}, CFG, tmp_path)  # its end of a line is drawn
    with pytest.raises(ConfigError, match=key.removeprefix("mm_")):
        check_agrees({**RAW, key: value}, CFG, tmp_path)


def test_with_auto_either_choice_of_tokens_agrees(tmp_path: Path) -> None:
    cfg = replace(CFG, select_feature=Feature.auto)
    for value, feature in (("patch", Feature.patch), ("cls_patch", Feature.full)):
        raw = {**RAW, "mm_vision_select_feature": value}
        check_agrees(raw, cfg, tmp_path)
        assert read_feature(raw, tmp_path) is feature


def test_what_is_not_said_is_what_the_original_takes(tmp_path: Path) -> None:
    said = Selection("mlp3x_gelu", -3, Feature.full, PatchMerge.spatial, True)
    assert read_selection(RAW, tmp_path) == said
    bare = {"model_type": "llava", "mm_vision_select_layer": -2}
    assert read_selection(bare, tmp_path) == Selection("linear", -2, Feature.patch, PatchMerge.flat, False)
    with pytest.raises(ModelError, match="mm_vision_select_layer"):
        read_selection({"model_type": "llava"}, tmp_path)
    for kind in ("llava_mpt", "llava_mistral", None):
        with pytest.raises(ModelError, match="model_type"):
            check_supported({"model_type": kind}, tmp_path)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "llava_llama"}, True),
        ({"model_type": "llava_mpt"}, True),
        ({"model_type": "llava_mistral"}, True),
        ({"model_type": "llava", "mm_vision_tower": "a"}, True),
        ({"model_type": "llava"}, False),
        ({"model_type": "llava_next"}, False),
        ({}, False),
    ],
)
def test_which_folders_are_the_originals(raw: dict[str, Any], expected: bool) -> None:
    assert is_original(raw) is expected


def test_a_tower_is_llava_1_5s_only_if_all_its_sizes_are() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    assert known_tower(CLIPVisionConfig(**sizes)) == "openai/clip-vit-large-patch14-336"
    for key in sizes.keys() - {"num_attention_heads"}:
        assert known_tower(CLIPVisionConfig(**{**sizes, key: sizes[key] * 2})) is None, key


def test_values_of_sampling_alone_are_left_out() -> None:
    sampling = {"temperature": 0.9, "top_p": 0.6, "top_k": 5, "typical_p": 0.5}
    assert generation_config({**sampling, "eos_token_id": 2, "max_length": 9}) == {"eos_token_id": 2, "max_length": 9}
    assert generation_config({**sampling, "do_sample": True}) == {**sampling, "do_sample": True}
