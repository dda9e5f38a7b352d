"""Find the bytes of the images in a Parquet file, and read the other columns without reading the images.

Images are the values of BYTE_ARRAY leaf columns: `image.bytes` of a struct of bytes and path, as Hugging Face datasets
writes it; `images.list.element.bytes` of a list of such structs; or a column of binary values. In an uncompressed
column, an image is a range of bytes of the file. In a column compressed with Snappy or zstd, it is a range of a
decompressed page.

`path` is that of a leaf column, such as `image.bytes`; `group` is the index of a row group.
"""

import contextlib
import functools
import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.containers.parquet.parquet_footer import BYTE_ARRAY, TYPES, Footer
from llava_fsdp.data.containers.parquet.parquet_pages import (
    COPY_AGAIN,
    DELTA_BYTE_ARRAY,
    DICTIONARY,
    Chunk,
    page_headers,
)
from llava_fsdp.data.containers.parquet.parquet_values import Values, chunk_values
from llava_fsdp.data.containers.read_image import MOST_BYTES, MOST_RATIO
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.terminal_text import shown_name

ROWS_AT_ONCE = 256
"""Greatest number of rows that are read of the columns without images at a time."""
BATCH_BYTES = 64 << 20
"""Number of bytes that a batch of rows may take, as far as page headers tell it before the rows are read."""
EXPANSION = 200
"""Greatest factor by which the text of a file's rows, and what is held in memory to read a row group, may exceed the
size of the file. Text grows about tenfold when it is unpacked, and rows that repeat one long text some tenfold more."""
LEAST_SIZE = 1 << 19
"""A smaller file may grow as if it had this many bytes."""
ROWS_FREE, ROWS_PER_BYTE = 20_000, 2
"""A file may have ROWS_FREE rows, and more if it has a byte for each ROWS_PER_BYTE of them. Rows that differ take
several bytes each."""
VALUE_BYTES, IMAGE_BYTES = 16, 64
"""Least number of bytes of memory of a value of a column, and of the position of an image."""
BUFFER = 1 << 20
SPELL_OUT = "no dataset does; take it from its source again, or write its rows as JSON Lines if it is right"


