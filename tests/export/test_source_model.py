"""What the folder of a model says of itself, where it says it, and what stands where it says nothing."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import conversion, write_json

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.images.image_tokens import MAX_TILES
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.export import source_model
from llava_fsdp.export.main import check_target
from llava_fsdp.export.source_model import (
    aspect_of,
    choice_of,
    default_template,
    open_run,
    open_source,
    source_of_folder,
)
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints

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
    assert aspect_of(tmp_path, {"model_type": "llava_onevision"}, {}) is AspectRatio.anyres_max
    assert aspect_of(tmp_path, {**original, "image_aspect_ratio": "anyres_max_9"}, {}) is AspectRatio.anyres_max
    assert aspect_of(tmp_path, {"model_type": "llava_next"}, {"image_aspect_ratio": "pad"}) is AspectRatio.pad
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
    of_tiles = source_of_folder(tmp_path, tiled, PARTS, cfg)
    assert (of_tiles.grid_pinpoints, of_tiles.max_tiles) == ([[4, 3]], 5)
    write_json(tmp_path / "config.json", {"image_aspect_ratio": "anyres_max_6", "tokenizer_model_max_length": 777})
    assert (found.max_tiles, found.video_sampling) == (MAX_TILES, VideoSampling(1.0, 32))
    assert source_of_folder(tmp_path, MODEL, PARTS, cfg).max_tiles == 6
    notes = {"max_length": 99, "template": "v0", "language": "l", "vision": "v", "run": "r", "step": 3, "seed": 8,
             "stage": "finetune", "train": ["projector"], "grid_pinpoints": [[5, 6]], "pixels": "fast",
             "special_tokens": "parse", "max_tiles": 7, "video_fps": 2.5, "video_frames": 11}  # fmt: skip
    write_json(tmp_path / "llava_fsdp.json", notes)
    found = source_of_folder(tmp_path, MODEL, PARTS, cfg)
    assert (found.max_length, found.template, found.language, found.vision) == (99, "v0", "l", "v")
    assert (found.grid_pinpoints, found.pixels.value, found.special_tokens.value) == ([[5, 6]], "fast", "parse")
    assert (found.max_tiles, found.video_sampling) == (7, VideoSampling(2.5, 11))
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


def test_which_of_a_run_s_folders_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export, if it is of the newest checkpoint's step and has the dtype; without checkpoints the adapter, unless
    the export is of its step."""
    newest: Any = None
    notes: dict[str, Any] = {}

    def read(folder: Path) -> dict[str, Any]:
        if notes.get(folder.name) == "damaged":
            raise DamagedModel("damaged")
        return notes.get(folder.name, {})

    monkeypatch.setattr(source_model, "newest_alone", lambda _: newest)
    monkeypatch.setattr(source_model, "read_notes", read)
    monkeypatch.setattr(source_model, "is_adapter_folder", lambda folder: folder.name in notes)
    for name in ("open_model", "open_adapted"):
        monkeypatch.setattr(source_model, name, lambda folder, _: folder.name)
    monkeypatch.setattr(source_model, "open_checkpoint", lambda checkpoint, _: checkpoint.folder)

    def opened(dtype: str = "keep") -> object:
        return open_run(tmp_path, conversion(tmp_path, tmp_path / "to", f"dtype={dtype}"))

    with pytest.raises(CheckpointError, match="a run without an export"):
        opened()
    notes["adapter"] = {"run": "r", "step": 3}
    assert opened() == "adapter"
    for step, name in ((2, "adapter"), (3, "export")):
        notes["export"] = {"run": "r", "step": step, "dtype": "bf16"}
        assert opened() == name
    newest = SimpleNamespace(facts={"run": "r", "step": 3}, folder="checkpoint")
    assert opened() == opened("bf16") == "export" and opened("fp32") == "checkpoint"
    for key, value in (("run", "other"), ("step", 2)):
        notes["export"] = {"run": "r", "step": 3, "dtype": "bf16", key: value}
        assert opened() == "checkpoint"
    notes["export"] = "damaged"
    assert opened() == "checkpoint"


def test_the_user_says_how_a_checkpoint_s_images_are_fitted(noise: Path, tmp_path: Path) -> None:
    checkpoint = list_checkpoints(noise / FOLDER)[-1]
    for aspect in (AspectRatio.pad, AspectRatio.square):
        cfg = conversion(checkpoint, tmp_path / "to", f"image_aspect_ratio={aspect.value}")
        opened = open_source(cfg).source
        assert opened.aspect is aspect and opened.renamed_tower is None and opened.vision
    named = open_source(conversion(checkpoint, tmp_path / "to", "vision=mine")).source
    assert (named.vision, named.renamed_tower) == ("mine", "mine")


def test_the_template_of_a_folder_that_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is asked for; the model's own of a model of tiles or in transformers' form; else LLaVA's."""
    monkeypatch.setattr(source_model, "own_name", lambda _: "chat_template-1")
    monkeypatch.setattr(source_model, "usable_name", lambda _: "chat_template-2")
    for grids, asked, expected in (
        (None, "auto", "v1"), ([[1, 2]], "auto", "chat_template-2"), ([[1, 2]], "v0", "v0"),
        (None, "chat_template", "chat_template-1"),
    ):  # fmt: skip
        parts: Any = SimpleNamespace(grid_pinpoints=grids, language_folder=tmp_path)
        assert default_template(conversion(tmp_path, tmp_path / "to", f"template={asked}"), parts) == expected
    write_json(tmp_path / "config.json", {"model_type": "internvl"})
    parts = SimpleNamespace(grid_pinpoints=None, language_folder=tmp_path)
    assert default_template(conversion(tmp_path, tmp_path / "to"), parts) == "chat_template-2"
    monkeypatch.setattr(source_model, "usable_name", lambda _: None)
    parts = SimpleNamespace(grid_pinpoints=[[1, 2]], language_folder=tmp_path)
    assert default_template(conversion(tmp_path, tmp_path / "to"), parts) == "v1"


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "mm_projector.safetensors", "notes.json"])
def test_which_folders_may_be_replaced(name: str, tmp_path: Path) -> None:
    """Those of a model, an adapter and a projector, if the user says so; an empty one always."""
    final, staged = tmp_path / "to", tmp_path / "to.tmp"
    final.mkdir()
    check_target(final, staged, conversion(tmp_path / "other", final))
    (final / name).write_text("{}")
    with pytest.raises(ConfigError):
        check_target(final, staged, conversion(tmp_path / "other", final))
    overwriting = conversion(tmp_path / "other", final, "overwrite=true")
    with pytest.raises(ConfigError) if name == "notes.json" else contextlib.nullcontext():
        check_target(final, staged, overwriting)
