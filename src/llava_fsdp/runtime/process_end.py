"""How another process ended, and processes that end with the one that started them. Needs Linux."""

import ctypes
import fcntl
import os
import re
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info` as it was first published: mask and cgroup, eleven numbers of the process, its wait status."""

LAUNCHER_VARIABLES = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)")
"""What one torchrun tells its workers; a torchrun inside another's worker must not see it."""


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


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the system send this process a signal when `parent`, which started it, ends; on Linux, which alone can."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it had died before that
            os._exit(1)


def end_torchrun() -> None:
    """Tell this machine's torchrun to end with its ranks, where a stop was asked for on another machine.

    That one's is leaving, and this one would start its ranks again and wait for it until the meeting's timeout.
    On one machine there is nobody to wait for.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1" and env.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """For a torchrun of its own."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
