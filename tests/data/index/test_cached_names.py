"""What is cached has another name, or another fingerprint, for each thing that it depends on."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small import make_config
from test_build import plan_of

from llava_fsdp.config import AspectRatio, Examine, PatchMerge, Pixels, SpecialTokens, TooLong
from llava_fsdp.data.containers.data_files import CacheFolder
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, Preprocessor
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.index import build, source_state
from llava_fsdp.data.index.build import Plan, encoded_name, newest_version, pictures_name
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.record_store import DataSource, SourceFile
from llava_fsdp.data.index.source_state import find_state, short_digest, stamp
from llava_fsdp.data.index.token_pass import EncodeRecords
from llava_fsdp.data.text.encode import ExactEncoder, OriginalEncoder
from llava_fsdp.data.text.llava_v1_5 import Original
from llava_fsdp.data.text.templates import template
from llava_fsdp.runtime.errors import SourceError
from llava_fsdp.runtime.text.progress import watch_silently


def tokenizer_of(fingerprint: str) -> Any:
    return SimpleNamespace(fingerprint=fingerprint)


EXACT = ExactEncoder(tokenizer_of("a"), template("v1"), lambda *_: np.arange(4), 99, TooLong.truncate)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": tokenizer_of("b")}, {"template": template("llava_v1")}, {"max_length": 98}, {"start_end": True},
        {"special_tokens": SpecialTokens.parse},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_exact_samples_depend_on_each_of_these(change: dict[str, Any]) -> None:
    assert replace(EXACT, **change).fingerprint != EXACT.fingerprint
    assert replace(EXACT, too_long=TooLong.fail).fingerprint == EXACT.fingerprint, "an index is for all of these"


ORIGINAL = Original(tokenizer_of("a"), template("v1"), 99)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": tokenizer_of("b")}, {"form": template("llava_v1")}, {"max_length": 98}, {"start_end": True},
        {"pad_id": 3},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_the_originals_samples_depend_on_each_of_these(change: dict[str, Any]) -> None:
    made = [OriginalEncoder(own, lambda *_: np.arange(4)) for own in (ORIGINAL, replace(ORIGINAL, **change))]
    assert made[0].fingerprint != made[1].fingerprint


CLIP = Preprocessor(28, True, Image.Resampling.BICUBIC, (0.5, 0.4, 0.3), (0.5, 0.4, 0.3))
READER = ImageReader(Path("a"), CLIP, ImageTokens(AspectRatio.square, CLIP.size, 4), Pixels.exact)


@pytest.mark.parametrize(
    "change",
    [
        {"preprocessor": replace(CLIP, size=56)}, {"preprocessor": replace(CLIP, keep_ratio=False)},
        {"preprocessor": replace(CLIP, resample=Image.Resampling.BILINEAR)},
        {"preprocessor": replace(CLIP, mean=(0.5, 0.4, 0.2))}, {"preprocessor": replace(CLIP, std=(0.5, 0.4, 0.2))},
        {"pixels": Pixels.fast},
        *({"tokens": replace(READER.tokens, **rule)} for rule in (
            {"aspect": AspectRatio.pad}, {"features": 9}, {"sizes": ((28, 56),)}, {"merge": PatchMerge.spatial},
        )),
    ],
)  # fmt: skip
def test_pixels_depend_on_each_of_these(change: dict[str, Any]) -> None:
    limited = replace(READER, tokens=replace(READER.tokens, aspect=AspectRatio.anyres_max))
    assert replace(limited, tokens=replace(limited.tokens, max_tiles=4)).fingerprint != limited.fingerprint
    films = [replace(limited, sampling=own).fingerprint for own in (None, VideoSampling(1.0, 8), VideoSampling(1.0, 9))]
    assert len({*films}) == 3, "which frames of a video are taken"
    assert replace(READER, **change).fingerprint != READER.fingerprint
    assert replace(READER, folder=Path("b")).fingerprint == READER.fingerprint, "what is in it counts"


@pytest.fixture(scope="module")
def plan(parts: Path, dataset: Path) -> Plan:
    return plan_of(make_config(parts, dataset, Path("unused")), parts)


@pytest.mark.parametrize(
    "change",
    [
        *({"examine": how} for how in Examine if how is not Examine.auto), {"allow_links": True},
        {"pixels": Pixels.llava_v1_5},
    ],
)  # fmt: skip
def test_what_was_found_of_images_depends_on_each_of_these(change: dict[str, Any], plan: Plan) -> None:
    assert pictures_name(replace(plan, cfg=replace(plan.cfg, **change))) != pictures_name(plan)


@pytest.mark.parametrize("change", ["images", "sizes", "none"])
def test_what_was_found_of_a_sample_depends_on_each_of_these(change: str, plan: Plan) -> None:
    """And what was found by decoding all does not depend on them."""
    sample = replace(plan, cfg=replace(plan.cfg, examine=Examine.sample))
    tiled = replace(plan.reader, tokens=replace(plan.reader.tokens, aspect=AspectRatio.anyres))
    for made in (sample, plan):
        changes = {
            "images": replace(made, cfg=replace(made.cfg, examine_images=7)),
            "sizes": replace(made, reader=tiled),
            "none": made,
        }
        is_other = made is sample and change != "none"
        assert (pictures_name(changes[change]) != pictures_name(made)) is is_other


def test_names_of_images_are_those_of_earlier_versions(plan: Plan) -> None:
    """An index that was made before is not made again."""
    for how in (Examine.decode, Examine.head):
        own = replace(plan, cfg=replace(plan.cfg, examine=how))
        assert pictures_name(own) == f"pictures-{short_digest(how.value, False, True)}"


def test_lengths_are_of_the_version_that_counted_them(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    before = encoded_name(plan, Path("pictures.0"))
    monkeypatch.setattr(build, "ENCODED_FORMAT", build.ENCODED_FORMAT + 1)
    assert encoded_name(plan, Path("pictures.0")) != before


@pytest.mark.parametrize("column", ["width", "height", "stored_height", "frames", "rate"])
def test_token_counts_of_a_chunk_depend_on_what_was_found_of_its_images(column: str, tmp_path: Path) -> None:
    """And not on that of others: the image of a record outside of the chunk has changed."""
    np.save(tmp_path / "first_picture.npy", np.array([0, 1, 2]))
    columns = {name: np.array([7, 8]) for name in ("width", "height", "stored_height", "frames", "rate")}

    def keys(**values: list[int]) -> list[str]:
        for name, own in (columns | {name: np.array(own) for name, own in values.items()}).items():
            np.save(tmp_path / f"{name}.npy", own)
        task = EncodeRecords(Path(), 1, None, CacheFolder(Path(), 0), tmp_path, tmp_path, EXACT, READER)
        task.__dict__["store"] = SimpleNamespace(part=lambda number: SimpleNamespace(key="key"))
        return [task.key_of(range(n, n + 1)) for n in range(2)]

    before, after = keys(), keys(**{column: [7, 9]})
    assert before[0] == after[0] and before[1] != after[1]


def test_lengths_depend_on_each_of_these(plan: Plan) -> None:
    folder = Path(pictures_name(plan) + ".0")
    assert isinstance(plan.encoder, ExactEncoder)
    shorter = replace(plan, encoder=replace(plan.encoder, max_length=99))
    larger = replace(plan, reader=replace(plan.reader, tokens=replace(plan.reader.tokens, features=9)))
    names = [encoded_name(shorter, folder), encoded_name(larger, folder), encoded_name(plan, folder.with_suffix(".1"))]
    assert len({encoded_name(plan, folder), *names}) == 4


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("[1]")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    return SourceFile("a", str(tmp_path / "a.json"), str(tmp_path / "x"))


def of(*files: SourceFile) -> list[DataSource]:
    """Each file as a data source."""
    return [DataSource(file.name, file.path, (file,)) for file in files]


SOURCES: dict[str, Callable[[SourceFile], SourceFile]] = {
    "name": lambda s: replace(s, name="b"),
    "path": lambda s: replace(s, path=s.path.replace("a.json", "b.json")),
    "images": lambda s: replace(s, images=None),
    "question": lambda s: replace(s, question="q"),
    "image_column": lambda s: replace(s, image_column="file"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_state_is_of_its_sources_and_of_the_largest_record(case: str, source: SourceFile, tmp_path: Path) -> None:
    other = SOURCES[case](source)
    assert stamp(of(other), 100) != stamp(of(source), 100) != stamp(of(source), 99)
    made = [find_state(of(s), tmp_path, most, watch_silently, True) for s, most in ((source, 100), (other, 100))]
    assert made[0].key != made[1].key and made[0].fingerprint == made[1].fingerprint
    third = find_state(of(source), tmp_path, 99, watch_silently, True)
    assert third.key != made[0].key
    assert len({own.file_keys[0] for own in (*made, third)}) == 3, "the results of single files are named by these"


def test_a_file_that_changes_while_its_checksum_is_made_is_refused(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of it afterwards, whatever it is when it has changed back. A file that is gone has changed."""
    path, own = Path(source.path), source_state.digest_of_records
    for change in (lambda: os.utime(path, ns=(10**18, 10**18 + 7)), path.unlink):
        with monkeypatch.context() as patch:
            patch.setattr(source_state, "digest_of_records", lambda file, change=change: (own(file), change())[0])
            with pytest.raises(SourceError):
                find_state(of(source), tmp_path, 100, watch_silently, False)
        assert not (tmp_path / "known.json").exists()
        (tmp_path / "digests.json").unlink()


