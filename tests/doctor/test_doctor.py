"""Every probe on outputs of machines that are not here; what a machine fails on, and that nothing hangs."""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import command
from hydra import compose, initialize_config_dir

from llava_fsdp.config import DoctorConfig, config_dir, load
from llava_fsdp.data.batching.workers import lock_bytes
from llava_fsdp.doctor import collectives, config_checks, disk, gpus, host, network, software
from llava_fsdp.doctor.checks import CHECKS, Check, run_check
from llava_fsdp.doctor.context import Needs, Subject
from llava_fsdp.doctor.findings import Finding, Level, ok, output_of, said_of
from llava_fsdp.doctor.gpus import TorchFacts, parse_links, parse_smi
from llava_fsdp.doctor.network import Interface
from llava_fsdp.plan.hardware import Machine
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.host import Host
from llava_fsdp.runtime.humanize import readable

GIB = 1 << 30


def config(*overrides: str) -> DoctorConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(DoctorConfig, compose("doctor", list(overrides)))


def levels(found: Iterable[Finding]) -> dict[str, str]:
    found = list(found)
    for finding in found:
        assert bool(finding.cure) == (finding.level is not Level.OK), finding
        assert "\n" not in finding.cure
    return {finding.name: finding.level.value for finding in found}


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


def torch_of(*devices: dict[str, Any], **more: Any) -> TorchFacts:
    known = {"version": "2.13.0", "cuda": "12.8", "hip": None, "nccl": "2.27.3", "available": bool(devices)}
    return TorchFacts(**{**known, "devices": list(devices), "no_peers": [], **more})


def test_gpus_as_the_driver_tells() -> None:
    found = parse_smi(SMI)
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert found[1].used == 40000 << 20 and found[2].mig and found[2].ecc_errors == 0 and found[3].ecc_errors == 17
    judged = levels(gpus.judge_gpus(found, torch_of(A100, A100, {**A100, "error": "CUDA error: unspecified"}, V100)))
    assert judged == {
        "GPU 0": "OK", "GPU 1": "WARN", "GPU 2": "WARN", "GPU 3": "FAIL", "GPU 2 in use": "FAIL",
        "kinds of GPU": "WARN",
    }  # fmt: skip
    assert levels(gpus.judge_gpus([], torch_of())) == {"GPUs": "OK"}
    assert parse_smi("") == []


