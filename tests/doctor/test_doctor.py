"""Probes on the outputs of other machines, what counts as a failure, and that no probe hangs."""

import errno
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import command
from harness import RankPool, RanksFailed
from small import command_config

from llava_fsdp.config import DoctorConfig, Format
from llava_fsdp.data.batching.workers import lock_bytes
from llava_fsdp.doctor import checks, config_checks
from llava_fsdp.doctor.checks import CHECKS, Check, run_check
from llava_fsdp.doctor.context import DoctorContext, Needs
from llava_fsdp.doctor.findings import Finding, Level, fail, ok, output_of, result_and_cure, warn
from llava_fsdp.doctor.main import doctor
from llava_fsdp.doctor.probes import collectives, disk, gpus, host, network, software, torch_probe
from llava_fsdp.doctor.probes.collectives_worker import check_exchange, check_messages, expect
from llava_fsdp.doctor.probes.gpus import TorchFacts, parse_links, parse_smi
from llava_fsdp.doctor.probes.network import Interface
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.time.hardware import PROCESS_BYTES, Machine
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files import durable_files
from llava_fsdp.runtime.files.durable_files import LEAST_INODES
from llava_fsdp.runtime.process.host import Host
from llava_fsdp.runtime.text.humanize import readable

GIB = 1 << 30
Judged = Callable[[], Iterable[Finding]]


def config(*overrides: str) -> DoctorConfig:
    return command_config(DoctorConfig, "doctor", *overrides)


def context_of(*overrides: str, **known: Any) -> DoctorContext:
    """A context in which some of the cached values are known."""
    context = DoctorContext(config(*overrides))
    context.__dict__ |= known
    return context


def rows_of(name: str, context: DoctorContext) -> list[Finding]:
    (check,) = (check for check in CHECKS if check.name == name)
    return run_check(check, context)


def levels(found: Iterable[Finding]) -> dict[str, str]:
    found = list(found)
    for finding in found:
        assert bool(finding.cure) == (finding.level is not Level.OK), finding
        assert "\n" not in finding.cure
    return {finding.name: finding.level.value for finding in found}


def judge_precision(devices: list[dict], *overrides: str, cpu_has: bool = False) -> Iterable[Finding]:
    able = all(device["bf16"] for device in devices) if devices else cpu_has
    return config_checks.judge_precision(config(*overrides), devices, able)


def only(found: Iterable[Finding], level: Level) -> Finding:
    (finding,) = found
    assert finding.level is level and bool(finding.cure) == (level is not Level.OK), finding
    return finding


SMI = """0, NVIDIA A100-SXM4-80GB, GPU-a, 81920, 3, 550.54.15, 8.0, Disabled, 0
1, NVIDIA A100-SXM4-80GB, GPU-b, 81920, 40000, 550.54.15, 8.0, Disabled, 0
2, NVIDIA A100-SXM4-80GB, GPU-c, 81920, 3, 550.54.15, 8.0, Enabled, [N/A]
3, NVIDIA A100-SXM4-80GB, GPU-d, 81920, 3, 550.54.15, 8.0, Disabled, 17
Unable to determine the device handle for GPU 0000:41:00.0: Unknown Error
"""
A100 = {"name": "NVIDIA A100-SXM4-80GB", "capability": [8, 0], "memory": 80 * GIB, "bf16": True, "error": ""}
V100 = {**A100, "name": "Tesla V100-SXM2-32GB", "capability": [7, 0], "bf16": False}
NVLINK = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-23
GPU1\tNV12\t X \tNV12\tSYS\t0-23
GPU2\tSYS\tNV12\t X \tSYS\t24-47
NIC0\tPXB\tSYS\tSYS\t X \t

