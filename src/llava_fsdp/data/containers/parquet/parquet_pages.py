"""Read the page headers of a column chunk of a Parquet file.

A column chunk is one column of one row group. It consists of pages with values, each with a header. Source:
`https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.parquet.parquet_levels import Cursor, EndsEarly, Malformed, number_of
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)  # kinds of pages
PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 2, 3, 7, 8
UNCOMPRESSED = "UNCOMPRESSED"
HEADER_SIZES = (1 << 8, 1 << 14, 1 << 20, 1 << 24)
"""Numbers of bytes that are read for a page header: the first one, and the next one if the header, which may contain
statistics, is longer."""
MOST_EMPTY = 100
"""Greatest number of pages of a chunk that have no values, such as a dictionary page."""
COPY_AGAIN = "take it from its source again"
REWRITE = (
    "rewrite the file once: pyarrow.parquet.write_table(pyarrow.parquet.read_table(OLD), NEW, row_group_size=1000, "
    "compression='none', use_dictionary=False)"
)


@dataclass(frozen=True)
class Chunk:
    """A column chunk, as the footer describes it."""

    file: Reader
    column: str
    """Path of the leaf column, such as `image.bytes`."""
    group: int
    codec: str
    begin: int
    end: int
    """The chunk is the bytes [begin, end) of the file."""
    values: int
    """Number of values, including nulls and empty lists."""
    max_definition: int
    max_repetition: int

    def refuse(self, problem: str, cure: str = COPY_AGAIN) -> NoReturn:
        """Raise a DataError about the column chunk, with the `problem` and what the user can do (`cure`)."""
        raise DataError(
            f"{self.file.name}, column {shown_name(self.column)}, row group {self.group}: {problem}; {cure}"
        ).about(file=self.file.name, key=self.column)


@dataclass(frozen=True)
class PageHeader:
    kind: int
    """DATA, INDEX, DICTIONARY or DATA_V2."""
    body: int
    """Offset in the file of the first byte after the header."""
    packed: int
    """Number of bytes in the file, without the header; `unpacked` likewise after decompression."""
    unpacked: int
    values: int
    encoding: int
    is_compressed: bool
    level_encodings: tuple[int, ...] = ()
    level_sizes: tuple[int, int] = (0, 0)
    """With DATA_V2, numbers of bytes of the repetition and of the definition levels at the page's beginning, which are
    never compressed."""
    crc: int | None = None


def page_headers(chunk: Chunk) -> Iterator[PageHeader]:
    """Yield the page headers of a chunk. The pages' sizes and numbers of values are checked against those of the chunk.
    Raise DataError if a header is damaged."""
    at, values_left, pages = chunk.begin, chunk.values, 0  # offset of the next header, values to come, pages so far
    while values_left:
        pages += 1
        if pages > chunk.values + MOST_EMPTY:
            chunk.refuse(f"it has more than {pages} pages for {chunk.values} values")
        if at >= chunk.end:
            chunk.refuse(f"its pages hold {chunk.values - values_left} of {chunk.values} values")
        try:
            header = page_header(chunk, at)
        except Malformed as error:
            chunk.refuse(f"the page header at byte {at} is damaged ({error})")
        if header.kind in (DATA, DATA_V2):
            if header.values > values_left:
                chunk.refuse(
                    f"the page at byte {at} claims {header.values} values, {values_left} are left in its column"
                )
            values_left -= header.values
        yield header
        at = header.body + header.packed


def page_header(chunk: Chunk, at: int) -> PageHeader:
    """Read the page header at byte `at`. Raise Malformed if it contradicts itself, or its chunk's compression or
    end."""
    cursor, fields = read_struct(chunk, at)  # numbers of fields are those of PageHeader in parquet.thrift
    body = at + cursor.at
    kind, unpacked, packed = (number_of(fields, field) for field in (1, 2, 3))
    if packed > chunk.end - body:
        raise Malformed(f"a page of {packed} bytes leaves its column")
    is_compressed = chunk.codec != UNCOMPRESSED
    if not is_compressed and packed != unpacked:
        raise Malformed(f"an uncompressed page has {packed} and {unpacked} bytes")
    crc = fields.get(4)
    fields_of_all = {"kind": kind, "body": body, "packed": packed, "unpacked": unpacked, "crc": crc}
    if kind == INDEX:
        return PageHeader(**fields_of_all, values=0, encoding=PLAIN, is_compressed=False)
    header = fields.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
    if not isinstance(header, dict) or not (crc is None or isinstance(crc, int)):
        raise Malformed(f"a page of the kind {kind} without a header of its own")
    fields_of_all["values"] = number_of(header, 1)
    if kind == DATA_V2:
        repetition, definition = number_of(header, 6), number_of(header, 5)
        if repetition + definition > min(packed, unpacked):
            raise Malformed(f"levels of {repetition + definition} bytes leave their page")
        is_compressed = is_compressed and header.get(7, True) is not False
        if not is_compressed and packed != unpacked:
            raise Malformed(f"an uncompressed page has {packed} and {unpacked} bytes")
        return PageHeader(
            **fields_of_all,
            encoding=number_of(header, 4),
            is_compressed=is_compressed,
            level_sizes=(repetition, definition),
        )
    levels = (number_of(header, 4), number_of(header, 3)) if kind == DATA else ()
    return PageHeader(
        **fields_of_all, encoding=number_of(header, 2), is_compressed=is_compressed, level_encodings=levels
    )


def read_struct(chunk: Chunk, at: int) -> tuple[Cursor, dict]:
    """Read the Thrift struct at byte `at` of the file. Return a cursor after it, and {field number: value}. Its size is
    not known before: it is read with one of HEADER_SIZES after the other, until it is complete."""
    for size in HEADER_SIZES:
        size = min(size, chunk.end - at)
        cursor = Cursor(chunk.file.read(at, size))
        try:
            return cursor, cursor.struct()
        except EndsEarly:
            if size == chunk.end - at:
                raise
    raise Malformed(f"it has more than {HEADER_SIZES[-1]} bytes")
