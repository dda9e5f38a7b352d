"""Before its first step a whole model's small copy has the logits of the class and the configuration in its folder."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModelForImageTextToText

from llava_fsdp.export.prove import compare_whole as compared
from llava_fsdp.export.prove.compare_language import UnlikeOwnClass
from llava_fsdp.runtime.files.provenance import write_sealed_notes
from llava_fsdp.train.setup.preflight import preflight

TEXT = {
    "model_type": "cohere2", "vocab_size": 611, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0,
}  # fmt: skip
SIZES = {"hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 3, "num_attention_heads": 2}
TILED = ["model.patch_merge=spatial_unpad", "data.grid_pinpoints=[[56,28],[28,56]]"]
WHOLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llava": ({"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}, []),
    "llava_next": (
        {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        [*TILED, "data.image_aspect_ratio=anyres"],
    ),
    "llava_onevision": (
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, "vision_use_head": False},
        [*TILED, "data.image_aspect_ratio=anyres_max", "model.select_layer=-1", "model.select_feature=auto"],
    ),
    "internvl": (
        {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        ["model.projector_type=pixel_shuffle2x_mlp2x_gelu", "model.select_feature=auto"],
    ),
}
"""Kinds of whole models: their vision tower, and configuration keys with which they are read."""


@pytest.fixture
def check(tmp_path: Path, parts: Path, dataset: Path) -> Callable[[str], None]:
    """Saves a whole model of the named kind with transformers, and makes the checks before the first step."""

    def save_and_check(kind: str) -> None:
        vision, keys = WHOLE[kind]
        layer = -1 if kind == "llava_onevision" else -2
        more: dict[str, Any] = {"image_grid_pinpoints": [[28, 56], [56, 28]]} if "_" in kind else {}
        more |= {"image_seq_length": 1 if kind == "internvl" else 4} if kind != "llava_onevision" else {}
        config = AutoConfig.for_model(
            kind, text_config=TEXT, vision_config=SIZES | vision, image_token_index=610, image_token_id=610,
            vision_feature_layer=layer, tie_word_embeddings=False, **more,
        )  # fmt: skip
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.save_pretrained(tmp_path / kind)
        if kind == "internvl":  # as this package has trained it; others are trained as their class has them
            write_sealed_notes(tmp_path / kind, {"vocab_size": config.text_config.vocab_size})
        values = [f"model.checkpoint={tmp_path / kind}", "model.projector=auto", "model.random_weights=false"]
        preflight(make_config(parts, dataset, tmp_path / "run", *values, *keys), torch.device("cpu"))

    return save_and_check


@pytest.mark.parametrize("kind", slow_after(1, ["llava_next", "llava", "llava_onevision", "internvl"]))
def test_a_small_copy_has_the_logits_of_the_own_class(
    kind: str,
    check: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a language model whose own class would multiply logits, which the class of the whole model does not. If
    the class does something else with its values than this project, the run ends."""
    with caplog.at_level(logging.WARNING):
        check(kind)
    assert "not compared" not in caplog.text
    read = compared.read_llava_config

    def otherwise(*args: Any) -> Any:
        config = read(*args)
        config.projector_hidden_act = "relu"
        return config

    monkeypatch.setattr(compared, "read_llava_config", otherwise)
    with pytest.raises(UnlikeOwnClass):
        check(kind)
