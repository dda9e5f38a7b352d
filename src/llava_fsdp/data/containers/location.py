"""Where the bytes of one image are: in which file, and at which bytes of it."""

from dataclasses import astuple, dataclass
from typing import Any

from llava_fsdp.runtime.text.terminal_text import shown_name

CODECS = "SNAPPY", "ZSTD"
"""Names of the compression methods of Parquet pages from which images can be read."""


@dataclass(frozen=True, slots=True)
class Page:
    """A compressed page of a Parquet file."""

    offset: int
    """First byte of the compressed page in the file."""
    packed: int
    """Number of bytes of the compressed page."""
    codec: str
    """Compression method: one of CODECS."""
    unpacked: int
    """Number of bytes of the decompressed page."""


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """Where the bytes of one image are: they are a whole file, a range of a file, or a range of a decompressed Parquet
    page."""

    file: str
    """Local path or URL of the file."""
    offset: int = 0
    """First byte of the image in the file, or in the decompressed page."""
    size: int | None = None
    """Number of bytes of the image; None: the whole file is the image."""
    page: Page | None = None
    """The compressed page that contains the image; None: the image is a range of the file itself."""
    name: str | None = None
    """Name that the file gives to the image, for messages."""

    def __post_init__(self) -> None:
        assert self.size is not None or (self.offset == 0 and self.page is None), self

    def __str__(self) -> str:
        if self.size is None:
            return self.file
        where = f"{self.file}, {self.size} bytes at byte {self.offset}"
        where = where if self.page is None else f"{where} of the page at byte {self.page.offset}"
        return where if self.name is None else f"{shown_name(self.name)} in {where}"

    def to_json(self) -> list[Any]:
        """Return all fields of this location of an image but `file`, as a list of JSON values; `location_from` reads
        it."""
        return [self.name, self.offset, self.size, None if self.page is None else list(astuple(self.page))]


def location_from(file: str, values: Any) -> ImageLocation:
    """Make an ImageLocation again from the list of values that `ImageLocation.to_json` returned.

    Args:
        file: path or URL of the file that contains the image.
        values: the list.

    Raises:
        ValueError: `values` is no such list.
    """
    match values:
        case [None | str() as name, int() as offset, int() as size, page] if offset >= 0 and size >= 0:
            return ImageLocation(file, offset, size, None if page is None else page_from(page), name)
    raise ValueError("no location of an image")


def page_from(values: Any) -> Page:
    match values:
        case [int() as offset, int() as packed, str() as codec, int() as unpacked]:
            if min(offset, packed, unpacked) >= 0 and codec in CODECS:
                return Page(offset, packed, codec, unpacked)
    raise ValueError("no page")
