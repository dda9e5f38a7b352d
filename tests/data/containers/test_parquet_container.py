"""Images of Parquet files lie where the places say, in every layout; files that cannot be read in place are refused."""

import base64
import hashlib
import io
import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tiers import slow_after

from llava_fsdp.data.containers.file_reader import LocalFile
from llava_fsdp.data.containers.parquet import parquet_container, parquet_footer, parquet_values
from llava_fsdp.data.containers.parquet.parquet_container import ParquetContainer
from llava_fsdp.data.containers.parquet.parquet_footer import Footer
from llava_fsdp.data.containers.parquet.parquet_pages import page_headers
from llava_fsdp.data.containers.read_image import PageCache, read_image
from llava_fsdp.runtime.errors import DataError

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
SCHEMA = pyarrow.schema([
    ("id", pyarrow.int64()),
    ("image", IMAGE),
    ("images", pyarrow.list_(IMAGE)),
    ("raw", pyarrow.binary()),
    pyarrow.field("must", pyarrow.large_binary(), nullable=False),
    ("many", pyarrow.large_list(pyarrow.binary())),
    ("pair", pyarrow.list_(pyarrow.binary(), 2)),
    ("text", pyarrow.list_(pyarrow.struct([("from", pyarrow.string()), ("value", pyarrow.string())]))),
])  # fmt: skip
LEAVES = {
    "image.bytes": "image", "images.list.element.bytes": "images", "raw": "raw", "must": "must",
    "many.list.element": "many", "pair.list.element": "pair",
}  # fmt: skip
LIKE_DATASETS = {
    "compression": {"image.bytes": "none", "image.path": "snappy"}, "use_dictionary": False, "write_page_index": True,
    "use_content_defined_chunking": {"min_chunk_size": 1 << 9, "max_chunk_size": 1 << 11, "norm_level": 0},
}  # fmt: skip
"""Hugging Face datasets 5 writes images this way, with larger chunks."""
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{compression}-{version}-{'dictionary' if dictionary else 'plain'}-{'small' if small else 'large'}": {
        "compression": compression, "data_page_version": version, "use_dictionary": dictionary,
        **({"data_page_size": 256, "write_batch_size": 3, "dictionary_pagesize_limit": 2048} if small else {}),
    }
    for compression, version, dictionary, small in itertools.product(
        ("none", "snappy", "zstd"), ("1.0", "2.0"), (True, False), (True, False)
    )
} | {"datasets": LIKE_DATASETS, "checksums": {"write_page_checksum": True}, "old": {"version": "1.0"}}  # fmt: skip


class Memory:
    """A reader of bytes in memory, which must only be asked for what exists. Remembers which bytes were read."""

    name = "a.parquet"

    def __init__(self, data: bytes):
        self.data, self.size = data, len(data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, offset: int, size: int, /) -> bytes:
        assert 0 <= offset and 0 <= size and offset + size <= self.size, (offset, size)
        self.ranges.append((offset, size))
        return self.data[offset : offset + size]


def make_rows(count: int = 61) -> list[dict[str, Any]]:
    draw = random.Random(count)

    def content() -> bytes:
        return draw.randbytes(draw.choice((0, 1, 5, 200, 700))) if draw.random() < 0.8 else b"the same again" * 9

    def image() -> dict[str, Any] | None:
        return draw.choice(({"bytes": content(), "path": "a.jpg"}, {"bytes": content(), "path": None},
                            {"bytes": None, "path": "b.jpg"}, None))  # fmt: skip

    return [
        {
            "id": row, "image": image(), "images": draw.choice((None, [], [image()], [image(), image(), image()])),
            "raw": draw.choice((None, content())), "must": content(),
            "many": draw.choice((None, [content() for _ in range(draw.randrange(4))], [None])),
            "pair": draw.choice((None, [content(), None])),
            "text": [{"from": "human", "value": f"what is é {row}?"}] * (row % 3),
        }
        for row in range(count)
    ]  # fmt: skip


