"""Explain file system errors in words, and measure the free space of a disk. Imports no torch."""

import errno
import os
from pathlib import Path

from llava_fsdp.runtime.text.humanize import readable

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers which mean that the disk or the user's quota is full."""
FORBIDDEN = (errno.EACCES, errno.EPERM)
A_FILE = ", or a folder above it, is a file"
MEANING = {
    errno.EROFS: " is mounted read-only",
    errno.ENOTDIR: A_FILE,
    errno.EEXIST: A_FILE,
    errno.ENOENT: "; was it deleted? Is output_dir one folder that all machines see?",
    errno.EFBIG: " is larger than this process may write (ulimit -f)",
    errno.ELOOP: " is a symbolic link, and nothing is written through links",
    errno.ESTALE: " was deleted or replaced on its server",
    errno.EIO: ": its disk, or the connection to it, has failed (see dmesg)",
}
"""Error number -> text that says what the error means; in a message, the text follows the path."""


def why(error: OSError, path: Path) -> str:
    """Explain an OSError in words: the system's reason, the path and, if known, what the user can do.

    Args:
        path: the path to name if the error itself names none.
    """
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return f"{reason}: {full(path)}"
    where = error.filename or path
    if error.errno in FORBIDDEN:
        return f"{reason}: {where} is not accessible to this user (uid {os.getuid()})"
    return f"{reason}: {where}{MEANING.get(error.errno or 0, '')}"


def full(path: Path) -> str:
    """Return a message about a full disk, which says whether inodes or bytes have run out.

    Args:
        path: a file or folder on the disk.
    """
    free = readable(free_bytes(path))
    if free_inodes(path) == 0:
        return f"the disk of {path} has no inodes left and takes no new file (df -i), though {free} are free"
    return f"the disk of {path} is full, {free} are free"


def existing(path: Path) -> Path:
    """Return the path itself if it exists, else its nearest parent folder that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write to the disk of `path`, which need not exist yet; 0 if unknown."""
    found = statvfs(path)
    return found.f_bavail * found.f_frsize if found is not None else 0


def free_inodes(path: Path) -> int | None:
    """Return the number of files that can still be created on the disk of `path`; None if unlimited or unknown."""
    found = statvfs(path)
    return found.f_favail if found is not None and found.f_files else None


def statvfs(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(existing(path))
    except OSError:
        return None
