"""Chunks, problems, names and numbers of the passes that make an index, without a dataset."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llava_fsdp.config import AspectRatio, BadRecords, DataConfig, Examine, Pixels, SpecialTokens, TooLong
from llava_fsdp.data.containers.data_files import CacheFolder
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.images.check import HEAD_BYTES, ImageFacts
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.index import build, record_store
from llava_fsdp.data.index.build import Plan, encoding_of, is_complete_folder, last_look, note_look, pictures_name
from llava_fsdp.data.index.examine.bad_records import describe_same_files, refuse_bad_records, remarks
from llava_fsdp.data.index.examine.examine_passes import (
    ExaminePictures,
    Findings,
    ImageProblem,
    PictureNames,
    PictureSizes,
    ReadRecords,
    check_pictures_named,
    sizes_of,
)
from llava_fsdp.data.index.find_files import is_in_index, is_records
from llava_fsdp.data.index.record_store import NumberedFile, RecordStore, SourceFile, sources_of
from llava_fsdp.data.index.token_pass import tell_if_cut, tell_special_token, tell_unlabelled
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.runtime.errors import ConfigError, DataError, ImageError

CACHE = CacheFolder(Path(), 0)
TURNS = (Turn("human", "<image> what"), Turn("gpt", "a"))
RECORD = Record("a.json", 3, "own", (), TURNS, False)
FILES = [SourceFile("a", "a.json", "images"), SourceFile("b", "b.json", None), SourceFile("b", "c.tar", None)]


def store_of(*counts: int) -> Any:
    """A store without records, of files that have so many."""
    store: Any = object.__new__(RecordStore)
    sources = [0, 1, 1]
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    store.sources = [SimpleNamespace(name=name) for name in "ab"]
    store.parts = [
        NumberedFile(sources[n], FILES[n], FILES[n].path, f"key{n}", first, count)
        for n, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ]
    store._part_begins = firsts
    store.lines = np.arange(sum(counts)) + 1
    return store


def with_store(task: Any, store: Any) -> Any:
    task.__dict__["store"] = store
    return task


def test_records_are_numbered_over_all_files() -> None:
    store = store_of(5, 3, 1)
    assert store.source_bounds == [0, 5, 9]
    assert [store.locate(n) for n in (0, 4, 5, 7, 8)] == [
        (FILES[0], 0), (FILES[0], 4), (FILES[1], 0), (FILES[1], 2), (FILES[2], 0),
    ]  # fmt: skip
    assert [store.line(n) for n in (0, 5, 8)] == [1, 6, None], "a tar has no lines"


def test_chunks_are_of_one_file_and_named_by_it() -> None:
    task = with_store(ReadRecords(Path("texts"), 2, None, CACHE), store_of(5, 3))
    assert task.chunks == [range(0, 2), range(2, 4), range(4, 5), range(5, 7), range(7, 8)]
    assert task.file_begins == [0, 0, 0, 5, 5]
    assert [task.chunk_of(n) for n in range(8)] == [0, 0, 1, 1, 2, 3, 3, 4]
    assert [path.name for path in task.files(Path("chunks"))] == [
        "key0-000000000.npz", "key0-000000002.npz", "key0-000000004.npz", "key1-000000000.npz", "key1-000000002.npz",
    ]  # fmt: skip


def test_problems_are_those_of_their_record() -> None:
    """One of each kind; numbers are those in the file, and names are shown without what controls a terminal."""
    found = Findings(range(7, 10), first=5)
    tell = found.teller_of(8, "own")
    for kind, reason in ((Kind.url, "a\x1b[1m"), (Kind.url, "second"), (Kind.no_labels, "b")):
        tell(kind, reason)
    found.teller_of(9, None)(Kind.too_long, "c")
    assert found.flags.tolist() == [0, BITS[Kind.url] | BITS[Kind.no_labels], BITS[Kind.too_long]]
    assert [(row["record"], row["id"], row["kind"]) for row in found.problems] == [
        (3, "own", "url"), (3, "own", "no_labels"), (4, None, "too_long"),
    ]  # fmt: skip
    assert "\x1b" not in found.problems[0]["reason"] and found.problems[0]["reason"].startswith("a")
    assert found.columns["flags"] is found.flags


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, [Kind.tag_without_image]),
        ({"turns": (Turn("human", "what"),)}, []),
        ({"images": ("a.png",)}, [Kind.images_unset]),
        ({"images": ("a.png",), "folder": Path("x")}, []),
        ({"images": ("inline",), "inline": {"inline": b""}}, []),
        ({"images": ("inline", "a.png"), "inline": {"inline": b""}}, [Kind.images_unset]),
        ({"unread": 'the key "audio"'}, [Kind.media_not_read]),
    ],
)
def test_how_a_record_names_its_images(values: dict[str, Any], kinds: list[Kind]) -> None:
    found: list[tuple[str, str]] = []
    check_pictures_named(replace(RECORD, **values), lambda kind, reason: found.append((kind, reason)))
    assert [kind for kind, _ in found] == kinds
    assert all(RECORD.where in reason for _, reason in found)
    assert Kind.images_unset not in kinds or "has image a.png" in found[0][1]


def pictures_pass(folder: Path, how: Examine, opens_all: bool, counts: list[int]) -> Any:
    """A pass over images of records with so many of them."""
    ends = np.cumsum([0, *counts])
    texts = [f"{n}.png".encode() for n in range(ends[-1])]
    np.save(folder / "first_picture.npy", ends)
    np.save(folder / "name_end.npy", np.cumsum([0, *map(len, texts)]))
    np.save(folder / "names.npy", np.frombuffer(b"".join(texts), dtype=np.uint8))
    return ExaminePictures(Path("texts"), 4, None, CACHE, folder, how, opens_all, 2, True, False)


@pytest.mark.parametrize(
    ("how", "opens_all", "opened", "head"),
    [
        (Examine.decode, True, [0, 1, 2, 3], False), (Examine.head, True, [0, 1, 2, 3], True),
        (Examine.lazy, False, [], None),
    ],
)  # fmt: skip
def test_which_images_are_opened(
    how: Examine, opens_all: bool, opened: list[int], head: bool | None, tmp_path: Path
) -> None:
    """To their ends where they are decoded, and else to where their sizes are."""
    task = with_store(pictures_pass(tmp_path, how, opens_all, [1, 0, 2, 3]), store_of(3, 1))
    assert PictureNames(tmp_path).names_of(2) == ["1.png", "2.png"] and PictureNames(tmp_path).names_of(1) == []
    assert task.image_range(range(2, 4)) == (1, 6)
    decoded = task.decoded_images(1, 6)
    assert list(decoded) == (list(range(1, 6)) if how is Examine.decode else [])
    assert list(task.records_to_open(range(4), decoded)) == opened
    place = ImageLocation("far", 7, HEAD_BYTES + 9)
    needed = task.part_to_fetch(decoded, set(), 2, "1.png", place)
    assert needed == (None if head is None else replace(place, size=HEAD_BYTES) if head else place)
    assert task.part_to_fetch(decoded, {("images", "1.png", how is Examine.decode)}, 2, "1.png", place) is None


def test_a_sample_opens_the_records_of_its_images(tmp_path: Path) -> None:
    task = with_store(pictures_pass(tmp_path, Examine.sample, False, [1, 0, 2, 3]), store_of(3, 1))
    task.__dict__["sample"] = SimpleNamespace(decoded_between=lambda begin, end: np.array([0, 2, 5]))
    assert list(task.records_to_open(range(4), task.decoded_images(0, 6))) == [0, 2, 3]
    assert list(task.records_to_open(range(2, 4), frozenset({1, 3}))) == [2, 3]
    keys = [task.key_of(range(3)), task.key_of(range(1, 3))]
    assert len({*keys, "key0"}) == 3 and all(key.startswith("key0-") for key in keys)


def test_an_image_without_a_folder_is_not_looked_for(tmp_path: Path) -> None:
    """That its folder is not set was told when its record was read. A video must lie in a local folder."""

    def missing(location: ImageLocation) -> bytes:
        raise ImageError("gone", Kind.image_missing)

    store = SimpleNamespace(data_files=SimpleNamespace(read=missing), parts=[])
    task = with_store(pictures_pass(tmp_path, Examine.decode, True, [1]), store)
    assert task.examine_one(None, "a.png", True, None) == ImageFacts(0, 0, 0)
    found = task.examine_one("s3://bucket/films", "a.mp4", True, None)
    assert isinstance(found, ImageProblem) and found.kind == Kind.image_unreadable


def test_sizes_of_images_and_lengths_of_videos(tmp_path: Path) -> None:
    columns = {
        "first_picture": [0, 2, 3], "width": [10, 30, 50], "height": [20, 40, 60], "stored_height": [21, 41, 61],
        "frames": [0, 7, 8], "rate": [0.0, 2.5, 3.5],
    }  # fmt: skip
    for name, values in columns.items():
        np.save(tmp_path / f"{name}.npy", np.array(values))
    sizes = PictureSizes(tmp_path, tmp_path)
    assert [sizes.sizes_of(0, 1), sizes.sizes_of(1, 0)] == [(30, 40, 41), (50, 60, 61)]
    record = replace(RECORD, images=("a", "b"))
    found = sizes.put(record, 0)
    assert (found.sizes, found.frames) == (((10, 20), (30, 40)), ((0, 0.0), (7, 2.5)))
    assert sizes.put(RECORD, 1) is RECORD
    (tmp_path / "frames.npy").unlink()
    assert PictureSizes(tmp_path, tmp_path).put(record, 0).frames == ((0, 0.0), (0, 0.0))


def test_sizes_that_a_record_gives() -> None:
    tokens = ImageTokens(AspectRatio.anyres, 28, 4, ((28, 56),))
    raw: dict[str, Any] = {"width": [30, 50], "height": [40, 60]}
    store: Any = SimpleNamespace(raw=lambda number: raw)
    record = replace(RECORD, images=("a.png", "b.png"))
    if tokens.needs_size(2):
        assert sizes_of(0, record, store, tokens) == [(30, 40), (50, 60)]
    assert sizes_of(0, record, store, ImageTokens(AspectRatio.pad, 28, 4)) == []
    alone = ImageTokens(AspectRatio.anyres_max, 28, 4, ((28, 56),))
    assert not alone.needs_size(0)
    for rule in (tokens, alone):
        with pytest.raises(ConfigError, match="has a video"):
            sizes_of(0, replace(RECORD, images=("a.mp4",)), store, rule)
    raw.clear()
    with pytest.raises(ConfigError, match=r"does not give the size .*data\.image_aspect_ratio=anyres"):
        sizes_of(0, replace(RECORD, images=("a.png",)), store, tokens)


def reader_of(rule: ImageTokens, pixels: Pixels = Pixels.exact) -> SimpleNamespace:
    return SimpleNamespace(
        tokens=rule, pixels=pixels, sampling=None, form=rule.aspect.value, cause=rule.cause, needs_size=rule.needs_size
    )


READERS = {
    "one tile": reader_of(ImageTokens(AspectRatio.pad, 28, 4)),
    "tiles": reader_of(ImageTokens(AspectRatio.anyres, 28, 4, ((28, 56),))),
    "original": reader_of(ImageTokens(AspectRatio.pad, 28, 4), Pixels.llava_v1_5),
}


def plan_of(reader: str, how: Examine, **values: Any) -> Plan:
    cfg: Any = SimpleNamespace(
        examine=how, allow_links=False, pixels=READERS[reader].pixels, examine_images=3, **values
    )
    encoder: Any = SimpleNamespace(fingerprint="encoder")
    return Plan(cfg, encoder, READERS[reader], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("reader", READERS)
def test_which_ways_of_looking_open_all_images(reader: str) -> None:
    """All but the lazy ones, and a sample unless sizes are needed: these are in the images."""
    opens = {how for how in Examine if plan_of(reader, how).opens_all}
    by_size = {Examine.sample} if reader != "one tile" else set()
    assert opens == {Examine.decode, Examine.head} | by_size
    rule = READERS["tiles"] if reader == "tiles" else None
    assert plan_of(reader, Examine.lazy).sized_by_records is rule
    assert plan_of(reader, Examine.sample).sized_by_records is None


def test_what_was_found_of_videos_and_of_given_sizes_has_other_names() -> None:
    sampling = SimpleNamespace(**{**vars(READERS["one tile"]), "sampling": VideoSampling()})
    plan = plan_of("one tile", Examine.decode)
    videos = replace(plan, reader=sampling)  # type: ignore[arg-type]
    assert (plan.records_name, videos.records_name) == ("records", "records-videos")
    assert pictures_name(videos) != pictures_name(plan)
    lazy = {pictures_name(plan_of(reader, Examine.lazy)) for reader in ("one tile", "tiles")}
    assert len(lazy) == 2


@pytest.mark.parametrize(("images", "how"), [(5, Examine.decode), (6, Examine.sample)])
def test_more_images_than_can_be_decoded_are_sampled(
    images: int, how: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "DECODED_AT_MOST", 5)
    monkeypatch.setattr(DataConfig, "__post_init__", lambda self: None)
    np.save(tmp_path / "first_picture.npy", np.array([0, 2, images]))
    plan = Plan(data_config(Examine.auto), None, None, 1)  # type: ignore[arg-type]
    assert plan.with_examine_chosen(tmp_path).cfg.examine is how
    head = Plan(data_config(Examine.head), None, None, 1)  # type: ignore[arg-type]
    assert head.with_examine_chosen(tmp_path) is head


def data_config(how: Examine = Examine.auto, **values: Any) -> DataConfig:
    cfg: Any = object.__new__(DataConfig)
    defaults = {"examine": how, "bad_records": BadRecords.skip, "too_long": TooLong.truncate, "max_bad_records": "2"}
    for name in DataConfig.__dataclass_fields__:
        object.__setattr__(cfg, name, (defaults | values).get(name))
    return cfg


def test_lengths_depend_on_the_encoder_and_the_reader() -> None:
    base = SimpleNamespace(**vars(READERS["one tile"]), fingerprint="a")
    plan = replace(plan_of("one tile", Examine.decode), reader=base)  # type: ignore[arg-type]
    others = [
        replace(plan, reader=SimpleNamespace(**{**vars(base), "fingerprint": "b"})),  # type: ignore[arg-type]
        replace(plan, reader=SimpleNamespace(**{**vars(base), "pixels": Pixels.llava_v1_5})),  # type: ignore[arg-type]
        replace(plan, encoder=SimpleNamespace(fingerprint="b")),  # type: ignore[arg-type]
    ]
    assert len({encoding_of(own) for own in (plan, *others)}) == 4


def test_a_look_at_all_bad_images_is_noted(tmp_path: Path) -> None:
    plan = plan_of("one tile", Examine.decode, index_folder=tmp_path)
    found = [last_look(plan)]
    for _ in range(2):
        note_look(plan)
        found.append(last_look(plan))
    assert found[0] == "" and len({*found}) == 3
    assert last_look(plan_of("one tile", Examine.head, index_folder=tmp_path)) == ""


def test_parts_of_an_index() -> None:
    parts = ["texts", "records", "records-videos", "pictures-a.0", "encoded-a"]
    others = ["texts.tmp", "pictures-a.0.tmp", "encoded-a.parts", "chunks", "rows", "records-a"]
    assert [name for name in (*parts, *others) if is_complete_folder(name)] == parts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.json", True), ("A.JSONL", True), ("a.parquet", True), ("a.tar", True), ("a.tar.gz", True),
        ("a.json?versionId=3", True), (".a.json", False), ("dataset_info.json", False), ("state.json", False),
        ("a.txt", False), ("json", False),
    ],
)  # fmt: skip
def test_names_of_files_of_records(name: str, expected: bool) -> None:
    assert is_records(name) is expected


def test_files_in_an_index_are_no_records() -> None:
    assert (
        is_in_index("a/b.json.index/rows/c.json") and not is_in_index("a/b.index") and not is_in_index("a/index/c.json")
    )


def test_sources_keep_their_settings(tmp_path: Path) -> None:
    """Images of a source, or those of all; columns in their places; a source without a name has that of its file."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("[]")
    (tmp_path / "own").mkdir()
    columns = {"question": "q", "answer": "a", "image_column": "i"}
    values = {"path": f"{tmp_path}/a.json,{tmp_path}/b.json", "images": str(tmp_path), "sources": {}} | columns
    (plain,) = sources_of(data_config(**values))
    assert plain.name == "a.json" and [Path(file.path).name for file in plain.files] == ["a.json", "b.json"]
    named = {
        "x": SimpleNamespace(path=str(tmp_path / "a.json"), images=str(tmp_path / "own")),
        "y": SimpleNamespace(path=str(tmp_path / "b.json"), images=None),
    }
    x, y = sources_of(data_config(**{**values, "sources": named}))
    assert (x.name, x.images, y.name, y.images) == ("x", str(tmp_path / "own"), "y", str(tmp_path))
    for source in (plain, x, y):
        assert (source.files[0].question, source.files[0].answer, source.files[0].image_column) == ("q", "a", "i")
    with pytest.raises(ConfigError, match=r"val\.sources\.x\.path"):
        named["x"].path = "absent.json"
        sources_of(data_config(**{**values, "sources": named}), "val")


