"""Which images are decoded before training with `data.examine=sample`, `lazy` and `auto`, and what follows from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import write_images
from harness import CPU
from PIL import Image
from small import config_of, make_config, write_json
from test_build import TILED, open_again, plan_of
from tiers import slow_after

from llava_fsdp.config import AspectRatio, Config, Examine, PrepareConfig
from llava_fsdp.data.images.check import HEAD_BYTES
from llava_fsdp.data.index import build as index_module
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine import examine_passes
from llava_fsdp.data.index.examine.bad_records import refuse_bad_records
from llava_fsdp.data.index.examine.examine_passes import ExaminePictures
from llava_fsdp.data.index.examine.image_sample import EACH_FILE, Examined, ImageSample, upper_bound
from llava_fsdp.data.index.verify import verify_index
from llava_fsdp.data.loader import ModelShape, build_loader
from llava_fsdp.prepare.main import prepare
from llava_fsdp.runtime.errors import DamagedError, DataError, ImageError
from llava_fsdp.runtime.text.progress import watch_silently

RECORDS, TEXT_ONLY = 23, (4, 22)
SIZE = "data.examine_images=5"


@pytest.mark.parametrize(
    ("bad", "drawn", "bound"),
    [(0, 299, 1e-2), (0, 2_995, 1e-3), (0, 29_956, 1e-4), (1, 3_000, 1.58e-3), (10, 3_000, 5.65e-3), (0, 1, 0.95)],
)
def test_bounds_of_clopper_and_pearson(bad: int, drawn: int, bound: float) -> None:
    assert upper_bound(bad, drawn) == pytest.approx(bound, rel=4e-3)
    if not bad:
        assert upper_bound(0, drawn) == pytest.approx(1 - 0.05 ** (1 / drawn), rel=1e-9)
        assert (upper_bound(0, drawn) <= 1e-3) is (drawn >= 2_995)


def test_bounds_grow_with_bad_ones() -> None:
    bounds = [upper_bound(bad, 7) for bad in range(8)]
    assert bounds == sorted(set(bounds)) and bounds[-1] == 1 and all(b > n / 7 for n, b in enumerate(bounds[:-1]))


@pytest.mark.parametrize("ends", [(0,), (1,), (0, 0), (2, 5), (7, 7, 100), (100_000_000,)])
@pytest.mark.parametrize("size", [1, 3, 99, 101])
def test_a_sample_is_fixed_and_has_the_end_of_every_file(ends: tuple[int, ...], size: int) -> None:
    sample = ImageSample(ends, size)
    drawn, chosen = sample.drawn_at_random.tolist(), sample.decoded.tolist()
    assert drawn == sorted(set(drawn)) == ImageSample(ends, size).drawn_at_random.tolist()
    assert len(drawn) == min(size, ends[-1]) and set(drawn) <= set(chosen)
    assert all(0 <= row < ends[-1] for row in chosen)
    begins = (0, *ends[:-1])
    for begin, end in zip(begins, ends, strict=True):
        own = sample.decoded_between(begin, end).tolist()
        assert own == [row for row in chosen if begin <= row < end] and len(own) >= min(EACH_FILE, end - begin)
        assert begin == end or end - 1 in own


@pytest.mark.slow
def test_each_image_is_drawn_as_often_as_another() -> None:
    counts = np.zeros(7)
    for total in range(1_000, 8_000):
        counts += np.bincount(ImageSample((total,), 1).drawn_at_random * 7 // total, minlength=7)
    assert abs(counts - 1_000).max() < 5 * 1_000**0.5


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """23 records in three files of odd sizes; 21 of them have an image of their own."""
    (tmp_path / "images").mkdir()
    rows: list[dict[str, Any]] = []
    for n in range(RECORDS):
        turns = [{"from": "human", "value": "how many"}, {"from": "gpt", "value": f"{n} of them"}]
        rows.append({"id": f"r{n}", "conversations": turns})
        if n not in TEXT_ONLY:
            turns[0]["value"] += "\n<image>"
            rows[-1]["image"] = f"{n}.png"
            Image.effect_noise((29 + n, 41), 90).convert("RGB").save(tmp_path / "images" / f"{n}.png")
    for name, begin, end in (("a", 0, 11), ("b", 11, 12), ("c", 12, RECORDS)):
        write_json(tmp_path / "records" / f"{name}.json", rows[begin:end])
    return tmp_path


def config(parts: Path, shards: Path, how: str, *overrides: str) -> Config:
    here = f"data.path={shards / 'records'}", f"data.images={shards / 'images'}", f"data.index={shards / 'index'}"
    return make_config(parts, shards, shards / "run", *here, f"data.examine={how}", SIZE, *overrides)


def images_of(records: Records) -> list[str]:
    index = records.index
    return [name for number in range(len(index)) for name in index.store.record(number).images]


def sample_of(size: int = 5, ends: tuple[int, ...] = (10, 11, 21)) -> list[int]:
    return ImageSample(ends, size).decoded.tolist()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-900])


def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each image that is examined, and whether it is decoded."""
    seen: list[tuple[str, bool]] = []
    real = examine_passes.examine

    def noting(path: Path, where: str, full: bool, scaled: bool):
        seen.append((path.name, full))
        return real(path, where, full, scaled)

    monkeypatch.setattr(examine_passes, "examine", noting)
    return seen


