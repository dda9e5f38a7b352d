"""Read how many CPU cores and how much memory this process may use: the machine's, or less if a container (cgroup)
limits them."""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""A cgroup's memory limit of so many bytes or more is no limit: cgroups of version 1 write nearly 2**63 for it."""


BF16_FEATURES = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Names in /proc/cpuinfo of instructions for matrix products in bf16; the last one is ARM's."""
ISA_WITHOUT_BF16 = frozenset("SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI".split())
"""Values of oneDNN's variable ONEDNN_MAX_CPU_ISA with which it emulates bf16."""


@dataclass(frozen=True)
class Host:
    """CPU cores, and bytes of memory, that this process may use."""

    cores: int
    """Number of cores in the CPU affinity of this process."""
    quota: float | None
    """Number of cores that the container may keep busy; None: no limit."""
    memory: int
    """Total memory of the machine."""
    available: int
    """Memory of the machine that can be allocated now."""
    limit: int | None
    """Memory that the container may use in total; None: no limit."""
    used: int
    """Memory that the container uses now, without file caches, which the kernel can free."""

    @property
    def usable_cores(self) -> int:
        return max(1, min(self.cores, math.ceil(self.quota) if self.quota is not None else self.cores))

    @property
    def usable_memory(self) -> int:
        """Bytes of memory that this process could ever have."""
        return self.memory if self.limit is None else min(self.memory, self.limit)

    @property
    def free(self) -> int:
        """Bytes of memory that this process can allocate now."""
        return self.available if self.limit is None else max(0, min(self.available, self.limit - self.used))

    def data_workers(self, ranks: int) -> int:
        """Return the default of `data.workers`: 4 as in LLaVA, or fewer, so that a core is left for the rank. `ranks`:
        number of ranks on this machine."""
        return max(0, min(4, self.usable_cores // ranks - 1))


def read_host(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Host:
    """Read how many CPU cores and how much memory this process may use, from the kernel's files about the machine and
    the container's limits. `proc` and `root` are where the file systems proc and cgroup are mounted."""
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in (read_kernel_file(proc / "meminfo") or "").splitlines()
        if len(line.split()) > 1
    }
    page = os.sysconf("SC_PAGE_SIZE")
    groups = cgroups(read_kernel_file(proc / "self/cgroup") or "", root)
    limits = [(limit, used_of(group)) for group in groups if (limit := limit_of(group)) is not None]
    # of several groups, the one that leaves the least memory
    limit, used = min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    total = memory.get("MemTotal") or page * os.sysconf("SC_PHYS_PAGES")
    return Host(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=min((quota for group in groups if (quota := quota_of(group)) is not None), default=None),
        memory=total,
        available=memory.get("MemAvailable", total),
        limit=limit,
        used=used,
    )


def cpu_has_bf16(proc: Path = Path("/proc"), environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether every core has instructions for matrix products in bf16 (AVX512-BF16 or AMX; on ARM, BF16), and
    oneDNN, whose kernels torch uses, may use them. False where the kernel lists no features, as on macOS."""
    if environment.get("ONEDNN_MAX_CPU_ISA", "").upper() in ISA_WITHOUT_BF16:
        return False
    lines = (line.partition(":") for line in (read_kernel_file(proc / "cpuinfo") or "").splitlines())
    features = [set(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")]
    return bool(features) and all(of_core & BF16_FEATURES for of_core in features)


def gpu_has_bf16(major: int, is_rocm: bool) -> bool:
    """Return whether a GPU has instructions for bf16: NVIDIA's since compute capability 8.0 (A100), and all of AMD's
    that torch supports. `major`: first number of the compute capability."""
    return is_rocm or major >= 8


def process_memory(key: str) -> int:
    """Return an entry of /proc/self/status, such as VmRSS, in bytes; 0 if the file has no such entry."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def cgroups(listed: str, root: Path) -> list[Path]:
    """Return the folders of the cgroups that limit this process, innermost first. The last one is `root`, in a
    container the container's own cgroup. `listed`: content of /proc/self/cgroup, whose lines are
    `number:controllers:path`. With cgroup v2, the list of controllers is empty, and paths begin at `root`; with v1,
    each controller has a folder of its own in `root`."""
    folders = []
    for line in listed.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        for name in names.split(","):
            if name not in ("", "memory", "cpu"):
                continue
            top = root / name if name else root
            inner = top / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return list(dict.fromkeys([*folders, root]))


def limit_of(group: Path) -> int | None:
    """Return the bytes of memory that a cgroup of version 2 or 1 may use; None: no limit."""
    limits = (parse_integer(read_kernel_file(group / name)) for name in ("memory.max", "memory.limit_in_bytes"))
    return next((limit for limit in limits if limit is not None and limit < UNLIMITED), None)


def used_of(group: Path) -> int:
    """Return the bytes of memory that a cgroup uses, without the file cache, which the kernel frees when needed."""
    # the files of cgroup v2 and of v1
    counts = (parse_integer(read_kernel_file(group / name)) for name in ("memory.current", "memory.usage_in_bytes"))
    current = next((count for count in counts if count is not None), 0)
    lines = (read_kernel_file(group / "memory.stat") or "").splitlines()
    stat = {name: parse_integer(count) or 0 for name, _, count in (line.partition(" ") for line in lines)}
    return max(0, current - stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def quota_of(group: Path) -> float | None:
    """Return the number of cores that a cgroup may keep busy (CPU time per period); None: no limit."""
    words = (read_kernel_file(group / "cpu.max") or "").split()
    if len(words) != 2:
        # cgroup v1 has a file for each number
        words = [read_kernel_file(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    quota, period = (parse_integer(word) for word in words)
    return quota / period if quota is not None and period and quota > 0 else None


def parse_integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def read_kernel_file(path: Path) -> str | None:
    """Return the content of a file of the kernel (/proc, /sys); None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