class ReaderFile(io.RawIOBase):
    """Read-only file object over a `file_reader.Reader`, for libraries that need a file object."""

    def __init__(self, reader: Reader):
        super().__init__()
        self.reader, self.at = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.reader.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes from the current position; all that are left if `size` is None or negative."""
        left = max(0, self.reader.size - self.at)
        data = self.reader.read(self.at, left if size is None or size < 0 else min(size, left)) if left else b""
        self.at += len(data)
        return data


@dataclass(frozen=True)
class GroupLocations:
    """Locations of the images in one column of one row group."""

    file: str
    first: np.ndarray
    """Index of the first element of each row, and the number of all elements, int64 [rows + 1]."""
    values: Values
    """Position of each element; a null has size -1."""
    pages: list[Page]

    def row(self, row: int) -> list[ImageLocation | None]:
        """Return the locations of the images of a row; None for each null."""
        return [self.location(index) for index in range(self.first[row], self.first[row + 1])]

    def count(self, row: int) -> tuple[int, int]:
        """Return (number of images, number of nulls) of a row, whose column has a list of images."""
        sizes = self.values.size[self.first[row] : self.first[row + 1]]
        images = int(np.count_nonzero(sizes >= 0))  # a null has size -1
        return images, len(sizes) - images

    def location(self, index: int) -> ImageLocation | None:
        """Return the location of image `index` of the row group; None for a null."""
        values = self.values  # page -1: the value is in the file itself, in no compressed page
        offset, size, page = int(values.offset[index]), int(values.size[index]), int(values.page[index])
        if size < 0:
            return None
        return ImageLocation(self.file, offset, size, None if page < 0 else self.pages[page])


class ParquetContainer:
    """An open Parquet file that may contain images. pyarrow reads the columns without images. Images are located
    without it; it only decompresses their pages.

    Every method raises DataError if what it reads is damaged, encrypted or too large, or if images are stored in a way
    that is not supported; and SourceError if the file cannot be read.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self.footer = Footer(reader)

    @property
    def groups(self) -> int:
        return len(self.footer.groups)

    def rows(self, group: int) -> int:
        return self.footer.rows(group)

    @property
    def most_bytes(self) -> int:
        """Greatest number of bytes to which the content may grow."""
        return EXPANSION * max(LEAST_SIZE, self.reader.size)

    def check_rows(self) -> None:
        """Raise DataError if the file claims more rows than its size allows, since rows that differ take several bytes
        each. A small number of rows (ROWS_FREE) is always allowed."""
        rows, most = sum(self.rows(group) for group in range(self.groups)), ROWS_PER_BYTE * self.reader.size
        if rows > max(ROWS_FREE, most):
            self.footer.refuse(
                f"it claims {rows:,} rows in {self.reader.size:,} bytes, which cannot be different records", SPELL_OUT
            )

    def check_values(self, path: str, group: int, value_bytes: int) -> Chunk:
        """Return the chunk of a leaf column in a row group. Raise DataError if it claims more values than a file of
        this size may have, at `value_bytes` bytes of memory for each."""
        chunk = self.footer.chunk(path, group)
        if chunk.values * value_bytes > self.most_bytes:
            chunk.refuse(f"it claims {chunk.values:,} values in a file of {self.reader.size:,} bytes", SPELL_OUT)
        return chunk

    def binary_leaves(self) -> list[str]:
        """Return the paths of the leaf columns that may contain images: bytes that the schema does not declare as
        text."""
        return [path for path, leaf in self.footer.leaves.items() if leaf.is_binary]

    def locations(self, path: str, group: int) -> GroupLocations:
        """Locate the images in a leaf column (by its path) of a row group. Raise DataError if it cannot have images."""
        leaf = self.footer.leaves.get(path)
        if leaf is None:
            self.footer.refuse(f"it has no column {shown_name(path)}", f"it has {shown_name(list(self.footer.leaves))}")
        chunk = self.check_values(path, group, IMAGE_BYTES)
        if leaf.kind != BYTE_ARRAY:
            chunk.refuse(f"images are BYTE_ARRAY, these are {TYPES[leaf.kind]}", "name a column of binary values")
        if leaf.max_repetition > 1:
            chunk.refuse("lists of lists of images are not read", "store one list of images a row")
        values, pages, definition, repetition = chunk_values(chunk)
        starts = np.flatnonzero(repetition == 0)  # the first value of each row
        rows = self.rows(group)
        if len(starts) != rows or (len(repetition) and repetition[0] != 0):
            chunk.refuse(f"it has {len(starts)} rows, and the row group has {rows}")
        exists = definition >= leaf.element  # a lower level is a null or an empty list, which has no element
        # for each row and behind the last one: number of the first existing value
        first = np.append(0, np.cumsum(exists))[np.append(starts, len(exists))]
        return GroupLocations(self.reader.name, first, values[exists], pages)

    def batches(self, group: int, leave_out: Collection[str]) -> Iterator[Any]:
        """Yield the rows of a row group as pyarrow RecordBatches, without the leaf columns `leave_out`; a struct keeps
        its other fields. A batch has at most ROWS_AT_ONCE rows, and fewer if rows may take many bytes."""
        chunks = {path: self.footer.chunk(path, group) for path in self.footer.leaves}
        kept = [path for path in chunks if path not in leave_out]
        for path in kept:
            # asked for `image`, pyarrow would also read `image.bytes`, which is to be left out
            if any(out.startswith(f"{path}.") for out in leave_out):
                chunks[path].refuse("another column's path begins with its own", "give it another name")
        repeatable_bytes = unpacked_bytes = 0  # those of the largest page that rows can repeat, and of all pages
        for path in kept:
            repeatable, unpacked = self.check_pages(self.check_values(path, group, VALUE_BYTES))
            repeatable_bytes = max(repeatable_bytes, repeatable)
            unpacked_bytes += unpacked
        if unpacked_bytes > self.most_bytes:
            self.footer.refuse(
                f"row group {group} claims {unpacked_bytes:,} bytes in a file of {self.reader.size:,} bytes", SPELL_OUT
            )
        rows_left = self.rows(group)
        # a row has the mean size, or if rows repeat a value at most that of the page that has it
        row_bytes = max(repeatable_bytes, unpacked_bytes // max(1, rows_left))
        batch_rows = max(1, min(ROWS_AT_ONCE, BATCH_BYTES // max(1, row_bytes)))
        with self.reading(group):
            batches = self.arrow.iter_batches(batch_rows, row_groups=[group], columns=kept, use_threads=False)
        while True:
            with self.reading(group):
                batch = next(batches, None)
            if batch is None:
                break
            rows_left -= batch.num_rows
            yield batch
        if rows_left:
            self.footer.refuse(f"the columns of row group {group} have other numbers of rows than it says", COPY_AGAIN)

    @functools.cached_property
    def arrow(self) -> Any:
        """The file as pyarrow's `ParquetFile`."""
        from pyarrow import PythonFile
        from pyarrow.parquet import ParquetFile

        return ParquetFile(PythonFile(ReaderFile(self.reader), mode="r"), pre_buffer=False, buffer_size=BUFFER)

    @contextlib.contextmanager
    def reading(self, group: int) -> Iterator[None]:
        """Context manager that converts errors of pyarrow into DataErrors that name the row group."""
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(
                f"{self.reader.name}: the columns without images of row group {group} cannot be read "
                f"({shown_name(error)}); {COPY_AGAIN}"
            ).about(file=self.reader.name) from error

    def check_pages(self, chunk: Chunk) -> tuple[int, int]:
        """Check the sizes in the page headers of a chunk, before pyarrow allocates memory for the pages. Return the
        size in bytes of the largest page whose values rows can repeat (a dictionary, or a page with the encoding
        DELTA_BYTE_ARRAY), and that of all pages."""
        repeatable_bytes = unpacked_bytes = 0
        for header in page_headers(chunk):
            if header.unpacked > min(MOST_BYTES, header.packed * MOST_RATIO.get(chunk.codec, MOST_BYTES)):
                chunk.refuse(f"the page at byte {header.body} claims {header.unpacked} bytes from {header.packed}")
            if header.kind == DICTIONARY or header.encoding == DELTA_BYTE_ARRAY:
                repeatable_bytes = max(repeatable_bytes, header.unpacked)
            unpacked_bytes += header.unpacked
        return repeatable_bytes, unpacked_bytes
