"""Where the images of a Parquet file lie, and its other columns, read without the images.

Images are values of BYTE_ARRAY leaf columns: `image.bytes` of a struct of bytes and path, as Hugging Face datasets
writes it; `images.list.element.bytes` of a list of such structs; or a column of binary values. Where a column is not
compressed, an image is a range of bytes of the file; with Snappy and zstd, it is a range of a decompressed page.
"""

import contextlib
import functools
import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llava_fsdp.data.containers.parquet_footer import BYTE_ARRAY, TYPES, Footer
from llava_fsdp.data.containers.parquet_pages import (
    COPY_AGAIN,
    DELTA_BYTE_ARRAY,
    DICTIONARY,
    Chunk,
    page_headers,
)
from llava_fsdp.data.containers.parquet_values import Values, chunk_values
from llava_fsdp.data.containers.place import Page, Place, Reader
from llava_fsdp.data.containers.read_place import MOST_BYTES, MOST_RATIO
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.terminal_text import shown_name

ROWS_AT_ONCE = 256
REPEATED_BYTES = 256 << 20
"""Bound on the bytes that a batch of rows takes because they repeat values of a dictionary."""
BUFFER = 1 << 20


class ReaderFile(io.RawIOBase):
    """A read-only file object over a `Reader`, for libraries."""

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

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.shard.size - self.at)
        data = self.shard.read(self.at, left if size is None or size < 0 else min(size, left)) if left else b""
        self.at += len(data)
        return data


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
    """A Parquet file. Places need no pyarrow, except to decompress pages; the other columns are read with it.

    Every method raises DataError, with the file, the column and the cure, if what it reads is damaged, encrypted, too
    large, or stored in a way that leaves images no place; and SourceError if the file cannot be read.
    """

    def __init__(self, shard: Reader):
        self.shard = shard
        self.footer = Footer(shard)

    @property
    def groups(self) -> int:
        """Number of row groups."""
        return len(self.footer.groups)

    def rows(self, group: int) -> int:
        """Return the number of rows of a row group."""
        return self.footer.rows(group)

    def binary_leaves(self) -> list[str]:
        """Return the paths of the leaf columns that may hold images: bytes that are not said to be text."""
        return [path for path, leaf in self.footer.leaves.items() if leaf.binary]

    def places(self, path: str, group: int) -> GroupPlaces:
        """Find the images of a row group.

        Args:
            path: of a leaf column, such as `image.bytes`; see `binary_leaves`.
            group: number of the row group.
        """
        leaf = self.footer.leaves.get(path)
        if leaf is None:
            self.footer.refuse(f"it has no column {shown_name(path)}", f"it has {shown_name(list(self.footer.leaves))}")
        chunk = self.footer.chunk(path, group)
        if leaf.kind != BYTE_ARRAY:
            chunk.refuse(f"images are BYTE_ARRAY, these are {TYPES[leaf.kind]}", "name a column of binary values")
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
        chunks = {path: self.footer.chunk(path, group) for path in self.footer.leaves}
        kept = [path for path in chunks if path not in leave_out]
        for path in kept:
            if any(out.startswith(f"{path}.") for out in leave_out):  # pyarrow would read both
                chunks[path].refuse("another column's path begins with its own", "give it another name")
        longest = max((self.check_pages(chunks[path]) for path in kept), default=0)
        rows, left = max(1, min(rows, REPEATED_BYTES // max(1, longest))), self.rows(group)
        with self.reading(group):
            batches = self.file.iter_batches(rows, row_groups=[group], columns=kept, use_threads=False)
        while True:
            with self.reading(group):
                batch = next(batches, None)
            if batch is None:
                break
            left -= batch.num_rows
            yield batch
        if left:
            self.footer.refuse(f"the columns of row group {group} have other numbers of rows than it says", COPY_AGAIN)

    @functools.cached_property
    def file(self) -> Any:
        """pyarrow's `ParquetFile`."""
        from pyarrow import PythonFile
        from pyarrow.parquet import ParquetFile

        return ParquetFile(PythonFile(ReaderFile(self.shard), mode="r"), pre_buffer=False, buffer_size=BUFFER)

    @contextlib.contextmanager
    def reading(self, group: int) -> Iterator[None]:
        """Context manager that turns errors of pyarrow into DataError."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(
                f"{self.shard.name}: the columns without images of row group {group} cannot be read "
                f"({shown_name(error)}); {COPY_AGAIN}"
            ).about(file=self.shard.name) from error

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
