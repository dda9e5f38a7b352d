"""Explain file system errors in words, and measure the free space of a disk. Imports no torch."""

import errno
import os
from pathlib import Path

from llava_fsdp.runtime.text.humanize import readable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors which mean that the disk or the user's quota is full."""
FORBIDDEN = (errno.EACCES, errno.EPERM)
A_FILE = ", or a folder above it, is a file"
MEANINGS = {
    errno.EROFS: " is mounted read-only",
    errno.ENOTDIR: A_FILE,
    errno.EEXIST: A_FILE,
    errno.ENOENT: "; was it deleted? Is output_dir one folder that all machines see?",
    errno.EFBIG: " is larger than this process may write (ulimit -f)",
    errno.ELOOP: " is a symbolic link, and nothing is written through links",
    errno.ESTALE: " was deleted or replaced on its server",
    errno.EIO: ": its disk, or the connection to it, has failed (see dmesg)",
}
"""Error number -> what it means; in a message, this follows the path."""


def why(error: OSError, path: Path) -> str:
    """Explain an OSError: the system's reason, the path (`path` if the error names none) and, if known, what to do."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return f"{reason}: {full_disk(path)}"
    where = error.filename or path
    if error.errno in FORBIDDEN:
        return f"{reason}: {where} is not accessible to this user (uid {os.getuid()})"
    return f"{reason}: {where}{MEANINGS.get(error.errno or 0, '')}"


def full_disk(path: Path) -> str:
    """Return a message about the full disk of a path: whether inodes or bytes have run out."""
    free = readable(free_bytes(path))
    if free_inodes(path) == 0:
        return f"the disk of {path} has no inodes left and takes no new file (df -i), though {free} are free"
    return f"the disk of {path} is full, {free} are free"


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent folder that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write to a path's disk; 0 if unknown. The path need not exist."""
    disk = statvfs(path)
    return disk.f_bavail * disk.f_frsize if disk is not None else 0


def free_inodes(path: Path) -> int | None:
    """Return the number of files that can still be created on a path's disk; None if unlimited or unknown."""
    disk = statvfs(path)
    return disk.f_favail if disk is not None and disk.f_files else None


def statvfs(path: Path) -> os.statvfs_result | None:
    """Return what the system says of a path's disk; None if it does not tell. The path need not exist."""
    try:
        return os.statvfs(nearest_existing(path))
    except OSError:
        return None