Legend:
"""
ETHERNET = [Interface("lo", "127.0.0.1", True, None), Interface("eth0", "10.0.0.7", True, 25000)]
NCCL, GLOO = network.CHOICES
LIMITS = {"nofile": 1024, "hard": 1 << 20, "memlock": 8 << 20}
PORTS = {"mlx5_0:1": "4: ACTIVE", "mlx5_1:1": "1: DOWN"}


def torch_of(*devices: dict[str, Any], **more: Any) -> TorchFacts:
    known = {"version": "2.13.0", "cuda": "12.8", "hip": None, "nccl": "2.27.3", "available": bool(devices)}
    return TorchFacts(**{**known, "devices": list(devices), "no_peers": [], **more})


def machine(**more: Any) -> Host:
    known = {"cores": 16, "quota": None, "memory": 64 * GIB, "available": 60 * GIB, "limit": None, "used": 0}
    return Host(**{**known, **more})


def needs(total: int, usable: int) -> Needs:
    row: Any = SimpleNamespace(bytes={"total": total}, usable=usable, fits=total <= usable, peak_moment="in the update")
    return Needs(row, "A100", 0, 0, 0)


def speed(write: float) -> Iterable[Finding]:
    return disk.judge_speed("speed", Path(), 10**9, lambda _: disk.Speed(write, 1e9))


def interfaces(nodes: int = 1, found: int = 2, **environment: str) -> Iterable[Finding]:
    return network.judge_interfaces(ETHERNET[:found], {}, environment, nodes)


TWO = parse_smi(SMI)[:2]
THREE = torch_of(A100, A100, A100)


@pytest.mark.parametrize(
    ("judge", "expected", "text"),
    [
        (lambda: gpus.judge_gpus([], torch_of()), {"GPUs": "OK"}, ""),
        (lambda: gpus.judge_torch(torch_of(A100), TWO, None), {"torch": "OK"}, "NCCL 2.27.3"),
        (lambda: gpus.judge_torch(torch_of(cuda=None), [], None), {"torch": "OK"}, ""),
        (lambda: gpus.judge_torch(torch_of(cuda=None), TWO, None), {"torch": "FAIL"}, "2 GPUs, which it cannot use"),
        (lambda: gpus.judge_torch(torch_of(), TWO, None), {"torch": "FAIL"}, "driver (550.54.15) to one for CUDA 12.8"),
        (lambda: gpus.judge_torch(torch_of(), TWO, ""), {"torch": "WARN"}, ""),
        (lambda: gpus.judge_torch(torch_of(), TWO, "-1"), {"torch": "WARN"}, "CUDA_VISIBLE_DEVICES='-1'"),
        (lambda: gpus.judge_torch(torch_of(), [], None), {"torch": "OK"}, ""),
        (lambda: gpus.judge_torch(torch_of(A100, cuda=None, hip="6.2"), TWO, None), {"torch": "OK"}, "ROCm 6.2"),
        (lambda: gpus.judge_torch(torch_of(error="hangs"), TWO, None), {"torch": "FAIL"}, ""),
        (lambda: gpus.judge_links(NVLINK, THREE), {"links": "WARN", "P2P": "OK"}, "GPUs 0-2 have no NVLink"),
        (lambda: gpus.judge_links(NVLINK.replace("SYS", "NV12"), THREE), {"links": "OK", "P2P": "OK"}, ""),
        (lambda: gpus.judge_links(NVLINK.replace("NV12", "PHB"), THREE), {"links": "WARN", "P2P": "OK"}, ""),
        (lambda: gpus.judge_links(None, torch_of(A100, A100, no_peers=[[0, 1]])), {"P2P": "WARN"}, "0-1"),
        (lambda: gpus.judge_count(2, torch_of(A100, A100), {}), {"ranks": "OK"}, ""),
        (lambda: gpus.judge_count(8, torch_of(), {}), {"ranks": "OK"}, ""),
        (
            lambda: gpus.judge_count(8, torch_of(A100), {"CUDA_VISIBLE_DEVICES": "0"}),
            {"ranks": "FAIL"}, "CUDA_VISIBLE_DEVICES=0",
        ),
        (lambda: gpus.judge_count(3, torch_of(A100, A100), {}), {"ranks": "FAIL"}, "gpus=2, or another machine"),
        (lambda: software.judge_python((3, 13, 0)), {"Python": "FAIL"}, ""),
        (lambda: software.judge_python((3, 12, 1)), {"Python": "OK"}, ""),
        (lambda: software.judge_optional({"peft": "0.21"}.get), {"extras": "OK"}, "peft 0.21; not installed: flash"),
        (lambda: software.judge_optional({}.get), {"extras": "OK"}, "none; not installed: flash"),
        (
            lambda: software.judge_environment({NCCL: "x", "NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "0"}),
            {"NCCL_P2P_DISABLE": "WARN"}, "unset NCCL_P2P_DISABLE",
        ),
        (lambda: software.judge_environment({}), {"environment": "OK"}, ""),
        (lambda: software.judge_environment({"TORCH_DISTRIBUTED_DEBUG": "OFF"}), {"environment": "OK"}, ""),
        (lambda: host.judge_cores(machine(), 8, None), {"cores": "OK"}, ""),
        (lambda: host.judge_cores(machine(quota=4.0), 8, None), {"cores": "WARN"}, ""),
        (lambda: host.judge_cores(machine(), 8, 4), {"cores": "WARN"}, "data.workers=1: more workers than"),
        (lambda: host.judge_cores(machine(), 16, 0), {"cores": "OK"}, ""),
        (lambda: host.judge_cores(machine(), 16, 1), {"cores": "WARN"}, "data.workers=0: more workers than"),
        (lambda: host.judge_memory(machine(), 0, ""), {"memory": "OK"}, ""),
        (lambda: host.judge_memory(machine(), 53 * GIB, ""), {"memory": "OK"}, ""),
        (lambda: host.judge_memory(machine(), 55 * GIB, ""), {"memory": "WARN"}, ""),  # of 60 GiB free, 64 in all
        (lambda: host.judge_memory(machine(), 61 * GIB, ""), {"memory": "FAIL"}, ""),
        (lambda: host.judge_memory(machine(), 58 * GIB, "it"), {"memory": "WARN"}, "it takes 58 GiB"),
        (lambda: host.judge_memory(machine(limit=32 * GIB), 58 * GIB, "it"), {"memory": "FAIL"}, ""),
        (
            lambda: host.judge_shared(64 << 10, 60 << 10, 2 * lock_bytes(2), several_gpus=False),
            {"shared memory": "WARN"}, "data.workers=0",
        ),
        (lambda: host.judge_shared(64 << 10, 60 << 10, lock_bytes(0), several_gpus=False), {"shared memory": "OK"}, ""),
        (lambda: host.judge_shared(64 << 20, 60 << 20, lock_bytes(8), several_gpus=False), {"shared memory": "OK"}, ""),
        (lambda: host.judge_shared(64 << 20, 60 << 20, 0, several_gpus=True), {"shared memory": "WARN"}, "--shm-size"),
        (lambda: host.judge_shared(8 * GIB, GIB - 1, 0, several_gpus=True), {"shared memory": "WARN"}, "--shm-size"),
        (lambda: host.judge_shared(8 * GIB, 8 * GIB, lock_bytes(4), several_gpus=True), {"shared memory": "OK"}, ""),
        (
            lambda: host.judge_limits(LIMITS, has_infiniband=True),
            {"open files": "WARN", "locked memory": "WARN"}, "ulimit -n 65536 before the start",
        ),
        (
            lambda: host.judge_limits({**LIMITS, "hard": 1024}, has_infiniband=False),
            {"open files": "WARN", "locked memory": "OK"}, "docker run --ulimit",
        ),
        (
            lambda: host.judge_limits({**LIMITS, "hard": -1}, has_infiniband=False),
            {"open files": "WARN", "locked memory": "OK"}, "ulimit -n 65536 before the start",
        ),
        (
            lambda: host.judge_limits({**LIMITS, "hard": 2048}, has_infiniband=False),
            {"open files": "WARN", "locked memory": "OK"}, "ulimit -n 2048 before the start",
        ),
        (
            lambda: host.judge_limits(dict.fromkeys(LIMITS, -1), has_infiniband=True),
            {"open files": "OK", "locked memory": "OK"}, "",
        ),
        (lambda: speed(1e6), {"speed": "WARN"}, "17 minutes a checkpoint"),
        (lambda: speed(1e8), {"speed": "OK"}, "10 s a checkpoint"),
        (lambda: disk.judge_room("room", Path(), GIB, 2 * GIB, "it takes", "more"), {"room": "FAIL"}, "it takes 2 GiB"),
        (lambda: disk.judge_room("room", Path(), 2 * GIB, GIB, "it takes", ""), {"room": "OK"}, "it takes 1 GiB"),
        (lambda: disk.check_writable("output_dir", Path("/proc/none")), {"output_dir": "FAIL"}, ""),
        (lambda: interfaces(2), {"interfaces": "OK"}, "eth0 10.0.0.7 (25 Gb/s)"),
        (lambda: interfaces(NCCL_SOCKET_IFNAME="eth"), {"interfaces": "OK"}, ""),
        (lambda: interfaces(NCCL_SOCKET_IFNAME="ib0"), {"interfaces": "FAIL"}, "there is no ib0"),
        (lambda: interfaces(NCCL_SOCKET_IFNAME="^docker"), {"interfaces": "OK"}, ""),
        (lambda: interfaces(NCCL_SOCKET_IFNAME="=eth"), {"interfaces": "FAIL"}, ""),
        (lambda: interfaces(GLOO_SOCKET_IFNAME="eth"), {"interfaces": "FAIL"}, ""),
        (lambda: interfaces(1, 1), {"interfaces": "OK"}, "loopback"),
        (lambda: interfaces(2, 1), {"interfaces": "FAIL"}, ""),
        (lambda: network.judge_interfaces(ETHERNET, PORTS, {}, 1), {"interfaces": "OK", "InfiniBand": "WARN"}, "DOWN"),
        (
            lambda: network.judge_interfaces(ETHERNET, PORTS, {}, 1),
            {"interfaces": "OK", "InfiniBand": "WARN"}, "NCCL may try mlx5_1:1",
        ),
        (
            lambda: network.judge_interfaces(ETHERNET, {"a:1": "4: ACTIVE", "b:1": "4: ACTIVE"}, {}, 1),
            {"interfaces": "OK", "InfiniBand": "OK"}, "2 ports, all active",
        ),
        (
            lambda: network.judge_interfaces([ETHERNET[0], replace(ETHERNET[1], up=False)], {}, {}, 2),
            {"interfaces": "FAIL"}, "",
        ),
        (lambda: network.judge_name("a", None, 1), {"host name": "WARN"}, ""),
        (lambda: network.judge_name("a", None, 2), {"host name": "FAIL"}, ""),
        (lambda: network.judge_name("a", "127.0.1.1", 1), {"host name": "OK"}, ""),
        (lambda: network.judge_name("a", "127.0.1.1", 2), {"host name": "FAIL"}, ""),
        (lambda: config_checks.judge_plan(needs(70 * GIB, 75 * GIB), True), {"memory by the plan": "OK"}, ""),
        (
            lambda: config_checks.judge_plan(needs(100 * GIB, 75 * GIB), True),
            {"memory by the plan": "FAIL"}, "100 GiB of 75 GiB",
        ),
        (lambda: config_checks.judge_taken(needs(70 * GIB, 75 * GIB), {0: 80 * GIB, 1: 79 * GIB}), {}, ""),
        (
            lambda: config_checks.judge_taken(needs(70 * GIB, 75 * GIB), {2: 80 * GIB, 5: 40 * GIB}),
            {"free memory": "FAIL"}, "GPU 5: 40 GiB",
        ),
        (lambda: judge_precision([V100], "precision=bf16"), {"precision": "FAIL"}, "precision=fp16"),
        (lambda: judge_precision([V100], "precision=fp16"), {"precision": "OK"}, ""),
        (lambda: judge_precision([V100]), {"precision": "WARN"}, "precision=fp16"),
        (lambda: judge_precision([V100], "precision.linear=fp8"), {"precision": "FAIL"}, "precision=fp16"),
        (lambda: judge_precision([A100]), {"precision": "OK"}, "bf16 on NVIDIA A100"),
        (lambda: judge_precision([]), {"precision": "OK"}, "fp32 on the CPU"),
        (lambda: judge_precision([], cpu_has=True), {"precision": "OK"}, "bf16 on the CPU"),
        (lambda: judge_precision([], "precision=bf16", cpu_has=True), {"precision": "OK"}, "bf16 on the CPU"),
    ],
)  # fmt: skip
def test_what_a_machine_fails_on(judge: Judged, expected: dict[str, str], text: str) -> None:
    found = list(judge())
    assert levels(found) == expected
    assert any(text in row.result or text in row.cure for row in found) or not text


def test_gpus_as_the_driver_reports_them() -> None:
    found = parse_smi(SMI)
    assert [gpu.index for gpu in found] == [0, 1, 2, 3] and parse_smi("") == []
    assert found[1].used == 40000 << 20 and found[2].mig and found[2].ecc_errors == 0 and found[3].ecc_errors == 17
    judged = levels(gpus.judge_gpus(found, torch_of(A100, A100, {**A100, "error": "CUDA error: unspecified"}, V100)))
    assert judged == {
        "GPU 0": "OK", "GPU 1": "WARN", "GPU 2": "WARN", "GPU 3": "FAIL", "GPU 2 in use": "FAIL",
        "kinds of GPU": "WARN",
    }  # fmt: skip
    assert parse_links(NVLINK) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "NV12"}
    pairs = [(0, n) for n in range(1, 7)]
    assert gpus.list_pairs(pairs[:4]) == "0-1, 0-2, 0-3, 0-4"
    assert gpus.list_pairs(pairs) == "0-1, 0-2, 0-3, 0-4 and 2 more pairs"


@pytest.mark.parametrize(
    ("visible", "wanted", "seen"),
    [
        (None, None, [0, 1, 2, 3]), (None, 2, [0, 1]), ("3,1", None, [3, 1]), ("3,1", 1, [3]), ("GPU-d", None, [3]),
        ("0,-1,1", None, [0]), ("", None, []), ("MIG-x", None, [2]),
    ],
)  # fmt: skip
def test_only_gpus_that_ranks_run_on_are_judged(
    visible: str | None, wanted: int | None, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    context = context_of(
        f"gpus={wanted or 'null'}", smi=parse_smi(SMI), torch=torch_of(*[A100] * (wanted or len(seen))),
        needs=needs(50 * GIB, 50 * GIB),
    )  # fmt: skip
    judged = [row.name for row in rows_of("GPUs", context) if row.name.startswith("GPU ")]
    assert judged == [f"GPU {index}" for index in seen]
    assert any("GPU 1: " in row.result for row in rows_of("memory by the plan", context)) == (1 in seen)


def test_ranks_are_as_many_as_train_starts() -> None:
    found = [context_of(*words, torch=torch_of(*gpus)).ranks
             for words, gpus in (([], []), ([], [A100, A100]), (["gpus=3"], []),
                                 (["gpus=1"], [A100, A100]))]  # fmt: skip
    assert found == [1, 2, 3, 1]
    two = {"host": machine(cores=4), "torch": torch_of(A100, A100)}
    assert context_of("data.workers=0", **two).workers == 0 != context_of("data.workers=null", **two).workers


def test_packages_in_the_declared_versions() -> None:
    declared = ["torch<2.16,>=2.11", "numpy>=1.26", "peft>=0.17; extra == 'lora'", "gone>=1"]
    found = {"torch": "2.9.1+cu128", "numpy": "2.4.6"}
    assert levels(software.judge_packages(declared, found.get)) == {"torch": "FAIL", "gone": "FAIL"}
    for version in ("2.13.0+cpu", "2.15.0.dev20261101+cu130"):
        found = {"torch": version, "numpy": "2.4.6", "gone": "1"}
        assert levels(software.judge_packages(declared, found.get)) == {"packages": "OK"}


def test_each_need_of_a_configuration_is_checked() -> None:
    def missing() -> str:
        raise ConfigError("adapters (model.lora) need peft, which cannot be imported (gone): pip install 'x[lora]'")

    found = list(software.judge_needs({"adapters": missing, "attention": lambda: "varlen: torch's varlen_attn"}))
    assert levels(found) == {"adapters": "FAIL", "attention": "OK"} and found[0].cure == "pip install 'x[lora]'"
    assert set(software.needs_of(config("stage=finetune_lora"))) == {"compile", "attention", "adapters"}
    assert set(software.needs_of(config("stage=finetune_qlora", "pack=false"))) == {
        "compile", "adapters", "quantized base",
    }  # fmt: skip
    found = {
        row.name: row.result
        for row in software.judge_needs(software.needs_of(config("compile=false", "precision=fp32")))
    }
    assert found["compile"].startswith("no: ") and found.keys() == {"compile", "attention"}
    (found,) = software.judge_needs({"fp8": software.needs_of(config("precision=fp8"))["fp8"]})
    assert found.level is Level.FAIL and "needs a CUDA GPU" in found.result and "precision=bf16" in found.cure
    (found,) = software.judge_needs({"int8": software.needs_of(config("precision=int8_mixed"))["int8_mixed"]})
    assert found.level is Level.OK and "torchao" in found.result


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    files, locked = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
    limits = (*resource.getrlimit(files), resource.getrlimit(locked)[0])
    assert host.read_limits() == dict(zip(("nofile", "hard", "memlock"), limits, strict=True))
    assert host.read_shared()[0] == shutil.disk_usage("/dev/shm").total
    assert any(each.address == "127.0.0.1" for each in network.read_interfaces())
    measured = disk.measure(tmp_path, max_bytes=2 * disk.BLOCK)
    assert measured.write > 0 and measured.read > 0 and list(tmp_path.iterdir()) == []
    assert list(disk.check_writable("output_dir", tmp_path / "not" / "yet")) == []
    assert "takes" not in only(disk.judge_room("room", tmp_path, 2 * GIB, 0, "takes", ""), Level.OK).result


def test_size_and_free_bytes_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free ones are those that a user may take."""
    state = SimpleNamespace(f_blocks=9, f_bfree=7, f_bavail=5, f_frsize=4096, f_bsize=1)
    monkeypatch.setattr(host.os, "statvfs", lambda path: state)
    assert host.read_shared() == (9 * 4096, 5 * 4096)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_a_bug_of_the_probe(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "write", full)
    (row,) = rows_of("speed of output_dir", context_of(f"output_dir={tmp_path}", known_needs=None))
    assert row.level is Level.WARN and "no room" in row.result and "report" not in row.result + row.cure


