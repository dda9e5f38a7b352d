"""What the folder of a model says of itself, where it says it, and what stands where it says nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import conversion, write_json

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.export.main import check_target
from llava_fsdp.export.source_model import aspect_of, choice_of, source_of_folder
from llava_fsdp.runtime.errors import ConfigError, ModelError

MODEL: Any = SimpleNamespace(parts=SimpleNamespace(grid_pinpoints=None, max_tiles=None))
PARTS: Any = SimpleNamespace(language="its language", vision="its tower")


def test_whether_pictures_are_padded(tmp_path: Path) -> None:
    """Our notes, then the original's configuration, then transformers' processor; squares where none says it."""
    original = {"model_type": "llava_llama", "mm_vision_tower": "tower", "image_aspect_ratio": "pad"}
    assert aspect_of(tmp_path, {}, {}) is AspectRatio.square
    assert aspect_of(tmp_path, original, {}) is AspectRatio.pad
    assert aspect_of(tmp_path, {**original, "image_aspect_ratio": "anyres"}, {}) is AspectRatio.anyres
    assert aspect_of(tmp_path, original, {"image_aspect_ratio": "square"}) is AspectRatio.square
    assert aspect_of(tmp_path, {"image_aspect_ratio": "pad"}, {}) is AspectRatio.square, "it is not the original's"
    write_json(tmp_path / "preprocessor_config.json", {"do_pad": True})
    assert aspect_of(tmp_path, {}, {}) is AspectRatio.pad
    assert aspect_of(tmp_path, {"model_type": "llava_next"}, {}) is AspectRatio.anyres
    del original["image_aspect_ratio"]
    assert aspect_of(tmp_path, original, {}) is AspectRatio.square
    with pytest.raises(ModelError):
        aspect_of(tmp_path, {}, {"image_aspect_ratio": "wide"})
    assert choice_of(Pixels, {}, "pixels", Pixels.exact, tmp_path) is Pixels.exact
    assert choice_of(Pixels, {"pixels": "fast"}, "pixels", Pixels.exact, tmp_path) is Pixels.fast
    with pytest.raises(ModelError):
        choice_of(Pixels, {"pixels": "blurred"}, "pixels", Pixels.exact, tmp_path)


def test_what_a_folder_says_wins_over_what_is_assumed(tmp_path: Path) -> None:
    cfg = conversion(tmp_path, tmp_path / "to", "template=plain")
    found = source_of_folder(tmp_path, MODEL, PARTS, cfg)
    assert (found.template, found.max_length, found.grid_pinpoints) == ("plain", 2048, [])
    assert (found.language, found.vision, found.history) == ("its language", "its tower", {})
    write_json(tmp_path / "config.json", {"tokenizer_model_max_length": 777, "image_grid_pinpoints": [[3, 4]]})
    found = source_of_folder(tmp_path, MODEL, PARTS, cfg)
    assert (found.max_length, found.grid_pinpoints) == (777, [[3, 4]])
    tiled: Any = SimpleNamespace(parts=SimpleNamespace(grid_pinpoints=[[4, 3]], max_tiles=5))
    assert source_of_folder(tmp_path, tiled, PARTS, cfg).grid_pinpoints == [[4, 3]]
    notes = {"max_length": 99, "template": "v0", "language": "l", "vision": "v", "run": "r", "step": 3, "seed": 8,
             "stage": "finetune", "train": ["projector"], "grid_pinpoints": [[5, 6]], "pixels": "fast",
             "special_tokens": "parse"}  # fmt: skip
    write_json(tmp_path / "llava_fsdp.json", notes)
    found = source_of_folder(tmp_path, MODEL, PARTS, cfg)
    assert (found.max_length, found.template, found.language, found.vision) == (99, "v0", "l", "v")
    assert (found.grid_pinpoints, found.pixels.value, found.special_tokens.value) == ([[5, 6]], "fast", "parse")
    assert found.history == {key: notes[key] for key in ("run", "stage", "step", "train")}
    named = conversion(tmp_path, tmp_path / "to", "vision=mine", "image_aspect_ratio=pad")
    found = source_of_folder(tmp_path, MODEL, PARTS, named)
    assert (found.vision, found.renamed_tower, found.aspect) == ("mine", "mine", AspectRatio.pad)


@pytest.mark.parametrize("key", ["source", "base", "language", "vision"])
@pytest.mark.parametrize("place", ["to", "to/inner", "to.tmp"])
def test_nothing_that_is_read_is_replaced(key: str, place: str, tmp_path: Path) -> None:
    read, final, staged = tmp_path / place, tmp_path / "to", tmp_path / "to.tmp"
    other = conversion(tmp_path / "other", final, *([] if key == "source" else [f"{key}={tmp_path / 'to2'}"]))
    check_target(final, staged, other)
    cfg = conversion(read if key == "source" else tmp_path / "other", final, "overwrite=true", f"{key}={read}")
    with pytest.raises(ConfigError):
        check_target(final, staged, cfg)
