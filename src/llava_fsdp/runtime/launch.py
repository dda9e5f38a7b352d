"""Which launch of torchrun, which restart and which rank this process belongs to, from torchrun's environment
variables. Imports no torch."""

import os
import socket
import time
from pathlib import Path


def env_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch_id() -> str | None:
    """The name of this launch of torchrun, the same in all restarts of the ranks; None without torchrun. Without a name
    from the user (--rdzv-id) torchrun calls every launch "none"; its process id is then added."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"none-{socket.gethostname()}-{os.getppid()}" if given == "none" and is_one_node() else given


def is_one_node() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def attempt() -> int:
    """Number of times that torchrun has restarted the ranks of this node before this start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def incarnation() -> str:
    """An identifier of this start of the ranks, the same on all ranks and different after each restart. Each node
    counts its own restarts; several share the port of torchrun's store, which is new for each (launch/multinode.sh)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"process {os.getpid()}"
    meeting = attempt() if is_one_node() else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"{launch_id()} {meeting}"


def started(pid: int) -> float:
    """Time at which a process started, in seconds since 1970; 0 if unknown."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - since_boot
