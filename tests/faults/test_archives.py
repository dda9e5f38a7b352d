"""Hostile tars, Parquet files and compressed files on the whole way of `prepare`: a typed error that names the file, or
counted problems; in little time and memory, and with messages that a terminal does not obey."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from planted_containers import add_member
from pyarrow import parquet
from test_bad_records import config, kinds_found
from test_build import open_again
from tiers import slow_after
from within_limits import within_limits

from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.runtime.text.terminal_text import shown_text

TEXT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ASKS = [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}]
RECORD = json.dumps({"conversations": TEXT}).encode()
HOSTILE_NAME = "a\x1b[2J\x07\u202e\u2028\x9b31m"


def header(name: bytes, size: bytes | int = 0, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """The header of a member, with a right checksum."""
    size = b"%011o\0" % size if isinstance(size, int) else size
    own = bytearray(512)
    for at, value in {0: name, 100: b"0000644\0", 124: size, 156: kind, 257: b"ustar\x0000", 345: prefix}.items():
        own[at : at + len(value)] = value
    own[148:156] = b"%06o\0 " % (sum(own) + 8 * 32)
    return bytes(own)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: bytes, data: bytes = RECORD, **how: Any) -> bytes:
    return header(name, **({"size": len(data)} | how)) + padded(data)


def pax(**values: str) -> bytes:
    """A pax header: `path`, `size` and others by keyword, with dots for underscores."""
    data = b""
    for key, value in values.items():
        body = f" {key.replace('_', '.')}={value}\n".encode()
        length = len(body) + 1
        while length != len(str(length)) + len(body):
            length += 1
        data += str(length).encode() + body
    return member(b"pax", data, kind=b"x")


def of(*members: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in members:
            add_member(tar, name, data)
    return made.getvalue()


def link(kind: bytes) -> bytes:
    return member(b"a.json") + header(b"a.jpg", kind=kind)


END = bytes(1024)
REFUSED = "refused"
"""The file is refused by a typed error."""
LONG = "x" * ((1 << 20) - 100)
TARS: dict[str, tuple[bytes, str | list[str | None]]] = {
    "..": (member(b"../a.json") + END, REFUSED),
    "absolute": (member(b"/etc/a.json") + END, REFUSED),
    "symbolic link": (link(b"2") + END, REFUSED),
    "hard link": (link(b"1") + END, REFUSED),
    "GNU sparse": (member(b"a.json", kind=b"S") + END, REFUSED),
    "pax 1.0 sparse": (pax(GNU_sparse_major="1", GNU_sparse_minor="0") + member(b"a.json") + END, REFUSED),
    "larger than the file": (header(b"a.json", 1 << 30) + RECORD, REFUSED),
    "negative size": (member(b"a.json", size=b"\xff" * 12) + END, REFUSED),
    "size of 2^87": (member(b"a.json", size=b"\x80" + b"\x7f" * 11) + END, REFUSED),
    "size in base 256": (member(b"a.json", size=b"\x80" + len(RECORD).to_bytes(11, "big")) + END, [None]),
    "pax size": (pax(size=str(len(RECORD))) + member(b"a.json", size=0) + END, [None]),
    "pax size, too large": (pax(size="9" * 18) + member(b"a.json") + END, REFUSED),
    "pax size, in the next header": (pax(size="2000") + member(b"a.json") + END, REFUSED),
    "pax header of 10 GB": (header(b"x", 10 * 10**9 % 8**11, kind=b"x") + END, REFUSED),
    "name of 1 MB": (pax(path=f"{LONG}.json") + member(b"a.json") + pax(path=f"{LONG}.json") + member(b"b"), REFUSED),
    "name of 1 MB, read": (pax(path=f"{LONG}.json") + member(b"a.json") + END, [None]),
    "name of 1 MB, refused": (pax(path=f"../{LONG}.json") + member(b"a.json") + END, REFUSED),
    "name over 1 MB": (pax(path=f"{LONG}{LONG}.json") + member(b"a.json") + END, REFUSED),
    "one key twice": (of(("a.json", RECORD), ("b.json", RECORD), ("a.json", RECORD)), REFUSED),
    "one member twice": (of(("a.json", RECORD), ("a.json", RECORD)), REFUSED),
    "tar in a tar": (of(("a.json", RECORD), ("a.tar", of(("b.json", RECORD)))), [None]),
    "only a tar in a tar": (of(("a.tar", of(("b.json", RECORD)))), ["bad_form"]),
    "empty": (of(), REFUSED),
    "no bytes": (b"", REFUSED),
    "zeros": (bytes(1 << 20), REFUSED),
    "only folders": (header(b"a/", kind=b"5") + header(b"b/", kind=b"5") + END, REFUSED),
    "only hidden files": (of((".a.json", RECORD)), REFUSED),
    "not UTF-8": (member(b"\xff\xfe.json") + END, REFUSED),
    "control characters": (of((f"{HOSTILE_NAME}.json", b"[")), ["not_json"]),
    "control characters, refused": (of((f"../{HOSTILE_NAME}.json", b"[")), REFUSED),
    "control characters, twice": (of(*[(f"{HOSTILE_NAME}.json", RECORD)] * 2), REFUSED),
    "control characters in images": (
        of(("a.json", json.dumps({"conversations": ASKS}).encode()), (f"a.{HOSTILE_NAME}.jpg", b"")), ["image_empty"],
    ),
    "control characters in media": (of(("a.json", RECORD), (f"a.{HOSTILE_NAME}.mp4", b"")), ["media_not_read"]),
    "many images": (
        of(("a.json", json.dumps({"conversations": ASKS}).encode()), *[(f"a.{n}.jpg", b"") for n in range(999)]),
        ["image_count", "image_empty"],
    ),
}  # fmt: skip


def message_of(error: LlavaFsdpError, path: Path) -> str:
    """The message of an error, which must name the file the user gave and no file of the index, in few words."""
    text = str(error)
    assert str(path) in text and f"{path}.index" not in text and len(text) < 6000, text[:3000]
    assert error.exit_code == 2
    assert not set(text) & {*HOSTILE_NAME} - {*"a[2J31m"}, text
    return text


def check(parts: Path, path: Path, expected: str | list[str | None], **limits: int) -> None:
    """Make the index within limits.

    Args:
        expected: REFUSED, or the kind of problem of each record.
    """
    (path.parent / "images").mkdir(exist_ok=True)
    cfg = config(parts, path, f"data.index={path}.index")

    def look() -> object:
        records = open_again(cfg, parts)
        return kinds_found(records), list(records.index.problems())

    found = within_limits(look, **limits)
    if isinstance(found, LlavaFsdpError):
        assert expected == REFUSED, found
        message_of(found, path)
        return
    kinds, rows = found
    assert expected != REFUSED, kinds
    if len(kinds) == 1:
        assert kinds == [{kind for kind in expected if kind}]
    else:
        assert kinds == [{kind} if kind else set() for kind in expected]
    assert all(row["reason"].startswith(f"{path}, ") and len(row["reason"]) < 3000 for row in rows)


@pytest.mark.parametrize("name", slow_after(9, TARS))
def test_tars(name: str, parts: Path, tmp_path: Path) -> None:
    content, expected = TARS[name]
    (tmp_path / "a.tar").write_bytes(content)
    check(parts, tmp_path / "a.tar", expected)


def bomb(length: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    made = [packer.compress(bytes(1 << 20)) for _ in range(length >> 20)]
    return b"".join(made) + packer.flush()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


LINES = RECORD + b"\n"
PACKED: dict[str, tuple[str, Callable[[], bytes], str | list[str | None]]] = {
    "gzip bomb": (".jsonl.gz", lambda: bomb(300 << 20), REFUSED),
    "zstd bomb": (".jsonl.zst", lambda: zstd(bytes(300 << 20)), REFUSED),
    "gzip in parts": (".jsonl.gz", lambda: gzip.compress(LINES) + gzip.compress(LINES), [None, None]),
    "zstd in parts": (".jsonl.zst", lambda: zstd(LINES) + zstd(LINES), [None, None]),
    "gzip, many empty parts": (".jsonl.gz", lambda: gzip.compress(b"") * 99_999 + gzip.compress(LINES * 2), [None] * 2),
    "gzip and zeros": (".jsonl.gz", lambda: gzip.compress(LINES * 2) + bytes(512), [None, None]),
    "gzip and other bytes": (".jsonl.gz", lambda: gzip.compress(LINES) + LINES, REFUSED),
    "cut gzip": (".jsonl.gz", lambda: gzip.compress(LINES * 99)[:-9], REFUSED),
    "gzip cut in its header": (".jsonl.gz", lambda: gzip.compress(LINES * 99)[:5], REFUSED),
    "gzip, wrong sum": (".jsonl.gz", lambda: gzip.compress(LINES * 99)[:-8] + bytes(8), REFUSED),
    "cut zstd": (".jsonl.zst", lambda: zstd(LINES * 99)[:-3], REFUSED),
    "zstd cut between parts": (".jsonl.zst", lambda: zstd(LINES) + zstd(LINES)[:6], REFUSED),
    "zstd, window of 2 GB": (".jsonl.zst", lambda: b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(30), REFUSED),
    "no bytes": (".jsonl.gz", lambda: b"", REFUSED),
    "gzip of no bytes": (".jsonl.gz", lambda: gzip.compress(b""), REFUSED),
    "gzip of blank lines": (".jsonl.gz", lambda: gzip.compress(b"\n \n"), REFUSED),
    "gzip of a list": (".jsonl.gz", lambda: gzip.compress(b"[" + b'"x",' * (2 << 20) + b'"x"]'), REFUSED),
    "gzip of gzip": (".jsonl.gz", lambda: gzip.compress(gzip.compress(LINES)), REFUSED),
    "gzip of UTF-16": (".jsonl.gz", lambda: gzip.compress(LINES.decode().encode("utf-16")), REFUSED),
    "gzip of a tar": (".jsonl.gz", lambda: gzip.compress(of(("a.json", RECORD))), ["not_json"]),
    "tar called .jsonl.gz": (".jsonl.gz", lambda: of(("a.json", RECORD)), REFUSED),
    "tar called .parquet": (".parquet", lambda: of(("a.json", RECORD)), REFUSED),
    "tar called .jsonl.zst": (".jsonl.zst", lambda: of(("a.json", RECORD)), REFUSED),
    "tar called .json": (".json", lambda: of(("a.json", RECORD)), REFUSED),
    "Parquet called .tar": (".tar", lambda: rows_of([{"conversations": TEXT}]), REFUSED),
    "Parquet called .json": (".json", lambda: rows_of([{"conversations": TEXT}]), REFUSED),
    "lines called .tar": (".tar", lambda: LINES * 99, REFUSED),
    "lines called .parquet": (".parquet", lambda: LINES * 99, REFUSED),
    "zip called .tar": (".tar", lambda: b"PK\x03\x04" + bytes(1 << 12), REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(2, PACKED))
def test_packed_and_misnamed_files(name: str, parts: Path, tmp_path: Path) -> None:
    suffix, make, expected = PACKED[name]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(make())
    check(parts, path, expected)


IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
TURNS = pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())]))


def rows_of(rows: list[dict[str, Any]], schema: pyarrow.Schema | None = None, **options: Any) -> bytes:
    made = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), made, **options)
    return made.getvalue()


def answered(value: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": "a"}, {"from": "gpt", "value": value}]


def repeated(count: int, length: int) -> bytes:
    """Rows whose answer is one long value of a dictionary."""
    value = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, "int32"), ["b" * length])
    made = io.BytesIO()
    table = pyarrow.table({"q": ["a"] * count, "v": value})
    parquet.write_table(table, made, row_group_size=count, compression="zstd", store_schema=False)
    return made.getvalue()


def lying_rows() -> bytes:
    """A footer that says that there are more rows."""
    data = rows_of([{"conversations": TEXT}] * 7, compression="none")
    assert data.count(b"\x16\x0e") > 1  # the number 7 in Thrift, of type i64
    at = data.index(b"\x16\x0e", data.rindex(b"conversations"))
    return data[:at] + b"\x16\x10" + data[at + 2 :]


def schema_of(image: Any) -> pyarrow.Schema:
    return pyarrow.schema([("conversations", TURNS), ("image", image)])


def nested_list(depth: int) -> Any:
    return [nested_list(depth - 1)] if depth else "x"


def no_groups() -> bytes:
    made = io.BytesIO()
    parquet.ParquetWriter(made, schema_of(IMAGE)).close()
    return made.getvalue()


PARQUETS: dict[str, tuple[Callable[[], bytes], str | list[str | None]]] = {
    "no rows": (lambda: rows_of([], schema_of(IMAGE)), REFUSED),
    "no row groups": (no_groups, REFUSED),
    "more rows than there are": (lying_rows, REFUSED),
    "lists of lists of images": (
        lambda: rows_of([{"conversations": ASKS, "image": [[None]]}], schema_of(pyarrow.list_(pyarrow.list_(IMAGE)))),
        REFUSED,
    ),
    "images of text": (lambda: rows_of([{"conversations": ASKS, "image": {"bytes": "x"}}]), REFUSED),
    "images of numbers": (lambda: rows_of([{"conversations": ASKS, "image": 3}]), REFUSED),
    "turns of numbers": (lambda: rows_of([{"conversations": 3}]), REFUSED),
    "turns of bytes": (lambda: rows_of([{"conversations": b"3"}]), REFUSED),
    "a text of 64 MB": (
        lambda: rows_of([{"conversations": answered("b" * (64 << 20))}], compression="zstd"), ["record_too_large"],
    ),
    "control characters in a column": (lambda: rows_of([{HOSTILE_NAME: "x"}]), REFUSED),
    "control characters in a field": (
        lambda: rows_of([{"conversations": [{"from": "a", HOSTILE_NAME: "b"}]}]), REFUSED,
    ),
    "a column of 1 MB": (lambda: rows_of([{LONG: "x"}]), REFUSED),
    "5000 columns": (lambda: rows_of([{f"c{n}": n for n in range(5000)}]), REFUSED),
    "deep": (lambda: rows_of([{"conversations": nested_list(60)}]), REFUSED),
    "an image of 60 MB of zeros": (
        lambda: rows_of([{"conversations": ASKS, "image": {"bytes": bytes(60 << 20)}}], compression="zstd"),
        ["image_unreadable"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(6, PARQUETS))
def test_parquet(name: str, parts: Path, tmp_path: Path) -> None:
    make, expected = PARQUETS[name]
    (tmp_path / "a.parquet").write_bytes(make())
    check(parts, tmp_path / "a.parquet", expected)


@pytest.mark.slow
def test_a_dictionary_of_long_values(parts: Path, tmp_path: Path) -> None:
    """Rows that repeat a value of 3 MB are read some at a time: all together they have 2 GB."""
    (tmp_path / "images").mkdir()
    path = tmp_path / "a.parquet"
    path.write_bytes(repeated(700, 3 << 20))
    cfg = config(parts, path, "data.question=q", "data.answer=v", "data.max_record_bytes=10000")
    found = within_limits(lambda: kinds_found(open_again(cfg, parts)), memory=1 << 30)
    assert found == [{"record_too_large"}] * 700


def prepare(path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "llava_fsdp.prepare", "data=llava_json", f"data.path='{path}'", *words]
    return subprocess.run(command, capture_output=True, cwd=path.parent, timeout=120, check=False)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name, code", slow_after(1, [("control characters, refused", 2), ("control characters in media", 0)])
)
def test_the_command(name: str, code: int, tmp_path: Path) -> None:
    """Neither its messages nor its page have a character that a terminal or a browser obeys."""
    path = tmp_path / f"{HOSTILE_NAME}.tar"
    path.write_bytes(TARS[name][0])
    done = prepare(path)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == code, said
    assert "Traceback" not in said and shown_text(said) == said