@pytest.mark.parametrize(("part", "export", "level"), [(3.5, 0, Level.FAIL), (5, 0, Level.OK), (5, 0.5, Level.FAIL)])
def test_room_is_asked_for_one_checkpoint_more_than_are_kept(
    part: float, export: float, level: Level, tmp_path: Path
) -> None:
    """The next one is written before the oldest is deleted."""
    row: Any = None
    free = shutil.disk_usage(tmp_path).free
    known = Needs(row, "", int(free / part), int(free * export), 0)
    context = context_of(f"output_dir={tmp_path}", "checkpoint.keep=3", known_needs=known)
    (found,) = (row for row in rows_of("output_dir", context) if row.name == "room in output_dir")
    assert found.level is level


def test_inodes_suffice_for_the_doctor_as_they_do_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "free_bytes", lambda _: GIB)
    for inodes in (0, 1, LEAST_INODES - 1, LEAST_INODES, None):  # None: this file system has no such limit
        for module in (disk, durable_files):
            monkeypatch.setattr(module, "free_inodes", lambda folder, inodes=inodes: inodes)
        level = Level.OK
        try:
            durable_files.require_room(tmp_path, 1)
        except CheckpointError:
            level = Level.FAIL
        only(disk.judge_room("room", tmp_path, GIB, 1, "it takes", "more"), level)
        assert (level is Level.OK) == (inodes in (LEAST_INODES, None))


