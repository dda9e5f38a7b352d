"""Read the bytes of an image from its location. The Parquet pages that were decompressed last are kept in memory."""

from collections import OrderedDict

from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError, SourceError

MOST_RATIO = {"SNAPPY": 22, "ZSTD": 1 << 16}
"""{compression method: upper bound of its compression ratio}. Snappy's longest copy makes 64 bytes from 3, and a block
of zstd makes 128 KiB from 4 bytes. A page that claims a higher ratio is damaged, and no memory is allocated for it."""
MOST_BYTES = 1 << 30
"""Greatest number of bytes of an image, and of a decompressed Parquet page."""
CACHE_BYTES = 256 << 20
"""Number of bytes of decompressed Parquet pages that are kept in memory."""


class DamagedPage(Exception):
    """A Parquet page cannot be decompressed. The message is the reason; callers add the file's name and a cure."""


class PageCache:
    """LRU cache of decompressed Parquet pages, bounded in bytes; a larger page is not kept. Not thread-safe."""

    def __init__(self, most_bytes: int = CACHE_BYTES):
        self.most_bytes = most_bytes
        self.size = 0
        self.pages: OrderedDict[tuple[str, Page], bytes] = OrderedDict()

    def get(self, file: str, page: Page) -> bytes | None:
        """Return the decompressed content of a page of a file; None if it is not in the cache."""
        data = self.pages.get((file, page))
        if data is not None:
            self.pages.move_to_end((file, page))
        return data

    def put(self, file: str, page: Page, data: bytes) -> None:
        """Add a page, unless it is larger than the cache, and drop the least recently used pages until all fit."""
        if len(data) > self.most_bytes or (file, page) in self.pages:
            return
        self.size += len(data)
        self.pages[file, page] = data
        while self.size > self.most_bytes:
            self.size -= len(self.pages.popitem(last=False)[1])


def read_image(file: Reader, location: ImageLocation, pages: PageCache) -> bytes:
    """Return the bytes of an image, still encoded (JPEG for example).

    Args:
        file: the opened file `location.file`.
        location: where the image is. With `location.page`, it is a part of this compressed page of a Parquet file;
            otherwise its bytes stand in the file itself.
        pages: the pages that were decompressed last; one that is decompressed here is added.

    Raises:
        ImageError: the image has more than `MOST_BYTES` bytes, or the page that contains it cannot be decompressed.
        SourceError: the file cannot be read, or is shorter than when the dataset was examined.
    """
    assert file.name == location.file, (file.name, location.file)
    size = file.size if location.size is None else location.size
    if size > MOST_BYTES:
        raise ImageError(
            f"{location}: the image has {size} bytes; most are {MOST_BYTES}: make it smaller", Kind.image_bomb
        )
    if location.page is None:
        check_end(file, location, location.offset + size)
        return file.read(location.offset, size)
    page = location.page
    data = pages.get(location.file, page)
    if data is None:
        check_end(file, location, page.offset + page.packed)
        try:
            data = unpack(page, file.read(page.offset, page.packed))
        except DamagedPage as error:
            raise ImageError(
                f"{location}: the image's page cannot be decompressed: {error}; take the file from its source again",
                Kind.image_unreadable,
            ) from error
        pages.put(location.file, page, data)
    if location.offset + size > len(data):
        raise SourceError(f"{location} leaves its page of {len(data)} bytes; run llava-fsdp prepare again")
    return data[location.offset : location.offset + size]


def check_end(file: Reader, location: ImageLocation, end: int) -> None:
    """Raise SourceError if a file ends before byte `end`, up to which an image or its page reaches."""
    if end > file.size:
        raise SourceError(
            f"{location}: the file ends at byte {file.size}, before the end of the image: it was changed since; "
            "restore it, or run llava-fsdp prepare again"
        ).about(file=file.name)


def check_page(page: Page) -> None:
    """Raise DamagedPage if a page claims more than `MOST_BYTES` bytes, or more than its compression method can make of
    it. Called before memory is allocated."""
    if page.unpacked > MOST_BYTES:
        raise DamagedPage(f"it has {page.unpacked} bytes, most are {MOST_BYTES}")
    if page.unpacked > page.packed * MOST_RATIO[page.codec]:
        raise DamagedPage(f"it claims {page.unpacked} bytes, more than {page.codec} makes of {page.packed}")


def unpack(page: Page, packed: bytes) -> bytes:
    """Decompress a page. Raise DamagedPage if it is damaged, or claims too many bytes."""
    import pyarrow

    check_page(page)
    if page.unpacked == 0:
        return b""
    if page.codec == "SNAPPY" and snappy_size(packed) != page.unpacked:  # pyarrow would leave the rest unset
        raise DamagedPage(f"its bytes are not {page.unpacked} bytes compressed with Snappy")
    try:
        data = pyarrow.Codec(page.codec.lower()).decompress(packed, decompressed_size=page.unpacked, asbytes=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedPage(str(error)) from error
    return data


def snappy_size(packed: bytes) -> int:
    """Return the unpacked size that Snappy data begins with: a base-128 number, least significant digit first."""
    size = 0
    for digit, byte in enumerate(packed[:5]):
        size |= (byte & 127) << 7 * digit
        if byte < 128:
            break
    return size
