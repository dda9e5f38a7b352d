"""Where the values of one column chunk of a Parquet file lie, by a walk over its pages.

A column chunk is one column of one row group. Its values lie in pages, each with a header. Of pages that are stored as
they are, only headers, levels and the lengths of values are read; compressed pages are decompressed once.
Source: `https://parquet.apache.org/docs/file-format/`.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from llava_fsdp.data.containers.parquet_levels import Cursor, EndsEarly, Malformed, number_of, small_numbers
from llava_fsdp.data.containers.place import Page, Reader
from llava_fsdp.data.containers.read_place import MOST_BYTES, MOST_RATIO, DamagedPage, unpack
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.terminal_text import shown_name

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)  # kinds of pages
PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 2, 3, 7, 8
ENCODINGS = {
    4: "BIT_PACKED", 5: "DELTA_BINARY_PACKED", 6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY",
    9: "BYTE_STREAM_SPLIT",
}  # fmt: skip
UNCOMPRESSED = "UNCOMPRESSED"
HEADER_SIZES = (1 << 8, 1 << 14, 1 << 20, 1 << 24)
"""Bytes that are read for a page header: more where a header, which may hold statistics, does not fit."""
MOST_IMAGES = 1 << 22
"""Most values of a column of images in one row group or dictionary; bounds memory to some 100 bytes for each."""
COPY_AGAIN = "take it from its source again"
REWRITE = (
    "rewrite the file once: pyarrow.parquet.write_table(pyarrow.parquet.read_table(OLD), NEW, row_group_size=1000, "
    "compression='none', use_dictionary=False)"
)


@dataclass(frozen=True)
class Chunk:
    """A column chunk, as the footer describes it."""

    shard: Reader
    column: str
    group: int
    codec: str
    begin: int
    end: int
    """Its bytes in the file: from `begin` up to `end`."""
    values: int
    """Number of its values, nulls and empty lists included."""
    max_definition: int
    max_repetition: int

    def refuse(self, problem: str, cure: str = COPY_AGAIN) -> NoReturn:
        """Raise a DataError that names the file, the column and the cure."""
        raise DataError(
            f"{self.shard.name}, column {shown_name(self.column)}, row group {self.group}: {problem}; {cure}"
        ).about(file=self.shard.name, key=self.column)


@dataclass(frozen=True)
class PageHeader:
    kind: int
    body: int
    """Where the page's bytes begin in the file."""
    packed: int
    """Number of these bytes."""
    unpacked: int
    """Number of bytes of the page once decompressed."""
    values: int
    encoding: int
    compressed: bool
    level_encodings: tuple[int, ...] = ()
    level_sizes: tuple[int, int] = (0, 0)
    """Bytes of repetition and definition levels at the beginning of a page of version 2, which are never compressed."""
    crc: int | None = None


@dataclass(frozen=True)
class Body:
    """The bytes of a page, in the file or decompressed: from `begin` up to `end` of what `read(offset, size)` reads."""

    read: Callable[[int, int], bytes]
    begin: int
    end: int
    page: Page | None = None

    def take(self, size: int) -> tuple[bytes, "Body"]:
        """Return the first bytes, and what follows them."""
        if size > self.end - self.begin:
            raise EndsEarly(f"{size} bytes expected, {self.end - self.begin} are left in the page")
        return self.read(self.begin, size), replace(self, begin=self.begin + size)


@dataclass(frozen=True)
class Values:
    """Where values lie: arrays with an element for each value."""

    offset: np.ndarray
    """int64: first byte, in the file or in the decompressed page."""
    size: np.ndarray
    """int64: bytes; -1 for a null."""
    page: np.ndarray
    """int64: number of the value's page in a list of `Page`; -1: it lies in the file as it is."""

    def __getitem__(self, index: np.ndarray | slice) -> "Values":
        return Values(self.offset[index], self.size[index], self.page[index])

    @classmethod
    def join(cls, parts: list["Values"]) -> "Values":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("offset", "size", "page")))

    @classmethod
    def nulls(cls, count: int) -> "Values":
        return cls(np.zeros(count, np.int64), np.full(count, -1, np.int64), np.full(count, -1, np.int64))


def page_headers(chunk: Chunk) -> Iterator[PageHeader]:
    """Yield the headers of a chunk's pages; sizes are checked against the chunk, and counts against its values.

    Raises:
        DataError: a header is damaged.
    """
    at, left = chunk.begin, chunk.values
    while left:
        if at >= chunk.end:
            chunk.refuse(f"its pages hold {chunk.values - left} of {chunk.values} values")
        try:
            header = page_header(chunk, at)
        except Malformed as error:
            chunk.refuse(f"the page header at byte {at} is damaged ({error})")
        if header.kind in (DATA, DATA_V2):
            if header.values > left:
                chunk.refuse(f"the page at byte {at} claims {header.values} values, {left} are left in its column")
            left -= header.values
        yield header
        at = header.body + header.packed


