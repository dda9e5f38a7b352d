"""Pixel shuffle and its projector against transformers' InternVL, bit for bit; what it is refused for, and the page
that says which projector is exported how."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import build
from small import changed_parts, make_config
from transformers import InternVLConfig, InternVLModel, InternVLVisionConfig, LlamaConfig
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from llava_fsdp.model.init_weights import DrawRule, Rule, draw_rule
from llava_fsdp.model.llava import Llava
from llava_fsdp.model.projector import Projector, pixel_shuffle
from llava_fsdp.model.weight_names import in_adapter, ours, ours_in_adapter
from llava_fsdp.runtime.errors import ConfigError

SHUFFLE = "model.projector_type=pixel_shuffle{}x_mlp2x_gelu"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "side", "width", "hidden"), [(2, 6, 5, 9), (4, 12, 3, 7), (8, 8, 1, 3)])
def test_features_are_transformers(factor: int, side: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(factor)
    config = InternVLConfig(
        downsample_ratio=1 / factor,
        vision_config=InternVLVisionConfig(hidden_size=width),
        text_config=LlamaConfig(hidden_size=hidden),
    )
    theirs: Any = InternVLMultiModalProjector(config).to(dtype)
    own = Projector(f"pixel_shuffle{factor}x_mlp2x_gelu", width, hidden, factor).to(dtype)
    own.load_state_dict({name: torch.randn_like(value) for name, value in theirs.state_dict().items()})
    theirs.load_state_dict(own.state_dict())
    features = torch.randn(3, side * side, width, dtype=dtype)
    grid = features.view(3, side, side, width)
    expected = InternVLModel.pixel_shuffle(theirs, grid, scale_factor=1 / factor).flatten(1, 2)
    assert torch.equal(pixel_shuffle(features, factor), expected)
    assert torch.equal(own(features), theirs(expected))
    assert own(features[:0]).shape == (0, (side // factor) ** 2, hidden)


@pytest.mark.parametrize(
    ("factor", "vision", "values", "said"),
    [
        (2, {"image_size": 42}, [], "3 x 3"),
        (4, {}, [], "2 x 2"),
        (2, {}, ["model.select_feature=full"], "model.select_feature=patch"),
    ],
    ids=["odd", "too large a factor", "CLS token"],
)
def test_a_grid_that_cannot_be_divided_is_refused(
    factor: int, vision: dict[str, int], values: list[str], said: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    folder = changed_parts(parts, tmp_path / "parts", vision=vision)
    cfg = make_config(folder, dataset, tmp_path / "run", SHUFFLE.format(factor), *values)
    with pytest.raises(ConfigError, match=f"{SHUFFLE.format(factor)} .*{said}"):
        build(cfg)
