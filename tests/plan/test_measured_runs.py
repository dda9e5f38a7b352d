"""What a run measures of its steps, and the correction of later plans by it."""

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from small import Configure, command_config, make_config

from llava_fsdp.config import OffloadMode, PlanConfig, Strategy
from llava_fsdp.config.command_line.tree import tree_of
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.plan import measured_runs
from llava_fsdp.plan.main import correction_of
from llava_fsdp.plan.measured_runs import (
    MeasuredRun,
    find_correction,
    kind_of_machine,
    predicted_seconds,
    read_runs,
    unlike_plans,
)
from llava_fsdp.plan.memory.micro_batches import MicroBatches, MicroBatchSizes
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import Choice, Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import GPUS, Machine, machine_named
from llava_fsdp.plan.time.step_time import StepTime
from llava_fsdp.runtime.errors import ConfigError, Stopped
from llava_fsdp.runtime.files.run_dir import PLAN_FILE
from llava_fsdp.train import main as train
from llava_fsdp.train.events.reporting.measured_steps import MeasuredSteps
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import StepResult

H200 = machine_named("h200", 1)
SAMPLE = {"tokens": 90.0, "spread": 20.0, "tiles": 0.5, "labels": 30.0}


@pytest.fixture
def run(wide_parts: Path, dataset: Path, tmp_path: Path) -> MeasuredRun:
    cfg = make_config(
        wide_parts, dataset, tmp_path, "precision=bf16", "global_batch_size=12", "tokens_per_micro_batch=512"
    )
    return MeasuredRun(
        version="0", device="NVIDIA H200", width=48, ranks=2, nodes=1, strategy="FULL_SHARD", precision="bf16", steps=9,
        seconds=1.0, quartiles=[0.9, 1.1], samples=SAMPLE, config=tree_of(cfg),
    )  # fmt: skip


def put(folder: Path, run: MeasuredRun, **changed: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text(json.dumps(asdict(run) | changed))
    return folder / PLAN_FILE


def test_the_factor_is_the_geometric_mean_of_measured_over_predicted(run: MeasuredRun, tmp_path: Path) -> None:
    """At any depth, of the nearest width alone, and of this kind of device."""
    predicted = predicted_seconds(run, H200)
    assert predicted == predicted_seconds(replace(run, seconds=7.0), H200) > 0
    put(tmp_path / "runs" / "a", run, seconds=2 * predicted)
    put(tmp_path / "runs" / "b" / "old-1" / "deep", run, seconds=8 * predicted, later_field=1)
    put(tmp_path / "runs" / "wide", run, width=100)
    put(tmp_path / "runs" / "other", run, device="NVIDIA B200", width=64)
    put(tmp_path / "runs" / "cpu", run, device="CPU")
    found = find_correction(tmp_path / "runs", lambda ranks: H200, 60)
    assert found is not None
    assert (found.factor, found.lowest, found.highest) == pytest.approx((4, 2, 8))
    assert (found.runs, found.device, found.width) == (2, "h200", 48)


def test_without_a_fitting_run_nothing_is_corrected(run: MeasuredRun, tmp_path: Path) -> None:
    put(tmp_path / "runs" / "a", run)
    assert find_correction(tmp_path / "runs", lambda ranks: machine_named("h100", ranks), 48) is None
    with pytest.raises(ConfigError) as caught:
        find_correction(tmp_path / "none", lambda ranks: H200, 48)
    assert f"runs={tmp_path / 'none'}" in str(caught.value)


@pytest.mark.parametrize("width", [23, 97])
def test_runs_of_much_smaller_or_larger_models_are_left_out(width: int, run: MeasuredRun, tmp_path: Path) -> None:
    put(tmp_path / "a", run, width=width)
    assert find_correction(tmp_path, lambda ranks: H200, 48) is None
    assert find_correction(tmp_path, lambda ranks: H200, width) is not None


@pytest.mark.parametrize(
    ("group", "key", "value"), [("data", "pairs", True), ("activation_checkpointing", "mode", "dynamic")]
)
def test_runs_whose_steps_no_plan_predicts_are_left_out(group: str, key: str, value: Any, run: MeasuredRun) -> None:
    assert not unlike_plans(run)
    assert unlike_plans(replace(run, config={**run.config, group: {**run.config[group], key: value}}))


def test_the_latest_runs_count(run: MeasuredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_runs, "predicted_seconds", lambda run, machine: 1.0)
    for number in range(10):
        os.utime(put(tmp_path / "runs" / f"{number}", run, seconds=1.0 + number), (number, number))
    found = find_correction(tmp_path / "runs", lambda ranks: H200, 48)
    assert found is not None and (found.runs, found.lowest, found.highest) == (8, 3, 10)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"device": 1}', '{"device": "NVIDIA H200"}', b"\xff"],
    ids=["cut", "a list", "a number", "without values", "no text"],
)
def test_a_damaged_file_is_one_warning_that_names_it(
    run: MeasuredRun, tmp_path: Path, content: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "good", run)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / PLAN_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert [path.parent.name for path, _ in read_runs(tmp_path)] == ["good"]
    [told] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path / "bad" / PLAN_FILE) in told.getMessage()