@pytest.mark.parametrize(
    ("visible", "wanted", "seen"),
    [
        (None, None, [0, 1, 2, 3]),
        (None, 2, [0, 1]),
        ("3,1", None, [3, 1]),
        ("3,1", 1, [3]),
        ("GPU-d", None, [3]),
        ("0,-1,1", None, [0]),
        ("", None, []),
        ("MIG-x", None, [2]),
    ],
)
def test_only_gpus_that_ranks_run_on_are_judged(
    visible: str | None, wanted: int | None, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others do on the rest of the machine is no matter."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    subject = Subject(config(f"gpus={wanted or 'null'}"))
    subject.__dict__ |= {
        "smi": parse_smi(SMI),
        "torch": torch_of(*[A100] * (wanted or len(seen))),
        "needs": needs(50 * GIB, 50 * GIB),
    }
    (check,) = (check for check in CHECKS if check.name == "GPUs")
    judged = [row.name for row in run_check(check, subject) if row.name.startswith("GPU ")]
    assert judged == [f"GPU {index}" for index in seen]
    (check,) = (check for check in CHECKS if check.name == "memory by the plan")
    assert any("GPU 1: " in row.said for row in run_check(check, subject)) == (1 in seen)


def test_torch_against_the_driver() -> None:
    there = parse_smi(SMI)[:2]
    assert "NCCL 2.27.3" in only(gpus.judge_torch(torch_of(A100), there, None), Level.OK).said
    only(gpus.judge_torch(torch_of(cuda=None), [], None), Level.OK)
    built = only(gpus.judge_torch(torch_of(cuda=None), there, None), Level.FAIL)
    assert "2 GPUs, which it cannot use" in built.said
    old = only(gpus.judge_torch(torch_of(), there, None), Level.FAIL)
    assert old.cure.startswith("update the driver (550.54.15) to one for CUDA 12.8")
    only(gpus.judge_torch(torch_of(), there, ""), Level.WARN)
    only(gpus.judge_torch(torch_of(error="hangs"), there, None), Level.FAIL)


NVLINK = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-23
GPU1\tNV12\t X \tNV12\tSYS\t0-23
GPU2\tSYS\tNV12\t X \tSYS\t24-47
NIC0\tPXB\tSYS\tSYS\t X \t

Legend:
"""


def test_links_between_gpus() -> None:
    assert parse_links(NVLINK) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "NV12"}
    three = torch_of(A100, A100, A100)
    mixed = list(gpus.judge_links(NVLINK, three))
    assert levels(mixed) == {"links": "WARN", "P2P": "OK"} and "GPUs 0-2 have no NVLink" in mixed[0].said
    assert levels(gpus.judge_links(NVLINK.replace("SYS", "NV12"), three))["links"] == "OK"
    assert levels(gpus.judge_links(NVLINK.replace("NV12", "PHB"), three))["links"] == "WARN"
    apart = list(gpus.judge_links(None, torch_of(A100, A100, no_peers=[[0, 1]])))
    assert levels(apart) == {"P2P": "WARN"} and "0-1" in apart[0].said
    assert list(gpus.judge_links(NVLINK, torch_of(A100))) == []


def test_ranks_against_gpus() -> None:
    only(gpus.judge_count(2, torch_of(A100, A100), {}), Level.OK)
    only(gpus.judge_count(8, torch_of(), {}), Level.OK)
    few = only(gpus.judge_count(8, torch_of(A100), {"CUDA_VISIBLE_DEVICES": "0"}), Level.FAIL)
    assert "CUDA_VISIBLE_DEVICES=0" in few.said


def test_packages_in_the_declared_versions() -> None:
    declared = ["torch<2.16,>=2.11", "numpy>=1.26", "peft>=0.17; extra == 'lora'", "gone>=1"]
    found = {"torch": "2.9.1+cu128", "numpy": "2.4.6"}
    assert levels(software.judge_packages(declared, found.get)) == {"torch": "FAIL", "gone": "FAIL"}
    found = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "gone": "1"}
    assert levels(software.judge_packages(declared, found.get)) == {"packages": "OK"}
    only(software.judge_python((3, 13, 0)), Level.FAIL)
    only(software.judge_python((3, 12, 1)), Level.OK)
    (extras,) = software.judge_optional({"peft": "0.21"}.get)
    assert extras.said.startswith("peft 0.21; not there: flash-attn")


def test_what_a_configuration_needs_is_asked_each_in_its_turn() -> None:
    def missing() -> str:
        raise ConfigError("adapters (model.lora) need peft, which cannot be imported (gone): pip install 'x[lora]'")

    found = list(software.judge_needs({"adapters": missing, "attention": lambda: "varlen: torch's varlen_attn"}))
    assert levels(found) == {"adapters": "FAIL", "attention": "OK"} and found[0].cure == "pip install 'x[lora]'"
    assert set(software.needs_of(config("stage=finetune_lora"))) == {"compile", "attention", "adapters"}
    assert set(software.needs_of(config("stage=finetune_qlora", "pack=false"))) == {
        "compile", "adapters", "quantized base",
    }  # fmt: skip
    fp8 = software.needs_of(config("precision=fp8"))["fp8"]
    (found,) = software.judge_needs({"fp8": fp8})
    assert found.level is Level.FAIL and "needs a CUDA GPU" in found.said and "precision=bf16" in found.cure


def test_variables_that_cost_speed() -> None:
    found = software.judge_environment({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "0", "HOME": "/"})
    assert only(found, Level.WARN).cure == "unset NCCL_P2P_DISABLE"
    only(software.judge_environment({}), Level.OK)


def machine(**more: Any) -> Host:
    known = {"cores": 16, "quota": None, "memory": 64 * GIB, "available": 60 * GIB, "limit": None, "used": 0}
    return Host(**{**known, **more})


def test_cores_and_memory_of_a_container() -> None:
    only(host.judge_cores(machine(), 8, None), Level.OK)
    only(host.judge_cores(machine(quota=4.0), 8, None), Level.WARN)
    assert only(host.judge_cores(machine(), 8, 4), Level.WARN).cure.startswith("data.workers=1: more workers than")
    only(host.judge_memory(machine(), 0, ""), Level.OK)
    only(host.judge_memory(machine(), 58 * GIB, "what is offloaded"), Level.WARN)
    only(host.judge_memory(machine(limit=32 * GIB), 58 * GIB, "what is offloaded"), Level.FAIL)


def test_shared_memory_and_limits() -> None:
    small = only(host.judge_shared(64 << 10, 60 << 10, 2 * lock_bytes(2), several=False), Level.WARN)
    assert "--shm-size" in small.cure and "data.workers=0" in small.said
    only(host.judge_shared(64 << 10, 60 << 10, lock_bytes(0), several=False), Level.OK)
    only(host.judge_shared(64 << 20, 60 << 20, lock_bytes(8), several=False), Level.OK)
    only(host.judge_shared(64 << 20, 60 << 20, 0, several=True), Level.WARN)
    only(host.judge_shared(8 * GIB, 8 * GIB, lock_bytes(4), several=True), Level.OK)
    limits = {"nofile": 1024, "hard": 1 << 20, "memlock": 8 << 20}
    found = list(host.judge_limits(limits, has_infiniband=True))
    assert levels(found) == {"open files": "WARN", "locked memory": "WARN"}
    assert found[0].cure == "ulimit -n 65536 before the start"
    capped = next(host.judge_limits({**limits, "hard": 1024}, has_infiniband=False))
    assert capped.cure.startswith("docker run --ulimit")
    free = {"nofile": -1, "hard": -1, "memlock": -1}
    assert set(levels(host.judge_limits(free, has_infiniband=True)).values()) == {"OK"}
    assert set(host.read_limits()) == set(limits) and host.read_shared()[0] > 0


def test_speed_of_a_folder_leaves_nothing(tmp_path: Path) -> None:
    speed = disk.measure(tmp_path, most=2 * disk.BLOCK)
    assert speed.write > 0 and speed.read > 0
    assert list(tmp_path.iterdir()) == []

    def judged(write: float) -> Iterable[Finding]:
        return disk.judge_speed("speed", tmp_path, 10**9, lambda _: disk.Speed(write, 1e9))

    only(judged(1e6), Level.WARN)
    assert "10 s a checkpoint" in only(judged(1e8), Level.OK).said
    assert only(disk.judge_room("room", tmp_path, GIB, 2 * GIB, "takes", "make room"), Level.FAIL).cure == "make room"
    only(disk.judge_room("room", tmp_path, 2 * GIB, GIB, "takes", ""), Level.OK)
    assert "takes" not in only(disk.judge_room("room", tmp_path, 2 * GIB, 0, "takes", ""), Level.OK).said
    assert list(disk.check_writable("output_dir", tmp_path / "not" / "yet")) == []
    only(disk.check_writable("output_dir", Path("/proc/none")), Level.FAIL)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_bug_of_the_probe(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "write", full)
    subject = Subject(config(f"output_dir={tmp_path}"))
    subject.__dict__["known_needs"] = None
    (check,) = (own for own in CHECKS if own.name == "speed of output_dir")
    (row,) = run_check(check, subject)
    assert row.level is Level.WARN and "no room" in row.said and "report" not in row.said + row.cure


@pytest.mark.parametrize(("part", "level"), [(3.5, Level.FAIL), (5, Level.OK)])
def test_room_is_asked_for_one_checkpoint_more_than_are_kept(part: float, level: Level, tmp_path: Path) -> None:
    """The next one is written before the oldest goes."""
    subject = Subject(config(f"output_dir={tmp_path}", "checkpoint.keep=3"))
    row: Any = None
    subject.__dict__["known_needs"] = Needs(row, "", int(shutil.disk_usage(tmp_path).free / part), 0, 0)
    (check,) = (own for own in CHECKS if own.name == "output_dir")
    (found,) = (own for own in run_check(check, subject) if own.name == "room in output_dir")
    assert found.level is level


def test_the_dataset_is_read(tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text("[]" * 100)
    assert "no index yet" in only(disk.judge_records("data.path", tmp_path / "records.json"), Level.OK).said
    (tmp_path / "records.json.index").mkdir()
    assert "index" not in only(disk.judge_records("data.path", tmp_path / "records.json"), Level.OK).said
    (tmp_path / "empty.json").touch()
    only(disk.judge_records("data.path", tmp_path / "empty.json"), Level.FAIL)
    pictures = tmp_path / "images" / "coco"
    pictures.mkdir(parents=True)
    assert "no file" in only(disk.judge_pictures("data.images", disk.pictures_in(tmp_path / "images")), Level.FAIL).said
    for number in range(5):
        (pictures / f"{number}.jpg").write_bytes(b"x" * 1000)
    found = disk.pictures_in(tmp_path / "images", most=3)
    assert len(found) == 3
    only(disk.judge_pictures("data.images", found), Level.OK)
    only(disk.judge_pictures("data.images", [pictures / "gone.jpg"]), Level.FAIL)


ETHERNET = [Interface("lo", "127.0.0.1", True, None), Interface("eth0", "10.0.0.7", True, 25000)]


def test_interfaces_and_names() -> None:
    assert "eth0 10.0.0.7 (25 Gb/s)" in only(network.judge_interfaces(ETHERNET, {}, {}, 2), Level.OK).said
    for chosen, level in (("eth", Level.OK), ("ib0", Level.FAIL), ("^docker", Level.OK), ("=eth", Level.FAIL)):
        only(network.judge_interfaces(ETHERNET, {}, {"NCCL_SOCKET_IFNAME": chosen}, 1), level)
    only(network.judge_interfaces(ETHERNET, {}, {"GLOO_SOCKET_IFNAME": "eth"}, 1), Level.FAIL)
    only(network.judge_interfaces(ETHERNET[:1], {}, {}, 1), Level.OK)
    only(network.judge_interfaces(ETHERNET[:1], {}, {}, 2), Level.FAIL)
    ports = {"mlx5_0:1": "4: ACTIVE", "mlx5_1:1": "1: DOWN"}
    assert levels(network.judge_interfaces(ETHERNET, ports, {}, 1)) == {"interfaces": "OK", "InfiniBand": "WARN"}
    only(network.judge_name("a", None, 1), Level.WARN)
    only(network.judge_name("a", None, 2), Level.FAIL)
    only(network.judge_name("a", "127.0.1.1", 1), Level.OK)
    only(network.judge_name("a", "127.0.1.1", 2), Level.FAIL)
    assert any(own.address == "127.0.0.1" for own in network.read_interfaces())


def test_places_and_parts_of_the_model(tmp_path: Path) -> None:
    assert levels(config_checks.judge_places(config())) == {"places": "OK"}
    gone = config("data=llava_json", "data.path=gone.json", "data.images=/nowhere")
    assert levels(config_checks.judge_places(gone)) == {"data.path": "FAIL", "data.images": "FAIL"}
    (tmp_path / "images").mkdir()
    (tmp_path / "records.json").write_text("[]")
    there = [f"data.path={tmp_path}/records.json", f"data.images={tmp_path}/images", "data=llava_json"]
    assert levels(config_checks.judge_places(config(*there))) == {"places": "OK"}
    assert config_checks.data_paths(config(*there)) == (
        {"data.path": tmp_path / "records.json"}, {"data.images": tmp_path / "images"},
    )  # fmt: skip
    held_out = [*there, "val.path=gone.json", "val.images=/nowhere"]
    assert levels(config_checks.judge_places(config(*held_out))) == {"places": "OK"}, "nothing is validated"
    absent = {"val.path": "FAIL", "val.images": "FAIL"}
    assert levels(config_checks.judge_places(config(*held_out, "val.every=1"))) == absent
    several = [*there, "val.every=1", "+val.sources.few={path: gone.json}"]
    assert levels(config_checks.judge_places(config(*several))) == {"val.sources.few.path": "FAIL"}
    inside = config("model.language=" + str(tmp_path), f"output_dir={tmp_path}/run")
    assert "places" in levels(config_checks.judge_places(inside))

    vicuna = config("model=llava_v1_5_7b")
    assert set(levels(config_checks.judge_model(vicuna, {}, tmp_path)).values()) == {"WARN"}
    assert set(levels(config_checks.judge_model(vicuna, {"HF_HUB_OFFLINE": "1"}, tmp_path)).values()) == {"FAIL"}
    for name in (vicuna.model.language, vicuna.model.vision):
        snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
    assert set(levels(config_checks.judge_model(vicuna, {}, tmp_path)).values()) == {"OK"}
    assert config_checks.hub_cache({"HF_HOME": "/big"}) == Path("/big/hub")
    assert config_checks.hub_cache({"HF_HOME": "/big", "HF_HUB_CACHE": "/c"}) == Path("/c")


def needs(total: int, usable: int) -> Needs:
    row: Any = SimpleNamespace(bytes={"total": total}, usable=usable, fits=total <= usable, moment="in the update")
    return Needs(row, "A100", 0, 0, 0)


def test_memory_by_the_plan() -> None:
    only(config_checks.judge_plan(needs(70 * GIB, 75 * GIB), True), Level.OK)
    over = only(config_checks.judge_plan(needs(100 * GIB, 75 * GIB), True), Level.FAIL)
    assert "100 GiB of 75 GiB" in over.said and "llava_fsdp.plan" in over.cure
    assert list(config_checks.judge_taken(needs(70 * GIB, 75 * GIB), {0: 80 * GIB, 1: 79 * GIB})) == []
    taken = only(config_checks.judge_taken(needs(70 * GIB, 75 * GIB), {2: 80 * GIB, 5: 40 * GIB}), Level.FAIL)
    assert "GPU 5: 40 GiB" in taken.said
    only(config_checks.judge_bf16(config(), [V100]), Level.FAIL)
    only(config_checks.judge_bf16(config("precision=fp16"), [V100]), Level.OK)
    only(config_checks.judge_bf16(config(), [A100]), Level.OK)


def test_a_model_that_is_too_large_fails_by_the_plan() -> None:
    """The real planner, on this machine's CPUs: 13B in full does not fit into them."""
    subject = Subject(config("model=llava_v1_5_13b", "data.max_length=256", "global_batch_size=2"))
    subject.__dict__["torch"] = torch_of(cuda=None)
    found = subject.needs
    assert found.export == pytest.approx(26.7e9, rel=0.01), "13.35 B parameters in bf16"
    assert found.checkpoint > 150e9 and subject.checkpoint == found.checkpoint
    only(config_checks.judge_plan(found, False), Level.FAIL)


def test_a_folder_without_a_model_is_one_row(tmp_path: Path) -> None:
    """What depends on the model's size says so, or is judged without it."""
    (tmp_path / "shapes").mkdir()
    subject = Subject(
        config("stage=finetune_task", f"model.checkpoint={tmp_path}/shapes", f"output_dir={tmp_path}/out")
    )
    subject.__dict__["torch"] = torch_of(cuda=None)
    asked = {"places", "needs", "memory by the plan", "memory", "shared memory", "output_dir", "offload.folder"}
    rows = [row for check in CHECKS if check.name in asked for row in run_check(check, subject)]
    failed = only((row for row in rows if row.level is Level.FAIL), Level.FAIL)
    assert (failed.name, "no config.json" in failed.said) == (
        "model.checkpoint",
        True,
    ) and "model folder" in failed.cure
    found = {row.name: row for row in rows}
    assert found["memory by the plan"].cure == "mend model.checkpoint first" and "attention" not in found
    assert "checkpoints" not in found["room in output_dir"].said and "takes" not in found["memory"].said

    (tmp_path / "shapes" / "config.json").write_text('{"model_type": "llama"}')
    (row,) = config_checks.judge_model(subject.cfg, {}, tmp_path)
    assert row.level is Level.FAIL and "not a LLaVA one" in row.said
    (row,) = config_checks.judge_model(config(f"model.checkpoint={__file__}"), {}, tmp_path)
    assert row.level is Level.FAIL and "is no folder" in row.said


def test_more_ranks_on_a_cpu_than_fit_fail_in_every_row() -> None:
    """Ranks share the memory, so more of them are no cure; no row shows less than nothing."""
    subject = Subject(config("gpus=256"))
    subject.__dict__["torch"] = torch_of(cuda=None)
    subject.__dict__["host"] = machine(memory=16 * GIB, available=16 * GIB)
    row: Any = SimpleNamespace(
        bytes={"total": 50 << 20}, usable=Machine(None, "", 16 * GIB // 256, 1.0).usable(256), fits=False, moment=""
    )
    subject.__dict__["needs"] = Needs(row, "2 CPU cores", 0, 0, 0)
    rows = {row.name: row for check in CHECKS if "memory" in check.name for row in run_check(check, subject)}
    by_plan, memory = rows["memory by the plan"], rows["memory"]
    assert by_plan.level is memory.level is Level.FAIL
    assert "50 MiB of 0 B for tensors" in by_plan.said and "-" not in by_plan.said
    assert by_plan.cure.partition("; ")[2].startswith("fewer ranks") and "fewer ranks" in memory.cure
    over = only(config_checks.judge_plan(needs(100 * GIB, 75 * GIB), True), Level.FAIL)
    assert "more gpus" in over.cure


def test_a_probe_that_crashes_or_hangs_is_a_row() -> None:
    def crash(subject: Subject) -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    def half(subject: Subject) -> Iterable[Finding]:
        yield ok("first", "fine")
        raise ConfigError("gpu=x is not in the table; choose auto")

    def hang(subject: Subject) -> Iterable[Finding]:
        yield ok("first", "fine")
        time.sleep(30)

    subject = Subject(config())
    (row,) = run_check(Check("g", "n", crash), subject)
    assert row.level is Level.WARN and "ZeroDivisionError: by nothing (test_doctor.py:" in row.said and row.cure
    rows = run_check(Check("g", "n", half), subject)
    assert [row.level for row in rows] == [Level.OK, Level.FAIL] and rows[1].cure == "choose auto"
    rows = run_check(Check("g", "n", hang, 0.2), subject)
    assert [row.level for row in rows] == [Level.OK, Level.FAIL] and "no answer within" in rows[1].said
    assert len({(check.group, check.name) for check in CHECKS}) == len(CHECKS)


def test_words() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5 MiB", "3072 GiB"]
    assert said_of(ConfigError("a is wrong; set b")) == ("a is wrong", "set b")
    assert said_of(ConfigError("a is wrong")) == ("a is wrong", "")
    assert output_of(["no-such-program"], 5) is None and output_of(["false"], 5) is None
    assert output_of(["sleep", "20"], 0.1) is None and output_of(["echo", "x"], 5) == "x\n"


HANGS = """import os, pathlib, sys, time
from llava_fsdp.runtime.process_end import end_with
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
    assert found.said == "not done after 20 s: rank 1 has not met the others" and "/etc/hosts" in found.cure
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
    assert "NCCL error: unhandled system error" in found.said and "NCCL_DEBUG" in found.cure


@pytest.mark.ranks
def test_ranks_that_agree_say_nothing(tmp_path: Path) -> None:
    """As docs/doctor.md has them started by hand."""
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = command(*start, "llava_fsdp.doctor.collectives_worker", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "measured" in (tmp_path / "rank-1").read_text()


@pytest.mark.parametrize(("on_gpus", "seen"), [(False, ""), (True, "0,3")])
def test_ranks_over_gloo_see_no_gpu(on_gpus: bool, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's only GPU would be refused to two of them."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ValueError: sees '$CUDA_VISIBLE_DEVICES'\"\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    found = only(collectives.try_ranks(2, on_gpus), Level.FAIL)
    assert f"sees {seen!r}" in found.said


def test_who_is_stuck() -> None:
    assert "every rank waits in its first all_reduce" in collectives.stuck("2 ranks", ["joined"] * 2, 60, True).said
    assert "rank 1, 2 has not started" in collectives.stuck("3 ranks", ["joined", "", ""], 60, True).said
    assert (
        collectives.stuck("2 ranks", ["joined"] * 2, 60, False).cure
        != collectives.stuck("2 ranks", ["joined"] * 2, 60, True).cure
    )


@pytest.mark.e2e
def test_doctor_of_this_machine(tmp_path: Path) -> None:
    """The whole command: two ranks really talk; a dataset that is not there fails it, and nothing else does."""
    (tmp_path / "one.png").write_bytes(b"x" * 100)
    done = command(
        "llava_fsdp.doctor", "stage=pretrain", "data=llava_json", "data.path=gone.json", "data.images=.",
        "format=json", cwd=tmp_path, timeout=400,
    )  # fmt: skip
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["checks"]}
    failed = [name for name, row in rows.items() if row["level"] == "FAIL"]
    assert failed == ["data.path"] and done.returncode == 2, done.stderr
    assert f"1 of {len(said['checks'])} checks fail: data.path" in done.stderr and "Traceback" not in done.stderr
    talked = [row for name, row in rows.items() if name.startswith("2 ranks")]
    assert talked[0]["level"] == "OK" and talked[0]["said"].startswith("right sums")
    assert {"Python", "torch", "GPUs", "memory by the plan", "shared memory", "speed of output_dir"} <= set(rows)
    assert not any((tmp_path / name).exists() for name in ("outputs", "data"))
