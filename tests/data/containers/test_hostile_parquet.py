"""Parquet files written by hand, whose sizes, counts and offsets lie, are refused before memory is allocated."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow
import pytest

from llava_fsdp.data.containers.parquet.parquet_container import ParquetContainer
from llava_fsdp.data.containers.parquet.parquet_levels import MOST_DEPTH
from llava_fsdp.data.containers.read_image import PageCache, read_image
from llava_fsdp.runtime.errors import DataError

INT32_MAX = (1 << 31) - 1
SNAPPY, ZSTD = 1, 6
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8


class Raw(bytes):
    """Bytes that are put into a Thrift struct as they are, with their type in front."""


class Memory:
    name = "a.parquet"

    def __init__(self, data: bytes):
        self.data, self.size = data, len(data)

    def read(self, offset: int, size: int, /) -> bytes:
        assert 0 <= offset and 0 <= size and offset + size <= self.size, (offset, size)
        return self.data[offset : offset + size]


def varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def thrift(value: Any) -> tuple[int, bytes]:
    """Type and bytes of a value in Thrift's compact protocol; a dict is a struct."""
    match value:
        case bool():
            return 2 - value, b""
        case int():
            return 6, varint(value * 2 if value >= 0 else -value * 2 - 1)
        case Raw():
            return value[0], value[1:]
        case bytes():
            return 8, varint(len(value)) + value
        case list():
            kind = thrift(value[0])[0] if value else 12
            return 9, bytes([0xF0 | kind]) + varint(len(value)) + b"".join(thrift(own)[1] for own in value)
        case dict():
            made = b""
            for field, own in value.items():
                kind, data = thrift(own)
                made += bytes([kind]) + varint(field * 2) + data
            return 12, made + b"\0"
    raise AssertionError(value)


