"""Download byte ranges of remote files in the background before they are read, through a cache on disk."""

import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from llava_fsdp.data.containers.range_cache import RangeCache
from llava_fsdp.data.containers.remote import Range, RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile

MOST_AHEAD = 512 << 20
"""Greatest number of bytes that are downloaded in advance; further ranges are downloaded when they are read."""


class ReadAhead:
    """Reads byte ranges of remote files. A range comes from those downloaded in advance, else from the cache, else from
    the storage. Not thread-safe; usable after a fork, when the child downloads anew."""

    def __init__(self, storage: RemoteStorage, cache: RangeCache | None = None, most_ahead: int = MOST_AHEAD):
        """Begin without downloads.

        Args:
            storage: reads the ranges.
            cache: keeps ranges on disk; None: they are not kept.
            most_ahead: maximum number of bytes that are downloaded and not read yet.
        """
        self.storage = storage
        self.cache = cache
        self.most_ahead = most_ahead
        self._process = os.getpid()
        self._ahead: dict[Range, Future[bytes]] = {}
        self._uses: Counter[Range] = Counter()
        """How often each range that is downloaded in advance will be read."""

    def fetch_ahead(self, ranges: Iterable[Range]) -> None:
        """Begin to download ranges, and return at once. Ranges beyond `most_ahead` bytes are not downloaded in advance.
        A range that is given twice is downloaded once, and kept until it was read twice."""
        self._drop_inherited_downloads()  # a forked process drops its parent's downloads, whose threads it lacks
        total = sum(size for _, _, size in self._ahead)
        for file_range in ranges:
            if file_range not in self._ahead:
                total += file_range[2]
                if total > self.most_ahead:
                    break
                self._ahead[file_range] = self.storage.submit(self._fetch, *file_range)
            self._uses[file_range] += 1

    def read(self, file: RemoteFile, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from byte `offset` on. Raise RemoteChanged if the file has other content now."""
        self._drop_inherited_downloads()  # a forked process drops its parent's downloads, whose threads it lacks
        wanted = (file, offset, size)
        future = self._ahead.get(wanted)
        if future is None:
            return self._fetch(file, offset, size)
        self._uses[wanted] -= 1
        if self._uses[wanted] <= 0:
            del self._ahead[wanted], self._uses[wanted]
        return future.result()

    def forget(self) -> None:
        """Drop the ranges that were downloaded in advance and not read."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._uses.clear()

    def _fetch(self, file: RemoteFile, offset: int, size: int) -> bytes:
        """Return a range from the cache, or else from the storage; then put it into the cache."""
        if self.cache is None:
            return self.storage.read_range(file, offset, size)
        data = self.cache.get(file.content, offset, size)
        if data is None:
            data = self.storage.read_range(file, offset, size)
            self.cache.put(file.content, offset, data)
        return data

    def _drop_inherited_downloads(self) -> None:
        """After a fork, drop the downloads of the parent: their threads do not exist in this process."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._ahead.clear()
            self._uses.clear()


@dataclass(frozen=True)
class RemoteReader:
    """Reads one remote file through a ReadAhead. Implements `file_reader.Reader`."""

    source: ReadAhead
    file: RemoteFile

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.size

    def read(self, offset: int, size: int, /) -> bytes:
        return self.source.read(self.file, offset, size)
