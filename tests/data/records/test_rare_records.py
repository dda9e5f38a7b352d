"""Records that are rare in files of every kind: compressed files, values of no use, samples of a tar that are odd."""

import gzip
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from test_tar import ASKS, TEXT, write

from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records import packed_text
from llava_fsdp.data.records.forms.image_places import given_sizes
from llava_fsdp.data.records.forms.parse_record import NO_KEYS, RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.packed_text import copy_name, is_copied, refused
from llava_fsdp.data.records.parquet import json_line, read_columns
from llava_fsdp.data.records.record import TOO_LARGE, Record, Turn, decode, shown, unread_tag
from llava_fsdp.data.records.record_file import RecordFile, read_records
from llava_fsdp.runtime.errors import DataError


def lines_of(path: Path, most: int = MOST_BYTES, keys: RecordKeys = NO_KEYS) -> list[Any]:
    return [json.loads(line) for line, _ in read_records(str(path), most, keys)]


def kind_of(path: Path, number: int = 0) -> str | None:
    with pytest.raises(DataError) as caught:
        RecordFile(path)[number]
    return caught.value.kind


def test_words_are_negative_without_the_key_for_images() -> None:
    """As LLaVA has it: a record with the key counts as one with an image, also if its value is empty."""
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
    for keys, words in (({}, -3), ({"image": None}, 3), ({"image": []}, 3), ({"images": []}, -3)):
        assert parse_record("a.json", 0, {"conversations": turns, **keys}).llava_length == words
    asked = [{"from": "human", "value": "<image>\none two"}, turns[1]]
    assert parse_record("a.json", 0, {"conversations": asked, "images": ["a.png"]}).llava_length == 4


def test_compressed_records_are_read_without_an_index(tmp_path: Path) -> None:
    rows = [{"id": str(n), "conversations": TEXT} for n in range(3)]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.JSONL.zst").write_bytes(pyarrow.Codec("zstd").compress(text.encode(), asbytes=True))
    for name in ("a.jsonl", "b.jsonl.gz", "c.JSONL.zst"):
        assert list(read_records(str(tmp_path / name), MOST_BYTES)) == [
            (json.dumps(row).encode(), n + 1) for n, row in enumerate(rows)
        ]
        with pytest.raises(DataError, match="line 1, record 0") as caught:
            list(read_records(str(tmp_path / name), 10))
        assert caught.value.kind == Kind.record_too_large
    packed, stored = gzip.compress(text.encode()), pyarrow.Codec("zstd").compress(text.encode(), asbytes=True)
    damaged = {"d.jsonl.gz": packed[:-9], "e.jsonl.gz": b"\x1f\x8b\x08" + b"x" * 50, "f.jsonl.zst": stored[:-5]}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            list(read_records(str(tmp_path / name), MOST_BYTES))


def test_errors_of_the_system_are_not_those_of_a_damaged_file() -> None:
    for error, found in ((zlib.error("a"), DataError), (EOFError("a"), DataError), (OSError("bad frame"), DataError),
                         (OSError(28, "full"), OSError), (KeyError("a"), KeyError)):  # fmt: skip
        with pytest.raises(found) as caught, refused("a.jsonl.gz"):
            raise error
        assert type(caught.value) is found