def page_header(chunk: Chunk, at: int) -> PageHeader:
    cursor, fields = read_struct(chunk, at)
    body = at + cursor.at
    kind, unpacked, packed = (number_of(fields, field) for field in (1, 2, 3))
    if packed > chunk.end - body:
        raise Malformed(f"a page of {packed} bytes leaves its column")
    compressed = chunk.codec != UNCOMPRESSED
    if not compressed and packed != unpacked:
        raise Malformed(f"an uncompressed page has {packed} and {unpacked} bytes")
    crc = fields.get(4)
    make = {"kind": kind, "body": body, "packed": packed, "unpacked": unpacked, "crc": crc}
    if kind == INDEX:
        return PageHeader(**make, values=0, encoding=PLAIN, compressed=False)
    own = fields.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
    if not isinstance(own, dict) or not (crc is None or isinstance(crc, int)):
        raise Malformed(f"a page of the kind {kind} without a header of its own")
    make["values"] = number_of(own, 1)
    if kind == DATA_V2:
        repetition, definition = number_of(own, 6), number_of(own, 5)
        if repetition + definition > min(packed, unpacked):
            raise Malformed(f"levels of {repetition + definition} bytes leave their page")
        compressed = compressed and own.get(7, True) is not False
        if not compressed and packed != unpacked:
            raise Malformed(f"an uncompressed page has {packed} and {unpacked} bytes")
        return PageHeader(
            **make, encoding=number_of(own, 4), compressed=compressed, level_sizes=(repetition, definition)
        )
    levels = (number_of(own, 4), number_of(own, 3)) if kind == DATA else ()
    return PageHeader(**make, encoding=number_of(own, 2), compressed=compressed, level_encodings=levels)


def read_struct(chunk: Chunk, at: int) -> tuple[Cursor, dict]:
    """Read the Thrift struct at a place of the file; return it, and a cursor at its end."""
    for size in HEADER_SIZES:
        size = min(size, chunk.end - at)
        cursor = Cursor(chunk.shard.read(at, size))
        try:
            return cursor, cursor.struct()
        except EndsEarly:
            if size == chunk.end - at:
                raise
    raise Malformed(f"it has more than {HEADER_SIZES[-1]} bytes")


def chunk_values(chunk: Chunk) -> tuple[Values, list[Page], np.ndarray, np.ndarray]:
    """Find where the values of a BYTE_ARRAY column chunk lie.

    Returns:
        The values in order, nulls included; the compressed pages; definition and repetition levels, int64 [values].

    Raises:
        DataError: the chunk is damaged, too large, or compressed or encoded in a way that leaves values no place.
        SourceError: the file cannot be read.
    """
    if chunk.codec != UNCOMPRESSED and chunk.codec not in MOST_RATIO:
        chunk.refuse(f"images in pages compressed with {chunk.codec} are not read", REWRITE)
    if chunk.values > MOST_IMAGES:
        chunk.refuse(f"it has {chunk.values} values, most are {MOST_IMAGES}", REWRITE)
    found, pages, levels, dictionary = [], [], [], Values.nulls(0)
    for header in page_headers(chunk):
        try:
            if header.kind == DICTIONARY:
                dictionary = plain_values(page_body(chunk, header, pages), header.values, pages)
            elif header.kind in (DATA, DATA_V2):
                definition, repetition, values = page_values(chunk, header, dictionary, pages)
                found.append(values)
                levels.append((definition, repetition))
        except (Malformed, DamagedPage) as error:
            chunk.refuse(f"the page at byte {header.body} cannot be read ({error})")
    if not found:
        return Values.nulls(0), pages, np.zeros(0, np.int64), np.zeros(0, np.int64)
    definition, repetition = (np.concatenate(own) for own in zip(*levels, strict=True))
    return Values.join(found), pages, definition, repetition


