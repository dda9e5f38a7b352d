"""Find the positions of the values of a column chunk (one column of one row group) of a Parquet file.

In uncompressed pages, only the levels and the lengths of the values are read. Compressed pages are decompressed once.
Source: `https://parquet.apache.org/docs/file-format/data-pages/`.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from llava_fsdp.data.containers.location import Page
from llava_fsdp.data.containers.parquet.parquet_levels import EndsEarly, Malformed, decode_small_numbers
from llava_fsdp.data.containers.parquet.parquet_pages import (
    DATA,
    DATA_V2,
    DICTIONARY,
    PLAIN,
    PLAIN_DICTIONARY,
    REWRITE,
    RLE,
    RLE_DICTIONARY,
    UNCOMPRESSED,
    Chunk,
    PageHeader,
    page_headers,
)
from llava_fsdp.data.containers.read_image import MOST_BYTES, MOST_RATIO, DamagedPage, unpack

ENCODINGS = {
    4: "BIT_PACKED", 5: "DELTA_BINARY_PACKED", 6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY",
    9: "BYTE_STREAM_SPLIT",
}  # fmt: skip
MOST_IMAGES = 1 << 22
"""Greatest number of values of a column of images in one row group or dictionary. Each takes about 100 bytes of
memory."""


@dataclass(frozen=True)
class Body:
    """The content of a page, in the file itself or decompressed in memory."""

    read: Callable[[int, int], bytes]
    """Function (offset, size) -> bytes of the file or of the decompressed page."""
    begin: int
    end: int
    """The content is the bytes [begin, end) of what `read` reads."""
    page: Page | None = None
    """The compressed page; None: the content is in the file itself."""

    def take(self, size: int) -> tuple[bytes, "Body"]:
        """Return the first `size` bytes, and the rest."""
        if size > self.end - self.begin:
            raise EndsEarly(f"{size} bytes expected, {self.end - self.begin} are left in the page")
        return self.read(self.begin, size), replace(self, begin=self.begin + size)


@dataclass(frozen=True)
class Values:
    """Positions of the values of a column."""

    offset: np.ndarray
    """First byte in the file or in a decompressed page, int64 [values]."""
    size: np.ndarray
    """Number of bytes, int64 [values]; -1 for a null."""
    page: np.ndarray
    """Index of the compressed page in a separate list of `Page`, int64 [values]; -1 for a value in the file itself."""

    def __getitem__(self, index: np.ndarray | slice) -> "Values":
        return Values(self.offset[index], self.size[index], self.page[index])

    @classmethod
    def join(cls, parts: list["Values"]) -> "Values":
        """Concatenate positions of values."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("offset", "size", "page")))

    @classmethod
    def nulls(cls, count: int) -> "Values":
        """Return the positions of `count` nulls."""
        return cls(np.zeros(count, np.int64), np.full(count, -1, np.int64), np.full(count, -1, np.int64))


def chunk_values(chunk: Chunk) -> tuple[Values, list[Page], np.ndarray, np.ndarray]:
    """Find the positions of the values of a BYTE_ARRAY chunk.

    Returns:
        (positions of the values in order, nulls included; the compressed pages to which they refer by index; definition
        levels, int64 [values]; repetition levels, int64 [values])

    Raises:
        DataError: the chunk is damaged, too large, or compressed or encoded in a way that is not supported.
    """
    if chunk.codec != UNCOMPRESSED and chunk.codec not in MOST_RATIO:
        chunk.refuse(f"images in pages compressed with {chunk.codec} are not read", REWRITE)
    if chunk.values > MOST_IMAGES:
        chunk.refuse(f"it has {chunk.values} values, most are {MOST_IMAGES}", REWRITE)
    values_of_pages, pages, levels, dictionary = [], [], [], Values.nulls(0)
    for header in page_headers(chunk):
        try:
            if header.kind == DICTIONARY:
                if len(dictionary.size) or header.encoding not in (PLAIN, PLAIN_DICTIONARY):
                    raise Malformed("it is a second dictionary, or one in an unknown encoding")
                dictionary = plain_values(page_body(chunk, header), header.values, pages)
            elif header.kind in (DATA, DATA_V2):
                definition, repetition, values = page_values(chunk, header, dictionary, pages)
                values_of_pages.append(values)
                levels.append((definition, repetition))
        except (Malformed, DamagedPage) as error:
            chunk.refuse(f"the page at byte {header.body} cannot be read ({error})")
    if not values_of_pages:
        return Values.nulls(0), pages, np.zeros(0, np.int64), np.zeros(0, np.int64)
    all_definitions = np.concatenate([definition for definition, _ in levels])
    all_repetitions = np.concatenate([repetition for _, repetition in levels])
    return Values.join(values_of_pages), pages, all_definitions, all_repetitions