def test_text_grows_by_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file as one of a block, because a few records may repeat a text."""
    monkeypatch.setattr(packed_text, "BLOCK", 1000)
    monkeypatch.setattr(packed_text, "MOST_RATIO", 2)
    for count, is_read in ((2000, True), (2001, False)):
        path = tmp_path / f"{count}.jsonl.gz"
        path.write_bytes(gzip.compress(b"1" * (count - 1) + b"\n"))
        if is_read:
            assert len(list(read_records(str(path), MOST_BYTES))) == 1
        else:
            with pytest.raises(DataError):
                list(read_records(str(path), MOST_BYTES))


def test_which_files_are_copied() -> None:
    copied = {"s3://b/a.json": "copy.json", "hf://datasets/a/b/c.JSONL": "copy.jsonl", "a.jsonl.gz": "copy.jsonl",
              "s3://b/a.jsonl.ZST": "copy.jsonl"}  # fmt: skip
    assert all(is_copied(path) and copy_name(path) == name for path, name in copied.items())
    assert copy_name("s3://b/a.JSON") == "copy.json"
    assert not any(map(is_copied, ("a.json", "a.jsonl", "s3://b/a.parquet", "s3://b/a.tar", "a.json.gz")))


def test_tags_of_media_count_in_questions_alone() -> None:
    for role, text, is_found in (("human", "<video>", True), ("system", "<video>", False), ("gpt", "<audio>", False),
                                 ("human", "<VIDEO> is HTML </Video>", False)):  # fmt: skip
        assert (unread_tag([Turn(role, text)]) is not None) is is_found


def test_the_deepest_record() -> None:
    """By its nesting, not by the number of its lists."""
    for depth, text in ((100, "[" * 100 + "]" * 100), (3, "[" + "[[]]," * 200 + "1]")):
        assert decode(text.encode()) == json.loads(text), depth
    for text in ("[" * 102 + "]" * 102, '{"a":' * 102 + "1" + "}" * 102):
        with pytest.raises(RecursionError):
            decode(text.encode())


def test_long_values_are_cut_in_messages() -> None:
    assert shown("a" * 78) == f'"{"a" * 78}"' and shown("a" * 79) == f'"{"a" * 79}...'


def test_a_name_without_an_id_has_none() -> None:
    record = Record("a.json", 4, "4", (), (), False, has_id=False)
    assert record.known_id is None and record.where == "a.json, record 4 (without an id)"


@pytest.mark.parametrize(
    ("raw", "sizes"),
    [
        ({"width": 3, "height": 4}, [(3, 4)]), ({"width": [3.0], "height": 4}, [(3, 4)]),
        ({"width": 0, "height": 4}, None), ({"width": 3.5, "height": 4}, None), ({"width": 2**31, "height": 4}, None),
        ({"width": 2**31 - 1, "height": 1}, [(2**31 - 1, 1)]), ({"width": True, "height": 4}, None),
        ({"width": [3, 3], "height": [4, 4]}, None),
    ],
)  # fmt: skip
def test_which_sizes_count(raw: dict[str, Any], sizes: object) -> None:
    assert given_sizes(raw, 1) == sizes


def test_members_without_a_sample_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are no reason to warn."""
    monkeypatch.setattr(logging.getLogger("llava_fsdp"), "propagate", True)
    sample = {"x/a.json": {"conversations": TEXT}}
    assert len(lines_of(write(tmp_path / "a.tar", {"x/": b"", **sample}))) == 1
    assert not caplog.records
    assert len(lines_of(write(tmp_path / "b.tar", {"x/README": b"", **sample, "x/.b.json": b"", "LICENSE": b""}))) == 1
    assert "2 of the kind no extension" in caplog.text and "1 of the kind hidden file" in caplog.text
    assert str(tmp_path / "b.tar") in caplog.text


def test_a_sample_that_grows_over_the_limit(tmp_path: Path) -> None:
    """With its id or the locations of its images it may have more bytes than its file."""
    raw = json.dumps({"conversations": TEXT}, separators=(",", ":"))
    path = write(tmp_path / "a.tar", {"a.json": raw, "b.txt": "x" * 500})
    whole = lines_of(path)[0]
    size = len(json.dumps(whole))
    assert size > len(raw) and whole == {"id": "a", "conversations": TEXT}
    assert lines_of(path, size)[0] == whole
    assert lines_of(path, size - 1)[0] == {"id": "a", TOO_LARGE: [size, size - 1]}
    assert lines_of(path, len(raw) - 1)[0] == {"id": "a", TOO_LARGE: [len(raw), len(raw) - 1]}
    assert kind_of(write(tmp_path / "b.tar", {"a.json": {"conversations": "a" * (4 << 20)}})) == Kind.record_too_large


def test_odd_samples_of_a_tar(tmp_path: Path) -> None:
    one, two = {"a.jpg": b"one"}, {"a.1.jpg": b"one", "a.2.jpg": b"two"}
    parts = [{"role": "user", "content": ["<image>"]}, {"role": "assistant", "content": "b"}]
    cases: dict[str, tuple[dict[str, Any], Kind]] = {
        "an address": ({**one, "a.json": {"conversations": ASKS, "image": "https://x/a.jpg"}}, Kind.url),
        "a part of text": ({**one, "a.json": {"messages": parts}}, Kind.bad_form),
        "a turn of text": ({"a.json": {"conversations": ["a", "b"]}}, Kind.bad_form),
    }  # fmt: skip
    for number, (members, kind) in enumerate(cases.values()):
        assert kind_of(write(tmp_path / f"{number}.tar", members)) == kind
    forged = {"id": None, "conversations": TEXT, TOO_LARGE: [9, 8]}
    record = RecordFile(write(tmp_path / "forged.tar", {"a.json": forged}))[0]
    assert record.id == "a" and len(record.turns) == 2
    for name, place in (("A.2.JPG", 1), ("1.jpg", 0), ("train/a.2.jpg", 1)):
        path = write(tmp_path / "two.tar", {**two, "a.json": {"conversations": ASKS, "image": name}})
        (image,) = (location for location in RecordFile(path)[0].inline.values())
        assert isinstance(image, ImageLocation) and image.name == f"a.{place + 1}.jpg"
    absent = write(tmp_path / "two.tar", {**two, "a.json": {"conversations": ASKS, "image": "a.3.jpg"}})
    assert RecordFile(absent)[0].images == ("a.3.jpg",)