@pytest.mark.parametrize(
    ("size", "seconds", "level"), [(1000, 0.5, Level.WARN), (1000, 0.001, Level.OK), (50 << 20, 0.5, Level.OK)]
)
def test_slow_images_are_few_files_and_few_bytes_a_second(
    size: int, seconds: float, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File:
        def read_bytes(self) -> bytes:
            clock[0] += seconds
            return bytes(size)

    clock = [0.0]
    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    files: Any = [File(), File()]
    assert f"{1 / seconds:,.0f} files a second" in only(disk.judge_images("data.images", files), level).result


def test_memory_is_that_of_all_ranks_and_of_their_prepared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    row: Any = SimpleNamespace(bytes={"total": GIB}, host=3 * GIB)
    known = Needs(row, "", 0, 0, GIB)
    words = ["gpus=2", "data.workers=3", "data.prefetch=5"]
    context = context_of(*words, torch=torch_of(), host=machine(), known_needs=known)
    (found,) = rows_of("memory", context)
    assert f"the training on 2 ranks takes {readable(2 * (GIB + PROCESS_BYTES + 15 * GIB))}" in found.result
    context.torch = torch_of(A100, A100)
    (found,) = rows_of("memory", context)
    assert f"takes {readable(2 * (3 * GIB + 15 * GIB))}" in found.result
    monkeypatch.setattr(host, "read_shared", lambda: (64 << 10, lock_bytes(3) + 1))
    (found,) = rows_of("shared memory", context)
    assert found.level is Level.WARN and f"take {readable(2 * lock_bytes(3))};" in found.result


def test_what_a_small_training_needs() -> None:
    """By the planner: two machines hold the weights in smaller parts, and each rank prepares fewer samples."""
    words = ["gpus=2", "sharding=zero3", "export.dtype=bf16"]
    one = context_of(*words, torch=torch_of(cuda=None)).needs
    two = context_of(*words, "nodes=2", "export.enabled=false", torch=torch_of(cuda=None)).needs
    assert two.plan.bytes["total"] < one.plan.bytes["total"] and 0 < two.step < one.step
    assert (one.export > 0, two.export, two.checkpoint) == (True, 0, one.checkpoint)


def test_what_doctor_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ok("a", "fine"),
        warn("b", "slow", "be patient"),
        fail("c", "gone", "look for it"),
        fail("d", "none", "buy"),
    ]
    own = [Check("g", "x", lambda _: rows[:3]), Check("h", "y", lambda _: rows[3:])]
    monkeypatch.setattr("llava_fsdp.doctor.main.CHECKS", own)
    cfg = config()
    with pytest.raises(ConfigError, match=r"^2 of 4 checks fail: c, d$"):
        doctor(replace(cfg, format=Format.json))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["OK"], printed["WARN"], printed["FAIL"]) == (1, 1, 2)
    assert [(row["group"], row["name"], row["level"]) for row in printed["checks"]] == [
        ("g", "a", "OK"), ("g", "b", "WARN"), ("g", "c", "FAIL"), ("h", "d", "FAIL"),
    ]  # fmt: skip
    own[:] = [Check("g", "x", lambda _: rows[:2])]
    doctor(cfg)
    shown = capsys.readouterr().out
    assert "-> be patient" in shown and "1 OK, 1 WARN, 0 FAIL" in shown


