"""How another process ended, where its parent, which is not us, may have asked already. Linux alone can tell."""

import fcntl
import os
import signal
import struct
from pathlib import Path

PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info` as it was first published: mask and cgroup, eleven numbers of the process, its wait status."""


def ending_of(pidfd: int, pid: int) -> str:
    """In words, of a process that has ended. A kernel before 6.15 cannot tell once the parent has asked."""
    status = status_while_unasked(pid)  # in this order: asked for once, it stays asked for
    if status is None:
        status = status_once_asked(pidfd)
    if status is None:
        return "ended without a word; the kernel kills processes when memory runs out (see dmesg)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = " (out of host memory? see dmesg)" if number == signal.SIGKILL else ""
        return f"was killed by signal {number}{hint}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)} in the middle of the run"


def status_while_unasked(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except (OSError, ValueError):
        return None


def status_once_asked(pidfd: int) -> int | None:
    asked = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = PIDFD_INFO.unpack(asked)
    return status if mask & PIDFD_INFO_EXIT else None
