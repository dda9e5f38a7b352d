"""Explain file system errors in words, and measure the free space of a disk. Imports no torch."""

import errno
import os
from pathlib import Path

from llava_fsdp.runtime.humanize import readable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean that the disk or the user's quota is full."""
FORBIDDEN = (errno.EACCES, errno.EPERM)


def why(error: OSError, path: Path) -> str:
    """Explain an OSError in words, with the path and, where known, what to do about it."""
    where = error.filename or path
    said = error.strerror or str(error)
    if error.errno in FULL:
        return f"{said}: {full(path)}"
    if error.errno in FORBIDDEN:
        return f"{said}: {where} is not accessible to this user (uid {os.getuid()})"
    if error.errno == errno.EROFS:
        return f"{said}: {where} is mounted read-only"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{said}: {where}, or a folder above it, is a file"
    if error.errno == errno.ENOENT:
        return f"{said}: {where}; was it deleted? Is output_dir one folder that all machines see?"
    if error.errno == errno.EFBIG:
        return f"{said}: {where} is larger than this process may write (ulimit -f)"
    if error.errno == errno.ELOOP:
        return f"{said}: {where} is a symbolic link, and nothing is written through links"
    if error.errno == errno.ESTALE:
        return f"{said}: {where} was deleted or replaced on its server"
    if error.errno == errno.EIO:
        return f"{said}: the disk of {where}, or the connection to it, has failed (see dmesg)"
    return f"{said}: {where}"


def full(path: Path) -> str:
    """A message about a full disk: whether inodes or bytes have run out."""
    free = readable(free_bytes(path))
    if free_inodes(path) == 0:
        return f"the disk of {path} has no inodes left and takes no new file (df -i), though {free} are free"
    return f"the disk of {path} is full, {free} are free"


def existing(path: Path) -> Path:
    """The path itself if it exists, else its nearest parent folder that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write to the disk of `path`; 0 if unknown. `path` need not exist yet."""
    try:
        found = os.statvfs(existing(path))
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def free_inodes(path: Path) -> int | None:
    """Number of files that the disk of `path` can still take; None if the file system has no fixed limit, or the number
    is unknown."""
    try:
        found = os.statvfs(existing(path))
    except OSError:
        return None
    return found.f_favail if found.f_files else None