def page_values(
    chunk: Chunk, header: PageHeader, dictionary: Values, pages: list[Page]
) -> tuple[np.ndarray, np.ndarray, Values]:
    """Return the definition levels, the repetition levels and the values of a data page, nulls included."""
    plain = header.encoding == PLAIN
    if not plain and header.encoding not in (PLAIN_DICTIONARY, RLE_DICTIONARY):
        name = ENCODINGS.get(header.encoding, f"number {header.encoding}")
        chunk.refuse(f"images in the encoding {name} are not read", REWRITE)
    body, sizes = page_body(chunk, header, pages), list(header.level_sizes)
    levels = []
    # of version 2, levels are before the body
    ahead = Body(chunk.shard.read, header.body, header.body + sum(sizes))
    for kind, most in enumerate((chunk.max_repetition, chunk.max_definition)):
        if header.kind == DATA_V2:
            data, ahead = ahead.take(sizes[kind])
        elif most == 0:
            data = b""
        else:
            if header.level_encodings[kind] != RLE:
                chunk.refuse("its levels are in the old encoding BIT_PACKED, which is not read", REWRITE)
            length, body = body.take(4)
            check_runs(size := int.from_bytes(length, "little"), header.values)
            data, body = body.take(size)
        levels.append(level(data, most, header.values))
    repetition, definition = levels
    present = definition == chunk.max_definition
    count = int(present.sum())
    if plain:
        own = plain_values(body, count, pages)
    else:
        own = dictionary_values(body, count, dictionary)
    values = Values.nulls(header.values)
    values.offset[present], values.size[present], values.page[present] = own.offset, own.size, own.page
    return definition, repetition, values


def level(data: bytes, most: int, count: int) -> np.ndarray:
    """Decode levels from 0 to `most`: int64 [count]."""
    if most == 0:
        return np.zeros(count, np.int64)
    check_runs(len(data), count)
    levels = small_numbers(data, most.bit_length(), count)
    if count and levels.max() > most:
        raise Malformed(f"a level is {levels.max()}, the highest is {most}")
    return levels


def check_runs(size: int, count: int) -> None:
    """Raise Malformed if small numbers take more bytes than any encoder makes of them: a run of one takes nine."""
    if size > 9 * count + 64:
        raise Malformed(f"{count} small numbers take {size} bytes")


def page_body(chunk: Chunk, header: PageHeader, pages: list[Page]) -> Body:
    """Return the bytes of a page without the levels of version 2; decompress them if needed and add the page to
    `pages`."""
    levels = sum(header.level_sizes)
    begin, end = header.body + levels, header.body + header.packed
    whole = header.compressed or (header.kind != DICTIONARY and header.encoding != PLAIN)
    if not whole:  # images as they are, which are not read
        return Body(chunk.shard.read, begin, end)
    if header.packed > MOST_BYTES:
        chunk.refuse(f"the page at byte {header.body} has {header.packed} bytes, most are {MOST_BYTES}", REWRITE)
    if header.unpacked > MOST_BYTES:
        chunk.refuse(f"the page at byte {header.body} unpacks to more than {MOST_BYTES} bytes", REWRITE)
    data = chunk.shard.read(header.body, header.packed)
    if header.crc is not None and zlib.crc32(data) != header.crc & 0xFFFFFFFF:
        raise DamagedPage("its checksum is wrong")
    data, page = data[levels:], None
    if header.compressed:
        page = Page(begin, len(data), chunk.codec, header.unpacked - levels)
        data = unpack(page, data)
        pages.append(page)
    return Body(lambda at, size: data[at : at + size], 0, len(data), page)


def plain_values(body: Body, count: int, pages: list[Page]) -> Values:
    """Find `count` values that each follow their length (four bytes) and fill a page."""
    if count > MOST_IMAGES:
        raise Malformed(f"it has {count} values, most are {MOST_IMAGES}")
    if 4 * count > body.end - body.begin:
        raise Malformed(f"{count} values in {body.end - body.begin} bytes")
    offset, size = np.empty(count, np.int64), np.empty(count, np.int64)
    at, read, end = body.begin, body.read, body.end
    for value in range(count):
        if at + 4 > end:
            raise EndsEarly(f"value {value} of {count} leaves its page")
        length = int.from_bytes(read(at, 4), "little")
        offset[value], size[value] = at + 4, length
        at += 4 + length
    if at != end:
        raise Malformed(f"{count} values take {at - body.begin} bytes of a page that has {end - body.begin}")
    return Values(offset, size, np.full(count, -1 if body.page is None else len(pages) - 1, np.int64))


def dictionary_values(body: Body, count: int, dictionary: Values) -> Values:
    """Find `count` values whose numbers in the dictionary are in a page."""
    if count == 0:
        return Values.nulls(0)
    width, body = body.take(1)
    check_runs(size := body.end - body.begin, count)
    ids = small_numbers(body.take(size)[0], width[0], count)
    if ids.max() >= len(dictionary.size):
        raise Malformed(f"value {ids.max()} of a dictionary of {len(dictionary.size)}")
    return dictionary[ids]
