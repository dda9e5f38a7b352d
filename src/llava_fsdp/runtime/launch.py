"""Read from torchrun's environment variables to which launch, restart and rank this process belongs. Imports no
torch."""

import os
import socket
import time
from pathlib import Path


def env_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch_id() -> str | None:
    """Return a name of the launch of torchrun, which stays the same when torchrun restarts the ranks; None without
    torchrun. It is the user's --rdzv-id. Without that, torchrun calls every launch "none"; on a single node, torchrun's
    host and process id are then appended."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"none-{socket.gethostname()}-{os.getppid()}" if run_id == "none" and is_one_node() else run_id


def is_one_node() -> bool:
    """Return whether torchrun runs on a single node; also True without torchrun."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def attempt() -> int:
    """Return how many times torchrun has restarted the ranks of this node."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def incarnation() -> str:
    """Return a text that identifies the current start of the ranks: the same on all ranks, different after each
    restart. On a single node it contains the number of restarts, and without torchrun only the process id. With several
    nodes it contains the port of torchrun's store, new for each restart (launch/multinode.sh), because the nodes count
    restarts separately."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"process {os.getpid()}"
    start = attempt() if is_one_node() else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"{launch_id()} {start}"


def start_time(pid: int) -> float:
    """Return when a process started, in seconds since 1970; 0 if unknown."""
    try:
        # the field `starttime`, in clock ticks after the machine's start; the name before ")" may contain spaces
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - since_boot
