"""Parquet gives the records that JSON and JSON Lines give, and its pictures where it holds them."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from harness import CPU
from pyarrow import parquet
from small import make_config
from test_build import FITS, open_again
from tiers import slow_after

from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.containers.parquet import parquet_container
from llava_fsdp.data.images.check import inline_images, read_file
from llava_fsdp.data.index import worker_pool
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.worker_pool import run_chunks
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records import rows as records_rows
from llava_fsdp.data.records.forms.parse_record import NO_KEYS
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.records.rows import RowsFile, WriteRows, all_lines, open_rows
from llava_fsdp.runtime.errors import ConfigError, DataError, SourceError


def write(path: Path, rows: list[dict], schema: pyarrow.Schema | None = None, row_group_size: int = 10) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, row_group_size=row_group_size)
    return path


def opened(path: Path, parts: Path, dataset: Path, *overrides: str) -> Records:
    return open_again(make_config(parts, dataset, path.parent, f"data.path={path}", *overrides), parts)


def said(record: Record) -> tuple:
    return record.index, record.id, record.images, record.turns, record.has_image_key, record.sizes


def test_three_formats_are_one(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = json.loads((dataset / "mixed.json").read_text())
    assert len({"image" in row for row in rows}) == 2
    paths = [dataset / "mixed.json", tmp_path / "a.jsonl", write(tmp_path / "a.parquet", rows)]
    paths[1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [opened(path, parts, dataset, f"data.index={tmp_path / path.suffix}") for path in paths]
    for other in made[1:]:
        assert [said(r) for r in map(other.__getitem__, range(44))] == [said(made[0][n]) for n in range(44)]
        for column in ("lengths", "labels", "images", "words", "positions_cut", "labels_cut"):
            assert getattr(other, column).tolist() == getattr(made[0], column).tolist()
    assert made[2][12].where == f"{paths[2]}, record 12 (id r12)", "behind the first row group"
    files = [RecordFile(path) for path in paths]
    assert [said(files[2][n]) for n in range(44)] == [said(files[0][n]) for n in range(44)]


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 10])
@pytest.mark.parametrize("at_once", [1, 3, 256])
@pytest.mark.parametrize("by_group", [True, False])
def test_rows_are_read_a_few_at_a_time(
    rows: int, at_once: int, by_group: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any row groups, which are then laid end to end a block at a time."""
    monkeypatch.setattr(parquet_container, "ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(records_rows, "BLOCK", 7)
    monkeypatch.setattr(records_rows, "ROWS_ALONE", 6)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    made = [{"id": f"r{n}", "conversations": turns} for n in range(rows)]
    kinds = pyarrow.schema([
        ("id", pyarrow.string()),
        ("conversations", pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())]))),
    ])  # fmt: skip
    path, data_files = write(tmp_path / "a.parquet", made, kinds, row_group_size=4), DataFiles()
    assert [json.loads(line) for line in all_lines(str(path), NO_KEYS, MOST_BYTES, data_files)] == made
    opened, groups = open_rows(str(path), NO_KEYS, data_files), max(1, -(-rows // 4))
    assert opened.groups == groups
    for group in range(groups):
        assert [json.loads(line) for line in opened.lines(group, MOST_BYTES)] == made[4 * group : 4 * group + 4]
    file = RowsFile(str(path), tmp_path / "rows", NO_KEYS)
    writing = WriteRows((file,), 1 << 20, data_files, by_group)
    alone = [range(group, group + 1) for group in range(groups)]
    each = alone if by_group and rows > 6 else [range(groups)]
    assert writing.parts == [(0, own) for own in each]
    run_chunks(writing, writing.chunks(), 1, lambda _: None)
    writing.join_parts()
    assert {path.name for path in file.folder.iterdir()} == {"rows.jsonl"} | ({"rows.npz"} if len(each) == 1 else set())
    written = file.whole.read_bytes()
    assert written.count(b"\n") == rows
    assert [json.loads(line) for line in written.splitlines()] == made


@pytest.mark.parametrize("by_group", [True, False])
def test_workers_go_on_after_this_process_has_begun(
    by_group: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has opened a file for the first chunk, which workers must not get."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    made = [{"id": f"r{n}", "conversations": turns} for n in range(7)]
    paths = [write(tmp_path / f"{n}.parquet", made, row_group_size=3) for n in range(3)]
    files = tuple(RowsFile(str(path), tmp_path / path.stem, NO_KEYS) for path in paths)
    writing = WriteRows(files, 1 << 20, DataFiles(), by_group)
    files[0].folder.mkdir()
    monkeypatch.setattr(records_rows, "ROWS_ALONE", 0)
    writing(0)
    assert {0: writing.opened(0)} not in writing.__getstate__().values()
    monkeypatch.setattr(worker_pool, "ALONE_SECONDS", 0)
    run_chunks(writing, writing.chunks(), 2, lambda _: None)
    writing.join_parts()
    for file in files:
        assert [json.loads(line) for line in file.whole.read_bytes().splitlines()] == made


def test_lists_of_pictures(parts: Path, dataset: Path, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image> <image>"}, {"from": "gpt", "value": "b"}]
    rows = [{"image": ["0.jpg", "1.png"], "conversations": turns}]
    records = opened(write(tmp_path / "a.parquet", rows), parts, dataset)
    assert records[0].images == ("0.jpg", "1.png") and records[0].id == "0" and not records[0].has_id


LAYOUTS = {
    "plain": {"compression": "none", "use_dictionary": False},
    "dictionary": {"compression": "none"},
    "snappy": {"compression": "snappy"},
    "zstd": {"compression": "zstd", "use_dictionary": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", slow_after(2, ["struct", "structs", "bytes", "lists of bytes"]))
def test_images_are_read_in_place(form: str, layout: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The pixels are those of the files, no image is in the index, and no other file is open for it."""
    files = [(dataset / "images" / name).read_bytes() for name in ("0.jpg", "1.png", "2.jpg", "3.png", "0.jpg")]
    values = [{"bytes": own, "path": f"{n}.x"} if "struct" in form else own for n, own in enumerate(files)]
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    rows = [{"id": n, "image": [own] if "s" in form[-1:] and form != "bytes" else own, "conversations": turns}
            for n, own in enumerate(values)]  # fmt: skip
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2, **LAYOUTS[layout])
    records = opened(path, parts, dataset, "data.images=null")
    found = [inline_images(records[n]) for n in range(len(rows))]
    assert [read_file(own, "") for images in found for own in images.values()] == files
    assert all(file.stat().st_size < 2000 for file in (tmp_path / "a.parquet.index" / "rows").rglob("*.*"))
    named = [str(own).split(" in ")[0] for images in found for own in images.values()]
    assert named == ([f"{n}.x" for n in range(5)] if "struct" in form else [""] * 5) or "struct" not in form
    assert [said(RecordFile(path)[n])[:4] for n in range(5)] == [said(records[n])[:4] for n in range(5)]
    assert read_file(inline_images(RecordFile(path)[3])[records[3].images[0]], "") == files[3]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_images_in_compressed_pages_are_told(
    compression: str, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (dataset / "images" / "1.png").read_bytes()
    rows = [
        {"image": whole, "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]}
    ] * 3
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression=compression, use_dictionary=False)
    opened(path, parts, dataset)
    assert ("3 times its bytes are decompressed" in caplog.text) == (compression == "zstd")


@pytest.mark.parametrize("several", [False, True])
def test_bad_images_in_the_rows(several: bool, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Paths may stand beside them; a null is no image."""
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    whole = (dataset / "images" / "1.png").read_bytes()
    pictures = [
        {"bytes": whole, "path": "x.png"}, {"bytes": whole[:-60], "path": "y.png"}, None,
        {"bytes": None, "path": "0.jpg"},
    ]  # fmt: skip
    rows = [{"id": n, "image": [p] if several and p else p, "conversations": turns} for n, p in enumerate(pictures)]
    path = write(tmp_path / "a.parquet", rows)
    records = opened(path, parts, dataset)
    assert records.counts["image_truncated"] == records.counts["tag_without_image"] == 1 and records.num_wrong == 2
    (reason,) = [row["reason"] for row in records.index.problems() if row["kind"] == "image_truncated"]
    assert f"record 1 (id 1): image y.png in {path}, " in reason and "is truncated after" in reason
    assert records[1].images == ("0.jpg",)


def test_a_shard_that_becomes_shorter(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """No record is at fault, and none is left out."""
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    whole = (dataset / "images" / "1.png").read_bytes()
    path = write(tmp_path / "a.parquet", [{"image": {"bytes": whole, "path": None}, "conversations": turns}])
    cfg = make_config(
        parts, dataset, tmp_path, f"data.path={path}", "data.bad_records=skip", "data.max_bad_records=100%"
    )
    steps = build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match=rf"{path}.* ends at byte 100"):
        steps.read(0)


def test_text_that_is_not_utf8(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": t}, {"from": "gpt", "value": b"b"}]} for t in (b"a", b"\xfc")]
    kind = pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.binary())]))
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("conversations", kind)]))
    column = table["conversations"].combine_chunks()
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 4, column.values.field("value").buffers())
    inner = pyarrow.StructArray.from_arrays([column.values.field("from"), texts], ["from", "value"])
    wrong = pyarrow.table({"conversations": pyarrow.ListArray.from_arrays(column.offsets, inner)})
    parquet.write_table(wrong, tmp_path / "a.parquet")
    records = opened(tmp_path / "a.parquet", parts, dataset)
    assert len(records) == records.num_wrong == records.counts["not_utf8"] == 1


