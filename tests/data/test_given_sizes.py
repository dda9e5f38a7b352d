"""With `data.examine=lazy` and images of several tiles, records give the sizes of their images; no image is opened."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from harness import CPU
from PIL import Image
from pyarrow import parquet
from small import make_config
from test_build import FITS, TILED, open_again
from test_containers import check_equal, rows_of, steps_of
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.data.images import check
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine.examine_passes import PictureSizes
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.image_places import given_sizes
from llava_fsdp.data.validation_prompts import ask
from llava_fsdp.runtime.errors import ConfigError, ImageError

MAX = ("data.image_aspect_ratio=anyres_max", "model.patch_merge=spatial_unpad")


def with_sizes(rows: list[dict[str, Any]], images: Path, as_lists: bool = False) -> list[dict[str, Any]]:
    for row in rows:
        names = row.get("image") or []
        sizes = [check.read_size(images / name, "") for name in ([names] if isinstance(names, str) else names)]
        if sizes:
            row["width"], row["height"] = ([own[side] for own in sizes] for side in range(2))
            if len(sizes) == 1 and not as_lists:
                row["width"], row["height"] = row["width"][0], row["height"][0]
    return rows


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"records.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    else:
        made = [{**row, "image": [name] if isinstance(name := row.get("image"), str) else name} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=10)
    return path


def config(parts: Path, dataset: Path, output: Path, path: Path, how: str, *words: str) -> Config:
    own = f"data.path={path}", f"data.images={dataset / 'images'}", f"data.index={output / how}"
    return make_config(parts, dataset, output, *own, f"data.examine={how}", *words)


@pytest.mark.parametrize(
    "words", slow_after(1, [pytest.param(own) for own in (TILED, MAX, (*TILED, "data.pixels=fast"))])
)
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_the_same_tensors_without_opening_an_image(
    kind: str, words: tuple[str, ...], parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_sizes(rows_of(dataset), dataset / "images", as_lists=kind == "parquet")
    path = write(kind, tmp_path / "records", rows)
    expected = steps_of(config(parts, dataset, tmp_path, path, "decode", *words), parts)
    cfg = config(parts, dataset, tmp_path, path, "lazy", *words)
    with monkeypatch.context() as patch:
        patch.setattr(check, "open_regular", None)
        records = open_again(cfg, parts)
    assert records.index.examined is not None and not records.index.examined.decoded
    check_equal(steps_of(cfg, parts), expected)


def wrong(parts: Path, dataset: Path, output: Path, *words: str) -> tuple[Config, Records, int]:
    """A dataset, one of whose records gives a size that is not its image's: its sides in the other order."""
    rows = with_sizes(rows_of(dataset), dataset / "images")
    number = next(
        n for n, own in enumerate(rows) if isinstance(own.get("image"), str) and own["width"] != own["height"]
    )
    rows[number]["width"], rows[number]["height"] = rows[number]["height"], rows[number]["width"]
    cfg = config(parts, dataset, output, write("json", output / "records", rows), "lazy", *TILED, *words)
    return cfg, open_again(cfg, parts), number