def test_every_file_of_records_must_be_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that a file needs are asked for when the sources are opened, for each file of each source."""
    names = ["a.json", "b.jsonl", "c.json"]
    for name in names:
        (tmp_path / name).write_text("[]")
    found: dict[str, list[str]] = {"check_installed": [], "check_unpacks": []}
    for check, asked in found.items():
        monkeypatch.setattr(record_store, check, lambda path, asked=asked: asked.append(Path(path).name))
    sources = {
        "x": SimpleNamespace(path=f"{tmp_path}/a.json,{tmp_path}/b.jsonl", images=None),
        "y": SimpleNamespace(path=f"{tmp_path}/c.json", images=None),
    }
    sources_of(data_config(sources=sources))
    assert list(found.values()) == [names, names]


def test_what_records_of_a_file_depend_on(tmp_path: Path) -> None:
    """A new commit need not change a file; a folder of images is the same by whatever link it is named."""
    hub = SourceFile("a", "hf://datasets/o/n@abc/data/a.json", "hf://datasets/o/n@abc/images", size=3, pin="x")
    other = replace(hub, path=hub.path.replace("abc", "def"))
    assert hub.identity == other.identity != replace(hub, images=str(hub.images).replace("abc", "def")).identity
    (tmp_path / "link").symlink_to(tmp_path)
    local = SourceFile("a", "a.json", str(tmp_path))
    assert local.identity == replace(local, images=str(tmp_path / "link")).identity
    assert local.identity != replace(local, question="q").identity != replace(local, answer="q").identity
    assert (
        local.identity != replace(local, name="b").identity
        and replace(local, image_column="i").identity != local.identity
    )
    assert hub.remote is not None and (hub.remote.size, hub.remote.pin) == (3, "x") and local.remote is None


def records_with(**values: Any) -> Any:
    counts = dict.fromkeys(Kind, 0) | values.pop("counts", {})
    names = [SourceFile("a", "a.json", "images"), SourceFile("b", "b.json", None)]
    store = SimpleNamespace(sources=names, parts=[SimpleNamespace(file=file) for file in names])
    rows = [{"kind": Kind.url, "reason": f"reason {n}"} for n in range(9)] + [{"kind": Kind.too_long, "reason": "long"}]
    index = SimpleNamespace(store=store, problems=lambda: iter(rows), __len__=None)

    class Sized(SimpleNamespace):
        def __len__(self) -> int:
            return self.size

    dropped = [Kind.url, Kind.too_long]
    records = Sized(size=90, counts=counts, num_wrong=0, dropped_kinds=dropped, source_counts=[60, 30])
    records.index = Sized(**vars(index), size=100, unread_keys={})
    records.pictures = np.array([1] + [0] * 89)
    for name, value in values.items():
        setattr(records, name, value)
    return records


@pytest.mark.parametrize(
    ("records", "keys", "said"),
    [
        ({"num_wrong": 2}, {}, None),
        (
            {"num_wrong": 3, "counts": {Kind.url: 3}},
            {},
            r"3 of 100 records are wrong\n  url: 3 .*max_bad_records=2, which allows 2",
        ),
        (
            {"num_wrong": 1, "counts": {Kind.url: 1}},
            {"bad_records": BadRecords.fail},
            r"1 of 100 .*data\.bad_records=skip",
        ),
        ({"counts": {Kind.too_long: 4}}, {"too_long": TooLong.fail}, r"4 of 100 records are too long\n.*\nlong\n"),
        ({"counts": {Kind.too_long: 4}}, {"too_long": TooLong.skip}, None),
        ({"size": 0}, {}, "no record is left"),
    ],
)
def test_when_a_training_may_begin(
    records: dict[str, Any], keys: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit it may. Five of the reasons are listed."""
    monkeypatch.setattr(DataConfig, "budget", lambda self, count: 2 if count == 100 else 0)
    monkeypatch.setattr(DataConfig, "index_folder", Path("index"))
    cfg = data_config(**keys)
    if said is None:
        return refuse_bad_records(records_with(**records), cfg)
    with pytest.raises(DataError, match=f"(?s){said}") as caught:
        refuse_bad_records(records_with(**records), cfg)
    assert str(caught.value).count("reason ") in (0, 5)
    return None