@pytest.mark.parametrize(
    "changed",
    [{"seconds": 0.0}, {"seconds": -1.0}, {"ranks": 0}, {"nodes": 0}, {"width": 0}, {"samples": {}}, {"config": {}}],
    ids=str,
)
def test_values_that_cannot_be_are_left_out(
    run: MeasuredRun, tmp_path: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "runs" / "good", run)
    bad = put(tmp_path / "runs" / "bad", run, **changed)
    found = find_correction(tmp_path / "runs", lambda ranks: H200, 48)
    assert found is not None and found.runs == 1
    [told] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(bad) in told.getMessage()


def test_the_kind_of_a_device() -> None:
    """A GPU of this machine has CUDA's name before its name in the table."""
    here = replace(H200, name="NVIDIA H200, as h200")
    unknown = Machine(GPUS["h100"], "NVIDIA H100 PCIe, which the table of GPUs lacks, timed as h100", 0, 0.0)
    cores = Machine(None, "2 CPU cores", 0, 1.0)
    assert [kind_of_machine(own) for own in (H200, here, unknown, cores)] == ["h200", "h200", "NVIDIA H100 PCIe", "CPU"]


def test_a_plan_is_corrected_only_if_it_is_asked_to(run: MeasuredRun, wide_parts: Path, tmp_path: Path) -> None:
    parts = [f"model.{part}={wide_parts / part}" for part in ("language", "vision")]
    cfg = command_config(PlanConfig, "plan", "gpu=h200", "model.projector=random", *parts)
    width = shapes_of(cfg.model).language.hidden_size
    put(tmp_path / "runs" / "a", run, seconds=3 * predicted_seconds(run, H200), width=width)
    assert cfg.runs is None and correction_of(cfg, shapes_of(cfg.model)) is None
    found = correction_of(replace(cfg, runs=str(tmp_path / "runs")), shapes_of(cfg.model))
    assert found is not None and found.factor == pytest.approx(3)


