"""Read the bytes of images from the files that hold many: the files that were used last stay open."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llava_fsdp.data.containers.place import LocalFile, Place, Reader
from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.read_ahead import ReadAhead
from llava_fsdp.data.containers.read_place import PageCache, read_place
from llava_fsdp.data.containers.remote import Range, RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile

MOST_OPEN = 64
"""Number of local files that a process keeps open."""
BLOCK = 8 << 20
"""Number of bytes that are requested at once of a remote file that is read from its beginning to its end."""


@dataclass(frozen=True)
class CacheFolder:
    """Where ranges of remote files are kept."""

    folder: Path
    gib: float
    """Bound of the folder's size in GiB; 0: nothing is kept."""


@dataclass(frozen=True, eq=False)
class OpenShards:
    """Reads images by their places, in local and remote files. When it is pickled, nothing that is open goes with it.
    Not for several threads."""

    remote: Mapping[str, RemoteFile] = field(default_factory=dict)
    """The remote files by their URLs."""
    cache: CacheFolder | None = None

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return OpenShards, (self.remote, self.cache)

    def read(self, place: Place) -> bytes:
        """Return the bytes of an image.

        Raises:
            ImageError: the image is too large, or its page cannot be decompressed.
            SourceError: the file cannot be read, or is shorter than when its index was made.
        """
        if place.file in self.remote:
            return read_place(self._ahead.open(self.remote[place.file]), place, self._pages)
        return read_place(self._local(place.file), place, self._pages)

    def open(self, file: str) -> Reader:
        """Return a reader for reading a file from its beginning to its end."""
        return Blocks(self._ahead.storage, self.remote[file]) if file in self.remote else self._local(file)

    def fetch_ahead(self, places: Iterable[Place]) -> None:
        """Begin to fetch the images that lie in remote files, and return at once. What was fetched ahead before and not
        read is dropped."""
        if self.remote:
            ranges = (self._range(place) for place in places if place.file in self.remote)
            self._ahead.forget()
            # a range that is empty or leaves the file is refused when it is read
            self._ahead.fetch_ahead(own for own in ranges if own[2] > 0 and own[1] + own[2] <= own[0].size)

    def _range(self, place: Place) -> Range:
        assert place.size is not None, "an image in a file among others"
        if place.page is not None:
            return self.remote[place.file], place.page.offset, place.page.packed
        return self.remote[place.file], place.offset, place.size

    def _local(self, file: str) -> LocalFile:
        if file not in self._open:
            self._open[file] = LocalFile(file)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)  # closed when nobody has it any more
        self._open.move_to_end(file)
        return self._open[file]

    @cached_property
    def _pages(self) -> PageCache:
        return PageCache()

    @cached_property
    def _open(self) -> OrderedDict[str, LocalFile]:
        return OrderedDict()

    @cached_property
    def _ahead(self) -> ReadAhead:
        if self.cache is None or self.cache.gib == 0:
            return ReadAhead(RemoteStorage())
        return ReadAhead(RemoteStorage(), RangeCache(self.cache.folder, self.cache.gib))


class Blocks:
    """The bytes of a remote file, requested in large blocks (a `place.Reader`)."""

    def __init__(self, storage: RemoteStorage, file: RemoteFile):
        self.storage = storage
        self.file = file
        self.name, self.size = file.name, file.size
        self._begin, self._block = 0, b""

    def read(self, offset: int, size: int, /) -> bytes:
        """See `Reader.read`."""
        if offset < self._begin or offset + size > self._begin + len(self._block):
            # the end of a file is read before the rest: where a block would leave the file, it lies at the end
            self._begin = max(0, min(offset, self.size - BLOCK)) if size < BLOCK else offset
            length = min(max(size, BLOCK), self.size - self._begin)
            self._block = self.storage.read_range(self.file, self._begin, length)
        at = offset - self._begin
        return self._block[at : at + size]
