"""`profile=true` writes traces that say where time went; without it nothing is recorded."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from harness import CPU, RankPool, World
from small import Configure, make_config
from steps import begin

from llava_fsdp.config import Config
from llava_fsdp.report.profile.profile_page import profile_page
from llava_fsdp.report.profile.profile_trace import (
    CATEGORIES,
    Times,
    TraceError,
    difference,
    intersection,
    merge_spans,
    times_of,
)
from llava_fsdp.runtime.errors import ConfigError, StorageError
from llava_fsdp.train import main as train
from llava_fsdp.train.events.profiler import StepProfiler, open_profiler
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup import build_state

PROFILE = "profile=true", "profile_steps=[2,3]", "micro_batch_size=6", "pack=false"


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_and_without(configure: Configure, tmp_path: Path) -> None:
    """The same run to the bit, and a folder more."""
    for name, overrides in (("on", PROFILE), ("off", PROFILE[2:])):
        train.train(configure(*overrides, to=name))
    assert not (tmp_path / "off" / "profile").exists()
    with_, without_ = ([(r["loss"], r["grad_norm"]) for r in rows(tmp_path / n)] for n in ("on", "off"))
    assert with_ == without_ and len(with_) == 4
    folder = tmp_path / "on" / "profile"
    times = times_of(folder / "rank-0.trace.json.gz")
    assert len(times.steps) == 2 and not times.on_device
    for step in times.steps:
        assert set(step) == set(CATEGORIES) and all(seconds >= -1e-9 for seconds in step.values())
        assert step["communication"] == 0
        assert all(step[name] > 0 for name in ("data", "forward", "backward", "optimizer", "host gaps"))
    with gzip.open(folder / "rank-0.trace.json.gz", "rt") as file:
        names = [e["name"] for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    assert names.count("llava_fsdp::forward") == names.count("llava_fsdp::backward") == 4  # two micro-batches each
    page = (folder / "rank-0.html").read_text()
    sizes = 2  # of a wide window and of a narrow one
    assert all(name in page for name in CATEGORIES) and page.count("<rect") == sizes * 2 * len(CATEGORIES)
    assert "aten::" in page
    for number in (2, 3):
        assert f">step {number}</text>" in page and f"<title>step {number}, forward: " in page
    assert page.count(" ms</text>") == sizes * 2 and ">0</text>" in page and "src=" not in page


def recorded(world: World, parts: Path, dataset: Path, folder: Path) -> list[dict[str, float]]:
    cfg = make_config(parts, dataset, folder, *PROFILE[:2], "sharding=zero3")
    folder.mkdir(exist_ok=True)
    state = begin(world, cfg)
    fit(state, cfg, StepProfiler(cfg, (2, 3), world.rank, world.device))
    return times_of(folder / "profile" / f"rank-{world.rank}.trace.json.gz").steps


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_talk_to_each_other(pools: dict[int, RankPool], parts: Path, dataset: Path, tmp_path: Path) -> None:
    for steps in pools[2].run(recorded, parts, dataset, tmp_path / "run", timeout=120):
        assert all(step["communication"] > 0 for step in steps)
    assert len(list((tmp_path / "run" / "profile").glob("rank-*.html"))) == 2


def test_steps_that_do_not_come_are_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the door where max_steps says how many there are, else before weights are looked for."""
    keys = "profile=true", "profile_steps=[10,12]"
    with pytest.raises(
        ConfigError, match=r"profile_steps=\[10, 12\]: this run has 4 steps; name earlier ones, or null"
    ):
        configure(*keys)
    monkeypatch.delattr(build_state, "find_sources")
    with pytest.raises(ConfigError, match=r"profile_steps=\[10, 12\]: this run has 4 steps"):
        train.train(configure(*keys, "max_steps=null", "epochs=1"))
    assert not configure("profile_steps=[10,12]").profile, "nobody is to record them"
    with pytest.raises(ConfigError, match=r"profile_steps=\[3, 2\] must be .* or null"):
        configure("profile_steps=[3,2]")


def opened(cfg: Config, done: int, total: int) -> tuple[int, int] | None:
    recorder = open_profiler(cfg, 0, CPU, done, total)
    return None if recorder is None else (recorder.first, recorder.last)


def test_which_steps_are_recorded(configure: Configure) -> None:
    """Three of any start where none are named; a restart near the end does without those that are."""
    named = configure("profile=true", "profile_steps=[2,4]", "max_steps=9")
    assert (opened(named, 0, 9), opened(named, 5, 9), opened(named, 6, 9)) == ((2, 4), (2, 4), None)
    usual = configure("profile=true")
    found = [opened(usual, 0, total) for total in (1, 2, 3, 11, 12, 500)]
    assert found == [(1, 1), (2, 2), (2, 3), (9, 11), (10, 12), (10, 12)]
    assert opened(usual, 498, 500) == (2, 2) and opened(usual, 500, 500) is None
    assert opened(configure(), 0, 500) is None


