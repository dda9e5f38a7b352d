"""The built-in data set of coloured shapes is drawn once, whole, and always the same."""

import contextlib
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from llava_fsdp.config import Source
from llava_fsdp.data import toy_shapes
from llava_fsdp.data.toy_shapes import COLOURS, PLACES, Scene, draw_shapes, ensure_shapes, preferences, questions
from llava_fsdp.runtime.errors import DataError

SMALL: dict[str, Any] = {"train_pictures": 12, "heldout_pictures": 4}


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((root / f"{name}.json").read_text())


def test_what_is_drawn(tmp_path: Path) -> None:
    """Every image has a caption and a conversation, or one question that is held out; no two images are the same."""
    ensure_shapes(tmp_path / "a", **SMALL)
    own = content(tmp_path / "a")
    images = {name: data for name, data in own.items() if name.endswith(".png")}
    assert len(images) == len(set(images.values())) == 16
    captions, talks, held = (rows(tmp_path / "a", name) for name in ("captions", "instructions", "heldout"))
    trained = {f"train_{n:05d}.png" for n in range(12)}
    assert {row["image"] for row in captions} == {row["image"] for row in talks if "image" in row} == trained
    assert {row["image"] for row in held} == {f"heldout_{n:05d}.png" for n in range(4)}
    assert [len(row["conversations"]) for row in (*captions, *held)] == [2] * 16
    assert len(talks) == 13, "one of them is text alone, which is 8 %"
    for row in (*captions, *talks, *held):
        tags = [turn["value"].count("<image>") for turn in row["conversations"]]
        assert tags == [int("image" in row), *[0] * (len(tags) - 1)]
    ensure_shapes(tmp_path / "b", **SMALL)
    ensure_shapes(tmp_path / "c", seed=1, **SMALL)
    assert content(tmp_path / "b") == own and content(tmp_path / "c")["captions.json"] != own["captions.json"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755, "other users may read it"


def test_no_image_is_drawn_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither among those that are trained on nor among those that are held out, even if chance repeats them."""
    pictures = itertools.count()
    monkeypatch.setattr(toy_shapes, "draw_picture", lambda *_: Image.new("RGB", (4, 4), (next(pictures) // 2, 0, 0)))
    ensure_shapes(tmp_path / "a", **SMALL)
    assert len({data for name, data in content(tmp_path / "a").items() if name.endswith(".png")}) == 16


def test_an_existing_folder_is_only_compared(tmp_path: Path) -> None:
    """With the parameters that it was drawn with. An empty folder is filled."""
    root = tmp_path / "root"
    root.mkdir()
    ensure_shapes(root, **SMALL)
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    ensure_shapes(root, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == times
    for other in ({"seed": 1}, {"train_pictures": 11}, {"heldout_pictures": 5}):
        with pytest.raises(DataError):
            ensure_shapes(root, **{**SMALL, **other})
    (root / "shapes.json").unlink()
    with pytest.raises(DataError):
        ensure_shapes(root, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_comes_second_takes_what_the_first_has_drawn(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an error is one if nobody has drawn anything. What was drawn in vain is deleted."""
    root, rename = tmp_path / "root", os.rename

    def refused(source: Path, target: Path) -> None:
        if not is_first:
            rename(source, target)
            Path(source).mkdir()
            (Path(source) / "left.png").touch()
        raise OSError("Directory not empty")

    monkeypatch.setattr(toy_shapes.os, "rename", refused)
    done = False
    with contextlib.suppress(OSError):
        ensure_shapes(root, **SMALL)
        done = True
    assert done is not is_first
    assert [path.name for path in tmp_path.iterdir()] == [] if is_first else ["root"]


def test_only_a_single_shape_has_a_place() -> None:
    for places in ((2,), (0, 2)):
        pairs = questions(Scene("ring", "red", "small", places))
        assert ("place" in pairs) is (len(places) == 1) and pairs["count"][1] == ("one", "two")[len(places) - 1]
    assert questions(Scene("ring", "red", "small", (2,)))["place"][1] == PLACES[2]


def test_shapes_are_drawn_only_where_they_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(toy_shapes, "ensure_shapes", drawn.append)
    for source in Source:
        cfg: Any = SimpleNamespace(source=source, root=str(tmp_path / "there"), pairs=False)
        draw_shapes(cfg)
    assert drawn == [tmp_path / "there"]


def test_pairs_have_the_colour_of_the_caption_and_another_one(tmp_path: Path) -> None:
    ensure_shapes(tmp_path, **SMALL)
    captions, pairs = rows(tmp_path, "captions"), preferences(rows(tmp_path, "captions"))
    assert [own["image"] for own in pairs] == [own["image"] for own in captions]
    for caption, own in zip(captions, pairs, strict=True):
        assert f" {own['chosen']} " in caption["conversations"][1]["value"]
        assert own["rejected"] in COLOURS and own["rejected"] != own["chosen"]