def expected(row: dict[str, Any], column: str) -> list[bytes | None]:
    value = row[column]
    if column in ("images", "many", "pair"):
        value = value or []
    else:
        value = [value]
    return [own["bytes"] if isinstance(own, dict) else own for own in value]


def write(rows: list[dict[str, Any]], schema: pyarrow.Schema = SCHEMA, group: int = 25, **layout: Any) -> bytes:
    file = io.BytesIO()
    layout.setdefault("version", "2.6")
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file, row_group_size=group, **layout)
    return file.getvalue()


def digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def images(shard: Any, path: str) -> list[list[bytes | None]]:
    """The bytes of every row's images."""
    pages, rows = PageCache(), []
    opened = ParquetContainer(shard)
    for group in range(opened.groups):
        places = opened.locations(path, group)
        for row in range(opened.rows(group)):
            rows.append([None if own is None else read_image(shard, own, pages) for own in places.row(row)])
    return rows


def refused(data: bytes, path: str = "raw") -> DataError:
    with pytest.raises(DataError) as error:
        images(Memory(data), path)
    assert "a.parquet" in str(error.value) and error.value.culprit["file"] == "a.parquet"
    return error.value


@pytest.mark.parametrize("name", slow_after(14, LAYOUTS))
def test_images_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    rows, layout = make_rows(), LAYOUTS[name]
    path = tmp_path / "a.parquet"
    path.write_bytes(write(rows, **layout))
    with LocalFile(path) as file:
        shard = ParquetContainer(file)
        assert (shard.groups, shard.binary_leaves()) == (3, list(LEAVES))
        for leaf, column in LEAVES.items():
            found = [[digest(one) for one in row] for row in images(file, leaf)]
            assert found == [[digest(one) for one in expected(row, column)] for row in rows], leaf
        for leaf in LEAVES:
            places = itertools.chain.from_iterable(shard.locations(leaf, 0).row(row) for row in range(20))
            packed = [own.page is not None for own in places if own is not None]
            if shard.footer.chunk(leaf, 0).codec == "UNCOMPRESSED":
                assert not any(packed)
            elif (
                layout.get("data_page_version") != "2.0"
            ):  # pages of version 2 are stored as they are if that is smaller
                assert all(packed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_columns_come_without_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_container, "ROWS_AT_ONCE", 7)
    rows = make_rows()
    shard = ParquetContainer(Memory(write(rows, **LAYOUTS[name])))
    found = []
    for group in range(shard.groups):
        for batch in shard.batches(group, list(LEAVES)):
            assert batch.num_rows <= 7
            found += batch.to_pylist()
    assert [(row["id"], row["text"]) for row in found] == [(row["id"], row["text"]) for row in rows]
    for row, right in zip(found, rows, strict=True):
        assert set(row) == {"id", "image", "images", "text"}
        assert row["image"] == (right["image"] and {"path": right["image"]["path"]})
        assert row["images"] == (right["images"] and [one and {"path": one["path"]} for one in right["images"]])


def test_other_columns_have_the_rows_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ParquetContainer(Memory(write(make_rows(9))))
    assert sum(batch.num_rows for batch in shard.batches(0, list(LEAVES))) == 9
    monkeypatch.setattr(shard.footer, "rows", lambda group: 10)
    with pytest.raises(DataError):
        list(shard.batches(0, list(LEAVES)))