def test_values_of_a_record_come_before_members_of_their_name(tmp_path: Path) -> None:
    keys = RecordKeys("q.txt", "a.txt", "2.jpg")
    members = {"a.1.jpg": b"one", "a.2.jpg": b"two", "a.q.txt": "why?", "a.a.txt": "so"}
    (row,) = lines_of(write(tmp_path / "a.tar", members), keys=keys)
    assert (row["q.txt"], row["a.txt"]) == ("why?", "so")
    assert "a.2.jpg" in json.dumps(row["2.jpg"]) and "images" not in row
    own = {"q.txt": "who?", "a.txt": "", "2.jpg": "1.jpg"}
    (row,) = lines_of(write(tmp_path / "a.tar", {**members, "a.json": own}), keys=keys)
    assert (row["q.txt"], row["a.txt"]) == ("who?", "so") and "a.1.jpg" in json.dumps(row["2.jpg"])
    wrong = write(tmp_path / "a.tar", {**members, "a.q.txt": b"\xff"})
    with pytest.raises(DataError) as caught:
        RecordFile(wrong, keys=keys)[0]
    assert caught.value.kind == Kind.bad_form, "not another text than the one in the file"
    large = write(tmp_path / "a.tar", {**members, "a.q.txt": "w" * 99})
    assert lines_of(large, 50, keys)[0][TOO_LARGE] == [99, 50]


def table(path: Path, **columns: Any) -> Path:
    turns = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    rows = len(next(iter(columns.values())))
    parquet.write_table(pyarrow.table({"conversations": turns * rows, **columns}), path)
    return path


def test_odd_rows_of_parquet(tmp_path: Path) -> None:
    nested = {"bytes": b"x", "path": "a", "more": {"bytes": b"y"}}
    with pytest.raises(DataError, match="several columns hold image"):
        lines_of(table(tmp_path / "a.parquet", image=[nested]))
    null = pyarrow.array([[None, {"from": "gpt", "value": "b"}]])
    path = table(tmp_path / "a.parquet", id=["1"])
    parquet.write_table(pyarrow.table({"conversations": null}), path)
    assert lines_of(path)[0]["conversations"][0] is None and kind_of(path) == Kind.bad_form
    path = table(
        tmp_path / "a.parquet",
        id=[1.0, float("nan")],
        width=[[3.0], [float("nan")]],
        height=[4.0, float("nan")],
        images=pyarrow.array([[b"x", None], None], pyarrow.list_(pyarrow.binary())),
        tools=["", "call"],
        video=pyarrow.array([[], ["a.mp4"]], pyarrow.list_(pyarrow.string())),
    )
    rows = lines_of(path)
    assert "id" in rows[0] and "id" not in rows[1] and rows[0]["width"] == [3.0] and "height" not in rows[1]
    assert len(rows[0]["images"]) == 2 and rows[0]["images"][1] is None and "images" not in rows[1]
    assert not rows[0].get("tools") and rows[1]["tools"] == "call" and rows[1]["video"] == ["a.mp4"]
    schema = pyarrow.schema([("id", pyarrow.int64()), ("width", pyarrow.string()), ("height", pyarrow.float32()),
                             ("video", pyarrow.binary()), ("imageless", pyarrow.string())])  # fmt: skip
    assert read_columns(NO_KEYS, schema) == ["id", "height"]


def test_half_a_surrogate_pair_stays_what_it_is() -> None:
    assert json_line({"a": "é"}) == '{"a": "é"}'.encode()
    assert json_line({"a": "\ud83dé"}) == b'{"a": "\\ud83d\\u00e9"}'