def test_the_speed_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "read_speed", lambda handle, most: float(most))
    measured = disk.measure(tmp_path, max_bytes=disk.BLOCK + 1)
    assert measured.read == 2 * disk.BLOCK != measured.write, "whole blocks are written, and all of them read"


def test_room_for_states_is_asked_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all ranks."""
    states, folder = tmp_path / "states", tmp_path / "out"
    states.mkdir()
    folder.mkdir()
    monkeypatch.setattr("llava_fsdp.doctor.checks.free_bytes", lambda place: 6 * GIB if place == states else 3 * GIB)
    monkeypatch.setattr(disk, "judge_speed", lambda *args: ())
    known: Any = Needs(SimpleNamespace(disk=2 * GIB), "", 0, 0, 0)
    words = ["gpus=3", f"output_dir={folder}", "offload=nvme", f"offload.folder={states}"]
    found = only(rows_of("offload.folder", context_of(*words, known_needs=known)), Level.OK)
    assert found.result == f"{states}: 6 GiB free, states take 6 GiB"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 3),
        (["epochs=2"], 6),
        (["epochs=2", "max_steps=5"], 5),
        (["global_batch_size=5"], 1),
        (["data=shapes"], None),
    ],
)
def test_steps_of_a_small_dataset_are_counted(
    words: list[str], steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of an epoch may be short."""
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"id": str(n), "conversations": []} for n in range(5)]))
    cfg = config("data=llava_json", f"data.path={path}", "data.images=null", "epochs=1", "global_batch_size=2", *words)
    assert config_checks.count_steps(cfg) == steps
    monkeypatch.setattr(config_checks, "MOST_COUNTED", path.stat().st_size - 1)
    assert config_checks.count_steps(cfg) == cfg.max_steps, "a large file is not read"


def test_every_file_of_a_list_is_checked_and_counted(tmp_path: Path) -> None:
    """Seven records in two files; a folder among them is not counted, so that the number of steps is not known."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    one, two = tmp_path / "a.json", tmp_path / "b.jsonl"
    one.write_text(json.dumps([{"conversations": turns}] * 4))
    two.write_text(json.dumps({"messages": []}) + "\n" + json.dumps({"messages": []}) + "\n{}\n")
    (tmp_path / "more").mkdir()
    words = ["data=llava_json", "data.images=null", "epochs=1", "global_batch_size=2"]
    cfg = config(*words, f"data.path=[{one},{two}]", "val.every=5", f"++val.sources.v.path=[{two},{one}]")
    assert config_checks.count_steps(cfg) == 4
    assert config_checks.data_paths(cfg)[0] == {
        "data.path[0]": one, "data.path[1]": two, "val.sources.v.path[0]": two, "val.sources.v.path[1]": one,
    }  # fmt: skip
    assert config_checks.count_steps(config(*words, f"data.path=[{one},{tmp_path / 'more'}]")) is None


def test_the_dataset_is_read(tmp_path: Path) -> None:
    records, images = tmp_path / "records.json", tmp_path / "images" / "coco"
    records.write_text("[]" * 100)
    index = tmp_path / "first.json.index"
    assert "or llava-fsdp prepare alone" in only(disk.judge_records("data.path", records, index), Level.OK).result
    index.mkdir()
    assert "index" not in only(disk.judge_records("data.path", records, index), Level.OK).result
    records.write_text("")
    only(disk.judge_records("data.path", records, index), Level.FAIL)
    images.mkdir(parents=True)
    assert "no file" in only(disk.judge_images("data.images", disk.images_in(images.parent)), Level.FAIL).result
    for number in range(5):
        (images / f"{number}.jpg").write_bytes(b"x" * 1000)
    found = disk.images_in(images.parent, max_files=3)
    assert len(found) == 3
    only(disk.judge_images("data.images", found), Level.OK)
    only(disk.judge_images("data.images", [images / "gone.jpg"]), Level.FAIL)


def test_missing_paths_are_told_before_those_that_are_written(tmp_path: Path) -> None:
    """Those of validation only if there is one. An output folder is compared when all paths are there."""
    (tmp_path / "images").mkdir()
    (tmp_path / "records.json").write_text("[]")
    there = f"data.path={tmp_path}/records.json", f"data.images={tmp_path}/images"
    cfg = config("data=llava_json", *there, "val.path=gone.json", f"model.language={tmp_path}", "output_dir=out")
    assert levels(config_checks.judge_paths(cfg)) == {"places": "OK"}
    within = replace(cfg, output_dir=str(tmp_path / "run"))
    assert levels(config_checks.judge_paths(within)) == {"places": "FAIL"}
    validated = replace(within, val=replace(cfg.val, every=1))
    assert levels(config_checks.judge_paths(validated)) == {"val.path": "FAIL"}
    both = replace(validated, data=replace(cfg.data, images="/nowhere"))
    assert levels(config_checks.judge_paths(both)) == {"data.images": "FAIL", "val.path": "FAIL"}
    assert config_checks.data_paths(both) == ({"data.path": tmp_path / "records.json"}, {})


@pytest.mark.slow
def test_paths_that_a_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "records.json").write_text("[]")
    gone = ["data=llava_json", "data.path=gone.json", "data.images=/nowhere"]
    there = [f"data.path={tmp_path}/records.json", f"data.images={tmp_path}/images", "data=llava_json"]
    held_out = [*there, "val.path=gone.json", "val.images=/nowhere"]
    for overrides, expected in (
        ([], {"places": "OK"}),
        (gone, {"data.path": "FAIL", "data.images": "FAIL"}),
        (there, {"places": "OK"}),
        (held_out, {"places": "OK"}),  # nothing is validated
        ([*held_out, "val.every=1"], {"val.path": "FAIL", "val.images": "FAIL"}),
        ([*there, "val.every=1", "+val.sources.few={path: gone.json}"], {"val.sources.few.path": "FAIL"}),
        ([f"model.language={tmp_path}", f"output_dir={tmp_path}/run"], {"places": "FAIL"}),
    ):
        assert levels(config_checks.judge_paths(config(*overrides))) == expected
    assert config_checks.data_paths(config(*there)) == (
        {"data.path": tmp_path / "records.json"}, {"data.images": tmp_path / "images"},
    )  # fmt: skip


def test_parts_of_the_model_on_the_hub(tmp_path: Path) -> None:
    vicuna = config("model=llava_v1_5_7b")

    def found(**environment: str) -> set[str]:
        return set(levels(config_checks.judge_model(vicuna, environment, tmp_path)).values())

    assert (found(), found(HF_HUB_OFFLINE="1")) == ({"WARN"}, {"FAIL"})
    for name in (vicuna.model.language, vicuna.model.vision):
        snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
    assert found() == {"OK"}
    assert config_checks.hub_cache({"HF_HOME": "/big"}) == Path("/big/hub")
    assert config_checks.hub_cache({"HF_HOME": "/big", "HF_HUB_CACHE": "/c"}) == Path("/c")


@pytest.mark.slow
def test_a_model_that_is_too_large_fails_by_the_plan() -> None:
    """The real planner on this machine's CPUs: 13B in full does not fit into them."""
    context = context_of(
        "model=llava_v1_5_13b", "data.max_length=256", "global_batch_size=2", torch=torch_of(cuda=None)
    )
    found = context.needs
    assert found.export == pytest.approx(26.7e9, rel=0.01), "13.35 B parameters in bf16"
    assert found.checkpoint > 150e9 and context.checkpoint_bytes == found.checkpoint
    only(config_checks.judge_plan(found, False), Level.FAIL)


