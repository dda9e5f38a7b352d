"""Limits of cgroups as this process reads them."""

from pathlib import Path
from typing import Any

import pytest

from llava_fsdp.checkpoint import snapshot
from llava_fsdp.runtime.process.host import Host, cgroups, limit_of, quota_of, read_host, used_of


def machine(**more: Any) -> Host:
    known = {"cores": 16, "quota": None, "memory": 640, "available": 600, "limit": None, "used": 0}
    return Host(**{**known, **more})


def test_a_container_has_less_than_its_machine() -> None:
    assert (machine().usable_cores, machine(quota=3.5).usable_cores) == (16, 4)
    assert (machine().free, machine().usable_memory) == (600, 640)
    small = machine(limit=80, used=60)
    assert (small.free, small.usable_memory) == (20, 80)
    here = read_host()
    assert 0 < here.free <= here.memory and here.usable_cores >= 1


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(1, 1, 0), (2, 1, 1), (5, 1, 4), (64, 1, 4), (16, 8, 1), (3, 8, 0)]
)
def test_workers_leave_each_rank_a_core(cores: int, ranks: int, workers: int) -> None:
    assert machine(cores=cores).data_workers(ranks) == workers


def test_free_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine's memory and of each surrounding cgroup's; the kernel frees file caches."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    inner = root / "a" / "job"
    (proc / "self").mkdir(parents=True)
    inner.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/job\n")
    (proc / "meminfo").write_text("MemTotal: 2 kB\nMemAvailable: 1 kB\nHugePages_Total: 0\n")

    def free() -> int:
        return read_host(proc, root).free

    (inner / "memory.max").write_text("max\n")
    assert free() == 1024
    for group, limit, used, cached in ((root / "a", "900", 500, 50), (inner, "1000", 100, 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\nactive_file 7\n")
    assert free() == 450
    monkeypatch.setattr(snapshot, "read_host", lambda: read_host(proc, root))
    assert snapshot.fits(360, None) and not snapshot.fits(361, None)
    (root / "memory.max").write_text("400\n")
    assert free() == 400, "the root is a container's own group"
    (inner / "memory.current").write_text("2000\n")
    assert free() == 0


def test_limits_of_both_versions_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert quota_of(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert quota_of(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert limit_of(old) is None
    (old / "memory.limit_in_bytes").write_text("4096\n")
    assert limit_of(old) == 4096
    listed = "5:memory:/x\n3:pids:/y\n1:name=systemd:/z\n"
    assert cgroups(listed, tmp_path) == [old / "x", old, tmp_path]
    assert cgroups("4:cpu,cpuacct:/x/y\n", tmp_path) == [
        tmp_path / "cpu" / "x" / "y", tmp_path / "cpu" / "x", tmp_path / "cpu", tmp_path,
    ]  # fmt: skip
    (old / "memory.usage_in_bytes").write_text("900\n")
    for lines, used in (("total_inactive_file 300\ninactive_file 100\n", 600), ("inactive_file 100\n", 800), ("", 900)):
        (old / "memory.stat").write_text(lines)
        assert used_of(old) == used, "of version 1, a total counts the groups within"
    for group, quota in (("", "300000"), ("inner", "250000"), ("inner/most", "-1")):
        (tmp_path / "cpu" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cpu" / group / "cpu.cfs_quota_us").write_text(quota)
        (tmp_path / "cpu" / group / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:cpu,cpuacct:/inner/most\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 3 kB\n")
    here = read_host(tmp_path / "proc", tmp_path)
    assert (here.quota, here.memory, here.available, here.limit) == (2.5, 3072, 3072, None)