def plain(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


def page(body: bytes, values: int = 1, encoding: int = PLAIN, **changed: Any) -> bytes:
    """A data page of version 1; `changed` replaces its sizes."""
    sizes = {"unpacked": len(body), "packed": len(body)} | changed
    header = {1: 0, 2: sizes["unpacked"], 3: sizes["packed"], 5: {1: values, 2: encoding, 3: RLE, 4: RLE}}
    return thrift(header)[1] + body


def dictionary(body: bytes, values: int = 1, encoding: int = PLAIN) -> bytes:
    return thrift({1: 2, 2: len(body), 3: len(body), 7: {1: values, 2: encoding}})[1] + body


def page_v2(body: bytes, values: int, repetition: int = 0, definition: int = 0, **changed: Any) -> bytes:
    sizes = {"unpacked": len(body), "packed": len(body)} | changed
    own = {1: values, 2: 0, 3: values, 4: PLAIN, 5: definition, 6: repetition, 7: False}
    return thrift({1: 3, 2: sizes["unpacked"], 3: sizes["packed"], 8: own})[1] + body


def file(
    pages: bytes,
    values: int = 1,
    how: int = REQUIRED,
    codec: int = 0,
    schema: Any = None,
    footer: Any = None,
    **meta: Any,
) -> bytes:
    """A file of one column `raw` in one row group. `meta` replaces fields of the column's metadata: `_9=5` field 9."""
    schema = schema or [{4: b"schema", 5: 1}, {1: 6, 3: how, 4: b"raw"}]
    column = {1: 6, 2: [PLAIN], 3: [b"raw"], 4: codec, 5: values, 6: len(pages), 7: len(pages), 9: 4}
    column |= {int(field[1:]): value for field, value in meta.items()}
    group = {1: [{2: 4, 3: column}], 2: len(pages), 3: values}
    end = thrift({1: 2, 2: schema, 3: values, 4: [group]} | (footer or {}))[1]
    return b"PAR1" + pages + end + len(end).to_bytes(4, "little") + b"PAR1"


def images(data: bytes) -> list[bytes | None]:
    shard = Memory(data)
    opened = ParquetContainer(shard)
    places = opened.locations("raw", 0)
    rows = [own for row in range(opened.rows(0)) for own in places.row(row)]
    return [None if own is None else read_image(shard, own, PageCache()) for own in rows]


def levels(*runs: bytes) -> bytes:
    data = b"".join(runs)
    return len(data).to_bytes(4, "little") + data


def refused(data: bytes) -> None:
    with pytest.raises(DataError):
        images(data)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No more than 8 MiB at any time."""
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert pyarrow.total_allocated_bytes() <= before + (1 << 20)


def test_files_written_by_hand_are_read() -> None:
    """Else the refusals below would prove nothing."""
    assert images(file(page(plain(b"ab", b""), 2) + page(plain(b"c")), 3)) == [b"ab", b"", b"c"]
    assert images(file(page(levels(b"\x03\x05") + plain(b"a", b"b"), 3), 3, OPTIONAL)) == [b"a", None, b"b"]
    assert images(file(page_v2(b"\x03\x05" + plain(b"a", b"b"), 3, definition=2), 3, OPTIONAL)) == [b"a", None, b"b"]
    assert images(file(dictionary(plain(b"x", b"y"), 2) + page(b"\x01\x06\x01", 3, RLE_DICTIONARY), 3)) == [b"y"] * 3
    body = pyarrow.Codec("snappy").compress(plain(b"ab"), asbytes=True)
    assert images(file(page(body, unpacked=6), codec=SNAPPY)) == [b"ab"]


SHORT = plain(b"ab" * 9)
PACKED = pyarrow.Codec("snappy").compress(SHORT, asbytes=True)


@pytest.mark.parametrize(("compressed", "body"), [({7: True}, PACKED), ({}, PACKED), ({7: False}, SHORT)])
def test_a_page_of_version_2_is_compressed_unless_it_says_otherwise(compressed: dict[int, bool], body: bytes) -> None:
    own = {1: 1, 2: 0, 3: 1, 4: PLAIN, 5: 0, 6: 0, **compressed}
    data = thrift({1: 3, 2: len(SHORT), 3: len(body), 8: own})[1] + body
    assert images(file(data, codec=SNAPPY)) == [b"ab" * 9]
    if compressed == {7: False}:
        refused(file(thrift({1: 3, 2: len(SHORT) + 1, 3: len(body), 8: own})[1] + body, codec=SNAPPY))


def test_rare_parts_of_a_column() -> None:
    """An index among the pages, numbers of no bits, levels of two lengths, levels in an old encoding, many pages, and a
    list of truth values in the footer."""
    index = thrift({1: 1, 2: 3, 3: 3, 6: {}})[1] + b"abc"
    assert images(file(page(plain(b"a")) + index + page(plain(b"b")), 2)) == [b"a", b"b"]
    same = dictionary(plain(b"x")) + page(b"\0" + varint(1 << 1 | 1), 3, RLE_DICTIONARY)
    assert images(file(same, 3)) == [b"x"] * 3
    # repetition levels 0 1 1 0 in a byte more than definition levels 1 1 1 1
    body = b"\x02\x00\x04\x01\x02\x00" + b"\x08\x01" + plain(b"a", b"b", b"c", b"d")
    data = file(page_v2(body, 4, repetition=6, definition=2), 2, REPEATED, _5=4)
    shard = Memory(data)
    places = ParquetContainer(shard).locations("raw", 0)
    found = [[own and read_image(shard, own, PageCache()) for own in places.row(row)] for row in range(2)]
    assert found == [[b"a", b"b", b"c"], [b"d"]]
    old = thrift({1: 0, 2: 7, 3: 7, 5: {1: 1, 2: PLAIN, 3: 4, 4: RLE}})[1] + b"\x80" + plain(b"ab")
    refused(file(old, how=OPTIONAL))
    assert images(file(page(plain(b"a")) * 150, 150)) == [b"a"] * 150
    flags = Raw(b"\x09\x21\x01\x02")
    assert images(file(page(plain(b"ab")), footer={99: flags})) == [b"ab"]


NESTED = b"\x1c" * (MOST_DEPTH + 5)
PAGES = {
    "empty": b"",
    "cut header": page(plain(b"ab"))[:5],
    "value past its page": page(plain(b"ab")[:-1]),
    "bytes after the values": page(plain(b"ab") + b"x"),
    "value of 4 GiB": page(b"\xff\xff\xff\xffab"),
    "length past its page": page(b"\x01\0\0"),
    "more values than its column": page(plain(b"a", b"b"), 2),
    "negative count": page(plain(b"a"), -1),
    "page past its column": page(plain(b"ab"), packed=INT32_MAX, unpacked=INT32_MAX),
    "negative size": page(plain(b"ab"), packed=-6, unpacked=-6),
    "two sizes": page(plain(b"ab"), unpacked=7),
    "large numbers": page(plain(b"ab"), packed=1 << 62),
    "unknown kind": thrift({1: 9, 2: 6, 3: 6})[1] + plain(b"ab"),
    "no header of its own": thrift({1: 0, 2: 6, 3: 6})[1] + plain(b"ab"),
    "header of another type": thrift({1: 0, 2: 6, 3: 6, 5: 7})[1] + plain(b"ab"),
    "nested structs": NESTED * 100,
    "list of 2^60": thrift({1: 0, 9: Raw(b"\x09\xfc" + varint(1 << 60) + bytes(1000))})[1],
    "text of 2^60": thrift({1: 0, 9: Raw(b"\x08" + varint(1 << 60) + bytes(1000))})[1],
    "long number": b"\x15" + b"\xff" * 100,
    "many fields": b"\x11" * 20_000 + bytes(1),
    "many empty pages": page(b"", 0) * 5000 + page(plain(b"ab")),
    "many dictionaries": dictionary(plain(b"ab")) * 2 + page(b"\x01\x02\x00", 1, RLE_DICTIONARY),
    "dictionary of 2^31 values": dictionary(plain(b"ab"), INT32_MAX) + page(b"\x01\x02\x00", 1, RLE_DICTIONARY),
    "dictionary in an encoding": dictionary(plain(b"ab"), 1, 7) + page(b"\x01\x02\x00", 1, RLE_DICTIONARY),
    "no dictionary": page(b"\x01\x02\x00", 1, RLE_DICTIONARY),
    "value behind the dictionary": dictionary(plain(b"ab")) + page(b"\x01\x02\x01", 1, RLE_DICTIONARY),
    "numbers of 255 bits": dictionary(plain(b"ab")) + page(b"\xff\x02\x00", 1, RLE_DICTIONARY),
    "numbers end early": dictionary(plain(b"ab")) + page(b"\x01", 1, RLE_DICTIONARY),
    "empty runs": dictionary(plain(b"ab")) + page(b"\x01" + bytes(60), 1, RLE_DICTIONARY),
    "many bytes of numbers": dictionary(plain(b"ab")) + page(b"\x01\x02\x00" + bytes(9999), 1, RLE_DICTIONARY),
    "levels past a page of version 2": page_v2(plain(b"ab"), 1, definition=7),
    "negative levels": page_v2(plain(b"ab"), 1, definition=-1),
    "two sizes in version 2": page_v2(plain(b"ab"), 1, unpacked=7),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str) -> None:
    refused(file(PAGES[name]))


LEVELS = {
    "too high": levels(b"\x02\x03") + plain(b"ab"),
    "too high, without a value": levels(b"\x02\x03"),
    "past their page": b"\xff\xff\xff\x7f\x02\x01" + plain(b"ab"),
    "of no numbers": levels(b"\x00\x01") + plain(b"ab"),
    "end early": levels(b"\x02") + plain(b"ab"),
    "cut groups": levels(b"\x03") + plain(b"ab"),
    "long number": levels(b"\xff" * 12) + plain(b"ab"),
    "no length": b"\x02",
}  # fmt: skip


@pytest.mark.parametrize("name", LEVELS)
def test_levels(name: str) -> None:
    refused(file(page(LEVELS[name]), how=OPTIONAL))


@pytest.mark.parametrize("codec", [SNAPPY, ZSTD])
def test_compressed_pages_that_claim_much(codec: int) -> None:
    """As images, and as another column, before pyarrow reads it."""
    body = pyarrow.Codec({SNAPPY: "snappy", ZSTD: "zstd"}[codec]).compress(plain(b"ab"), asbytes=True)
    for unpacked in (7, 5, 1 << 20, INT32_MAX):
        data = file(page(body, unpacked=unpacked), codec=codec)
        with pytest.raises(DataError):
            images(data)
        if unpacked > 1 << 20:
            with pytest.raises(DataError):
                list(ParquetContainer(Memory(data)).batches(0, []))


NULLS = page(levels(varint(5_000_000 << 1) + b"\0"), 5_000_000)


def column(**fields: Any) -> list[dict[int, Any]]:
    return [{4: b"schema", 5: 1}, {1: 6, 3: REQUIRED, 4: b"raw"} | {int(key[1:]): own for key, own in fields.items()}]


ONE = page(plain(b"ab"))
META = {1: 6, 2: [PLAIN], 3: [b"raw"], 4: 0, 5: 1, 6: len(ONE), 7: len(ONE), 9: 4}
FOOTERS = {
    "five million nulls": file(NULLS, 5_000_000, OPTIONAL),
    "2^60 values": file(NULLS, 1 << 60, OPTIONAL),
    "negative values": file(ONE, -1),
    "other number of rows": file(ONE, 2, _5=1),
    "no value": file(ONE, _5=0),
    "offset past the end": file(ONE, _9=1 << 40),
    "negative offset": file(ONE, _9=-1),
    "size past the end": file(ONE, _7=1 << 40),
    "negative size": file(ONE, _7=-1),
    "dictionary past the end": file(ONE, _11=1 << 40),
    "unknown codec": file(ONE, codec=99),
    "other path": file(ONE, _3=[b"row"]),
    "path not UTF-8": file(ONE, _3=[b"\xff"]),
    "path of numbers": file(ONE, _3=[1, 2]),
    "other type": file(ONE, _1=2),
    "not BYTE_ARRAY": file(ONE, schema=column(_1=2), _1=2),
    "no columns": file(ONE, footer={4: [{3: 1}]}),
    "two columns": file(ONE, footer={4: [{1: [{}, {}], 3: 1}]}),
    "no metadata": file(ONE, footer={4: [{1: [{2: 4}], 3: 1}]}),
    "encrypted column": file(ONE, footer={4: [{1: [{3: META, 8: {1: {}}}], 3: 1}]}),
    "encrypted column without metadata": file(ONE, footer={4: [{1: [{2: 4, 8: {1: {}}, 9: b"x"}], 3: 1}]}),
    "column shorter than its page": file(ONE, _7=len(ONE) - 1),
    "encrypted": file(ONE, footer={8: {1: {}}}),
    "another file": file(ONE, footer={4: [{1: [{1: b"b.parquet"}], 3: 1}]}),
    "groups of numbers": file(ONE, footer={4: [1, 2]}),
    "no schema": file(ONE, footer={2: 7}),
    "endless schema": file(ONE, schema=[{4: b"schema", 5: INT32_MAX}, {1: 6, 3: 0, 4: b"raw"}]),
    "short schema": file(ONE, schema=[{4: b"schema", 5: 1}, *[{1: 6, 3: 0, 4: b"raw"}] * 2]),
    "deep schema": file(ONE, schema=[{4: b"s", 5: 1}] + [{4: b"s", 5: 1, 3: 0}] * 5000 + [{1: 6, 3: 0, 4: b"raw"}]),
    "name not UTF-8": file(ONE, schema=column(_4=b"\xff")),
    "unknown repetition": file(ONE, schema=column(_3=9)),
    "unknown type": file(ONE, schema=column(_1=9)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOOTERS)
def test_footers(name: str) -> None:
    refused(FOOTERS[name])


def test_a_legacy_list() -> None:
    """A repeated leaf without a group around it: a list whose elements are never null."""
    # repetition levels 0 1 0, definition levels 1 1 0
    body = levels(b"\x03\x02") + levels(b"\x03\x03") + plain(b"a", b"b")
    data = file(page(body, 3), 2, REPEATED, _5=3)
    shard = Memory(data)
    places = ParquetContainer(shard).locations("raw", 0)
    assert [[read_image(shard, own, PageCache()) for own in places.row(row) if own] for row in (0, 1)] == [
        [b"a", b"b"],
        [],
    ]