def test_a_folder_without_a_model_is_one_row(tmp_path: Path) -> None:
    """Checks that depend on the model's size report that, or judge without it."""
    (tmp_path / "shapes").mkdir()
    context = context_of(
        "stage=finetune_task", f"model.checkpoint={tmp_path}/shapes", f"output_dir={tmp_path}/out",
        torch=torch_of(cuda=None),
    )  # fmt: skip
    names = "places", "needs", "memory by the plan", "memory", "shared memory", "output_dir", "offload.folder"
    rows = [row for name in names for row in rows_of(name, context)]
    failed = only((row for row in rows if row.level is Level.FAIL), Level.FAIL)
    assert failed.name == "model.checkpoint" and "no config.json" in failed.result and "model folder" in failed.cure
    found = {row.name: row for row in rows}
    assert found["memory by the plan"].cure == "fix model.checkpoint first" and "attention" not in found
    assert "checkpoints" not in found["room in output_dir"].result and "takes" not in found["memory"].result

    (tmp_path / "shapes" / "config.json").write_text('{"model_type": "llama"}')
    (row,) = config_checks.judge_model(context.cfg, {}, tmp_path)
    assert row.level is Level.FAIL and "not know as a vision-language one" in row.result
    (row,) = config_checks.judge_model(config(f"model.checkpoint={__file__}"), {}, tmp_path)
    assert row.level is Level.FAIL and "is not a folder" in row.result


def test_more_ranks_on_a_cpu_than_fit_fail_in_every_row() -> None:
    """Ranks share the memory, so more of them are no cure; no row shows a negative number."""
    usable = Machine(None, "", 16 * GIB // 256, 1.0).usable(256)
    row: Any = SimpleNamespace(bytes={"total": 50 << 20}, usable=usable, fits=False, peak_moment="")
    context = context_of(
        "gpus=256", torch=torch_of(cuda=None), host=machine(memory=16 * GIB, available=16 * GIB),
        needs=Needs(row, "2 CPU cores", 0, 0, 0),
    )  # fmt: skip
    (by_plan,), (memory,) = rows_of("memory by the plan", context), rows_of("memory", context)
    assert by_plan.level is memory.level is Level.FAIL
    assert "50 MiB of 0 B for tensors" in by_plan.result and "-" not in by_plan.result
    assert by_plan.cure.partition("; ")[2].startswith("fewer ranks") and "fewer ranks" in memory.cure
    over = only(config_checks.judge_plan(needs(100 * GIB, 75 * GIB), True), Level.FAIL)
    assert "more gpus" in over.cure


def test_a_probe_that_crashes_or_hangs_is_a_row() -> None:
    def crash(context: DoctorContext) -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    def half(context: DoctorContext) -> Iterable[Finding]:
        yield ok("first", "fine")
        raise ConfigError("gpu=x is not in the table; choose auto")

    def hang(context: DoctorContext) -> Iterable[Finding]:
        yield ok("first", "fine")
        time.sleep(30)

    context = DoctorContext(config())
    (row,) = run_check(Check("g", "n", crash), context)
    assert row.level is Level.WARN and "ZeroDivisionError: by nothing (test_doctor.py:" in row.result and row.cure
    rows = run_check(Check("g", "n", half), context)
    assert [row.level for row in rows] == [Level.OK, Level.FAIL] and rows[1].cure == "choose auto"
    rows = run_check(Check("g", "n", hang, 0.2), context)
    assert [row.level for row in rows] == [Level.OK, Level.FAIL] and "no answer within" in rows[1].result
    assert len({(check.group, check.name) for check in CHECKS}) == len(CHECKS)


def test_network_and_links_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "read_interfaces", lambda: ETHERNET[:1])
    assert {"interfaces", "host name"} <= {row.name for row in rows_of("interfaces", context_of())}
    assert rows_of("links", context_of(torch=SimpleNamespace(devices=[]))) == []


