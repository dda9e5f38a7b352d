"""Find out how another process ended, and end processes when their parent process ends. Needs Linux."""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.launch import is_one_node

AGENT = "LLAVA_FSDP_AGENT"
"""Environment variable `PID:FD`: process id of the agent of `llava-fsdp train`, which starts the ranks
(train/launch/agent.py), and its file descriptor for reports. Only ranks that the agent starts have it."""
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""First version of the kernel's `struct pidfd_info`: mask and cgroup, eleven numbers of the process, its wait
status."""

STOP_SECONDS = "600"
"""Seconds that the ranks have to save a checkpoint and end after torchrun's agent has sent SIGTERM. torchrun's default
is 30."""
LAUNCHER_VARIABLES = re.compile(
    rf"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|{AGENT}|(MASTER|GROUP|ROLE|TORCHELASTIC)_.*)"
)
"""Variables that torchrun sets for its workers. A worker that starts another torchrun must remove them."""


def ending_of(pidfd: int, pid: int) -> str:
    """Return in words how another process has ended; before Linux 6.15, known only until its parent waited for it."""
    status = status_of_zombie(pid)  # tried first, because the zombie may be gone a moment later
    if status is None:
        status = status_of_reaped(pidfd)
    if status is None:
        return "ended without a report; the kernel kills processes when memory runs out (see dmesg)"
    code = os.waitstatus_to_exitcode(status)
    return how_ended(code) if code < 0 else f"{how_ended(code)} in the middle of the run"


def how_ended(code: int) -> str:
    """Describe an exit code in words; -N: killed by signal N, as in `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of host memory? see dmesg)" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended, even if its parent has not waited for it yet."""
    try:  # the word after the process's name is its state: Z is a zombie, X is dead
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True


def status_of_zombie(pid: int) -> int | None:
    """Return the wait status of an ended process whose parent has not waited for it; None if unknown."""
    try:  # the last number of the file is the wait status
        return int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except (OSError, ValueError):
        return None


def status_of_reaped(pidfd: int) -> int | None:
    """Return the wait status of an ended process, also one that was waited for; None if unknown. Needs Linux 6.15."""
    info = bytearray(PIDFD_INFO.size)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)  # the mask: what to fill in
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = PIDFD_INFO.unpack(info)
    return status if mask & PIDFD_INFO_EXIT else None


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process the signal `number` when its parent process, with the id `parent`, ends. If the
    parent has already ended, end at once. Does nothing on systems other than Linux."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)


def children(pid: int) -> set[int]:
    """Return the ids of a process's children; empty if it has ended, or on systems other than Linux."""
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def siblings() -> set[int]:
    """Return the process ids of the other ranks of this machine; empty without torchrun."""
    return children(os.getppid()) - {os.getpid()} if "TORCHELASTIC_RUN_ID" in os.environ else set()


def end_torchrun() -> None:
    """End this machine's torchrun with its ranks, because a stop was requested on another machine of the run.

    The torchrun of that machine ends by itself. This one would restart its ranks and wait for the other machine until
    the rendezvous times out. Does nothing in a run on a single machine.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and not is_one_node() and env.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def end_agent(report: dict[str, Any] | None = None) -> None:
    """End the agent of `llava-fsdp train`, the process that started the ranks of this machine, because it would restart
    them in vain. Only the machine's first rank does this. Does nothing if the user started torchrun, which has no
    agent: the ranks that it restarts end at once (`cli.start_process`).

    Args:
        report: reason and exit code, which `llava-fsdp train` prints if the run's folder has no status. None: the
            status in the folder has them.
    """
    # process id of the agent, and the number of its pipe to `llava-fsdp train`
    agent, _, handle = os.environ.get(AGENT, "").partition(":")
    if agent == str(os.getppid()) and os.environ.get("LOCAL_RANK") == "0":
        if report is not None:
            with contextlib.suppress(OSError), open(f"/proc/{agent}/fd/{handle}", "wb") as pipe:
                pipe.write(json.dumps(report).encode() + b"\n")
        os.kill(os.getppid(), signal.SIGTERM)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those that torchrun sets for its workers."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