@pytest.mark.parametrize("pixels", ["exact", "fast"])
def test_a_record_with_a_wrong_size_is_skipped(pixels: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """When its image is read, and as a record with a broken image is; never trained on with other tokens."""
    skip = "data.bad_records=skip", "data.max_bad_records=100%", "global_batch_size=44", f"data.pixels={pixels}"
    cfg, records, number = wrong(parts, dataset, tmp_path, *skip)
    assert not list(records.index.problems())
    step = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps[0]
    assert not isinstance(step, Exception)
    assert [(own.number, own.kind) for own in step.facts.skipped] == [(number, Kind.image_unreadable)]
    assert len(records) == 44


def test_a_wrong_size_ends_a_run_that_may_skip_nothing(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg, _, number = wrong(parts, dataset, tmp_path)
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    with pytest.raises(ImageError, match=r"pixels, and its tokens were counted for"):
        steps.read(number)
    question = ask(steps.records[number], steps.encoder, steps.image_reader, cfg)
    assert question.sizes is not None
    with pytest.raises(ImageError):
        steps.image_reader.load(question.images[0], "x", 1, question.sizes)


def test_an_image_that_was_replaced_by_one_of_another_size(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """However images were examined."""
    own = Path(shutil.copytree(dataset, tmp_path / "own"))
    cfg = config(parts, own, tmp_path, own / "mixed.json", "decode", *TILED)
    open_again(cfg, parts)
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    number = next(n for n in range(len(steps.records)) if steps.records[n].num_images == 1)
    Image.new("RGB", (91, 33)).save(own / "images" / steps.records[number].images[0])
    with pytest.raises(ImageError, match=r"91 x 33 pixels"):
        steps.read(number)


def no_height(row: dict[str, Any]) -> None:
    del row["height"]


def null_width(row: dict[str, Any]) -> None:
    row["width"] = None


def too_many(row: dict[str, Any]) -> None:
    row["width"] = [row["width"]] * 2


@pytest.mark.parametrize("hurt", [no_height, null_width, too_many])
def test_a_record_without_sizes_is_refused(hurt: Any, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With the record and the cure. Where no number of tokens depends on a size, none is needed."""
    rows = with_sizes(rows_of(dataset), dataset / "images")
    number = next(n for n, row in enumerate(rows) if n > 7 and isinstance(row.get("image"), str))
    hurt(rows[number])
    path = write("json", tmp_path / "records", rows)
    with pytest.raises(ConfigError, match=rf"record {number} .*width and height.*data\.examine=head"):
        open_again(config(parts, dataset, tmp_path, path, "lazy", *TILED), parts)
    open_again(config(parts, dataset, tmp_path, path, "lazy"), parts)


def test_several_images_of_anyres_max_need_no_size(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = [row for row in with_sizes(rows_of(dataset), dataset / "images") if row["id"] != "two"]
    rows = [row for row in rows if row.get("image")]
    two = next(row for row in rows_of(dataset) if row["id"] == "two")
    path = write("json", tmp_path / "records", [two, *rows])
    records = open_again(config(parts, dataset, tmp_path, path, "lazy", *MAX), parts)
    sizes = PictureSizes(records.index.records, records.index.pictures)
    assert sizes.sizes_of(0, 0) == (0, 0, 0) and min(sizes.sizes_of(1, 0)) > 0
    with pytest.raises(ConfigError, match="record 0 "):
        open_again(config(parts, dataset, tmp_path, path, "lazy", *TILED), parts)


def test_a_video_is_refused(parts: Path, dataset: Path, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nwhich?"}, {"from": "gpt", "value": "red"}]
    path = write("json", tmp_path / "records", [{"id": "v", "image": "a.mp4", "conversations": turns, "width": 3}])
    with pytest.raises(ConfigError, match=r"has a video.*data\.examine=head"):
        open_again(config(parts, dataset, tmp_path, path, "lazy", *MAX), parts)


@pytest.mark.parametrize(("width", "height", "count", "sizes"), [
    (3, 5, 1, [(3, 5)]), ([3, 7], [5, 9], 2, [(3, 5), (7, 9)]), (640.0, 480.0, 1, [(640, 480)]),
    (3, 5, 2, None), ([3], [5, 9], 2, None), (0, 5, 1, None), (True, 5, 1, None), ("3", 5, 1, None),
    (3.5, 5, 1, None), (float("nan"), 5, 1, None), (float("inf"), 5, 1, None), (1 << 40, 5, 1, None),
    ([None], 5, 1, None),
])  # fmt: skip
def test_what_counts_as_a_size(width: Any, height: Any, count: int, sizes: Any) -> None:
    assert given_sizes({"width": width, "height": height}, count) == sizes
