"""Where the images of a Parquet file lie, and its other columns, read without the images.

Images are values of BYTE_ARRAY leaf columns: `image.bytes` of a struct of bytes and path, as Hugging Face datasets
writes it; `images.list.element.bytes` of a list of such structs; or a column of binary values. Where a column is not
compressed, an image is a range of bytes of the file; with Snappy and zstd, it is a range of a decompressed page.
"""

import contextlib
import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np

from llava_fsdp.data.containers.parquet_pages import (
    COPY_AGAIN,
    DELTA_BYTE_ARRAY,
    DICTIONARY,
    REWRITE,
    Chunk,
    Values,
    chunk_values,
    page_headers,
)
from llava_fsdp.data.containers.place import Page, Place, Reader
from llava_fsdp.data.containers.read_place import MOST_BYTES, MOST_RATIO
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.terminal_text import shown_name

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
MOST_FOOTER = 256 << 20
MOST_VALUES = 1 << 26
"""Most values of a column without images in one row group."""
ROWS_AT_ONCE = 256
REPEATED_BYTES = 256 << 20
"""Bound on the bytes that a batch of rows takes because they repeat values of a dictionary."""
BUFFER = 1 << 20
DECRYPT = "decrypt it once: read it with its keys and write it without encryption"


class ReaderFile(io.RawIOBase):
    """A read-only file object over a `Reader`, for pyarrow."""

    def __init__(self, shard: Reader):
        super().__init__()
        self.shard, self.at = shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.shard.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.shard.size - self.at)
        data = self.shard.read(self.at, left if size is None or size < 0 else min(size, left)) if left else b""
        self.at += len(data)
        return data


@dataclass(frozen=True)
class Leaf:
    """A leaf column: its number, and which definition levels mean what."""

    number: int
    max_definition: int
    max_repetition: int
    element: int
    """Definition level from which an element of the list exists, even if it is null; 0 without a list."""


@dataclass(frozen=True)
class GroupPlaces:
    """Where the images of a row group lie.

    `values` holds, for each row in order, one element if the column has no lists, or else one for each element of its
    list. Elements without an image (nulls) have the size -1.
    """

    file: str
    first: np.ndarray
    """int64 [rows + 1]: the elements of a row are from `first[row]` up to `first[row + 1]`."""
    values: Values
    pages: list[Page]

    def row(self, row: int) -> list[Place | None]:
        """Return the places of a row's images; None for each null."""
        return [self.place(index) for index in range(self.first[row], self.first[row + 1])]

    def place(self, index: int) -> Place | None:
        """Return the place of an element of `values`."""
        offset, size, page = (int(own[index]) for own in (self.values.offset, self.values.size, self.values.page))
        return Place(self.file, offset, size, None if page < 0 else self.pages[page]) if size >= 0 else None


