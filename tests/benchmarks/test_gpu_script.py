"""benchmarks/gpu.sh and what it runs keep what they have measured, whatever fails, hangs or is killed."""

import argparse
import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/bash
[ -z "$SLEEPS" ] || case "$*" in *$SLEEPS*) exec sleep 60 ;; esac
case "$*" in
    *benchmarks/kernels.py*)
        echo '{{"cases": [{{"name": "one", "not_run": "no GPU"}}, {{"name": "two"}}]}}' > "$2/kernels-2026-12-01.json"
        exit 0 ;;
    *benchmarks/memory.py*) echo broken >&2; exit 3 ;;
    *benchmarks/activation_checkpointing.py*) exec sleep 60 ;;
    *benchmarks/strategies.py*) exec sleep 60 ;;
    *benchmarks/*.py* | *-m\\ llava_fsdp* | *-m\\ pytest*) exit 0 ;;
esac
exec {python} "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def folder_of_benchmarks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with two interpreters: `python` lacks torch, `python3` has a torch that is nothing but a name."""
    programs, modules = tmp_path / "bin", tmp_path / "modules"
    programs.mkdir()
    modules.mkdir()
    (programs / "python").write_text("#!/bin/bash\nexit 1\n")
    (programs / "python3").write_text(STUB.format(python=sys.executable))
    for program in programs.iterdir():
        program.chmod(0o755)
    cuda = "class cuda:\n    is_available = staticmethod(lambda: False)\n    device_count = staticmethod(lambda: 0)\n"
    (modules / "torch.py").write_text(f"__version__ = '2.13'\n{cuda}")
    (modules / "transformers.py").write_text("__version__ = '5.17'\n")
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "WHEELS", "LIMIT", "SLEEPS")}
    return kept | {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(modules)}


def run_script(machine: dict[str, str], out: Path, what: str, **variables: str) -> tuple[int, dict[str, Any]]:
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), str(out), what]
    done = subprocess.run(command, env=machine | variables, capture_output=True, text=True, timeout=60, check=False)
    parts = json.loads((out / f"summary-{what}.json").read_text())
    return done.returncode, {part["part"]: (part["state"], part.get("exit_code", part.get("reason"))) for part in parts}


def test_a_part_that_fails_and_one_that_hangs_are_rows(machine: dict[str, str], tmp_path: Path) -> None:
    code, parts = run_script(machine, tmp_path / "out", "memory", LIMIT="1")
    assert code == 1
    assert parts["memory"] == ("failed", 3) and parts["recompute"] == ("over its limit", 124)


def test_parts_after_one_that_hangs_run(machine: dict[str, str], tmp_path: Path) -> None:
    code, parts = run_script(machine, tmp_path / "out", "checks", LIMIT="1")
    assert code == 1
    assert [parts[name][0] for name in ("strategies", "pretrain", "finetune")] == ["over its limit", "done", "done"]


PARTS_OF_BRIEF = ("kernels", "bf16", "fp8", "compiled", "hangs", "train", "resume", "export", "gpu-tests")


def test_brief_goes_on_after_a_part_that_hangs_and_says_what_did_not_run(
    machine: dict[str, str], tmp_path: Path
) -> None:
    code, parts = run_script(machine, tmp_path / "out", "brief", LIMIT="2", SLEEPS="benchmarks/hangs.py")
    assert code == 1
    states = {name: parts[name][0] for name in PARTS_OF_BRIEF}
    assert states.pop("hangs") == "over its limit"
    assert set(states.values()) == {"done"}
    assert parts["kernels: one"] == ("not run", "no GPU") and "kernels: two" not in parts
    assert parts["everything on CUDA"][0] == "not run"
    log = (tmp_path / "out" / "log-brief.txt").read_text()
    assert "NOT RUN         kernels: one: no GPU" in log and "NOT RUN: everything on CUDA: torch sees no" in log


def test_brief_begins_no_part_that_no_time_is_left_for(machine: dict[str, str], tmp_path: Path) -> None:
    """The first part is ended before its own 45 seconds are over, and leaves too little for the others."""
    code, parts = run_script(machine, tmp_path / "out", "brief", BUDGET="20", SLEEPS="benchmarks/kernels.py")
    assert code == 1
    assert parts["kernels"] == ("over its limit", 124)
    others = {parts[name] for name in PARTS_OF_BRIEF[1:]}
    assert others == {("not run", "nothing is left of the 20 s of this call")}


@pytest.mark.parametrize(
    ("what", "sleeps", "done"),
    [("memory", "recompute", ["the real shape", "memory"]), ("brief", "bf16", ["everything on CUDA", "kernels"])],
)
def test_a_script_that_is_killed_leaves_its_rows(
    what: str, sleeps: str, done: list[str], machine: dict[str, str], tmp_path: Path
) -> None:
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), str(tmp_path / "out"), what]
    summary = tmp_path / "out" / f"summary-{what}.json"
    environment = machine | {"LIMIT": "5", "SLEEPS": "benchmarks/speed.py"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        assert script.stdout is not None
        for line in script.stdout:
            if line.startswith(f"== {sleeps}"):
                break
        os.killpg(script.pid, 9)
        script.stdout.read()
    assert [part["part"] for part in json.loads(summary.read_text())][:2] == done


class Stop(BaseException):
    """The process is killed here."""


def result_in(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The one result that a benchmark has written, and its name."""
    paths = list(folder.glob("*.json"))
    assert len(paths) == 1
    return paths[0], json.loads(paths[0].read_text())


def test_memory_writes_every_case_and_names_those_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = importlib.import_module("memory")
    plan = {"moment": "forward", "bytes": {"total": 90}}
    results = iter([{"failed": "no memory"}, {"peak": {"peak_resident": 100, "planned": 90}, "plan": plan}])

    def start_case(*_: object) -> dict[str, Any]:
        for result in results:
            return result
        raise Stop

    monkeypatch.setattr(memory, "start_case", start_case)
    monkeypatch.setattr(sys, "argv", ["memory.py", str(tmp_path), "--cases", "0", "1", "2"])
    with pytest.raises(Stop):
        memory.main()
    _, report = result_in(tmp_path)
    assert [row.get("failed") for row in report["rows"]] == ["no memory", None]
    assert report["error"]["worst"] == pytest.approx(0.1)


@pytest.mark.parametrize(("program", "timeout", "reason"), [("/bin/false", 60, "nothing"), ("sleep", 0.2, "0.2 s")])
def test_a_case_of_memory_that_fails_or_hangs_is_a_row(
    program: str, timeout: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = importlib.import_module("memory")
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", program if program != "sleep" else str(sleeper))
    options = argparse.Namespace(real=True, tiny=True, compiled=False, threads=1, timeout=timeout)
    found = memory.start_case(0, options, tmp_path)
    assert list(found) == ["failed"] and reason in found["failed"]
    assert memory.row_of(memory.CASES_OF_REAL[0], found)["failed"] == found["failed"]


@pytest.mark.parametrize(("total", "precision"), [(80e9, "bf16_pure"), (141e9, "bf16")])
def test_speed_writes_every_way_and_the_precision_of_all(
    total: float, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of 80 GB has no room for fp32 masters of 7B: its result has another name, so that neither replaces the
    other."""
    speed = importlib.import_module("speed")
    given = iter([{"products": {"a": 1.0}}, {"relative": 0.0}, {"failed": "not done"}, {"seconds": [1.0] * 4}])

    def start(*_: object) -> dict[str, Any]:
        for result in given:
            return result
        raise Stop

    monkeypatch.setattr(speed, "start", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(sys, "argv", ["speed.py", str(tmp_path), "--ways", "ours", "transformers"])
    with pytest.raises(Stop):
        speed.main()
    path, report = result_in(tmp_path)
    assert report["work"]["precision"] == precision and f"-{precision}-cuda" in path.name
    assert [row.get("failed") for row in report["ways"]] == ["not done", None]


def test_speed_says_what_ended_it_before_anything_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = importlib.import_module("speed")
    monkeypatch.setattr(speed, "start", lambda what, *_: {"failed": what})
    monkeypatch.setattr(sys, "argv", ["speed.py", str(tmp_path), "--tiny"])
    with pytest.raises(SystemExit):
        speed.main()
    _, report = result_in(tmp_path)
    assert report["ceilings"] == {"failed": "ceilings"} and report["first_loss"] == {"failed": "first_loss"}
    assert not report["ways"]


def test_speed_in_one_process_keeps_each_step_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of the device cannot be measured, the first way fails in its second step, and the process is killed in
    that of the last one. The way between the two, a variant of the first, takes fewer steps to warm up."""
    speed = importlib.import_module("speed")
    found = {"seconds": [2.0], "warmup_seconds": [1.0], "flops": [1e12, 4e12, 9e12], "peak_flops": 4e12}

    def run_child(told: dict[str, Any], keep: Any) -> dict[str, Any]:
        is_move = told["way"] is not None and told["way"]["is_move"]
        assert told["work"]["steps"] == (4 if is_move else 1 + 2) and told["work"]["profile"]
        if is_move:
            return found
        if told["way"] is None:
            raise RuntimeError("no ceilings")
        keep(found)
        raise RuntimeError("broken") if told["way"]["name"] == "bf16" else Stop

    monkeypatch.setattr(speed, "run_child", run_child)
    monkeypatch.setattr(speed, "extend_segments", lambda: None)
    options = ["--brief", "--tiny", "--one-process", "--profile", "--no-first-loss", "--steps", "2", "--name", "few"]
    monkeypatch.setattr(sys, "argv", ["speed.py", str(tmp_path), *options])
    with pytest.raises(Stop):
        speed.main()
    path, report = result_in(tmp_path)
    assert path.name.startswith("few-") and report["first_loss"] == {"not_run": "--no-first-loss"}
    assert report["ceilings"] == {"failed": "RuntimeError: no ceilings"}
    first, move, last = report["ways"]
    assert [row["failed"] for row in (first, last)] == ["RuntimeError: broken", "cut off before its end"]
    assert [row["mfu"] for row in (first, last)] == [0.5, 0.5] and first["of_measured_product"] is None
    assert "failed" not in move and move["mfu"] == 0.5


def test_seconds_by_kind_are_those_of_a_stored_profile() -> None:
    """The stored profile has the kernels of a step of LLaVA-1.5-7B on an H200. Those that add gradients are recognised
    by where they were launched, not by their names."""
    kinds = importlib.import_module("profile_kinds")
    stored = json.loads((ROOT / "benchmarks/results/planner-7b-cuda-2026-11-26.json").read_text())["profile"]
    kernels = {name: t for name, t in stored["device_microseconds"].items() if not name.startswith("aten::")}
    events, at = [], 0.0

    def add(category: str, name: str, begin: float, seconds: float, number: int | None = None) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": seconds, "tid": 7}
        events.append(event | ({} if number is None else {"args": {"correlation": number}}))

    for number, (name, seconds) in enumerate(kernels.items()):
        if "CUDAFunctor_add" in name:
            add("cpu_op", "torch::autograd::AccumulateGrad", 10 * number, 9)
        if "multi_tensor_apply" in name:
            add("user_annotation", "llava_fsdp::optimizer", 10 * number, 9)
        add("cuda_runtime", "cudaLaunchKernel", 10 * number + 1, 2, number)
        add("kernel", name, at, seconds, number)
        at += seconds
    found = kinds.kinds_of(events)
    assert found["of"] == "kernels" and found["busy_seconds"] == pytest.approx(at / 1e6)
    assert sum(found["seconds"].values()) == pytest.approx(found["busy_seconds"])
    assert {kind: round(seconds, 3) for kind, seconds in found["seconds"].items()} == {
        "gradient additions": 0.525, "optimizer": 0.011, "attention": 0.35, "products": 3.064, "copies": 0.031,
        "elementwise": 0.265, "rest": 0.014,
    }  # fmt: skip


def test_seconds_by_kind_without_a_gpu_are_those_of_operations() -> None:
    kinds = importlib.import_module("profile_kinds")
    linear = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(linear.parameters())

    def step() -> None:
        for _ in range(2):  # the second gradient is added to the first
            linear(torch.ones(256, 256)).sum().backward()
        optimizer.step()

    found = kinds.profiled(step, torch.device("cpu"))
    assert found["of"] == "operations" and 0 < found["busy_seconds"] <= found["wall_seconds"]
    assert all(found["seconds"][kind] > 0 for kind in ("products", "gradient additions", "optimizer"))
    assert found["seconds"]["attention"] == 0


def test_kernels_writes_every_case_and_why_one_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("kernels")
    usual, small = kernels.cases, kernels.Bench(torch.device("cpu"), tiny=True)

    def fail() -> dict[str, Any]:
        raise RuntimeError("broken")

    def chosen(_: object) -> Iterator[tuple[str, Any]]:
        of_name = dict(usual(small))
        assert len([name for name in of_name if name.startswith("product, ")]) == 3 * 9
        for name in ("product, 4154 tokens, down, weight gradient", "gradients added, by torch", "attention, cuDNN"):
            yield name, of_name[name]
        yield "another", fail
        raise Stop

    monkeypatch.setattr(kernels, "cases", chosen)
    monkeypatch.setattr(sys, "argv", ["kernels.py", str(tmp_path), "--tiny"])
    with pytest.raises(Stop):
        kernels.main()
    product, added, attention, failed = result_in(tmp_path)[1]["cases"]
    assert product["ms"] > 0 and added["ms of 7B"] > added["ms"]
    assert attention["not_run"] == "needs a GPU, and torch sees none" and failed["failed"] == "RuntimeError: broken"


def test_attention_of_a_row_is_compared_with_each_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that attends across the samples' boundaries is told from one that does not."""
    kernels = importlib.import_module("kernels")
    monkeypatch.setattr(kernels, "HEADS", 2)
    monkeypatch.setattr(kernels, "HEAD", 16)
    monkeypatch.setattr(kernels, "TOKENS", (2000,))
    monkeypatch.setattr(kernels.Bench, "needs_gpu", lambda *_: None)
    small = kernels.Bench(torch.device("cpu"), tiny=True)

    def attend(ends: slice, bench: Any, *row: Any) -> dict[str, Any]:
        *inputs, bounds, longest = row
        lengths = bounds[ends].diff().tolist()
        assert bounds.dtype == torch.int32 and len(bounds) > 2 and longest == max(bounds.diff().tolist())
        output, *gradients = kernels.reference(*inputs, lengths)
        return kernels.timed(bench, output, lambda: None, lambda: gradients)

    right, wrong = (
        kernels.attention(small, lambda *row, ends=ends: attend(ends, *row))
        for ends in (slice(None), slice(0, None, 2))
    )
    assert set(right["errors"].values()) == {0.0}
    assert len(right["lengths"]) == 2 and min(wrong["errors"].values()) > 0.1


def test_hangs_writes_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = importlib.import_module("hangs")
    results = iter([{"name": "a", "failed": "too long"}])

    def run_case(_: str) -> dict[str, Any]:
        for result in results:
            return result
        raise Stop

    monkeypatch.setattr(hangs, "run_case", run_case)
    monkeypatch.setattr(sys, "argv", ["hangs.py", str(tmp_path)])
    with pytest.raises(Stop):
        hangs.main()
    *not_run, first = result_in(tmp_path)[1]["cases"]
    assert first["failed"] == "too long" and [row["name"] for row in not_run] == list(hangs.ON_GPU)
    assert {row["not_run"] for row in not_run} == {"needs a GPU, and torch sees none"}


def test_a_call_that_hangs_is_ended_by_the_watchdog_and_one_that_does_not_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs = importlib.import_module("hangs")
    found = hangs.run_case("sleeping call")
    assert found["ended_by"] == "watchdog" and found["exit_code"] == 75 and found["seconds"] < hangs.ENDED
    monkeypatch.setattr(hangs.sys, "executable", "/bin/false")
    assert hangs.run_case("sleeping call")["failed"].startswith("did not hang within ")


def test_a_step_for_a_gpu_is_pinned_as_training_s_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copies of ours would wait for the host, while the peers' samples lie on the device."""
    speed = importlib.import_module("speed")
    rows = [SimpleNamespace(map=lambda function: function)]
    assert speed.placed(rows, torch.device("cpu")) == rows
    assert speed.placed(rows, torch.device("cuda")) == [torch.Tensor.pin_memory]


def test_a_mode_that_fails_leaves_the_others_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mode fails where it is built, another in a step."""
    measured = importlib.import_module("activation_checkpointing")

    def build(mode: str, *_: object) -> Any:
        if mode == "none":
            raise torch.OutOfMemoryError("no room\nat all")
        return measured.Run(None, None, mode, held=7, losses=[1.0], seconds=[1.0], rises=[3])

    def step(run: Any, _: object) -> None:
        if run.shape == "selective":
            raise RuntimeError("broken")
        run.losses.append(1.0)
        run.seconds.append(2.0)
        run.rises.append(5)

    monkeypatch.setattr(measured, "build", build)
    monkeypatch.setattr(measured, "step", step)
    monkeypatch.setattr(measured, "configure", lambda *_: SimpleNamespace())
    monkeypatch.setattr(measured, "distributed", lambda _: pytest.MonkeyPatch.context())
    options = argparse.Namespace(folder=tmp_path, model=None, tokens=512, repetitions=2)
    options.modes = ["none", "selective", "full"]
    measured.compare(options, tmp_path)
    rows = {row["mode"]: row for row in result_in(tmp_path)[1]["rows"]}
    assert (
        rows["none"]["failed"] == "OutOfMemoryError: no room" and rows["selective"]["failed"] == "RuntimeError: broken"
    )
    assert rows["full"]["peak_bytes"] == 12 and rows["full"]["seconds"] == [2.0, 2.0]


def test_a_case_of_strategies_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = importlib.import_module("strategies")
    results: list[Any] = [SystemExit("losses differ"), ([{"variant": "ddp"}], 2e-6)]

    def run_case(*_: object) -> Any:
        result = results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(strategies, "run_case", run_case)
    report: dict[str, Any] = {"rows": [], "equality": {"fp32_largest_relative_difference": 0.0}}
    case = strategies.Case("pretrain", 4)
    found = [strategies.measured_case(case, None, None, None, report) for _ in range(2)]
    assert isinstance(found[0], SystemExit) and found[1] is None
    failed = {"stage": "pretrain", "accumulation": 4, "failed": "SystemExit: losses differ"}
    assert report["rows"] == [failed, {"variant": "ddp"}]
    assert report["equality"]["fp32_largest_relative_difference"] == 2e-6


@pytest.fixture
def gpu_conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_conftest", ROOT / "tests/gpu/conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_gpu_test_is_a_row_when_it_ends(
    gpu_conftest: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setenv("GPU_TESTS_ROWS", str(rows))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    phases = [("setup", "passed", ""), ("call", "failed", "it broke"), ("teardown", "passed", "")]
    for when, outcome, reason in phases:
        report = pytest.TestReport("a::b", ("a", 0, "b"), {}, outcome, reason, when, duration=1.25)  # type: ignore[arg-type]
        gpu_conftest.pytest_runtest_logreport(report)
    (row,) = [json.loads(line) for line in rows.read_text().splitlines()]
    assert (row["test"], row["outcome"], row["reason"], row["seconds"]) == ("a::b", "failed", "it broke", 1.25)


def test_gpu_tests_import_no_optional_package_when_they_are_collected() -> None:
    """Neither do the files of tests and benchmarks that they import."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {name.split(">")[0].split("=")[0].split("[")[0] for extra in extras.values() for name in extra}
    optional = {name.replace("-", "_") for name in names} - {"pytest"}
    assert {"bitsandbytes", "torchao", "peft", "flash_attn"} <= optional
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = [ROOT / "tests", *(ROOT / path for path in settings["pythonpath"])]
    waiting = [ROOT / "tests/conftest.py", *(ROOT / "tests/gpu").glob("*.py")]
    seen: set[Path] = set()
    found: list[tuple[str, str]] = []
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for name in top_imports(path):
            found += [(path.name, name)] if name in optional else []
            files = [folder / f"{name}.py" for folder in folders]
            waiting += [file for file in files if file.is_file() and file not in seen]
    assert len(seen) > 15 and not found


def top_imports(path: Path) -> set[str]:
    """The packages that importing a file imports: not those that its functions import."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
