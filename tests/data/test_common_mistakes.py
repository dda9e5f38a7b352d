"""What users give by mistake is read if it can be, and otherwise the message says what it is and what to do."""

import datetime
import gzip
import json
import unicodedata
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from small import make_config
from test_build import open_again

from llava_fsdp.data.images.check import examine
from llava_fsdp.data.index.find_files import find_files, find_images
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.text.conversation import check_turns
from llava_fsdp.runtime.errors import ConfigError, DataError, ImageError

TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
KIND = pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())]))


def table(rows: int, **columns: Any) -> Any:
    return pyarrow.table({"conversations": pyarrow.array([TURNS] * rows, KIND), **columns})


def test_shards_without_rows_are_left_out(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """First, between others and last; a source of which nothing is left is refused."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, rows in enumerate((0, 2, 0, 3, 0)):
        parquet.write_table(table(rows), folder / f"{number}.parquet")
    cfg = make_config(parts, dataset, tmp_path, f"data.path={folder}")
    records = open_again(cfg, parts)
    assert len(records) == 5 and [records[n].file[-9:] for n in range(5)] == ["1.parquet"] * 2 + ["3.parquet"] * 3
    assert [part.count for part in records.index.store.parts] == [2, 3]
    for number in (1, 3):
        parquet.write_table(table(0), folder / f"{number}.parquet")
    with pytest.raises(DataError, match="holds no records"):
        open_again(cfg, parts)
    with pytest.raises(DataError, match="holds no records"):
        open_again(make_config(parts, dataset, tmp_path, f"data.path={folder / '0.parquet'}"), parts)


ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
NOON = datetime.datetime(2026, 1, 2, 12, 30)
IDS: dict[str, tuple[Any, str | None]] = {
    "binary": (pyarrow.array([b"abc"]), "abc"),
    "bytes": (pyarrow.array([b"\xff\x00"]), "ff00"),
    "fixed": (pyarrow.array([ID.bytes], pyarrow.binary(16)), ID.hex),
    "uuid": (pyarrow.array([ID.bytes], pyarrow.uuid()), str(ID)),
    "timestamp": (pyarrow.array([NOON], pyarrow.timestamp("us")), "2026-01-02 12:30:00.000000"),
    "nanoseconds": (pyarrow.array([1], pyarrow.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    "date": (pyarrow.array([NOON.date()]), "2026-01-02"),
    "decimal": (pyarrow.array([Decimal("1.50")]), "1.50"),
    "boolean": (pyarrow.array([True]), "true"),
    "null": (pyarrow.nulls(1, pyarrow.binary()), None),
    "struct": (pyarrow.array([{"a": 1}]), None),
    "list": (pyarrow.array([[1]]), None),
    "beyond dates": (pyarrow.array([1 << 62], pyarrow.timestamp("us")), None),
}  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_ids_of_every_type_are_read_or_left_out(name: str, tmp_path: Path) -> None:
    column, expected = IDS[name]
    parquet.write_table(table(1, id=column), tmp_path / "a.parquet")
    record = RecordFile(tmp_path / "a.parquet")[0]
    assert name == "beyond dates" or record.known_id == expected
    assert [turn.text for turn in record.turns] == ["a", "b"]


def test_lines_of_json_have_two_suffixes(parts: Path, dataset: Path, tmp_path: Path) -> None:
    text = "".join(json.dumps({"conversations": TURNS}) + "\n" for _ in range(3))
    (tmp_path / "a.ndjson").write_text(text)
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "C.NDJSON").write_text(text)
    assert len(find_files(str(tmp_path), "data.path")) == 3
    assert [len(RecordFile(tmp_path / name)) for name in ("a.ndjson", "b.ndjson.gz", "C.NDJSON")] == [3, 3, 3]
    assert len(open_again(make_config(parts, dataset, tmp_path, f"data.path={tmp_path}"), parts)) == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps([{"conversations": TURNS}] * 3, indent=2), "a JSON list, which belongs into"),
        ("\n\n" + json.dumps([{"conversations": TURNS}], indent="\t"), "a JSON list, which belongs into"),
        ("\ufeff" + json.dumps([{"conversations": TURNS}], indent=1), "a JSON list, which belongs into"),
        ("[" + ",\n".join([json.dumps({"conversations": TURNS})] * 3) + "]", "a JSON list, which belongs into"),
    ],
)
def test_json_of_several_lines_is_no_json_lines(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        RecordFile(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversations": TURNS}) + "\n[\n")
    assert len(RecordFile(tmp_path / "b.jsonl")) == 2, "a wrong line is a wrong record"


def test_addresses_of_local_files_are_told_as_paths(tmp_path: Path) -> None:
    for find in (find_files, find_images):
        with pytest.raises(ConfigError, match=r"data\.path=.*give the path: /data/my file"):
            find("file:///data/my%20file", "data.path")
    (tmp_path / "a.json").write_text(json.dumps([{"image": "file:///x/a.jpg", "conversations": TURNS}]))
    with pytest.raises(DataError, match=r"below data\.images") as caught:
        RecordFile(tmp_path / "a.json")[0]
    assert caught.value.kind == Kind.url and "nothing is fetched" not in str(caught.value)


@pytest.mark.parametrize("names", [["state.json", "data-0.arrow"], ["dataset_dict.json", "train/data-0.arrow"]])
def test_what_save_to_disk_writes_is_told_its_conversion(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / "saved" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / name).write_text("{}")
    for path in (tmp_path / "saved", tmp_path / "saved" / "data-0.arrow"):
        if path.exists():
            with pytest.raises(ConfigError, match=r"load_from_disk\(.*to_parquet"):
                find_files(str(path), "data.path")
    parquet.write_table(table(1), tmp_path / "saved" / "a.parquet")
    assert len(find_files(str(tmp_path / "saved"), "data.path")) == 1, "files of records are taken"


def checked(tmp_path: Path, **raw: Any) -> DataError:
    (tmp_path / "a.json").write_text(json.dumps([raw]))
    with pytest.raises(DataError) as caught:
        check_turns(RecordFile(tmp_path / "a.json")[0])
    return caught.value


def test_an_answer_alone_is_told_as_one(tmp_path: Path) -> None:
    error = checked(tmp_path, conversations=[{"from": "gpt", "value": "a"}])
    assert error.kind == Kind.odd_turns and "an answer and no question" in str(error)
    assert "no turns" in str(checked(tmp_path, conversations=[]))


@pytest.mark.parametrize(
    "tag", ["<Image>", "<image1>", "<image_1>", "<IMAGE>", "<|image|>", "<img>", "[image]", "<image/>"]
)
def test_a_tag_that_is_none_is_shown(tag: str, tmp_path: Path) -> None:
    error = checked(tmp_path, image="a.jpg", conversations=[{"from": "human", "value": f"{tag}\na"}, TURNS[1]])
    assert error.kind == Kind.image_count and tag in str(error)


@pytest.mark.parametrize(
    ("there", "named"),
    [
        (unicodedata.normalize("NFD", "café.png"), unicodedata.normalize("NFC", "café.png")),
        (unicodedata.normalize("NFC", "café.png"), unicodedata.normalize("NFD", "café.png")),
        ("Photo.PNG", "photo.png"), ("a/B/c.png", "A/b/C.png"), ("a/b.png", "a\\b.png"), ("a b.png", "a b.png "),
        ("a b.png", " a  b.png"), ("a b.png", "a%20b.png"), ("ab.png", "a b.png"),
    ],
)  # fmt: skip
def test_a_missing_image_is_told_the_name_that_is_near(there: str, named: str, tmp_path: Path) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_bytes(b"x")
    with pytest.raises(ImageError) as caught:
        examine(tmp_path / named, named, True, True)
    assert caught.value.kind == Kind.image_missing and repr(str(tmp_path / there)) in str(caught.value)
    with pytest.raises(ImageError, match=r"is data\.images right"):
        examine(tmp_path / "other.png", "other.png", True, True)
