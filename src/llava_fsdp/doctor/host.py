"""Cores, memory, shared memory and limits of this machine, or of the container that this process is in."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok, warn
from llava_fsdp.runtime.host import Host
from llava_fsdp.runtime.humanize import readable

GIB = 1 << 30
FILES = 4096
"""Open files a process may need: sockets to the other ranks, files of weights, pictures, shared memory of workers."""
MANY = 65536
HEADROOM = 0.9
"""Share of the host's memory that a training may be planned to take."""


def judge_cores(host: Host, ranks: int, workers: int | None) -> Iterator[Finding]:
    """
    Args:
        workers: of each rank; None: as many as there is room for.
    """
    quota = f", {host.quota:.3g} by the container's quota" if host.quota is not None else ""
    said = f"{host.cores}{quota}, for {ranks} ranks"
    needed = ranks * (1 + (workers or 0))
    if host.usable_cores < ranks:
        yield warn("cores", said, f"fewer ranks, or more cores: {ranks} ranks take turns")
    elif host.usable_cores < needed:
        most = max(0, host.usable_cores // ranks - 1)
        cure = f"data.workers={most}: more workers than cores take turns, and prepare samples no faster"
        yield warn("cores", f"{said} with {workers} workers each", cure)
    else:
        yield ok("cores", said)


def judge_memory(host: Host, needed: int, what: str) -> Iterator[Finding]:
    """
    Args:
        needed: bytes of all ranks on this machine; 0: not known.
        what: they are for.
    """
    limit = f", {readable(host.limit)} for this container" if host.limit is not None else ""
    said = f"{readable(host.memory)}{limit}, {readable(host.free)} free"
    if needed > host.free:
        cure = "offload less, fewer ranks, precision=bf16_pure, or more memory: llava_fsdp.plan compares the ways"
        yield fail("memory", f"{said}; {what} takes {readable(needed)}", cure)
    elif needed > HEADROOM * host.free:
        cure = "other programs and the file cache need some too: end what else runs here"
        yield warn("memory", f"{said}; {what} takes {readable(needed)}", cure)
    else:
        yield ok("memory", said + (f"; {what} takes {readable(needed)}" if needed else ""))


def read_shared(path: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Bytes of shared memory: all, and free."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def judge_shared(total: int, free: int, needed: int, several: bool) -> Iterator[Finding]:
    """Shared memory: where the locks of data workers lie, and NCCL's data between processes.

    Args:
        needed: bytes of locks.
        several: there are several GPUs.
    """
    said = f"/dev/shm of {readable(total)}, {readable(free)} free"
    cure = "docker run --ipc=host, or --shm-size=16g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if needed > free:
        less = f"data workers take {readable(needed)}: steps will be prepared between steps, as with data.workers=0"
        yield warn("shared memory", f"{said}; {less}", cure)
    elif several and free < GIB:
        yield warn("shared memory", f"{said}; NCCL takes it, where GPUs have no access to each other", cure)
    else:
        yield ok("shared memory", said)


def read_limits() -> dict[str, int]:
    """Soft limits; -1: none."""
    files, locked = (resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return {"nofile": files[0], "hard": files[1], "memlock": locked[0]}


def judge_limits(limits: dict[str, int], has_infiniband: bool) -> Iterator[Finding]:
    files, locked = limits["nofile"], limits["memlock"]
    if 0 <= files < FILES:
        most = min(limits["hard"], MANY) if limits["hard"] >= 0 else MANY
        cure = f"ulimit -n {most} before the start" if most > files else f"docker run --ulimit nofile={MANY}"
        yield warn("open files", f"{files} a process", cure)
    else:
        yield ok("open files", "no limit" if files < 0 else f"{files} a process")
    shown = "no limit" if locked < 0 else readable(locked)
    if has_infiniband and locked >= 0:
        cure = "ulimit -l unlimited, or docker run --ulimit memlock=-1: InfiniBand pins what it sends"
        yield warn("locked memory", shown, cure)
    else:
        yield ok("locked memory", shown)