def test_ranks_are_tried_on_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on GPUs only if there are two; more than two all together. One GPU has no links."""
    tried: list[tuple[int, bool]] = []
    monkeypatch.setattr(checks, "try_ranks", lambda count, on_gpus: tried.append((count, on_gpus)) or [])
    monkeypatch.setattr(checks, "output_of", lambda *_: NVLINK)
    links, context = [], context_of()
    for count in range(4):
        context.torch = torch_of(*[A100] * count)
        assert rows_of("2 ranks", context) == rows_of("all GPUs", context) == []
        links.append({row.name for row in rows_of("links", context)})
    assert tried == [(2, False), (2, False), (2, True), (2, True), (3, True)]
    assert links == [set(), set(), {"links", "P2P"}, {"links", "P2P"}]


def test_a_folder_that_cannot_be_written_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room and its speed are not judged. Else the speed is that for a checkpoint of this training."""
    asked: list[Any] = []
    monkeypatch.setattr(disk, "judge_speed", lambda name, folder, size: asked.append((folder, size)) or [])
    row: Any = None
    refused = context_of("output_dir=/proc/none", known_needs=Needs(row, "", 7, 8, 9))
    assert levels(rows_of("output_dir", refused)) == {"output_dir": "FAIL"}
    context = context_of(f"output_dir={tmp_path}/not/yet", known_needs=Needs(row, "", 7, 8, 9))
    assert levels(rows_of("output_dir", context)) == {"room in output_dir": "OK"}
    assert rows_of("speed of output_dir", context) == [] and asked == [(tmp_path, 7)]
    context.__dict__["known_needs"] = None
    assert rows_of("speed of output_dir", context) == [] and asked[1:] == [(tmp_path, 0)]


def test_a_training_is_tried_only_if_its_paths_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of the training, and of a dataset of few steps, are warnings here."""
    monkeypatch.setattr(
        "llava_fsdp.train.setup.preflight.preflight", lambda cfg, device: [f"slow on {device.type}; wait"]
    )
    monkeypatch.setattr(
        "llava_fsdp.train.setup.preflight.few_steps", lambda cfg, steps: [f"{steps} steps are few; add"]
    )
    words = "data=llava_json", f"data.path={tmp_path}/records.json", "data.images=null"
    context = context_of(*words, torch=torch_of(A100))
    assert "FAIL" in levels(rows_of("places", context)).values() and context.is_missing
    assert rows_of("train", context) == []
    (tmp_path / "records.json").write_text(json.dumps([{"id": "a", "conversations": []}]))
    context = context_of(*words, "epochs=3", torch=torch_of(A100))
    assert not any(row.level is Level.FAIL for row in rows_of("places", context)) and not context.is_missing
    assert [(row.level, row.result) for row in rows_of("train", context)] == [
        (Level.WARN, "slow on cuda"), (Level.WARN, "3 steps are few"), (Level.OK, "takes this configuration"),
    ]  # fmt: skip
    context.torch = torch_of()
    monkeypatch.setattr(config_checks, "count_steps", lambda cfg: None)
    assert [row.result for row in rows_of("train", context)] == ["slow on cpu", "takes this configuration"]


def test_each_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one without bf16; one that torch sees and nvidia-smi does not."""
    found = only(judge_precision([A100, V100], "precision=bf16"), Level.FAIL)
    assert "GPU 1 (Tesla V100" in found.result
    assert levels(gpus.judge_gpus([], torch_of(A100))) == {}
    broken = torch_of(A100, {**A100, "error": "it computes wrong products"})
    assert levels(gpus.judge_gpus([], broken)) == {"GPU 1 in use": "FAIL"}
    assert gpus.seen_gpus(parse_smi(SMI), "GPU-d,GPU-d,GPU-a,unknown", None)[0].index == 3
    assert levels(software.judge_environment(dict.fromkeys(software.SLOW, "1"))) == dict.fromkeys(software.SLOW, "WARN")
    off = dict(zip(software.SLOW, ("", "0", "Off", "FALSE", "INFO", "false"), strict=True))
    assert levels(software.judge_environment(off)) == {"environment": "OK"}


@pytest.mark.parametrize(
    ("value", "level"), [("1", "FAIL"), ("yes", "FAIL"), ("0", "WARN"), ("False", "WARN"), ("", "WARN")]
)
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_downloads_that_are_forbidden(variable: str, value: str, level: str, tmp_path: Path) -> None:
    cfg: Any = SimpleNamespace(model=SimpleNamespace(language="a/b", vision="package:tiny-clip", checkpoint=None))
    found = levels(config_checks.judge_model(cfg, {variable: value}, tmp_path))
    assert found == {"model.language": level, "model.vision": "OK"}
    cfg.model.checkpoint = "a/c"
    assert levels(config_checks.judge_model(cfg, {variable: value}, tmp_path)) == {"model.checkpoint": level}


def test_images_are_looked_for_and_read_for_a_short_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            (tmp_path / folder / f"{number}.jpg").write_bytes(b"x")
    assert len(disk.images_in(tmp_path)) == 6 and len(disk.images_in(tmp_path, max_files=5)) == 5
    walk = os.walk

    def slowly(folder: Path) -> Iterable[Any]:
        for found in walk(folder):
            clock[0] += 0.8
            yield found

    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(disk.os, "walk", slowly)
    assert len(disk.images_in(tmp_path)) == 4, "of the folder and two below it"

    class File:
        def read_bytes(self) -> bytes:
            clock[0] += 1.5
            return b"x"

    files: Any = (File() for _ in range(100))
    assert "1 files a second" in only(disk.judge_images("data.images", files), Level.WARN).result
    assert len(list(files)) == 98


def test_ranks_that_take_too_long_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wrote says where they are; one of them has not begun."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nfor folder; do :; done\necho joined > $folder/rank-0\necho $$ > {tmp_path}/pid\nexec sleep 60\n"
    )
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    found = only(collectives.try_ranks(2, False, limit=0.3), Level.FAIL)
    assert found.name == "2 ranks, gloo" and "rank 1 has not started" in found.result
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_text_of_sizes_errors_and_programs() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5 MiB", "3072 GiB"]
    assert result_and_cure(ConfigError("a is wrong; set b")) == ("a is wrong", "set b")
    assert result_and_cure(ConfigError("a is wrong")) == ("a is wrong", "")
    assert result_and_cure(ConfigError("a is wrong; so is b; set both")) == ("a is wrong; so is b", "set both")
    assert output_of(["no-such-program"], 5) is None and output_of(["false"], 5) is None
    assert output_of(["sleep", "20"], 0.1) is None and output_of(["echo", "x"], 5) == "x\n"


