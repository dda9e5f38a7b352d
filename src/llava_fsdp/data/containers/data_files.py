"""Open the files of a dataset, local and remote, and read the images that Parquet files and tars contain."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from llava_fsdp.config import is_remote
from llava_fsdp.data.containers.file_reader import LocalFile, Reader
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.read_ahead import ReadAhead, RemoteReader
from llava_fsdp.data.containers.read_image import PageCache, read_image
from llava_fsdp.data.containers.remote import Range, RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile
from llava_fsdp.data.problems import Kind
from llava_fsdp.runtime.errors import ImageError, RemoteGone

MOST_OPEN = 128
"""Number of local files that a DataFiles keeps open: those that were used last."""
BLOCK = 8 << 20
"""Number of bytes in a request for a remote file that is read from beginning to end."""


@dataclass(frozen=True)
class CacheFolder:
    """Folder on a local disk that caches byte ranges of remote files."""

    folder: Path
    gib: float
    """Largest size of the folder in GiB; 0 disables the cache."""


@dataclass(frozen=True, eq=False)
class DataFiles:
    """Reads the files of a dataset, local and remote, and the images in them. It keeps the local files open that were
    used last; a pickled copy has no open files or connections. Not thread-safe."""

    remote: Mapping[str, RemoteFile] = field(default_factory=dict)
    """The remote files by their URLs."""
    cache: CacheFolder | None = None

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return DataFiles, (self.remote, self.cache)

    def read(self, location: ImageLocation) -> bytes:
        """Return the bytes of an image file, still encoded (JPEG for example). In a file of a remote folder, the
        location may go past the end of the file: then the bytes up to the end are returned.

        Raises:
            ImageError: the image is too large, its Parquet page cannot be decompressed, or it is not in the remote
                folder.
            SourceError: the file cannot be read, or is shorter than when the dataset was examined.
        """
        if location.file in self.remote:  # a remote file of the dataset, with many images
            return read_image(RemoteReader(self._ahead, self.remote[location.file]), location, self._pages)
        if not is_remote(location.file):
            return read_image(self._local(location.file), location, self._pages)
        try:  # a file of a remote folder, whose size `fetch_ahead` may have found out
            file = self._files_in_remote_folders.get(location.file) or self._ahead.storage.stat(location.file)
            return read_image(RemoteReader(self._ahead, file), without_excess(location, file), self._pages)
        except RemoteGone:
            raise ImageError(
                f"image {location.file} does not exist; is data.images right?", Kind.image_missing
            ) from None

    def open(self, file: str) -> Reader:
        """Open a file, to read it from beginning to end; a remote one must be in `self.remote`."""
        return BlockReader(self._ahead.storage, self.remote[file]) if file in self.remote else self._local(file)

    def fetch_ahead(self, locations: Iterable[ImageLocation]) -> None:
        """Begin to download those images that are in remote files or folders. Return once the sizes of the images in
        remote folders are known. Images that earlier calls have begun to download, and that were not read, are dropped.
        Raise SourceError if a remote storage does not answer, or refuses access."""
        wanted = [location for location in locations if is_remote(location.file)]
        if not wanted:
            return
        self._ahead.forget()
        self._files_in_remote_folders.clear()
        in_folders = (location.file for location in wanted if location.file not in self.remote)
        self._files_in_remote_folders.update(self._ahead.storage.stat_files(in_folders))
        ranges = (self._range(location, file) for location in wanted if (file := self._file(location.file)) is not None)
        # an empty range, or one past the end of the file, is refused when it is read
        self._ahead.fetch_ahead(
            (file, offset, size) for file, offset, size in ranges if size > 0 and offset + size <= file.size
        )

    def _file(self, url: str) -> RemoteFile | None:
        """Return a remote file of the dataset, or one that `fetch_ahead` has asked for; None if that does not exist."""
        return self.remote.get(url) or self._files_in_remote_folders[url]

    def _range(self, location: ImageLocation, file: RemoteFile) -> Range:
        """Return the range of a remote file that must be read to get the image: its whole page if it is compressed. The
        location of an image in a remote folder may go past the end of its file; the range does not."""
        if location.page is not None:
            return file, location.page.offset, location.page.packed
        size = (location if file.name in self.remote else without_excess(location, file)).size
        assert size is not None, "an image in a Parquet file or tar is a range of it"
        return file, location.offset, size

    def _local(self, file: str) -> LocalFile:
        """Return a local file, opened, and kept open."""
        if file not in self._open:
            self._open[file] = LocalFile(file)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)  # closed once nobody refers to it
        self._open.move_to_end(file)
        return self._open[file]

    @cached_property
    def _files_in_remote_folders(self) -> dict[str, RemoteFile | None]:
        """{URL of an image in a remote folder: its file, or None if it does not exist}; `fetch_ahead` fills it."""
        return {}

    @cached_property
    def _pages(self) -> PageCache:
        return PageCache()

    @cached_property
    def _open(self) -> OrderedDict[str, LocalFile]:
        return OrderedDict()

    @cached_property
    def _ahead(self) -> ReadAhead:
        """What reads the ranges of remote files: in advance, and through the cache on disk if there is one."""
        if self.cache is None or self.cache.gib == 0:
            return ReadAhead(RemoteStorage())
        return ReadAhead(RemoteStorage(), RangeCache(self.cache.folder, self.cache.gib))


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of images in a remote storage, given instead of the `Path` of a local one."""

    url: str
    """URL without a final slash; see `RemoteStorage.pin_folder`."""
    data_files: DataFiles = field(compare=False, repr=False)

    def location(self, name: str) -> ImageLocation:
        """Return the location of an image by its path below the folder, without `..`."""
        return ImageLocation(f"{self.url}/{PurePosixPath(name)}")


def open_folder(name: str, data_files: DataFiles) -> Path | RemoteFolder:
    """Return a folder of images. A URL of the Hugging Face hub contains the commit."""
    return RemoteFolder(name, data_files) if is_remote(name) else Path(name)


def without_excess(location: ImageLocation, file: RemoteFile) -> ImageLocation:
    """Return a location without the part that is past the end of the file."""
    return replace(location, size=file.size if location.size is None else min(location.size, file.size))


class BlockReader:
    """Reads a remote file from beginning to end, in requests of BLOCK bytes. Implements `file_reader.Reader`."""

    def __init__(self, storage: RemoteStorage, file: RemoteFile):
        """Prepare to read a remote file; nothing is requested yet."""
        self.storage = storage
        self.file = file
        self.name, self.size = file.name, file.size
        self._begin, self._block = 0, b""  # offset and content of the block that was requested last

    def read(self, offset: int, size: int, /) -> bytes:
        """Return exactly `size` bytes from `offset`, out of the block that was requested last if it contains them."""
        if offset < self._begin or offset + size > self._begin + len(self._block):
            # a block that would go past the end of the file is moved back to end there, because the end of a Parquet
            # file is read in several small parts
            self._begin = max(0, min(offset, self.size - BLOCK)) if size < BLOCK else offset
            length = min(max(size, BLOCK), self.size - self._begin)
            self._block = self.storage.read_range(self.file, self._begin, length)
        at = offset - self._begin
        return self._block[at : at + size]