def test_paths_as_hugging_face_writes_them(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Structs without bytes are paths below data.images; other columns and fields do not matter, of whatever type."""
    said = [{"from": "human", "value": "<image>", "at": b"x"}, {"from": "gpt", "value": "b", "at": None}]
    rows = [{"id": n, "image": {"bytes": None, "path": "0.jpg"}, "conversations": said, "more": b""} for n in range(3)]
    schema = pyarrow.Table.from_pylist(rows).schema
    schema = schema.set(
        1, pyarrow.field("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    )
    records = opened(write(tmp_path / "a.parquet", rows, schema, row_group_size=1), parts, dataset)
    assert len(records) == 3 and records[2].images == ("0.jpg",) and records[2].folder == dataset / "images"


def test_many_row_groups_are_one_open_file(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = json.loads((dataset / "text.json").read_text())
    records = opened(write(tmp_path / "a.parquet", rows, row_group_size=1), parts, dataset)
    assert len(records) == len({records[n].id for n in range(len(rows))}) == len(rows)
    assert len({part.text for part in records.index.store.parts}) == 1
    assert [path.name for path in tmp_path.rglob("*.jsonl") if "/rows/" in str(path)] == ["rows.jsonl"]


TURNS = [{"from": "a", "value": "b"}]
WRONG = {
    "text of bytes": ([{"conversations": [{"from": "a", "value": b"b"}]}], r"from and value, which are text"),
    "no columns": ([{"text": "a"}], r"has the columns \['text'\]; records have one of conversations, messages, texts"),
    "turns as text": ([{"conversations": "a"}], r"conversations is string; it must be a list of structs"),
    "a number": ([{"conversations": [{"from": "a", "value": "b"}], "image": 3}], r"image is int64; it must be a path"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_tables_are_refused(case: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        opened(write(tmp_path / "a.parquet", rows), parts, dataset)


def test_what_is_called_parquet(tmp_path: Path) -> None:
    path = tmp_path / "A.PARQUET"
    for content, message in {
        b"": r"A\.PARQUET is empty \(0 bytes\)",
        b"version https://git-lfs.github.com/spec/v1\n": "is a pointer of git-LFS",
        b"PAR1": "4 bytes are no Parquet file; take it from its source again",
    }.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            RecordFile(path)
    write(path, [{"id": "a", "conversations": TURNS}])
    assert RecordFile(path)[0].where == f"{path}, record 0 (id a)"


def test_no_parquet_at_all(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("nothing")
    with pytest.raises(DataError, match=r"a\.parquet: 7 bytes are no Parquet file"):
        opened(tmp_path / "a.parquet", parts, dataset)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'llava-fsdp\[parquet\]'"):
        opened(tmp_path / "a.parquet", parts, dataset)


@pytest.mark.parametrize("key", ["photo", "image"])
def test_tables_without_pictures_are_told(key: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The column has another name; or every struct is of two nulls."""
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    rows = [{key: "0.jpg" if key == "photo" else {"bytes": None, "path": None}, "conversations": turns}] * 2
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.Table.from_pylist(rows).schema
    schema = schema if key == "photo" else schema.set(0, pyarrow.field("image", struct))
    records = opened(write(tmp_path / "a.parquet", rows, schema), parts, dataset)
    kind = "media_not_read" if key == "photo" else "tag_without_image"
    assert records.counts[kind] == records.num_wrong == 2


def test_media_in_columns_that_are_not_read(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of each row by itself; a struct of nulls is no video, and a turn's own key is found too."""
    turn = {"from": "human", "value": "what", "image": None}
    answer = {"from": "gpt", "value": "b", "image": None}
    named = {**turn, "image": "0.jpg"}
    none = {"bytes": None, "path": None}
    rows = [
        {"video": none, "conversations": [turn, answer]},
        {"video": {"bytes": b"mp4", "path": None}, "conversations": [turn, answer]},
        {"video": None, "conversations": [named, answer]},
    ]
    records = opened(
        write(tmp_path / "a.parquet", rows), parts, dataset, "data.bad_records=skip", "data.max_bad_records=9"
    )
    assert records.index.flags(0, 3).tolist() == [0, BITS[Kind.media_not_read], BITS[Kind.media_not_read]]


def test_rows_that_are_too_large(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """By the bytes of their texts, before any JSON is made of them; or of the JSON, which escapes make longer."""
    rows = [
        {"id": f"r{n}", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": text}]}
        for n, text in enumerate(["b", "b" * 5000, "\n" * 1500, "c"])
    ]
    path = write(tmp_path / "a.parquet", rows)
    records = opened(
        path, parts, dataset, "data.max_record_bytes=2000", "data.bad_records=skip", "data.max_bad_records=9"
    )
    assert records.counts["record_too_large"] == records.num_wrong == 2 and [records[n].id for n in (0, 1)] == [
        "r0",
        "r3",
    ]
    assert [row["id"] for row in records.index.problems()] == ["r1", "r2"]
    assert all("over data.max_record_bytes=2000" in row["reason"] for row in records.index.problems())
    with pytest.raises(DataError, match=r"record 1 \(id r1\) has [\d,]+ bytes"):
        RecordFile(path, 2000)[1]


def test_a_struct_with_other_bytes_beside_the_image(parts: Path, dataset: Path, tmp_path: Path) -> None:
    whole, mask = ((dataset / "images" / name).read_bytes() for name in ("1.png", "3.png"))
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]
    image = {"bytes": whole, "mask": mask, "path": "x"}
    records = opened(write(tmp_path / "a.parquet", [{"image": image, "conversations": turns}]), parts, dataset)
    assert [read_file(own, "") for own in inline_images(records[0]).values()] == [whole]


def test_ids_that_pandas_has_filled_and_videos(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "ä" * 700}, {"from": "gpt", "value": "b"}]
    rows = [{"id": own, "videos": ["a.mp4"], "conversations": turns} for own in (float("nan"), 3.0)]
    path = write(tmp_path / "a.parquet", rows)
    found = [RecordFile(path, 1700)[n] for n in range(2)]
    assert [(own.id, own.images) for own in found] == [("0", ("a.mp4",)), ("3.0", ("a.mp4",))]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    column = pyarrow.array([TURNS])
    parquet.write_table(
        pyarrow.Table.from_arrays([column, column, column], ["conversations", "x", "x"]), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"two columns have the path x\."):
        RecordFile(tmp_path / "a.parquet")
