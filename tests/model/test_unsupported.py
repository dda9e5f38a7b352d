"""Models that cannot be trained are refused by their type, and not blamed on the user's files."""

from pathlib import Path

import pytest
import torch
from small import Configure, changed_parts
from transformers import AutoConfig

from llava_fsdp.model.load_weights import missing
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train.setup.preflight import open_model


@pytest.fixture
def own_parts(configure: Configure) -> Parts:
    return find_parts(configure().model)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("siglip2_vision_model", "image_size"),
        ("swin", "several sizes"),
        ("swinv2", "several sizes"),
        ("convnext", "hidden_size"),
        ("vitdet", "attention"),
        ("vit_mae", "differentiate"),
        ("beit", "meta device"),
        ("sam_vision_model", "features of shape"),
        ("bert", "image_size"),
        ("blip_vision_model", "no class"),
    ],
)
def test_a_vision_tower_that_gives_no_sequence_of_features(
    kind: str, reason: str, configure: Configure, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "v")
    with pytest.raises(ModelError, match=rf"type {kind} is not supported: .*{reason}") as caught:
        open_model(configure(f"model.vision={tmp_path / 'v'}"), torch.device("cpu"))
    assert "\n" not in str(caught.value)


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


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 60,
    "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}  # fmt: skip


@pytest.mark.parametrize(("length", "rows", "refused"), [(61, 2, True), (60, 2, False), (61, 1, False)])
def test_longrope_above_its_first_length(
    length: int, rows: int, refused: bool, configure: Configure, parts: Path, tmp_path: Path
) -> None:
    folder = changed_parts(parts, tmp_path / "parts", language={"rope_parameters": LONGROPE})
    cfg = configure(f"model.language={folder / 'language'}", "pack=false", f"data.max_length={length}",
        f"micro_batch_size={rows}")  # fmt: skip
    if not refused:
        open_model(cfg, torch.device("cpu"))
        return
    with pytest.raises(ConfigError, match=r"longrope.*original_max_position_embeddings"):
        open_model(cfg, torch.device("cpu"))


@pytest.mark.parametrize("part", ["language", "vision"])
def test_layers_left_out_at_random_are_refused(part: str, configure: Configure, parts: Path, tmp_path: Path) -> None:
    """Ranks would leave out different layers, and wait for one another."""
    for value in (0.0, 0.1):
        folder = changed_parts(parts, tmp_path / f"parts{value}", **{part: {"layerdrop": value}})
        cfg = configure(f"model.{part}={folder / part}")
        if not value:
            open_model(cfg, torch.device("cpu"))
            continue
        with pytest.raises(ModelError, match=r"layerdrop=0\.1 .*set it to 0"):
            open_model(cfg, torch.device("cpu"))
