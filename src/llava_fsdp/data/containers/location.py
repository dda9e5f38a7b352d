"""Where the bytes of one image are: in which file, and at which bytes of it."""

from dataclasses import astuple, dataclass
from typing import Any

from llava_fsdp.runtime.text.terminal_text import shown_name

CODECS = "SNAPPY", "ZSTD"
"""Compression methods of Parquet pages from which images can be read."""


@dataclass(frozen=True, slots=True)
class Page:
    """A compressed page of a Parquet file."""

    offset: int
    """First byte in the file."""
    packed: int
    """Number of bytes of the compressed page; `unpacked` likewise of the decompressed one."""
    codec: str
    """The page's compression, one of CODECS."""
    unpacked: int


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """Where the bytes of one image are: they are a whole file, a range of a file, or a range of a decompressed Parquet
    page."""

    file: str
    """Local path or URL."""
    offset: int = 0
    """First byte of the image in the file, or in the decompressed page."""
    size: int | None = None
    """Number of bytes; None: the whole file is the image."""
    page: Page | None = None
    """The compressed page that contains the image."""
    name: str | None = None
    """Name that the file gives to the image, for messages."""

    def __post_init__(self) -> None:
        assert self.size is not None or (self.offset == 0 and self.page is None), self

    def __str__(self) -> str:
        """Return the location as messages name it."""
        if self.size is None:
            return self.file
        where = f"{self.file}, {self.size} bytes at byte {self.offset}"
        where = where if self.page is None else f"{where} of the page at byte {self.page.offset}"
        return where if self.name is None else f"{shown_name(self.name)} in {where}"

    def to_json(self) -> list[Any]:
        """Return all fields but `file`, as a list of JSON values."""
        return [self.name, self.offset, self.size, None if self.page is None else list(astuple(self.page))]


def location_from(file: str, values: Any) -> ImageLocation:
    """Return an image's location in `file` from the list that `ImageLocation.to_json` writes: name, offset, size, and
    the fields of the compressed page or None. Raise ValueError for other values."""
    match values:
        case [None | str() as name, int() as offset, int() as size, page] if offset >= 0 and size >= 0:
            return ImageLocation(file, offset, size, None if page is None else page_from(page), name)
    raise ValueError("no location of an image")


def page_from(values: Any) -> Page:
    """Return a compressed page of a Parquet file from a list of its fields: offset in the file, compressed bytes,
    codec, decompressed bytes. Raise ValueError for other values."""
    match values:
        case [int() as offset, int() as packed, str() as codec, int() as unpacked]:
            if min(offset, packed, unpacked) >= 0 and codec in CODECS:
                return Page(offset, packed, codec, unpacked)
    raise ValueError("no page")