def test_of_uncompressed_images_only_their_lengths_are_read() -> None:
    schema = pyarrow.schema([("image", IMAGE), ("text", pyarrow.string())])
    rows = [{"image": {"bytes": random.Random(n).randbytes(20_000), "path": "a"}, "text": f"t{n}"} for n in range(50)]
    memory = Memory(write(rows, schema, compression="none", use_dictionary=False))
    shard = ParquetContainer(memory)
    places = shard.locations("image.bytes", 0)
    assert [row["text"] for row in rows[:25]] == [
        row["text"] for batch in shard.batches(0, ["image.bytes"]) for row in batch.to_pylist()
    ]
    assert sum(size for _, size in memory.ranges) < 100_000 < memory.size / 9, "64 KiB of it for pyarrow's footer"
    own = places.row(3)[0]
    assert own is not None and memory.data[own.offset :][: own.size] == rows[3]["image"]["bytes"]


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_and_only_nulls(count: int) -> None:
    for layout in (LAYOUTS["none-1.0-plain-large"], LAYOUTS["snappy-2.0-dictionary-small"]):
        data = write([{"must": b""}] * count, **layout)
        for leaf, column in LEAVES.items():
            assert (
                images(Memory(data), leaf)
                == [expected({**dict.fromkeys(LEAVES.values()), "must": b""}, column)] * count
            )


def test_a_file_of_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_container, "ROWS_AT_ONCE", 3)
    shard = ParquetContainer(Memory(write([{"raw": b"x"}] * 7, pyarrow.schema([("raw", pyarrow.binary())]), 4)))
    assert [batch.num_rows for group in (0, 1) for batch in shard.batches(group, ["raw"])] == [3, 1, 3]


def test_a_struct_in_a_list_in_a_struct() -> None:
    kind = pyarrow.struct(
        [("shots", pyarrow.list_(pyarrow.field("element", IMAGE, nullable=False))), ("n", pyarrow.int8())]
    )
    rows = [{"a": {"shots": [{"bytes": b"1", "path": ""}, {"bytes": None, "path": ""}], "n": 1}}, {"a": None}]
    data = write(rows, pyarrow.schema([("a", kind)]))
    assert images(Memory(data), "a.shots.list.element.bytes") == [[b"1", None], []]


def test_levels_of_long_runs() -> None:
    """Nulls in alternation and in long runs, and a dictionary of more than 256 values: numbers of 9 bits and more."""
    draw = random.Random(1)
    values = [str(draw.randrange(700)).encode() for _ in range(40_000)]
    rows = [{"raw": None if 9000 < n < 30_000 or n % 7 == 0 else value} for n, value in enumerate(values)]
    schema = pyarrow.schema([("raw", pyarrow.binary())])
    for name in ("none-1.0-dictionary-large", "zstd-2.0-dictionary-large"):
        data = write(rows, schema, 40_000, **LAYOUTS[name])
        assert images(Memory(data), "raw") == [[row["raw"]] for row in rows]


@pytest.mark.parametrize("codec", ["gzip", "brotli", "lz4"])
def test_codecs_that_are_not_read(codec: str) -> None:
    error = refused(write(make_rows(), compression=codec))
    assert codec.upper() in str(error) and "compression='none'" in str(error)
    assert error.culprit["key"] == "raw"


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_encodings_that_are_not_read(encoding: str) -> None:
    error = refused(write(make_rows(), use_dictionary=False, column_encoding={"raw": encoding}))
    assert encoding in str(error) and error.culprit["key"] == "raw"


def test_columns_that_are_no_images() -> None:
    data = write(make_rows())
    for path in ("id", "absent", "image"):
        assert path in str(refused(data, path))
    deep = pyarrow.schema([("raw", pyarrow.list_(pyarrow.list_(pyarrow.binary())))])
    refused(write([{"raw": [[b"x"]]}], deep), "raw.list.element.list.element")
    refused(write([{"raw": b"123"}], pyarrow.schema([("raw", pyarrow.binary(3))])))
    twice = pyarrow.schema([("a", pyarrow.struct([("b", pyarrow.binary())])), ("a.b", pyarrow.binary())])
    refused(write([], twice), "a.b")
    shard = ParquetContainer(Memory(write([], pyarrow.schema([("a", pyarrow.binary()), ("a.b", pyarrow.binary())]))))
    with pytest.raises(DataError):
        list(shard.batches(0, ["a.b"]))


