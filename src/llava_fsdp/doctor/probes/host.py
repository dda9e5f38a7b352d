"""Check CPU cores, memory, shared memory and process limits of this machine or container."""

import os
import resource
from collections.abc import Iterator

from llava_fsdp.doctor.findings import Finding, fail, ok, warn
from llava_fsdp.runtime.process.host import Host
from llava_fsdp.runtime.text.humanize import readable

GIB = 1 << 30
FILES, MANY = 4096, 65536
"""Limits of open files per process: fewer than the first may be too few; the second is enough for any training."""
HEADROOM = 0.9
"""Share of the free memory above which the planned use is a warning."""


def judge_cores(host: Host, ranks: int, workers: int | None) -> Iterator[Finding]:
    """Check that there are enough CPU cores. `workers`: data processes of each rank; None: chosen to fit the cores."""
    quota = f", {host.quota:.3g} by the container's quota" if host.quota is not None else ""
    result = f"{host.cores}{quota}, for {ranks} rank{'s' * (ranks > 1)}"
    needed = ranks * (1 + (workers or 0))
    if host.usable_cores < ranks:
        yield warn("cores", result, f"fewer ranks, or more cores: {ranks} ranks share them")
    elif host.usable_cores < needed:
        most = max(0, host.usable_cores // ranks - 1)
        cure = f"data.workers={most}: more workers than cores prepare samples no faster"
        yield warn("cores", f"{result} with {workers} workers each", cure)
    else:
        yield ok("cores", result)


def judge_memory(host: Host, needed: int, what: str) -> Iterator[Finding]:
    """Check that there is enough free memory: `needed` bytes for this machine's ranks (0: unknown), taken by `what`."""
    limit = f", {readable(host.limit)} for this container" if host.limit is not None else ""
    result = f"{readable(host.memory)}{limit}, {readable(host.free)} free"
    if needed > host.free:
        cure = "offload less, fewer ranks, precision=bf16_pure, or more memory; llava-fsdp plan compares them"
        yield fail("memory", f"{result}; {what} takes {readable(needed)}", cure)
    elif needed > HEADROOM * host.free:
        cure = "other programs and the file cache need memory too: end other programs"
        yield warn("memory", f"{result}; {what} takes {readable(needed)}", cure)
    else:
        yield ok("memory", result + (f"; {what} takes {readable(needed)}" if needed else ""))


def read_shared() -> tuple[int, int]:
    """Return the total and the free bytes of shared memory (/dev/shm)."""
    shared = os.statvfs("/dev/shm")
    return shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize


def judge_shared(total: int, free: int, needed: int, several_gpus: bool) -> Iterator[Finding]:
    """Check that there is enough shared memory (/dev/shm).

    Args:
        total, free: its bytes.
        needed: bytes that the processes that prepare data take there.
        several_gpus: whether this machine has several GPUs, between which NCCL may have buffers there.
    """
    result = f"/dev/shm of {readable(total)}, {readable(free)} free"
    cure = "docker run --ipc=host, or --shm-size=16g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if needed > free:
        less = f"data workers take {readable(needed)}; without them the rank prepares steps itself (data.workers=0)"
        yield warn("shared memory", f"{result}; {less}", cure)
    elif several_gpus and free < GIB:
        yield warn("shared memory", f"{result}; NCCL uses it between GPUs without direct access to each other", cure)
    else:
        yield ok("shared memory", result)


def read_limits() -> dict[str, int]:
    """Return limits of open files (soft `nofile`, and `hard`) and bytes of locked memory (`memlock`). -1: no limit."""
    nofile, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"nofile": nofile, "hard": hard, "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}


def judge_limits(limits: dict[str, int], has_infiniband: bool) -> Iterator[Finding]:
    """Check the limits of open files (`nofile`, hard limit `hard`) and locked bytes (`memlock`). Negative: no limit."""
    files, locked = limits["nofile"], limits["memlock"]
    if 0 <= files < FILES:
        most = min(limits["hard"], MANY) if limits["hard"] >= 0 else MANY
        cure = f"ulimit -n {most} before the start" if most > files else f"docker run --ulimit nofile={MANY}"
        yield warn("open files", f"{files} per process", cure)
    else:
        yield ok("open files", "no limit" if files < 0 else f"{files} per process")
    result = "no limit" if locked < 0 else readable(locked)
    if has_infiniband and locked >= 0:
        cure = "ulimit -l unlimited, or docker run --ulimit memlock=-1: InfiniBand pins the memory that it sends from"
        yield warn("locked memory", result, cure)
    else:
        yield ok("locked memory", result)