def page_values(
    chunk: Chunk, header: PageHeader, dictionary: Values, pages: list[Page]
) -> tuple[np.ndarray, np.ndarray, Values]:
    """Find the positions of the values of a data page.

    Args:
        dictionary: positions of the values of the chunk's dictionary; empty if it has none.
        pages: the compressed pages that positions refer to by index; this page is appended if its positions need it.

    Returns:
        (definition levels, int64 [values]; repetition levels, int64 [values]; positions of the values, nulls included)
    """
    is_plain = header.encoding == PLAIN
    if not is_plain and header.encoding not in (PLAIN_DICTIONARY, RLE_DICTIONARY):
        name = ENCODINGS.get(header.encoding, f"number {header.encoding}")
        chunk.refuse(f"images in the encoding {name} are not read", REWRITE)
    body, sizes = page_body(chunk, header), list(header.level_sizes)
    levels = []
    # in a page of version 2, the levels are before the compressed part
    level_bytes = Body(chunk.file.read, header.body, header.body + sum(sizes))
    for kind, highest in enumerate((chunk.max_repetition, chunk.max_definition)):
        if header.kind == DATA_V2:
            data, level_bytes = level_bytes.take(sizes[kind])
        elif highest == 0:
            data = b""
        else:
            if header.level_encodings[kind] != RLE:
                chunk.refuse("its levels are in the old encoding BIT_PACKED, which is not read", REWRITE)
            length, body = body.take(4)
            check_runs(size := int.from_bytes(length, "little"), header.values)
            data, body = body.take(size)
        levels.append(decode_levels(data, highest, header.values))
    repetition, definition = levels
    has_value = definition == chunk.max_definition
    count = int(has_value.sum())
    if is_plain:
        positions = plain_values(body, count, pages)
    else:
        positions = dictionary_values(body, count, dictionary)
    values = Values.nulls(header.values)
    values.offset[has_value], values.size[has_value], values.page[has_value] = (
        positions.offset,
        positions.size,
        positions.page,
    )
    return definition, repetition, values


def decode_levels(data: bytes, highest: int, count: int) -> np.ndarray:
    """Decode the definition or repetition levels of a page, int64 [count] with values from 0 to `highest`."""
    if highest == 0:
        return np.zeros(count, np.int64)
    check_runs(len(data), count)
    levels = decode_small_numbers(data, highest.bit_length(), count)
    if count and levels.max() > highest:
        raise Malformed(f"a level is {levels.max()}, the highest is {highest}")
    return levels


def check_runs(size: int, count: int) -> None:
    """Raise Malformed if `count` encoded small numbers take more bytes than an encoder uses (at most nine for each)."""
    if size > 9 * count + 64:
        raise Malformed(f"{count} small numbers take {size} bytes")


def page_body(chunk: Chunk, header: PageHeader) -> Body:
    """Return the content of a page, without the definition and repetition levels at the beginning of a page of version
    2: as bytes in memory, decompressed and checked, or, for uncompressed plain values such as images, as a byte range
    of the file, which is not read here."""
    levels = sum(header.level_sizes)
    begin, end = header.body + levels, header.body + header.packed
    is_read = header.is_compressed or (header.kind != DICTIONARY and header.encoding != PLAIN)
    if not is_read:
        return Body(chunk.file.read, begin, end)
    if header.packed > MOST_BYTES:
        chunk.refuse(f"the page at byte {header.body} has {header.packed} bytes, most are {MOST_BYTES}", REWRITE)
    if header.unpacked > MOST_BYTES:
        chunk.refuse(f"the page at byte {header.body} unpacks to more than {MOST_BYTES} bytes", REWRITE)
    data = chunk.file.read(header.body, header.packed)
    if header.crc is not None and zlib.crc32(data) != header.crc & 0xFFFFFFFF:
        raise DamagedPage("its checksum is wrong")
    data, page = data[levels:], None
    if header.is_compressed:
        page = Page(begin, len(data), chunk.codec, header.unpacked - levels)
        data = unpack(page, data)
    return Body(lambda at, size: data[at : at + size], 0, len(data), page)


def plain_values(body: Body, count: int, pages: list[Page]) -> Values:
    """Return the offset, size and page index of the `count` values of a page in the encoding PLAIN: each value has its
    length in four bytes before it. A compressed page is appended to `pages`, and offsets are in its decompressed bytes;
    otherwise they are in the file, with page index -1."""
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
    if body.page is not None:
        pages.append(body.page)
    return Values(offset, size, np.full(count, -1 if body.page is None else len(pages) - 1, np.int64))


def dictionary_values(body: Body, count: int, dictionary: Values) -> Values:
    """Return the positions of a page's `count` values. The page, `body`, has only their indices in `dictionary` (the
    positions of its entries); its first byte is the number of bits of an index."""
    if count == 0:
        return Values.nulls(0)
    width, body = body.take(1)
    check_runs(size := body.end - body.begin, count)
    ids = decode_small_numbers(body.take(size)[0], width[0], count)
    if ids.max() >= len(dictionary.size):
        raise Malformed(f"value {ids.max()} of a dictionary of {len(dictionary.size)}")
    return dictionary[ids]
