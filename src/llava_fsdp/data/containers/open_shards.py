"""Read the bytes of images from the files that hold many: the files that were used last stay open."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from llava_fsdp.config import is_remote
from llava_fsdp.data.containers.place import LocalFile, Place, Reader
from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.read_ahead import ReadAhead
from llava_fsdp.data.containers.read_place import PageCache, read_place
from llava_fsdp.data.containers.remote import Range, RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.runtime.errors import ImageError, RemoteGone

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
        """Return the bytes of an image. Of an image in a remote folder, those beyond its end are left out.

        Raises:
            ImageError: the image is too large, its page cannot be decompressed, or it is not in the remote folder.
            SourceError: the file cannot be read, or is shorter than when its index was made.
        """
        if place.file in self.remote:
            return read_place(self._ahead.open(self.remote[place.file]), place, self._pages)
        if not is_remote(place.file):
            return read_place(self._local(place.file), place, self._pages)
        try:
            file = self._listed.get(place.file) or self._ahead.storage.stat(place.file)
            return read_place(self._ahead.open(file), within(place, file), self._pages)
        except RemoteGone:
            raise ImageError(f"image {place.file} does not exist; is data.images right?", Kind.image_missing) from None

    def open(self, file: str) -> Reader:
        """Return a reader for reading a file from its beginning to its end."""
        return Blocks(self._ahead.storage, self.remote[file]) if file in self.remote else self._local(file)

    def fetch_ahead(self, places: Iterable[Place]) -> None:
        """Begin to fetch the images that lie in remote files, and return once the sizes of those in remote folders are
        known. What was fetched ahead before and not read is dropped.

        Raises:
            SourceError: a storage does not answer, or refuses.
        """
        wanted = [place for place in places if is_remote(place.file)]
        if not wanted:
            return
        self._ahead.forget()
        self._listed.clear()
        self._listed.update(self._ahead.storage.stat_files(own.file for own in wanted if own.file not in self.remote))
        ranges = (self._range(place, file) for place in wanted if (file := self._file(place.file)) is not None)
        # a range that is empty or leaves the file is refused when it is read
        self._ahead.fetch_ahead(own for own in ranges if own[2] > 0 and own[1] + own[2] <= own[0].size)

    def _file(self, url: str) -> RemoteFile | None:
        return self.remote.get(url) or self._listed[url]

    def _range(self, place: Place, file: RemoteFile) -> Range:
        if place.page is not None:
            return file, place.page.offset, place.page.packed
        size = (place if file.name in self.remote else within(place, file)).size
        assert size is not None, "an image in a file among others"
        return file, place.offset, size

    def _local(self, file: str) -> LocalFile:
        if file not in self._open:
            self._open[file] = LocalFile(file)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)  # closed when nobody has it any more
        self._open.move_to_end(file)
        return self._open[file]

    @cached_property
    def _listed(self) -> dict[str, RemoteFile | None]:
        """The images in remote folders that are fetched ahead, by their URLs; None: there is no such image."""
        return {}

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


@dataclass(frozen=True)
class RemoteFolder:
    """A remote folder of images, each a file of its own; takes the place of the path of a local one."""

    url: str
    """URL without a final slash, see `RemoteStorage.pin_folder`."""
    shards: OpenShards = field(compare=False, repr=False)
    """Reads the images."""

    def place(self, name: str) -> Place:
        """Return where an image lies; `name` is a relative path that `check_name` accepts."""
        return Place(f"{self.url}/{PurePosixPath(name)}")


def open_folder(name: str, shards: OpenShards) -> Path | RemoteFolder:
    """Return a folder of images; `name` is a path or a URL, see `find_images`."""
    return RemoteFolder(name, shards) if is_remote(name) else Path(name)


def within(place: Place, file: RemoteFile) -> Place:
    """Return the part of a place that is not beyond the end of the file."""
    return replace(place, size=file.size if place.size is None else min(place.size, file.size))


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
