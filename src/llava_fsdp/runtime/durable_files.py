"""Write files that are whole after a crash, replace them in one step, and check that a disk has room."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.humanize import readable
from llava_fsdp.runtime.os_errors import free_bytes, free_inodes

NO_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot fsync folders: SMB, some of FUSE."""
FILES = 16
"""Fewest inodes that a checkpoint needs."""
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def require_room(folder: Path, needed: int) -> None:
    """Raise CheckpointError if fewer bytes are free, or the disk takes no more files."""
    inodes = free_inodes(folder)
    if inodes is not None and inodes < FILES:
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
    """Make a private folder. Its parent must exist: a run whose folder was deleted must not make it again."""
    folder.mkdir(mode=0o700, exist_ok=True)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new private file, which is on the disk when this returns."""
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file. Raises FileExistsError if anything has this name, also a link.

    Args:
        mode: permissions before the umask.
    """
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def replace_file(path: Path, content: bytes, mode: int = 0o666, durable: bool = False) -> None:
    """Write a file, or replace it in one step. See `replacing`."""
    with replacing(path, mode, durable) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that takes the name `path` when the block ends: readers see the old content or all of the new.

    It is written beside `path` as `NAME.XXXXXXXX.tmp`, so that several processes, also of several machines, may
    replace one file. If the block or the disk fails, the old file stays.

    Args:
        mode: permissions before the umask.
        durable: content and name are on the disk when the block ends. Otherwise a loss of power may leave an empty
            file.

    Raises:
        OSError: its `filename` is `path`.
    """
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with create(staged, mode) as file:
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
    """Open a descriptor of a new private file, which is on the disk when the block ends. Errors name the file."""
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
    """Fsync a folder, if the file system can: the names in it are on the disk then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDERS:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Fsync all files below a folder, then all folders."""
    inside = sorted(folder.rglob("*"))
    for path in (path for path in inside if path.is_file() and not path.is_symlink()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    for path in (*(path for path in inside if path.is_dir()), folder):
        sync_folder(path)
