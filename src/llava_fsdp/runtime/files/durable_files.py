"""Write files so that they are complete after a crash, replace files atomically, and check that a disk has room."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.os_errors import free_bytes, free_inodes
from llava_fsdp.runtime.text.humanize import readable

NO_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
"""Errors of fsync of a folder on file systems that do not support it (SMB, some FUSE systems)."""
LEAST_INODES = 16
"""Minimum number of free inodes (files that can be created) that a checkpoint needs."""
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def require_room(folder: Path, needed: int) -> None:
    """Raise CheckpointError if the folder's disk has fewer than `needed` bytes free, or almost no free inodes."""
    inodes = free_inodes(folder)
    if inodes is not None and inodes < LEAST_INODES:
        raise CheckpointError(
            f"No space left for a checkpoint in {folder}: {inodes} inodes are left on that disk (df -i), and a "
            "checkpoint is several files; delete files there, or give an output_dir on another disk"
        )
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"No space left for a checkpoint in {folder}: it needs {readable(needed)}, and {readable(free)} are free; "
            "make room, or give an output_dir on a larger disk"
        )


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read. The parent must exist: a run's folder that was deleted must not be
    created again here."""
    folder.mkdir(mode=0o700, exist_ok=True)


def make_empty(folder: Path) -> None:
    """Delete a folder with all that is in it, and create it again, readable only by its owner."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)


def write_durably(path: Path, content: bytes) -> None:
    """Write and fsync a new file that only its owner can read."""
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file for writing bytes. Raises FileExistsError if the path exists, even as a symbolic link. `mode`:
    permissions before the umask."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def replace_file(path: Path, content: bytes, mode: int = 0o666, durable: bool = False) -> None:
    """Write a file atomically: other processes read either the old content or the new. Arguments as for `replacing`."""
    with replacing(path, mode, durable) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Context manager that yields a temporary file, opened for writing, and renames it to `path` at the end. If its
    body or the disk fails, an existing file at `path` is kept.

    The temporary file is named `NAME.XXXXXXXX.tmp`, with 8 random hexadecimal digits, so that processes on several
    machines may replace the same file at the same time.

    Args:
        mode: permissions before the umask.
        durable: whether to fsync the file and its folder. Otherwise a power failure may leave an empty file.

    Raises:
        OSError: the file cannot be written; the error's `filename` is `path`.
    """
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open_new(staged, mode) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(staged, path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(staged)):
            error.filename = str(path)
        raise


def write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Context manager that creates a file which only its owner can read, yields its descriptor, and fsyncs it at the
    end. Raises OSError with the path as `filename`."""
    try:
        descriptor = os.open(path, WRITE, 0o600)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that the names of its files are on the disk, where the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDERS:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Fsync all files below a folder, and then the folders themselves."""
    inside = sorted(folder.rglob("*"))
    for path in (path for path in inside if path.is_file() and not path.is_symlink()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in (*(path for path in inside if path.is_dir()), folder):
        sync_folder(path)