def test_what_is_remarked() -> None:
    """Problems that are trained on, and a source with a folder of images whose records have none."""
    assert remarks(records_with()) == ""
    noted = remarks(records_with(counts={Kind.duplicate_id: 7, Kind.url: 2}))
    assert "of 100 records, 7 have the id of an earlier one" in noted and "2 " not in noted
    assert "no record of a.json has an image, but images is set" in remarks(records_with(pictures=np.zeros(90)))
    assert "no record" not in remarks(records_with(pictures=np.zeros(90), source_counts=[0, 90]))
    last = records_with()
    last.index.store.sources[1] = SourceFile("b", "b.json", "images")
    assert "no record of b.json has an image" in remarks(last), "those of the source before do not count"
    records = records_with()
    assert describe_same_files(records) == ""
    records.index.store.parts.append(SimpleNamespace(file=SourceFile("c", "./a.json", None)))
    assert "sources a and c are the same file" in describe_same_files(records)


@pytest.mark.parametrize(
    ("cut", "labels", "whole", "kinds", "said"),
    [
        (0, 3, 3, [], ""), (2, 3, 5, [Kind.too_long], "is 12 positions long, over data.max_length=10"),
        (2, 0, 5, [Kind.no_labels], "all are beyond data.max_length=10"),
        (0, 0, 0, [Kind.no_labels], "no answer of it is supervised"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_cut(cut: int, labels: int, whole: int, kinds: list[Kind], said: str) -> None:
    found: list[tuple[str, str]] = []
    made: Any = SimpleNamespace(
        sample=SimpleNamespace(positions_cut=cut, num_labels=labels),
        whole=SimpleNamespace(longest=10 + cut, num_labels=whole),
    )

    def tell(kind: Kind, reason: str) -> None:
        found.append((kind, reason))

    if labels:
        tell_if_cut(RECORD, made, 10, tell)
    else:
        tell_unlabelled(RECORD, [made], 10, tell)
    assert [kind for kind, _ in found] == kinds and said in (found[-1][1] if found else "")


@pytest.mark.parametrize(("special", "said"), [("text", "tokenized as text"), ("parse", "read as that token")])
def test_what_is_said_of_special_tokens(special: str, said: str) -> None:
    """The first that is no image tag."""
    text, found = "<image> a </s> <pad>", list[tuple[str, str]]()
    spans = [(0, 7), (10, 14), (15, 20)]
    encoder: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(find_special=lambda given: spans if given == text else spans[:1]),
        special_tokens=SpecialTokens(special),
    )
    tell_special_token(RECORD, 2, text, encoder, lambda kind, reason: found.append((kind, reason)))
    ((kind, reason),) = found
    assert kind == Kind.special_token and f"turn 2 has the special token </s> in its text, which is {said}" in reason
    tell_special_token(RECORD, 2, "<image>", encoder, lambda kind, reason: found.append((kind, reason)))
    assert len(found) == 1
