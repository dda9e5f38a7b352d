"""Find out how another process ended, and end processes together with the process that started them. Needs Linux."""

import ctypes
import fcntl
import os
import re
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

AGENT = "LLAVA_FSDP_AGENT"
"""Environment variable with the process id of the agent (train/agent.py) in its ranks."""
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""Layout of the kernel's first `struct pidfd_info`: mask and cgroup, eleven numbers of the process, its wait status."""

STOP_SECONDS = "600"
"""Seconds that torchrun's agent gives its ranks to save a checkpoint before it kills them; torchrun's default is 30."""
LAUNCHER_VARIABLES = re.compile(
    rf"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|{AGENT}|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)"
)
"""Names of the environment variables that torchrun sets for its workers. A torchrun started inside such a worker must
not see them."""


def ending_of(pidfd: int, pid: int) -> str:
    """How a process has ended, in words. Linux before 6.15 knows this only until the parent has waited for it."""
    status = status_of_zombie(pid)  # first, as a zombie may be gone a moment later
    if status is None:
        status = status_of_reaped(pidfd)
    if status is None:
        return "ended without a report; the kernel kills processes when memory runs out (see dmesg)"
    code = os.waitstatus_to_exitcode(status)
    return how_ended(code) if code < 0 else f"{how_ended(code)} in the middle of the run"


def how_ended(code: int) -> str:
    """An exit code in words; -N is signal N, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of host memory? see dmesg)" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"


def status_of_zombie(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except (OSError, ValueError):
        return None


def status_of_reaped(pidfd: int) -> int | None:
    info = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = PIDFD_INFO.unpack(info)
    return status if mask & PIDFD_INFO_EXIT else None


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent process ends. Does nothing on systems other than
    Linux."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # the parent had ended before
            os._exit(1)


def end_torchrun() -> None:
    """End this machine's torchrun together with its ranks, after a stop was requested on another machine.

    The other machine's torchrun ends; this one would otherwise restart its ranks and wait for the other until the
    rendezvous times out. Not needed on a single machine.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1" and env.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def end_agent() -> None:
    """End the agent of `llava-fsdp train` on this machine, if it started this rank and this is its first: it would
    restart ranks that a restart cannot help.

    torchrun itself cannot be told; its restarted ranks end at once (`cli.begin`).
    """
    if os.environ.get(AGENT) == str(os.getppid()) and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without the variables that torchrun sets for its workers."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