@pytest.mark.parametrize("plain_footer", [False, True])
def test_encrypted_files(plain_footer: bool, tmp_path: Path) -> None:
    from pyarrow.parquet import encryption

    class Client(encryption.KmsClient):
        def __init__(self, config: Any):
            super().__init__()

        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

        def unwrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64decode(key)

    own = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["image.bytes"]}, plaintext_footer=plain_footer
    )
    properties = encryption.CryptoFactory(Client).file_encryption_properties(encryption.KmsConnectionConfig(), own)
    parquet.write_table(
        pyarrow.Table.from_pylist(make_rows(), SCHEMA.remove(7)), tmp_path / "a", encryption_properties=properties
    )
    assert "encrypt" in str(refused((tmp_path / "a").read_bytes(), "image.bytes"))


def test_what_is_no_parquet_file() -> None:
    data = write(make_rows())
    for other in (b"", b"PAR1", b"PAR1" * 4, bytes(100), b"PAR1" + bytes(100), data[:-1], data[:5000], data[4:]):
        refused(other)
    refused(data[:-8] + b"\xff\xff\xff\x7fPAR1")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": n, "raw": bytes([n]) * 1000, "must": b""} for n in range(20)]
    data = write(rows, compression="snappy")
    assert len(images(Memory(data), "raw")) == 20
    for module, name, value in (
        (parquet_values, "MOST_BYTES", 1000),
        (parquet_values, "MOST_IMAGES", 19),
        (parquet_footer, "MOST_VALUES", 19),
        (parquet_footer, "MOST_FOOTER", 100),
        (parquet_footer, "MOST_FIELDS", 100),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            refused(data)
    monkeypatch.setattr(parquet_container, "BATCH_BYTES", 20 * 1004 * 3)
    shard = ParquetContainer(Memory(data))
    assert [batch.num_rows for batch in shard.batches(0, ["image.bytes"])] == [3] * 6 + [2], "raw has a dictionary"
    monkeypatch.setattr(parquet_container, "MOST_BYTES", 1000)
    assert len(list(shard.batches(0, ["raw"]))) == 1
    with pytest.raises(DataError):
        list(shard.batches(0, ["image.bytes"]))


FUZZED = (
    "none-1.0-plain-large", "none-1.0-dictionary-small", "snappy-1.0-dictionary-large", "zstd-2.0-plain-small",
    "none-2.0-dictionary-large", "checksums",
)  # fmt: skip


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUZZED)
def test_fuzz(name: str, times: int) -> None:
    """A changed byte or a cut gives the bytes that were written, or a DataError.

    Where a page has no checksum, a change in it may give a changed image, or another one of the same column.
    """
    schema = pyarrow.schema([SCHEMA.field(column) for column in ("images", "raw", "text")])
    rows = [{key: row[key] for key in schema.names} for row in make_rows(9)]
    data = write(rows, schema, 5, **LAYOUTS[name])
    leaves = {leaf: column for leaf, column in LEAVES.items() if column in schema.names}
    written = {leaf: [expected(row, column) for row in rows] for leaf, column in leaves.items()}
    footer = Footer(Memory(data))
    unproven = {
        at
        for leaf, group in itertools.product(leaves, (0, 1))
        for page in page_headers(footer.chunk(leaf, group))
        for at in range(page.body, page.body + page.packed)
        if page.crc is None or not (page.is_compressed or page.encoding)
    }
    draw, errors = random.Random(0), 0
    if times > 50 or name == FUZZED[0]:  # it makes Python some seven times slower
        tracemalloc.start()
    for _ in range(times):
        other, at = bytearray(data), draw.randrange(len(data))
        if draw.random() < 0.9:
            other[at] = draw.randrange(256)
        else:
            del other[at:]
        shard = Memory(bytes(other))
        try:
            for leaf in leaves:
                assert images(shard, leaf) == written[leaf] or at in unproven, (at, other[at])
            opened = ParquetContainer(shard)
            for group in range(opened.groups):
                for batch in opened.batches(group, list(leaves)):
                    assert batch.num_rows <= 5
        except DataError:
            errors += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert pyarrow.default_memory_pool().max_memory() < 1 << 30
    assert errors > times / 5