def test_a_correction_multiplies_all_seconds(run: MeasuredRun, wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", "activation_checkpointing=none")
    plain, slow = (Planner(cfg, H200, correction=factor) for factor in (1.0, 3.0))
    choice = Choice(Strategy.FULL_SHARD, cfg.activation_checkpointing, OffloadMode.none)
    micros = MicroBatches([MicroBatchSizes(1, 40, 2, 3, 9, 7)])
    one, three = (own.seconds(choice, RankCounts(2, 2, 2), micros) for own in (plain, slow))
    assert three == pytest.approx(3 * one)
    assert StepTime(1, 2, 3, 4, 5, 6, 7).times(2) == StepTime(2, 4, 6, 8, 10, 12, 14)


def result(step: int, seconds: float, **more: Any) -> StepResult:
    """The result of a step (numbered from 1) with two samples of 10 and 30 tokens."""
    facts = StepFacts(step - 1, samples=2, tokens=40, token_pairs=10**2 + 30**2, label_tokens=8, tiles=3)
    return StepResult(facts, 1.0, 1e-3, 1.0, seconds, data_seconds=0.5, **more)


def measuring(configure: Configure, *overrides: str, is_lost: bool = False) -> MeasuredSteps:
    cfg = configure("checkpoint.every=10", *overrides)
    Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
    about = {"device": "CPU", "ranks": 4, "nodes": 2}
    return MeasuredSteps(cfg, about, 48, lambda: is_lost)


def written(steps: MeasuredSteps) -> dict[str, Any] | None:
    path = Path(steps.cfg.output_dir) / PLAN_FILE
    return json.loads(path.read_text()) if path.exists() else None


def test_steady_steps_are_measured(configure: Configure) -> None:
    """Not the first three of a start, nor one that compiles, is skipped, or follows a checkpoint or a validation."""
    steps = measuring(configure)
    seconds = {8: 1.5, 9: 2.5, 14: 3.5, 15: 4.5}
    for step in range(5, 16):  # the run continues after step 4
        recompiles = 2 + (step >= 12)
        own = result(step, seconds.get(step, 100.0), skipped=step == 10, recompiles=2 if step < 12 else recompiles)
        steps.step({"step": step}, own)
        if step == 12:
            steps.validation({})
    found = written(steps)
    assert found is not None and steps.seconds == [1.0, 2.0, 3.0, 4.0]
    assert (found["steps"], found["seconds"], found["quartiles"]) == (4, 2.5, [1.25, 3.75])
    assert found["samples"] == {"tokens": 20.0, "spread": 10.0, "tiles": 1.5, "labels": 4.0}
    kind = [found[name] for name in ("device", "width", "ranks", "nodes", "strategy", "precision")]
    assert kind == ["CPU", 48, 4, 2, steps.cfg.sharding.strategy.value, "fp32"]


def test_a_killed_run_leaves_half_of_its_steps_and_any_other_all(configure: Configure) -> None:
    steps = measuring(configure, "checkpoint.every=null")
    counts = []
    for step in range(1, 24):
        steps.step({"step": step}, result(step, 2.0))
        counts.append((written(steps) or {"steps": 0})["steps"])
    assert counts == [0] * 6 + [4] * 4 + [8] * 8 + [16] * 5
    steps.end(1, 0.0)
    assert (written(steps) or {})["steps"] == 20
    assert os.listdir(steps.cfg.output_dir) == [PLAN_FILE], "no temporary file is left"


def test_too_few_steps_and_a_lost_folder_write_nothing(configure: Configure) -> None:
    few, lost = measuring(configure), measuring(configure, "checkpoint.every=null", is_lost=True)
    for steps, last in ((few, 6), (lost, 20)):
        for step in range(1, last + 1):
            steps.step({"step": step}, result(step, 2.0))
        steps.end(0, 0.0)
    assert written(few) is None and written(lost) is None


class StopsAfter(RunEvents):
    def __init__(self, step: int):
        self.step = step

    def after_step(self, result: StepResult) -> None:
        if result.facts.step + 1 == self.step:
            raise Stopped("a test stops the run")


def test_a_stopped_run_and_the_start_that_continues_it(configure: Configure, tmp_path: Path) -> None:
    """The file of the first start is replaced when the second has measured four steps; a plan can read it."""
    keys = "max_steps=20", "checkpoint.every=9", "tokens_per_micro_batch=null"
    parts, path = train.RunParts(), tmp_path / PLAN_FILE
    with pytest.raises(Stopped):
        train.train(configure(*keys), parts, events=[StopsAfter(9)])
    assert parts.reports is not None
    parts.reports.end()
    assert json.loads(path.read_text())["steps"] == 6, "steps 4 to 9"
    parts = train.RunParts()
    train.train(configure(*keys), parts)
    assert parts.reports is not None
    parts.reports.end()
    found = json.loads(path.read_text())
    assert found["steps"] == 20 - 9 - 3 - 1, "steps 13 to 20 but the one behind the checkpoint of step 18"
    [(_, run)] = read_runs(tmp_path)
    assert predicted_seconds(run, Machine(None, "2 CPU cores", 0, 30e9)) > 0
    assert run.width == 36 and 0 < run.quartiles[0] <= run.seconds <= run.quartiles[1]
