"""A run that continues knows of itself what it knew when it was saved: every fact of a checkpoint that is no tensor."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from reference import outcome
from small import make_config

from llava_fsdp import checkpoint, loop, train
from llava_fsdp.checkpoint.facts import facts_of, is_fixed
from llava_fsdp.config import SourceConfig
from llava_fsdp.data.batch import Step
from llava_fsdp.optim import prepare_moments
from llava_fsdp.sharding.zero import SHARD_PLANS
from llava_fsdp.state import StepResult, TrainState

do_step = loop.train_step
FACTS: dict[str, Any] = {"step": 3, "samples": 35, "skipped": 2, "run": "an earlier start's", "broken": [4, 17]}
"""Each is another than a new run's, and cannot be computed from the others."""
SCALER = {"scale": 32.0, "hysteresis": 1, "steps": 9, "last_overflow": 5}


def test_every_fact_is_restored(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, "precision=fp16", "checkpoint.every=1")
    plan = SHARD_PLANS[cfg.sharding.strategy]
    saved, resumed = (train.build_state(cfg, single_world(), plan, None) for _ in range(2))
    saved.step, saved.samples, saved.skipped = FACTS["step"], FACTS["samples"], FACTS["skipped"]
    saved.run, saved.loader.broken = FACTS["run"], set(FACTS["broken"])
    assert saved.scaler is not None
    saved.scaler.restore(SCALER)
    prepare_moments(saved.optimizer)
    facts = facts_of(saved, cfg)
    saver = checkpoint.open_saver(saved, cfg, None)
    saver.save()
    saver.close()
    before = facts_of(resumed, cfg)
    assert {name for name in facts if facts[name] != before[name]} == {*FACTS, "scaler"}
    assert checkpoint.resume(resumed, cfg) is not None
    assert facts_of(resumed, cfg) == facts


def test_a_run_with_skipped_steps_continues_as_if_it_had_not_stopped(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule stands where it stood; so learning rates, counts and weights are those of one run."""

    def poisoned(state: TrainState, step: Step, *rest: Any) -> StepResult:
        if state.step in (1, 4):
            step.micro_batches[0].scale = float("inf")
        return do_step(state, step, *rest)

    monkeypatch.setattr(loop, "train_step", poisoned)
    values = ["export.enabled=true", "export.dtype=fp32", "export.verify=false", "checkpoint.every=3", "max_steps=6"]
    rows = {}
    for name in ("whole", "cut"):
        cfg = make_config(parts, dataset, tmp_path / name, *values, "checkpoint.keep=9")
        if name == "cut":
            kept = Path("checkpoints") / "step-000003"
            (tmp_path / name / "checkpoints").mkdir(parents=True)
            (tmp_path / "whole" / kept).rename(tmp_path / name / kept)
        train.train(cfg)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    assert [row["skipped_steps"] for row in rows["whole"]] == [0, 1, 1, 1, 2, 2]
    assert [row["step"] for row in rows["cut"]] == [4, 5, 6]
    for row, wanted in zip(rows["cut"], rows["whole"][3:], strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "skipped", "skipped_steps"):
            assert row[key] == wanted[key], (row["step"], key)
    found, wanted = (outcome(tmp_path / name).weights for name in ("cut", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_of_a_source_only_its_places_may_change() -> None:
    """A run continues with the same mixture of records, wherever their files lie now."""
    keys = {f"data.sources.a.{field.name}" for field in fields(SourceConfig)}
    assert {key for key in keys if not is_fixed(key)} == {"data.sources.a.path", "data.sources.a.images"} < keys
