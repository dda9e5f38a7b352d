"""Read the bytes of one image from its place; compressed Parquet pages are decompressed and kept for a while."""

from collections import OrderedDict

from llava_fsdp.data.containers.place import Page, Place, Reader
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.runtime.errors import ImageError, SourceError

MOST_RATIO = {"SNAPPY": 22, "ZSTD": 1 << 16}
"""Codecs of pages that are read, and upper bounds of how much each can compress: Snappy's longest copy makes 64 bytes
from 3, and a block of zstd makes 128 KiB from 4 bytes. A page that claims more is damaged, and no
memory is allocated for it."""
MOST_BYTES = 1 << 30
"""Largest number of bytes of an image, and of a decompressed page."""
CACHE_BYTES = 256 << 20


class DamagedPage(Exception):
    """A compressed page cannot be decompressed. The message is the reason; callers add the file and the cure."""


class PageCache:
    """The decompressed pages that were used last, bounded in bytes. Each process makes its own; not for threads."""

    def __init__(self, most_bytes: int = CACHE_BYTES):
        """Create an empty cache.

        Args:
            most_bytes: bound on the bytes of all pages that are kept; a larger page is returned and not kept.
        """
        self.most_bytes = most_bytes
        self.held = 0
        self.pages: OrderedDict[tuple[str, Page], bytes] = OrderedDict()

    def get(self, file: str, page: Page) -> bytes | None:
        data = self.pages.get((file, page))
        if data is not None:
            self.pages.move_to_end((file, page))
        return data

    def put(self, file: str, page: Page, data: bytes) -> None:
        if len(data) > self.most_bytes or (file, page) in self.pages:
            return
        self.held += len(data)
        self.pages[file, page] = data
        while self.held > self.most_bytes:
            self.held -= len(self.pages.popitem(last=False)[1])


def read_place(shard: Reader, place: Place, pages: PageCache) -> bytes:
    """Return the bytes of an image.

    Args:
        shard: reader of the file `place.file`.
        pages: where decompressed pages are kept.

    Raises:
        ImageError: the image has more than `MOST_BYTES` bytes, or its page cannot be decompressed.
        SourceError: the file cannot be read, or is shorter than when its index was made.
    """
    assert shard.name == place.file, (shard.name, place.file)
    size = shard.size if place.size is None else place.size
    if size > MOST_BYTES:
        raise ImageError(
            f"{place}: the image has {size} bytes; most are {MOST_BYTES}: make it smaller", Kind.image_bomb
        )
    if place.page is None:
        check_end(shard, place, place.offset + size)
        return shard.read(place.offset, size)
    page = place.page
    data = pages.get(place.file, page)
    if data is None:
        check_end(shard, place, page.offset + page.packed)
        try:
            data = unpack(page, shard.read(page.offset, page.packed))
        except DamagedPage as error:
            raise ImageError(
                f"{place}: the image's page cannot be decompressed: {error}; take the file from its source again",
                Kind.image_unreadable,
            ) from error
        pages.put(place.file, page, data)
    if place.offset + size > len(data):
        raise SourceError(f"{place} leaves its page of {len(data)} bytes; run llava-fsdp prepare again")
    return data[place.offset : place.offset + size]


def check_end(shard: Reader, place: Place, end: int) -> None:
    if end > shard.size:
        raise SourceError(
            f"{place}: the file ends at byte {shard.size}, before the end of the image: it was changed since; "
            "restore it, or run llava-fsdp prepare again"
        ).about(file=shard.name)


def check_page(page: Page) -> None:
    """Check what a page claims about its size, before memory is allocated.

    Raises:
        DamagedPage: the page claims more bytes than `MOST_BYTES`, or than its codec can make of it.
    """
    if page.unpacked > MOST_BYTES:
        raise DamagedPage(f"it has {page.unpacked} bytes, most are {MOST_BYTES}")
    if page.unpacked > page.packed * MOST_RATIO[page.codec]:
        raise DamagedPage(f"it claims {page.unpacked} bytes, more than {page.codec} makes of {page.packed}")


def unpack(page: Page, packed: bytes) -> bytes:
    """Decompress a page.

    Raises:
        DamagedPage: it is damaged, or claims too many bytes.
    """
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
    """Return how many bytes Snappy's data say that they unpack to: a little-endian base-128 number in front."""
    size = 0
    for place, byte in enumerate(packed[:5]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    return size
