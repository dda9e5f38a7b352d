"""Models that cannot be trained are refused by their type, and not blamed on the user's files."""

from pathlib import Path

import pytest
from small import Configure
from transformers import AutoConfig

from llava_fsdp.model.load_weights import missing
from llava_fsdp.model.pretrained import Parts, find_parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train.preflight import open_model


@pytest.fixture
def own_parts(configure: Configure) -> Parts:
    return find_parts(configure().model)


def test_a_vision_tower_without_a_fixed_size(configure: Configure, parts: Path, tmp_path: Path) -> None:
    import torch

    AutoConfig.for_model("siglip2_vision_model", hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path / "v")
    cfg = configure(f"model.vision={tmp_path / 'v'}")
    with pytest.raises(ModelError, match=r"siglip2_vision_model.*image_size"):
        open_model(cfg, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vision_tower.encoder.weight", "clip_vision_model"),
        ("language_model.norm.weight", "llama"),
        ("multi_modal_projector.linear_1.weight", "model.projector=given"),
    ],
)
def test_weights_that_no_file_has(name: str, named: str, own_parts: Parts) -> None:
    error = missing(name, own_parts, Path("given"))
    assert name in str(error) and named in str(error)
