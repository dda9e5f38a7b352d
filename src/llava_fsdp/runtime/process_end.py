"""Find out how another process ended, and end processes when their parent process ends. Needs Linux."""

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
"""Environment variable that holds the process id of the agent (train/agent.py); set in the ranks that the agent
starts."""
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""Layout of the first version of the kernel's `struct pidfd_info`: mask and cgroup, eleven numbers of the process, its
wait status."""

STOP_SECONDS = "600"
"""Seconds that the ranks have to save a checkpoint after torchrun's agent asked them to end, before it kills them.
torchrun's default is 30."""
LAUNCHER_VARIABLES = re.compile(
    rf"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|{AGENT}|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)"
)
"""Pattern for names of the environment variables that torchrun sets for its workers. They must be removed for a
torchrun that is started inside such a worker."""


def ending_of(pidfd: int, pid: int) -> str:
    """Return in words how a process has ended. On Linux before 6.15 this is known only until the parent has waited for
    the process."""
    status = status_of_zombie(pid)  # first, because the zombie may be gone a moment later
    if status is None:
        status = status_of_reaped(pidfd)
    if status is None:
        return "ended without a report; the kernel kills processes when memory runs out (see dmesg)"
    code = os.waitstatus_to_exitcode(status)
    return how_ended(code) if code < 0 else f"{how_ended(code)} in the middle of the run"


def how_ended(code: int) -> str:
    """Return in words what an exit code means; -N is signal N, as in `subprocess`."""
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
    """Make the kernel send this process a signal when its parent process ends. Does nothing on systems other than
    Linux."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)


def end_torchrun() -> None:
    """End torchrun on this machine together with its ranks, after a stop was requested on another machine.

    The torchrun of the other machine ends by itself. Otherwise the one on this machine would restart its ranks and wait
    for the other machine until the rendezvous times out. Does nothing on a single machine.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1" and env.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def end_agent() -> None:
    """End the agent of `llava-fsdp train` (train/agent.py) on this machine, which would otherwise restart the ranks
    although a restart cannot help. Does nothing on a rank other than the first of the machine, or without that agent.

    torchrun itself cannot be ended in this way; the ranks that it restarts end at once (`cli.start_process`).
    """
    if os.environ.get(AGENT) == str(os.getppid()) and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment without the variables that torchrun sets for its workers."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