HANGS = """import os, pathlib, sys, time
from llava_fsdp.runtime.process.process_end import end_with
end_with(os.getppid())
rank = os.environ["RANK"]
pathlib.Path(sys.argv[1], f"rank-{rank}").write_text("started\\n" + "joined\\n" * (rank == "0"))
time.sleep(60)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_hang_are_named(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    start = time.monotonic()
    found = only(collectives.try_ranks(2, False, limit=20, program=[str(program)]), Level.FAIL)
    assert time.monotonic() - start < 50
    assert found.result == "not done after 20 s: rank 1 has not met the others" and "/etc/hosts" in found.cure
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                assert str(program) not in (entry / "cmdline").read_text()
            except OSError:
                continue


@pytest.mark.ranks
def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise RuntimeError('NCCL error: unhandled system error')")
    found = only(collectives.try_ranks(2, True, program=[str(program)]), Level.FAIL)
    assert "NCCL error: unhandled system error" in found.result and "NCCL_DEBUG" in found.cure


OF_RANK = "[rank1]: RuntimeError: NCCL error: unhandled system error"
OF_TORCHRUN = "ChildFailedError: see above"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["ValueError: first", OF_RANK, "E1 api.py:1] failed (exitcode: 1) local_rank: 1", OF_TORCHRUN], OF_RANK),
        ([OF_RANK, "frame #2: c10d::DistNetworkError::DistNetworkError(std::string) + 0x1f"], OF_RANK),
        (["E1 api.py:1] failed (exitcode: -9) local_rank: 1", OF_TORCHRUN], OF_TORCHRUN),
        (["one", "two"], "two"),
        ([], "no output"),
    ],
)
def test_which_line_says_why(lines: list[str], reason: str) -> None:
    assert collectives.reason("\n".join(lines)) == reason


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_agree_print_nothing(tmp_path: Path) -> None:
    """As docs/doctor.md has them started by hand."""
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = command(*start, "llava_fsdp.doctor.probes.collectives_worker", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    stages = [line.split()[0] for line in (tmp_path / "rank-1").read_text().splitlines()]
    assert stages == [stage for stage in collectives.HANGS if stage]


@pytest.mark.parametrize(("on_gpus", "seen"), [(False, ""), (True, "0,3")])
def test_ranks_over_gloo_see_no_gpu(on_gpus: bool, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's only GPU would be refused to two of them."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ValueError: sees '$CUDA_VISIBLE_DEVICES'\"\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    found = only(collectives.try_ranks(2, on_gpus), Level.FAIL)
    assert f"sees {seen!r}" in found.result


def test_the_slowest_rank_gives_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    lines = [f"printf 'started \\nmeasured {speed} \\n' > $folder/rank-{rank}" for rank, speed in enumerate((9e6, 5e6))]
    python.write_text("\n".join(["#!/bin/sh", "for folder; do :; done", *lines]))
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    assert f"all_reduce at {readable(5e6)}/s" in only(collectives.try_ranks(2, False), Level.OK).result


def test_who_is_stuck() -> None:
    assert (
        "every rank waits in its first all_reduce"
        in collectives.hang_finding("2 ranks", ["joined"] * 2, 60, True).result
    )
    assert (
        "every rank does not end"
        in collectives.hang_finding("2 ranks", ["measured 5e9", "measured 4e9"], 60, True).result
    )
    assert "rank 1, 2 has not started" in collectives.hang_finding("3 ranks", ["joined", "", ""], 60, True).result
    assert (
        "rank 0 waits in all_to_all" in collectives.hang_finding("2 ranks", ["scattered", "exchanged"], 60, True).result
    )
    assert "rank 1 waits for a message" in collectives.hang_finding("2 ranks", ["passed", "exchanged"], 60, True).result
    on_cpu, on_gpus = (
        collectives.hang_finding("2 ranks", ["joined"] * 2, 60, on_gpus).cure for on_gpus in (False, True)
    )
    assert "GLOO" in on_cpu and "NCCL" in on_gpus
    assert (
        collectives.hang_finding("2 ranks", [""] * 2, 60, False).cure
        == collectives.hang_finding("2 ranks", [""] * 2, 60, True).cure
    )


def test_one_wrong_number_of_a_collective_is_an_error() -> None:
    expect(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), "all_gather")
    expect(torch.tensor([3.0, 3.0]), 3.0, "all_reduce")
    with pytest.raises(RuntimeError, match="all_gather"):
        expect(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "all_gather")


def exchange_and_pass(world: World) -> None:
    check_exchange(world)
    check_messages(world)


def exchange_wrongly(world: World) -> None:
    """One number of what rank 1 gets is that of another rank."""
    exchange = dist.all_to_all_single

    def wrong(received: torch.Tensor, sent: torch.Tensor) -> None:
        exchange(received, sent)
        received[0] += world.rank == 1

    dist.all_to_all_single = wrong
    try:
        check_exchange(world)
    finally:
        dist.all_to_all_single = exchange


@pytest.mark.ranks
def test_ranks_exchange_numbers_and_send_messages(pools: dict[int, RankPool]) -> None:
    pools[3].run(exchange_and_pass)
    with pytest.raises(RanksFailed, match="all_to_all returned") as failed:
        pools[3].run(exchange_wrongly)
    assert len(failed.value.kinds) == 1


@pytest.mark.parametrize(("major", "bf16"), [(7, False), (8, True), (9, True)])
def test_what_torch_says_of_a_gpu(major: int, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="X", major=major, minor=5, total_memory=7 * GIB)
    ones, factor = torch.ones, 1
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: factor * ones(*sizes))
    known = {"name": "X", "capability": [major, 5], "memory": 7 * GIB, "bf16": bf16}
    assert torch_probe.facts_of(0) == {**known, "error": ""}
    factor = 2
    assert torch_probe.facts_of(0) == {**known, "error": "it computes wrong products"}


@pytest.mark.e2e
@pytest.mark.slow
def test_doctor_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks really talk; a dataset that is not there fails the command, and nothing else does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.png").write_bytes(b"x" * 100)
    words = ["stage=pretrain", "data=llava_json", "data.path=gone.json", "data.images=.", "format=json"]
    with pytest.raises(ConfigError) as raised:
        doctor(config(*words))
    report = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in report["checks"]}
    failed = [name for name, row in rows.items() if row["level"] == "FAIL"]
    assert failed == ["data.path"] and raised.value.exit_code == 2
    assert str(raised.value) == f"1 of {len(report['checks'])} checks fail: data.path"
    talked = [row for name, row in rows.items() if name.startswith("2 ranks")]
    assert talked[0]["level"] == "OK" and talked[0]["result"].startswith("right sums")
    assert {"Python", "torch", "GPUs", "memory by the plan", "shared memory", "speed of output_dir"} <= set(rows)
    assert not any((tmp_path / name).exists() for name in ("outputs", "data"))
