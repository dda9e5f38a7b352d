"""Cache byte ranges of remote files in a folder on a local disk. Several processes and runs may share the folder.

An entry is a file with the bytes of a range and their digest. It is written under a temporary name and renamed. The
digest is checked at each read, so that after a crash or on a damaged disk, bytes are requested again and never wrong.
fsync is not needed: the digest also reveals an entry that a power failure has truncated.

`content` identifies the version of a remote file (`RemoteFile.content`), `offset` is the first byte of a range.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128_digest

from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.text.log import log

DIGEST = 16
"""Number of bytes of the digest at the end of an entry."""
BLOCK = 4096
"""Number of bytes of a disk block, in which the size of an entry is counted."""
REMAINING = 7 / 8
"""Old entries are deleted until this fraction of the folder's greatest size is left."""
REPORTED, WAITED_FOR = 1024, 256
"""A process adds the bytes that it has written to the common total whenever they reach 1/1024 of the folder's greatest
size, unless another process holds the lock (it may be deleting entries). From 1/256 on, it waits for the lock. So each
process may exceed the greatest size by 1/256."""
USED_AGAIN = 60.0
"""An entry's modification time (the time of its last use) is renewed at a read if it is older than this many
seconds."""
LEFT_BEHIND = 3600.0
"""Age in seconds from which an unfinished entry is taken for one of a killed process, and deleted."""
TMP = ".tmp"


class RangeCache:
    """LRU cache of byte ranges, in a folder of bounded size. The key of an entry is (content, offset, size)."""

    def __init__(self, folder: Path, gib: float):
        """Create the folder of the cache if it does not exist. `gib`: maximum size of the folder in GiB; if runs with
        different sizes share it, the smallest holds. Raise ConfigError if the folder cannot be written."""
        self.folder = folder
        self.bound = int(gib * 2**30)
        self.hits = self.misses = self.damaged = self.not_written = 0
        """Counts of this process: reads that found an entry (hits) or did not (misses), damaged entries, and entries
        that could not be written."""
        self._unreported = 0
        """Number of bytes written by this process and not yet added to the common total."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(folder / "total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise ConfigError(
                f"data.cache={folder} cannot be written: {why(error, folder)}; give a folder on a local disk"
            ) from error

    def path(self, content: str, offset: int, size: int) -> Path:
        """Return the file of an entry, which may not exist."""
        name = hashlib.sha256(f"{offset} {size} {content}".encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / name[:2] / name

    def get(self, content: str, offset: int, size: int) -> bytes | None:
        """Return `size` bytes from `offset` of the file version that `content` identifies; None if not cached."""
        path = self.path(content, offset, size)
        try:
            data = self._read(path, size)
        except OSError:
            data = None
        if data is None:
            self.misses += 1
            return None
        self.hits += 1
        return data

    def put(self, content: str, offset: int, data: bytes) -> None:
        """Add the range `data`, from `offset` on, of the file version that `content` identifies. If the disk is full or
        fails, nothing is added, and a warning is logged once."""
        path = self.path(content, offset, len(data))
        staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TMP}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # unbuffered: a buffer that cannot be written would be written again when the file is closed
            with open(staged, "xb", buffering=0) as file:
                for part in (data, digest(path.name, data)):
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
            os.replace(staged, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            if not self.not_written:
                log().warning(
                    "data.cache: an entry cannot be written (%s); training continues without it",
                    why(error, self.folder),
                )
            self.not_written += 1
            return
        self._unreported += on_disk(len(data) + DIGEST)
        if self._unreported > self.bound // REPORTED:
            self._report()  # adds to the folder's total, and deletes old entries if that is above the bound

    def _read(self, path: Path, size: int) -> bytes | None:
        """Return the range in an entry's file, or delete a damaged file and return None. OSError: it cannot be read."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == size + DIGEST:
                stored = file.read(size + DIGEST)
                data, found = stored[:size], stored[size:]
                if found == digest(path.name, data):
                    # the modification time is the time of the last use
                    if time.time() - status.st_mtime > USED_AGAIN:
                        os.utime(descriptor)
                    return data
        self.damaged += 1
        path.unlink(missing_ok=True)
        return None

    def _report(self) -> None:
        """Add the bytes that this process has written to the common total, and delete old entries if that is too large.
        If another process holds the lock, do nothing, unless this process has written much since its last report: then
        wait for the lock."""
        try:
            with (self.folder / "total").open("r+b", buffering=0) as file:
                must_wait = self._unreported > self.bound // WAITED_FOR
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if must_wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    return
                text = file.read(32)
                # without a valid total, after a crash for example, the folder is counted
                total = int(text) + self._unreported if text.isdigit() else self.bound + 1
                if total > self.bound:
                    total = self._evict()
                file.seek(0)
                file.truncate()
                file.write(str(total).encode())
                self._unreported = 0
        except OSError as error:
            log().warning("data.cache: old entries cannot be deleted: %s", why(error, self.folder))

    def _evict(self) -> int:
        """Delete the least recently used entries, and unfinished ones of killed processes; return the rest's size."""
        # First add up the sizes by the second of the last use, because a list of many millions of entries would take
        # too much memory. Then find the second `last`: all entries of earlier seconds are deleted and, of this second,
        # the oldest until enough space is free
        used: Counter[int] = Counter()
        for _, status in self._entries():
            used[int(status.st_mtime)] += on_disk(status.st_size)
        total, most = used.total(), int(self.bound * REMAINING)
        surplus, last = total - most, -1
        for last in sorted(used):
            surplus -= used[last]
            if surplus <= 0:
                break
        of_last: list[tuple[int, int, str]] = []
        for path, status in self._entries():
            if int(status.st_mtime) == last:
                of_last.append((status.st_mtime_ns, on_disk(status.st_size), path))
            elif status.st_mtime < last:
                total -= unlink(path, on_disk(status.st_size))
        for _, size, path in sorted(of_last):
            if total <= most:
                break
            total -= unlink(path, size)
        return total

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the path and status of every entry, and delete old unfinished ones."""
        for folder in [found for found in os.scandir(self.folder) if found.is_dir(follow_symlinks=False)]:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not entry.name.endswith(TMP):
                            yield entry.path, status
                        elif time.time() - status.st_mtime > LEFT_BEHIND:
                            os.unlink(entry.path)


def digest(name: str, data: bytes) -> bytes:
    """Return the digest of an entry. It depends on the name of its file, a hexadecimal number, so that a wrongly named
    entry counts as damaged."""
    return xxh3_128_digest(data, seed=int(name[:16], 16))


def unlink(path: str, size: int) -> int:
    """Delete an entry unless another process has done so. Return `size`, the number of bytes that are free then."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return size


def on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
