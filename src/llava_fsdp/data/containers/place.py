"""Where the bytes of one image lie, and how the bytes of a file are read."""

import os
import stat
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from llava_fsdp.runtime.errors import SourceError
from llava_fsdp.runtime.os_errors import why
from llava_fsdp.runtime.terminal_text import shown_name

CODECS = "SNAPPY", "ZSTD"
"""Names of the ways in which pages may be compressed."""


@dataclass(frozen=True, slots=True)
class Page:
    """A compressed page of a Parquet file."""

    offset: int
    """Where its compressed bytes begin in the file."""
    packed: int
    """Number of its bytes in the file."""
    codec: str
    """How it is compressed: one of CODECS."""
    unpacked: int
    """Number of its bytes once decompressed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of one image lie: a whole file, a range of a file, or a range of a compressed page."""

    file: str
    """Local path or URL of the file."""
    offset: int = 0
    """First byte: of the file, or of the decompressed page."""
    size: int | None = None
    """Number of bytes; None: the whole file."""
    page: Page | None = None
    """The compressed page that holds the image; None: the bytes lie in the file as they are."""
    name: str | None = None
    """Name of the image in the file, for messages."""

    def __post_init__(self) -> None:
        assert self.size is not None or (self.offset == 0 and self.page is None), self

    def __str__(self) -> str:
        if self.size is None:
            return self.file
        where = f"{self.file}, {self.size} bytes at byte {self.offset}"
        where = where if self.page is None else f"{where} of the page at byte {self.page.offset}"
        return where if self.name is None else f"{shown_name(self.name)} in {where}"

    def to_json(self) -> list[Any]:
        """Return all fields but `file` as JSON values, which `place_from` reads."""
        return [self.name, self.offset, self.size, None if self.page is None else list(astuple(self.page))]


def place_from(file: str, values: Any) -> Place:
    """Return the place in a file that `Place.to_json` wrote.

    Raises:
        ValueError: the values are not those of a place.
    """
    match values:
        case [None | str() as name, int() as offset, int() as size, page] if offset >= 0 and size >= 0:
            return Place(file, offset, size, None if page is None else page_from(page), name)
    raise ValueError("no place")


def page_from(values: Any) -> Page:
    match values:
        case [int() as offset, int() as packed, str() as codec, int() as unpacked]:
            if min(offset, packed, unpacked) >= 0 and codec in CODECS:
                return Page(offset, packed, codec, unpacked)
    raise ValueError("no page")


class Reader(Protocol):
    """The bytes of one file, local or remote."""

    @property
    def name(self) -> str:
        """Local path or URL, for messages and for `Place.file`."""
        ...

    @property
    def size(self) -> int:
        """Number of bytes of the file."""
        ...

    def read(self, offset: int, size: int, /) -> bytes:
        """Return exactly `size` bytes from `offset`. The caller asks for no byte past the end of the file.

        Raises:
            SourceError: the bytes cannot be read, or there are fewer of them.
        """
        ...


class LocalFile:
    """A local file, open until `close`. Several threads and forked processes may read it at once."""

    def __init__(self, path: str | Path):
        """Open a file.

        Raises:
            SourceError: the file cannot be opened, or is not a regular file.
        """
        self.name = str(path)
        try:
            # without O_NONBLOCK, opening a pipe would wait for a writer; the file is closed when nobody has it any more
            self._file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        except OSError as error:
            raise SourceError(f"cannot open a data file: {why(error, Path(path))}").about(file=self.name) from error
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise SourceError(f"{self.name} is not a regular file; give the path of a file").about(file=self.name)
        self.size = found.st_size

    def read(self, offset: int, size: int, /) -> bytes:
        """See `Reader.read`."""
        assert offset >= 0 and size >= 0, (offset, size)
        try:
            data, descriptor = b"", self._file.fileno()
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data = data + more if data else more
        except OSError as error:
            raise SourceError(f"cannot read a data file: {why(error, Path(self.name))}").about(
                file=self.name
            ) from error
        if len(data) < size:
            raise SourceError(
                f"{self.name}: {size} bytes expected at byte {offset}, only {len(data)} are there: it was changed; "
                "restore it, or run llava-fsdp prepare again"
            ).about(file=self.name)
        return data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
