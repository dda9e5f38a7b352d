"""Cores, memory, shared memory and limits of this machine, or of the container that this process is in."""

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.doctor.findings import Finding, fail, ok, text_of, warn
from llava_fsdp.runtime.humanize import readable

GIB = 1 << 30
UNLIMITED = 1 << 60
"""Bytes from which a limit is none: version 1 of cgroups writes one of nearly 2**63."""
USED = ("memory.current", "memory.usage_in_bytes")
FILES = 4096
"""Open files a process may need: sockets to the other ranks, files of weights, pictures, shared memory of workers."""
MANY = 65536
HEADROOM = 0.9
"""Share of the host's memory that a training may be planned to take."""


@dataclass(frozen=True)
class Host:
    """What this process may use."""

    cores: int
    """By affinity."""
    quota: float | None
    """Cores that a container may keep busy; None: no limit."""
    memory: int
    """Bytes of the machine."""
    available: int
    limit: int | None
    """Bytes that a container may hold; None: no limit."""
    used: int
    """Bytes that the container holds, for good."""

    @property
    def usable_cores(self) -> int:
        return max(1, min(self.cores, math.ceil(self.quota) if self.quota is not None else self.cores))

    @property
    def free(self) -> int:
        """Bytes that can be had."""
        return self.available if self.limit is None else max(0, min(self.available, self.limit - self.used))


def read_host() -> Host:
    memory = dict(
        (line.split(":")[0], int(line.split()[1]) * 1024)
        for line in (text_of(Path("/proc/meminfo")) or "").splitlines()
        if len(line.split()) > 1
    )
    total = memory.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = folders_of(text_of(Path("/proc/self/cgroup")) or "")
    limits = [(limit, used_of(folder)) for folder in groups if (limit := limit_of(folder)) is not None]
    limit, used = min(limits, key=lambda own: own[0] - own[1], default=(None, 0))
    quotas = [n for folder in groups if (n := quota_of(folder)) is not None]
    return Host(
        cores=cores,
        quota=min(quotas, default=None),
        memory=total,
        available=memory.get("MemAvailable", total),
        limit=limit,
        used=used,
    )


def folders_of(listed: str, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Where limits of this process stand, the nearest first: of its groups, of those above them, and of the root,
    which in a container is its own.

    Args:
        listed: /proc/self/cgroup.
    """
    found = []
    for line in listed.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        for name in names.split(",") if names else [""]:
            if name not in ("", "memory", "cpu"):
                continue
            top = root / name if name else root
            own = top / path.lstrip("/")
            found += [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return list(dict.fromkeys([*found, root]))


def limit_of(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        found = integer(text_of(folder / name))
        if found is not None and found < UNLIMITED:
            return found
    return None


def used_of(folder: Path) -> int:
    """Bytes that a group holds, without the files that the system keeps in memory as long as there is room."""
    current = next((n for name in USED if (n := integer(text_of(folder / name))) is not None), 0)
    lines = (text_of(folder / "memory.stat") or "").splitlines()
    stat = {name: integer(count) or 0 for name, _, count in (line.partition(" ") for line in lines)}
    return max(0, current - stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def quota_of(folder: Path) -> float | None:
    """Cores: microseconds of computing in a period."""
    words = (text_of(folder / "cpu.max") or "").split()
    if len(words) != 2:
        words = [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    quota, period = (integer(word) for word in words)
    return quota / period if quota is not None and period and quota > 0 else None


def integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


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