class ParquetShard:
    """A Parquet file, open through pyarrow for its footer and its columns without images.

    Every method raises DataError, with the file, the column and the cure, if what it reads is damaged, encrypted, too
    large, or stored in a way that leaves images no place; and SourceError if the file cannot be read.
    """

    def __init__(self, shard: Reader):
        self.shard = shard
        self.check_ends()
        from pyarrow import PythonFile
        from pyarrow.parquet import ParquetFile

        with self.reading("its footer"):
            self.file = ParquetFile(PythonFile(ReaderFile(shard), mode="r"), pre_buffer=False, buffer_size=BUFFER)
            self.groups: int = self.file.num_row_groups
            self.columns = [self.file.schema.column(number) for number in range(len(self.file.schema))]
            self.paths: list[str] = [column.path for column in self.columns]
            levels = [own for field in self.file.schema_arrow for own in leaf_levels(field.type, field.nullable)]
        if len(set(self.paths)) < len(self.paths):
            self.refuse("two of its columns have the same path", "give one of them another name")
        of_file = [(column.max_definition_level, column.max_repetition_level) for column in self.columns]
        if [own[:2] for own in levels] != of_file:
            self.refuse("its columns are nested in an unknown way", REWRITE)
        self.leaves = {path: Leaf(number, *levels[number]) for number, path in enumerate(self.paths)}

    def check_ends(self) -> None:
        """Check the first and last bytes of the file, before pyarrow reads it."""
        size = self.shard.size
        if size < 12:
            self.refuse(f"{size} bytes are no Parquet file", COPY_AGAIN)
        head, tail = self.shard.read(0, 4), self.shard.read(size - 8, 8)
        if ENCRYPTED in (head, tail[4:]):
            self.refuse("it is encrypted", DECRYPT)
        if head != MAGIC:
            self.refuse("it is no Parquet file: its first bytes are not PAR1", COPY_AGAIN)
        if tail[4:] != MAGIC:
            self.refuse(f"it is truncated or damaged: its last bytes, before byte {size}, are not PAR1", COPY_AGAIN)
        footer = int.from_bytes(tail[:4], "little")
        if footer > min(size - 12, MOST_FOOTER):
            self.refuse(f"its footer claims {footer} bytes", COPY_AGAIN)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse(self, problem: str, cure: str, cause: Exception | None = None) -> NoReturn:
        raise DataError(f"{self.shard.name}: {problem}; {cure}").about(file=self.shard.name) from cause

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Context manager that turns errors of pyarrow into DataError."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            encrypted = "crypt" in str(error)
            self.refuse(f"{what} cannot be read ({shown_name(error)})", DECRYPT if encrypted else COPY_AGAIN, error)

    def binary_leaves(self) -> list[str]:
        """Return the paths of the leaf columns that may hold images: bytes that are not said to be text."""
        return [
            column.path
            for column in self.columns
            if column.physical_type == "BYTE_ARRAY" and column.logical_type.type == "NONE"
        ]

    def rows(self, group: int) -> int:
        """Return the number of rows of a row group."""
        with self.reading(f"row group {group}"):
            rows = self.file.metadata.row_group(group).num_rows
        if not 0 <= rows <= MOST_VALUES:
            self.refuse(f"row group {group} has {rows} rows, most are {MOST_VALUES}", REWRITE)
        return rows

    def chunk(self, path: str, group: int) -> Chunk:
        """Return where a column of a row group lies, checked against the file."""
        leaf = self.leaves[path]
        with self.reading(f"column {shown_name(path)} of row group {group}"):
            meta = self.file.metadata.row_group(group).column(leaf.number)
            begin, size, values = meta.data_page_offset, meta.total_compressed_size, meta.num_values
            if meta.has_dictionary_page and 0 < meta.dictionary_page_offset < begin:
                begin = meta.dictionary_page_offset
            chunk = Chunk(
                self.shard, path, group, meta.compression, begin, begin + size, values,
                leaf.max_definition, leaf.max_repetition,
            )  # fmt: skip
            if meta.path_in_schema != path or meta.physical_type != self.columns[leaf.number].physical_type:
                chunk.refuse(f"the footer calls it {shown_name(meta.path_in_schema)} ({meta.physical_type})")
            if meta.file_path:
                chunk.refuse(f"it is in another file, {shown_name(meta.file_path)}", REWRITE)
        if not (4 <= begin <= chunk.end <= self.shard.size - 8 and size >= 0):
            chunk.refuse(f"bytes {begin} to {chunk.end} are not within the file of {self.shard.size} bytes")
        if not 0 <= values <= MOST_VALUES:
            chunk.refuse(f"it has {values} values, most are {MOST_VALUES}", REWRITE)
        return chunk

    def places(self, path: str, group: int) -> GroupPlaces:
        """Find the images of a row group.

        Args:
            path: of a leaf column, such as `image.bytes`; see `binary_leaves`.
            group: number of the row group.
        """
        leaf = self.leaves.get(path)
        if leaf is None:
            self.refuse(f"it has no column {shown_name(path)}", f"its columns are {self.paths}")
        chunk = self.chunk(path, group)
        if (kind := self.columns[leaf.number].physical_type) != "BYTE_ARRAY":
            chunk.refuse(f"images are BYTE_ARRAY, these are {kind}", "name a column of binary values")
        if leaf.max_repetition > 1:
            chunk.refuse("lists of lists of images are not read", "store one list of images a row")
        values, pages, definition, repetition = chunk_values(chunk)
        starts = np.flatnonzero(repetition == 0)
        rows = self.rows(group)
        if len(starts) != rows or (len(repetition) and repetition[0] != 0):
            chunk.refuse(f"it has {len(starts)} rows, and the row group has {rows}")
        exists = definition >= leaf.element
        first = np.append(0, np.cumsum(exists))[np.append(starts, len(exists))]
        return GroupPlaces(self.shard.name, first, values[exists], pages)

    def batches(self, group: int, leave_out: Collection[str], rows: int = ROWS_AT_ONCE) -> Iterator[Any]:
        """Yield the rows of a row group as pyarrow `RecordBatch`, without some leaf columns, which are not read.

        Args:
            leave_out: paths of the columns of images, as given to `places`. A struct keeps its other fields.
            rows: most rows of a batch; fewer come if they repeat long values.
        """
        kept = [path for path in self.paths if path not in leave_out]
        for path in kept:
            if any(out.startswith(f"{path}.") for out in leave_out):  # pyarrow would read both
                self.refuse(f"the path of its column {shown_name(path)} begins another's", "give it another name")
        longest = max((self.check_pages(self.chunk(path, group)) for path in kept), default=0)
        batches = self.file.iter_batches(
            max(1, min(rows, REPEATED_BYTES // max(1, longest))), row_groups=[group], columns=kept, use_threads=False
        )
        left = self.rows(group)
        while True:
            with self.reading(f"the columns without images of row group {group}"):
                batch = next(batches, None)
            if batch is None:
                break
            left -= batch.num_rows
            yield batch
        if left:
            self.refuse(f"the columns of row group {group} do not have its number of rows (by {left})", COPY_AGAIN)

    def check_pages(self, chunk: Chunk) -> int:
        """Check the sizes in page headers, before pyarrow allocates memory for the pages. Return the size of the
        largest page whose values can be repeated: a dictionary, or one of the encoding DELTA_BYTE_ARRAY."""
        longest = 0
        for header in page_headers(chunk):
            if header.unpacked > min(MOST_BYTES, header.packed * MOST_RATIO.get(chunk.codec, MOST_BYTES)):
                chunk.refuse(f"the page at byte {header.body} claims {header.unpacked} bytes from {header.packed}")
            if header.kind == DICTIONARY or header.encoding == DELTA_BYTE_ARRAY:
                longest = max(longest, header.unpacked)
        return longest


def leaf_levels(
    kind: Any, nullable: bool, definition: int = 0, repetition: int = 0, element: int = 0
) -> list[tuple[int, int, int]]:
    """Return the highest definition and repetition levels of each leaf of an Arrow type, and the definition level from
    which an element of its innermost list exists.

    Args:
        kind: Arrow type.
        nullable: whether the type's values may be null.
        definition, repetition, element: these levels of what holds the type.
    """
    import pyarrow
    from pyarrow import types

    definition += nullable
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    inner: list[Any] = []
    if types.is_struct(kind):
        inner = list(kind)
    elif types.is_map(kind):
        inner = [kind.key_field, kind.item_field]
    elif hasattr(kind, "value_field"):
        inner = [kind.value_field]
    if not inner:
        return [(definition, repetition, element)]
    if not types.is_struct(kind):
        definition, repetition = definition + 1, repetition + 1
        element = definition
    return [own for field in inner for own in leaf_levels(field.type, field.nullable, definition, repetition, element)]