@pytest.mark.parametrize(
    ("how", "overrides", "rest"),
    slow_after(4, [
        ("decode", (), True), ("head", (), False), ("lazy", (), None), ("lazy", ("data.pixels=llava_v1_5",), None),
        ("sample", (), None), ("sample", TILED, False), ("sample", ("data.pixels=llava_v1_5",), False),
    ]),
)  # fmt: skip
def test_no_more_is_opened_than_needed(
    how: str, overrides: tuple[str, ...], rest: bool | None, parts: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = looks(monkeypatch)
    monkeypatch.setattr(index_module, "CHUNKS", dict.fromkeys(index_module.CHUNKS, 7))
    records = open_again(config(parts, shards, how, *overrides), parts)
    names = images_of(records)
    chosen = {names[row] for row in sample_of()} if how == "sample" else set()
    assert not chosen or len(chosen) < len(names)
    assert sorted(seen) == sorted(
        (name, name in chosen or bool(rest)) for name in names if name in chosen or rest is not None
    )
    numbers = [n for n in range(RECORDS) if n not in TEXT_ONLY]
    for name, number in zip(names, numbers, strict=True):
        known = records[number].sizes
        is_open = name in chosen or rest is not None
        assert known == (((29 + number, 41),) if is_open else ((0, 0),))
        assert records.is_decoded(number, 0) is (name in chosen or bool(rest))
    whole = open_again(config(parts, shards, "decode", *overrides), parts)
    for column in ("lengths", "labels", "images", "tiles", "image_tokens"):
        assert getattr(records, column).tolist() == getattr(whole, column).tolist()
    assert records.fingerprint == whole.fingerprint and not records.num_wrong


def test_a_sample_finds_what_is_in_it_and_nothing_else(parts: Path, shards: Path) -> None:
    cfg = config(parts, shards, "sample")
    names = images_of(open_again(cfg, parts))
    shutil.rmtree(shards / "index")
    for name in names[::2]:
        cut(shards / "images" / name)
    records = open_again(cfg, parts)
    bad = [row for row in sample_of() if row % 2 == 0]
    found = [records.index.store.record(row["record"]).images[0] for row in records.index.problems()]
    assert sorted(found) == sorted(names[row] for row in bad) and 0 < len(bad) < len(names) // 2
    drawn = ImageSample((21,), 5).drawn_at_random
    own = records.index.examined
    assert own is not None and own == Examined(21, len(sample_of()), len(bad), 5, int((drawn % 2 == 0).sum()))
    assert own.bound == upper_bound(own.bad_drawn, 5)
    # one of them is mended, and one that was not examined breaks
    shutil.copy(shards / "images" / names[1], shards / "images" / names[bad[0]])
    cut(shards / "images" / next(name for row, name in enumerate(names) if row % 2 and row not in sample_of()))
    again = open_again(cfg, parts, look_again=True)
    fresh = open_again(config(parts, shards, "sample", f"data.index={shards / 'fresh'}"), parts)
    assert again.num_wrong == fresh.num_wrong == len(bad) - 1 and again.index.examined == fresh.index.examined
    assert again.index.pictures.name.endswith(".1")
    assert again.kept_samples is not None and again.kept_samples.tolist() == fresh.kept_samples.tolist()
    with pytest.raises(DataError, match="records are wrong"):
        refuse_bad_records(again, cfg.data)


def test_a_sample_of_all_has_no_bound(parts: Path, shards: Path) -> None:
    cut(shards / "images" / "7.png")
    index = open_again(config(parts, shards, "sample", "data.examine_images=21"), parts).index
    assert index.examined == Examined(21, 21, 1, 21, 1) and index.examined.bound is None
    assert open_again(config(parts, shards, "lazy"), parts).index.examined == Examined(21)
    assert Examined(21).bound is None and "none of 21 images" in Examined(21).summary
    assert open_again(config(parts, shards, "head"), parts).index.examined is None


@pytest.mark.parametrize("size", [1, 5])
def test_a_file_that_is_added_changes_the_sample(size: int, parts: Path, shards: Path) -> None:
    cfg = config(parts, shards, "sample", f"data.examine_images={size}")
    for number in range(0, RECORDS, 3):
        if number not in TEXT_ONLY:
            cut(shards / "images" / f"{number}.png")
    last = (shards / "records" / "c.json").rename(shards / "c.json")
    first = open_again(cfg, parts)
    assert first.index.examined is not None and first.index.examined.images == 11
    last.rename(shards / "records" / "c.json")
    added = open_again(cfg, parts)
    fresh = open_again(
        config(parts, shards, "sample", f"data.examine_images={size}", f"data.index={shards / 'f'}"), parts
    )
    assert added.index.examined == fresh.index.examined and list(added.index.problems()) == list(fresh.index.problems())


@pytest.mark.parametrize(("most", "how"), [(21, Examine.decode), (20, Examine.sample)])
def test_above_a_number_of_images_only_some_are_decoded(
    most: int, how: Examine, parts: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "DECODED_AT_MOST", most)
    made = open_again(config(parts, shards, "auto"), parts).index
    named = open_again(config(parts, shards, how.value), parts).index
    assert made.pictures == named.pictures and made.examined == named.examined
    assert (made.examined is None) is (how is Examine.decode)
    monkeypatch.setattr(index_module, "DECODED_AT_MOST", 41 - most)
    assert open_again(config(parts, shards, "auto"), parts).index.pictures != made.pictures


def test_the_limit_of_auto() -> None:
    assert index_module.DECODED_AT_MOST == 1_000_000
    cfg = config_of(["data=llava_json", "data.path=a.json"])
    assert (cfg.data.examine, cfg.data.examine_images) == (Examine.auto, 3_000)


def test_lazy_with_tiles_that_the_original_squeezes(parts: Path, shards: Path) -> None:
    cfg = config(parts, shards, "lazy", "data.image_aspect_ratio=anyres", "data.pixels=llava_v1_5")
    assert cfg.data.examine is Examine.lazy and cfg.data.trained_aspect is AspectRatio.square


@pytest.mark.parametrize("how", ["sample", "lazy", "head", "decode"])
def test_an_image_that_breaks_is_told_to_be_unexamined(how: str, parts: Path, shards: Path) -> None:
    """If it was; with links out of the folder, which are found only then."""
    cfg = config(parts, shards, how, "data.workers=0")
    names = images_of(open_again(cfg, parts))
    outside = Path(shutil.copy(shards / "images" / "0.png", shards / "outside.png"))
    chosen = sample_of()
    free = [row for row in range(21) if row not in chosen]
    broken, linked, examined = names[free[0]], names[free[1]], names[chosen[0]]
    for name in (broken, examined):
        cut(shards / "images" / name)
    (shards / "images" / linked).unlink()
    (shards / "images" / linked).symlink_to(outside)
    shape = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
    steps = build_loader(cfg, parts / "language", parts / "vision", shape, 0, 1, CPU).steps
    for name, kind in ((broken, "image_truncated"), (linked, "path_outside"), (examined, "image_truncated")):
        with pytest.raises(ImageError) as caught:
            steps.read(int(name.removesuffix(".png")))
        assert caught.value.kind == kind and caught.value.culprit["record"] == steps.records.where(int(name[:-4]))
        is_known = how == "decode" or (how == "sample" and name == examined)
        assert ("data.examine=decode" in str(caught.value)) is not is_known


def test_verify_compares_what_was_decoded(parts: Path, shards: Path) -> None:
    cfg = config(parts, shards, "sample")
    names = images_of(open_again(cfg, parts))
    chosen = sample_of()
    assert verify_index(plan_of(cfg, parts), watch_silently) == (RECORDS, len(chosen))
    cut(shards / "images" / next(name for row, name in enumerate(names) if row not in chosen))
    assert verify_index(plan_of(cfg, parts), watch_silently) == (RECORDS, len(chosen))
    cut(shards / "images" / names[chosen[0]])
    with pytest.raises(DataError, match=r"1 records or images"):
        verify_index(plan_of(cfg, parts), watch_silently)


@pytest.mark.slow
def test_prepare_reports_a_sample(parts: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(shards / "images" / "21.png")  # the last of its file
    given = [
        "data=llava_json", f"data.path={shards / 'records'}", f"data.images={shards / 'images'}", SIZE,
        f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "model.random_weights=true",
        "data.max_length=256", "prepare.workers=1", "model.projector=random", "data.examine=sample",
        f"data.index={shards / 'index'}",
    ]  # fmt: skip
    for form in ("text", "json"):
        cfg = config_of([*given, f"format={form}"], "prepare")
        assert isinstance(cfg, PrepareConfig)
        prepare(cfg)
        out = capsys.readouterr().out
        if form == "json":
            found = json.loads(out)["examined"]
            assert (found["images"], found["decoded"], found["bad"]) == (21, len(sample_of()), 1)
            page = (shards / "index" / "report.html").read_text()
        else:
            said = " ".join(out.split())
    assert found["summary"] in said and found["summary"].partition("; ")[2] in page


@pytest.mark.parametrize("how", list(Examine)[1:])
def test_of_a_remote_image_only_what_is_examined_is_fetched(how: Examine, parts: Path, shards: Path) -> None:
    rows = [
        row for file in sorted((shards / "records").iterdir()) for row in json.loads(file.read_text()) if "image" in row
    ]
    Image.effect_noise((300, 300), 99).convert("RGB").save(shards / "images" / "2.png")
    write_images(shards / "a.parquet", rows, shards / "images")
    cfg = config(parts, shards, how.value, f"data.path={shards / 'a.parquet'}")
    index = open_again(cfg, parts).index
    folder, plan = index.store.folder, plan_of(cfg, parts)
    task = ExaminePictures(folder, 7, None, plan.cache, index.records, how, plan.opens_all, 5, True, False)
    rows_of = sample_of(5, (21,))
    sizes: dict[int, list[int]] = {}
    for numbers in task.chunks:
        decoded = task.decoded_images(*task.image_range(numbers))
        for number in task.records_to_open(numbers, decoded):
            held = index.store.record(number).inline
            needed = [task.part_to_fetch(decoded, (), number, name, place) for name, place in held.items()]
            sizes[number] = [place.size for place in needed if place is not None]
    whole = {number: [(shards / "images" / row["image"]).stat().st_size] for number, row in enumerate(rows)}
    assert max(whole.values()) > [HEAD_BYTES]
    expected: dict[Examine, Callable[[], dict[int, list[int]]]] = {
        Examine.decode: lambda: whole,
        Examine.head: lambda: {number: [min(size, HEAD_BYTES)] for number, (size,) in whole.items()},
        Examine.sample: lambda: {number: whole[number] for number in rows_of},
        Examine.lazy: dict,
    }
    assert sizes == expected[how]()


def test_an_image_that_is_not_opened_has_its_size_when_asked(parts: Path, shards: Path) -> None:
    """The index does not have it, but the proof of an export needs it."""
    cfg = config(parts, shards, "lazy")
    record, reader = open_again(cfg, parts)[3], plan_of(cfg, parts).reader
    assert record.sizes == ((0, 0),) and reader.size(record, 0) == (32, 41)


def test_counts_that_are_not_what_was_written(parts: Path, shards: Path) -> None:
    cfg = config(parts, shards, "sample")
    path = open_again(cfg, parts).index.pictures / "done.json"
    facts = json.loads(path.read_text())
    for change in ({"examined": 3}, {"examined": {"images": "3"}}, {"examined": {**facts["examined"], "more": 1}}):
        path.write_text(json.dumps({**facts, **change}))
        with pytest.raises(DamagedError, match=r"done\.json"):
            open_again(cfg, parts)
