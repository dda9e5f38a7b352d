"""Interface for reading ranges of bytes of one file, and its implementation for local files."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from llava_fsdp.runtime.errors import SourceError

CURES = {
    errno.EACCES: "let this user read it: chmod, chown, or run as one who may",
    errno.EPERM: "let this user read it: chmod, chown, or run as one who may",
    errno.ENOENT: "put it back, or name another file",
    errno.EISDIR: "name a file",
}
"""Advice about a file that cannot be read, by errno, for errors that trying again would not fix."""


class Reader(Protocol):
    """Reads ranges of bytes of one file, local or remote."""

    @property
    def name(self) -> str:
        """Path or URL."""
        ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int, /) -> bytes:
        """Return exactly `size` bytes from byte `offset` on. The range must not go past the end of the file. Raise
        SourceError if the bytes cannot be read, or the file has become shorter."""
        ...


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError while `path` is read into a SourceError with advice."""
    try:
        yield
    except OSError as error:
        cure = CURES.get(error.errno or 0, "does its file system answer? run it again")
        raise SourceError(f"{path} cannot be read: {error.strerror or error}; {cure}").about(file=str(path)) from error


class LocalFile:
    """An open local file. Several threads and forked processes may read it at once."""

    def __init__(self, path: str | Path):
        """Open a file. Raise SourceError if that fails, or if it is not a regular file."""
        self.name = str(path)
        with reading(Path(path)):
            # without O_NONBLOCK, opening a pipe would wait for a writer
            self._file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise SourceError(f"{self.name} is not a regular file; give the path of a file").about(file=self.name)
        self.size = found.st_size

    def read(self, offset: int, size: int, /) -> bytes:
        """Return exactly `size` bytes from `offset`; raise SourceError if the file ends before them."""
        assert offset >= 0 and size >= 0, (offset, size)
        data, descriptor = b"", self._file.fileno()
        with reading(Path(self.name)):
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data = data + more if data else more
        if len(data) < size:
            raise SourceError(
                f"{self.name} ends before byte {offset + size}: it has changed, or its index is damaged; restore it, "
                "or run llava-fsdp prepare, which checks both"
            ).about(file=self.name)
        return data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