def test_checksums_are_kept_while_others_are_made(
    source: SourceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of files that are read later are still stored when the process is killed at an earlier one; and those of
    files that are no longer in the dataset are forgotten at the end."""
    files = [replace(source, path=source.path.replace("a.json", f"{n}.json")) for n in range(3)]
    for file in files:
        Path(file.path).write_text(f"[{file.path!r}]")
    first = source_state.digests_of(files, tmp_path, watch_silently, False)
    monkeypatch.setattr(source_state, "STORED_EVERY", 1)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(source_state, "replace_file", lambda path, text: written.append(json.loads(text)))
    assert source_state.digests_of(files[:2], tmp_path, watch_silently, False) == first[:2]
    assert [len(own) for own in written] == [3, 3, 2]


def test_a_state_is_of_size_time_and_content(source: SourceFile, tmp_path: Path) -> None:
    path, before = Path(source.path), stamp(of(source), 100)
    first = find_state(of(source), tmp_path, 100, watch_silently, False)
    os.utime(path, ns=(10**18, 10**18 + 1))
    later = stamp(of(source), 100)
    assert later != before, "a nanosecond"
    assert find_state(of(source), tmp_path, 100, watch_silently, False) == first, "the same content"
    path.write_text("[2] ")
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert stamp(of(source), 100) != later
    other = find_state(of(source), tmp_path, 100, watch_silently, False)
    assert other.key != first.key and other.fingerprint != first.fingerprint


def test_a_file_is_read_again_when_its_size_or_time_has_changed(source: SourceFile, tmp_path: Path) -> None:
    """Its checksum is stored by both; a file that is as it was is not read, unless that is asked for."""
    path = Path(source.path)

    def found(look_again: bool = False) -> str:
        if not look_again:
            (tmp_path / "known.json").unlink(missing_ok=True)
        return find_state(of(source), tmp_path, 100, watch_silently, look_again).fingerprint

    def write(text: str, time: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(time, time))

    first = found()
    write("[2]", 10**18)
    assert found() == first, "as it was, by size and time"
    assert found(look_again=True) != first
    write("[1]", 10**18 + 1)
    assert found() == first, "by its time"
    write("[1] ", 10**18 + 1)
    assert found() != first, "by its size"


def test_the_content_of_every_source_counts(source: SourceFile, tmp_path: Path) -> None:
    second = replace(source, path=source.path.replace("a.json", "b.json"))
    found = []
    for content in ("[1]", "[2]"):
        Path(second.path).write_text(content)
        found.append(find_state(of(source, second), tmp_path, 100, watch_silently, True).fingerprint)
    swapped = find_state(of(second, source), tmp_path, 100, watch_silently, True).fingerprint
    assert len({*found, swapped}) == 3


def test_the_tenth_version_is_newer_than_the_ninth(tmp_path: Path) -> None:
    for name in ("pictures-a.9", "pictures-a.10", "pictures-a.tmp", "pictures-b.11", "pictures-a.parts"):
        (tmp_path / name).mkdir()
    assert newest_version(tmp_path / "pictures-a") == tmp_path / "pictures-a.10"
    assert newest_version(tmp_path / "pictures-c") is None


def records_of(numbers: list[int] | None, content: str = "a") -> Any:
    """Records of three sources of 4, 1 and 3, of which these are kept."""
    records: Any = object.__new__(Records)
    records.kept_samples = None if numbers is None else np.array(numbers, dtype=np.int64)
    records.index = SimpleNamespace(
        store=SimpleNamespace(source_bounds=[0, 4, 5, 8], fingerprint=content), first_sample=None
    )
    return records


@pytest.mark.parametrize(
    ("kept", "counts"),
    [(None, [4, 1, 3]), ([0, 1, 3, 4, 5, 7], [3, 1, 2]), ([1, 2, 3, 6, 7], [3, 0, 2]), ([4, 5], [0, 1, 1])],
)
def test_records_left_out_are_counted_off_their_own_source(kept: list[int] | None, counts: list[int]) -> None:
    assert records_of(kept).source_counts == counts


def test_a_dataset_is_its_content_and_what_is_kept_of_it() -> None:
    made = [records_of(None), records_of(None, "b"), records_of([0, 1]), records_of([0, 2]), records_of([0, 1], "b")]
    assert len({records.fingerprint for records in made}) == 5
    assert records_of([0, 1]).fingerprint == records_of([0, 1]).fingerprint