WHOLE = gzip.compress(b'{"traceEvents": [{"ph": "X", "na', mtime=0)


@pytest.mark.parametrize("content", [WHOLE, WHOLE[:30], b""])
def test_a_trace_that_was_cut_short_is_said_to_be(
    content: bytes, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch.profiler.profile.export_chrome_trace", lambda profiler, name: Path(name).write_bytes(content)
    )
    recorder = StepProfiler(configure(), (2, 2), 0, CPU)
    with pytest.raises(StorageError, match=r"rank-0.trace.json.gz was not written to its end .*profile=false"):
        for number in (1, 2, 3):
            recorder.begin(number)
    with pytest.raises(TraceError, match="holds no step"):
        times(tmp_path)


def test_a_run_that_ends_early_writes_no_trace(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = StepProfiler(configure(*PROFILE[:2]), (2, 3), 0, CPU)
    recorder.begin_next()
    recorder.begin_next()
    assert torch.autograd._profiler_enabled()
    recorder.close()
    assert not torch.autograd._profiler_enabled() and not (tmp_path / "profile").exists()
    assert "the run has ended before step 3" in caplog.text


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def times(tmp_path: Path, *events: dict) -> Times:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "other"}, *events]}, file)
    return times_of(path)


PARTS = (
    event("ProfilerStep#1", "user_annotation", 0, 1000),
    event("llava_fsdp::data", "user_annotation", 0, 100),
    event("llava_fsdp::forward", "user_annotation", 100, 300),
    event("llava_fsdp::backward", "user_annotation", 400, 300),
    event("llava_fsdp::optimizer", "user_annotation", 700, 200),
)


def test_on_a_gpu_kernels_count_where_they_were_launched(tmp_path: Path) -> None:
    found = times(
        tmp_path, *PARTS,
        event("cudaLaunchKernel", "cuda_runtime", 150, 5, correlation=1),
        event("gemm", "kernel", 200, 250, tid=7, correlation=1),  # still runs when the backward pass has begun
        event("cudaLaunchKernel", "cuda_runtime", 450, 5, tid=2, correlation=2),
        event("gemm", "kernel", 460, 240, tid=7, correlation=2),
        event("ncclDevKernel_AllGather", "kernel", 650, 100, tid=8, correlation=3),  # half of it beside the gemm
        event("cudaLaunchKernel", "cuda_runtime", 710, 5, correlation=4),
        event("adam", "kernel", 800, 50, tid=7, correlation=4),
    )  # fmt: skip
    assert found.on_device
    assert {name: round(seconds * 1e6) for name, seconds in found.steps[0].items()} == {
        "data": 100, "forward": 250, "backward": 240, "optimizer": 50, "communication": 50, "host gaps": 310,
    }  # fmt: skip
    assert found.longest[0] == ("gemm", pytest.approx(490e-6))


def test_on_a_cpu_waiting_for_a_collective_is_communication(tmp_path: Path) -> None:
    found = times(
        tmp_path, *PARTS,
        event("aten::linear", "cpu_op", 110, 100),
        event("aten::mm", "cpu_op", 120, 80),
        event("gloo:all_gather", "user_annotation", 150, 150, tid=3),  # 90 of it beside nothing
        event("autograd::engine::evaluate_function: FSDP", "cpu_op", 400, 200),
        event("aten::mm", "cpu_op", 410, 90),
        event("gloo:reduce_scatter", "user_annotation", 550, 50, tid=3),
    )  # fmt: skip
    assert {name: round(seconds * 1e6) for name, seconds in found.steps[0].items()} == {
        "data": 100, "forward": 100, "backward": 150, "optimizer": 0, "communication": 140, "host gaps": 510,
    }  # fmt: skip
    assert dict(found.longest)["aten::mm"] == pytest.approx(170e-6)
    assert dict(found.longest)["aten::linear"] == pytest.approx(20e-6), "without what it calls"
    node = dict(found.longest)["autograd::engine::evaluate_function: FSDP"]
    assert node == pytest.approx(60e-6), "without waiting for the collective"
    assert "&lt;x&gt;" in profile_page(Times(False, found.steps, [("<x>", 1.0)]), "t")


def test_arithmetic_of_spans() -> None:
    assert merge_spans([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert merge_spans([(0, 4), (1, 2), (3, 5)]) == [(0, 5)]
    assert intersection([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 10)]) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert difference([(0, 4), (5, 9)], [(1, 2), (3, 6)]) == [(0, 1), (2, 3), (6, 9)]
    assert difference([(0, 4)], []) == [(0, 4)] and intersection([], [(0, 1)]) == []
