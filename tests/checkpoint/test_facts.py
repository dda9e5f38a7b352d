"""A run that continues knows of itself what it knew when it was saved: every fact of a checkpoint that is no tensor."""

import contextlib
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import alone
from reference import outcome
from saves import CONFIG as CHECKPOINTS
from small import Configure, config_of

from llava_fsdp.checkpoint.commit import merge_entries
from llava_fsdp.checkpoint.manifest import Manifest, RowRange, TensorEntry, rank_file
from llava_fsdp.checkpoint.saver import Saver
from llava_fsdp.checkpoint.state_json import parse_facts, render_facts, without_enums
from llava_fsdp.config import Config, SourceConfig, schema_keys
from llava_fsdp.data.batching.batch import Step
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files import durable_files
from llava_fsdp.runtime.files.durable_files import LEAST_INODES
from llava_fsdp.runtime.files.run_dir import FOLDER_NAMES, WRITTEN_NAMES, begun_at, list_checkpoints
from llava_fsdp.train import loop
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.checkpoint_contents import facts_of
from llava_fsdp.train.checkpoints.replica_check import counters
from llava_fsdp.train.checkpoints.resume import changed_settings, flat, is_fixed, resume, settings_then, start_over
from llava_fsdp.train.events.save_and_stop import is_due, open_saver
from llava_fsdp.train.optimizer import prepare_moments
from llava_fsdp.train.state import StepResult, TrainState

do_step = loop.train_step
FACTS: dict[str, Any] = {"step": 3, "samples": 35, "skipped": 2, "consecutive": 1, "run": "r", "broken": [4]}
"""Each is another than a new run's, and cannot be computed from the others."""
SCALER = {"scale": 32.0, "hysteresis": 1, "steps": 9, "last_overflow": 5}


def test_every_fact_is_restored(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that continues from a named checkpoint notes that it has begun there, and sets later ones aside."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    cfg = configure("precision=fp16", "checkpoint.every=1")
    saved, resumed = (train.build_state(cfg, alone(cfg)) for _ in range(2))
    for name in ("step", "samples", "skipped", "consecutive", "run"):
        setattr(saved, name, FACTS[name])
    saved.loader.broken = set(FACTS["broken"])
    assert saved.scaler is not None
    saved.scaler.restore(SCALER)
    with torch.no_grad():
        for weight in saved.masters.named.values():
            weight.add_(1)
    prepare_moments(saved.optimizer)
    facts = facts_of(saved, cfg)
    saver = open_saver(saved, cfg, None)
    saver.save()
    saver.close()
    before = facts_of(resumed, cfg)
    assert {name for name in facts if facts[name] != before[name]} == {*FACTS, "scaler"}
    assert resume(resumed, cfg) is not None
    assert facts_of(resumed, cfg) == facts
    assert all(torch.equal(weight, saved.masters.named[name]) for name, weight in resumed.masters.named.items())
    copies = [(p, resumed.masters.named[name]) for name, p in resumed.model.named_parameters() if p.requires_grad]
    assert len(copies) > 9 and all(torch.equal(own, weight.to(own.dtype)) for own, weight in copies)
    assert begun_at(tmp_path, "auto") is None
    saved.scaler, saved.step = None, 4  # as with another precision
    saver = open_saver(saved, cfg, None)
    saver.save()
    saver.close()
    assert resume(resumed, cfg) is not None and resumed.step == 4
    assert resumed.scaler is not None and resumed.scaler.state() == SCALER, "nothing is known of another scale"
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    named = tmp_path / "checkpoints" / "step-000003"
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, resume=str(named)))
    assert resume(resumed, cfg) == named
    assert begun_at(tmp_path, str(named)) == 3, "ranks that are started again continue what is saved from now on"
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000003"]


def test_the_optimizer_waits_for_the_copy_of_a_save_before_it_changes_a_weight(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("checkpoint.every=1")
    state = train.build_state(cfg, alone(cfg))
    seen = []
    monkeypatch.setattr(Saver, "before_update", lambda _: seen.append(copy_of(state)))
    saver = open_saver(state, cfg)
    for weight in state.masters.named.values():
        weight.grad = torch.ones_like(weight)
    before = copy_of(state)
    state.optimizer.step()
    saver.close()
    assert len(seen) == 1 and all(torch.equal(before[name], seen[0][name]) for name in before)
    assert not any(torch.equal(before[name], value) for name, value in copy_of(state).items())


def copy_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in state.masters.named.items()}


def test_of_a_source_only_its_places_may_change() -> None:
    """A run continues with the same mixture of records, wherever their files lie now."""
    keys = {f"data.sources.a.{field.name}" for field in fields(SourceConfig)}
    assert {key for key in keys if not is_fixed(key)} == {"data.sources.a.path", "data.sources.a.images"} < keys


FREE = {
    "data.path", "data.images", "data.root", "data.workers", "data.prefetch", "data.stall", "data.source", "data.index",
    "data.cache", "data.cache_gb",
    "data.examine", "data.examine_images", "data.allow_links", "data.bad_records", "data.max_bad_records",
    "model.name", "model.language",
    "model.vision",
    "model.checkpoint", "model.projector", "model.lora.checkpoint",
}  # fmt: skip
"""Keys of the groups that fix a run's results, and that say no more than where something lies or how it is read."""


def test_which_keys_a_run_must_continue_with() -> None:
    every = schema_keys(Config)
    keys = {key for key in every if not any(other.startswith(f"{key}.") for other in every)}
    fixed = {key for key in keys if is_fixed(key)}
    groups = {key.partition(".")[0] for key in fixed} - {"precision"}
    assert groups == {"seed", "global_batch_size", "model", "loss", "pref", "optim", "data", "labels", "sampler"}
    assert {key for key in fixed if key.startswith("precision.")} == {
        "precision.master_dtype",
        "precision.moment_dtype",
    }
    assert {key for key in keys - fixed if key.partition(".")[0] in groups} == FREE
    assert is_fixed("data.sources.path.weight") and not is_fixed("data.sources.path.path")
    assert is_fixed("data.sources.a.path.more") and is_fixed("data.sources.a.b.images")


def test_a_key_of_one_side_alone_has_changed() -> None:
    """What a newer version has added, or has taken away, is a change as another value is."""
    now = {"seed": 1, "optim.lr": 0.5, "model.new": True, "log_every": 3}
    then = {"seed": 1, "optim.lr": 0.25, "data.old": "x", "log_every": 4, "epochs": 2}
    changed = [line.partition(":")[0] for line in changed_settings(then, now)]
    assert changed == ["data.old", "model.new", "optim.lr"]
    for key, then, now in (("model.select_feature", "full", "patch"), ("data.template", "v1", "chatml")):
        assert changed_settings({key: then}, {key: now})
        assert not changed_settings({key: then}, {key: "auto"}), "it may mean the same"
        assert not changed_settings({key: "auto"}, {key: now})
    assert not changed_settings({"data.template": "chat_template-1"}, {"data.template": "chat_template"})
    assert changed_settings({"model.select_feature": "patch"}, {"model.select_feature": "chat_template"})
    older = settings_then({"model": {"name": "a", "lora": {"r": 7}}})
    assert (
        older["model.lora.r"] == 7 and older["model.lora.enabled"] is False and older["model.quantize.mode"] == "none"
    )


def test_the_default_training_of_0_2_0_continues() -> None:
    """CHANGELOG.md promises it. The file has what a checkpoint of 0.2.0 says of the keys that a run must continue with.
    A key that was added since needs the value of before in `settings_then`, a renamed one its row in
    `config/command_line/renamed.py`."""
    then = json.loads(Path(__file__).with_name("settings_0_2_0.json").read_text())
    assert changed_settings(settings_then(then), flat(without_enums(asdict(config_of([]))))) == []


WHOLE: dict[str, Any] = {
    "format": 6, "run": "r", "step": 3, "samples": 24, "skipped": 0, "consecutive": 0, "seed": 5,
    "scaler": SCALER, "dynamic": {"device": "d", "limits": [[1, 22, 3]]}, "broken": [4],
    "fingerprints": dict.fromkeys(("dataset", "encoding", "order", "model"), "f"), "trainable": ["a"], "versions": {},
    "written_by": {}, "config": {},
}  # fmt: skip


@pytest.mark.parametrize("change", [
    {"step": 4}, {"step": 3.0}, {"step": True}, {"samples": -1}, {"skipped": -1}, {"consecutive": -1},
    {"seed": "5"}, {"run": None},
    {"broken": [4, "5"]}, {"broken": [True]}, {"trainable": ["a", 7]}, {"more": 1}, {"scaler": {**SCALER, "more": 1}},
    {"scaler": {**SCALER, "scale": 32}}, {"scaler": {k: v for k, v in SCALER.items() if k != "last_overflow"}},
    *({"fingerprints": {k: v for k, v in WHOLE["fingerprints"].items() if k != name}}
      for name in WHOLE["fingerprints"]),
    {"fingerprints": {**WHOLE["fingerprints"], "more": "f"}},
    {"dynamic": {"limits": []}}, {"dynamic": {"device": "d", "limits": [[1, 22]]}},
    {"dynamic": {"device": "d", "limits": [[1, 22, "3"]]}}, {"dynamic": {"device": "d", "limits": [1]}},
], ids=str)  # fmt: skip
def test_facts_of_another_form_are_refused(change: dict[str, Any]) -> None:
    manifest = Manifest(3, {}, {})
    assert parse_facts(render_facts(WHOLE), manifest) == WHOLE
    assert parse_facts(render_facts(WHOLE | {"scaler": None}), manifest)["scaler"] is None
    with pytest.raises(CheckpointError):
        parse_facts(render_facts(WHOLE | change), manifest)
    older = {key: value for key, value in WHOLE.items() if key not in ("consecutive", "dynamic")}
    assert parse_facts(render_facts(older), manifest) == WHOLE | {"dynamic": None}
    for key in older:
        with pytest.raises(CheckpointError):
            parse_facts(render_facts({k: v for k, v in WHOLE.items() if k != key}), manifest)


def test_every_counter_is_compared_between_ranks() -> None:
    def state(**values: Any) -> Any:
        own: dict[str, Any] = {"step": 3, "samples": 35, "skipped": 2, "consecutive": 1, "scaler": None} | values
        broken = own.pop("broken", {4, 17})
        return SimpleNamespace(**own, loader=SimpleNamespace(broken=broken))

    def scaler(**values: Any) -> Any:
        return SimpleNamespace(state=lambda: SCALER | values)

    same = counters(state())
    assert counters(state(broken={17, 4})) == same
    for name in ("step", "samples", "skipped", "consecutive"):
        assert counters(state(**{name: 9})) != same, name
    assert counters(state(broken={4})) != same
    whole = counters(state(scaler=scaler()))
    assert whole != same
    assert all(counters(state(scaler=scaler(**{name: 7}))) != whole for name in SCALER)


@pytest.mark.parametrize(("step", "every", "due"), [
    (7, None, True), (6, None, False), (7, 3, True), (6, 3, True), (5, 3, False), (3, 3, True), (1, 1, True),
])  # fmt: skip
def test_when_a_checkpoint_is_due(step: int, every: int | None, due: bool) -> None:
    assert is_due(step, 7, replace(CHECKPOINTS, every=every)) is due


def test_pieces_of_all_ranks_are_in_the_order_of_rows() -> None:
    """Whatever rank has written the first of them."""
    ranges = [RowRange(rank_file(n), *rows) for n, rows in enumerate([(5, 7), (0, 3), (3, 5)])]
    written = [{"b": TensorEntry(torch.bfloat16, (7, 2), (rows,))} for rows in ranges]
    written[0]["a"] = scalar = TensorEntry(torch.float32, (), (RowRange(rank_file(0), 0, 1),))
    whole = TensorEntry(torch.bfloat16, (7, 2), (ranges[1], ranges[2], ranges[0]))
    found = merge_entries(written)
    assert found == {"a": scalar, "b": whole} and list(found) == ["a", "b"] and scalar.rows == 1


def test_room_for_exactly_one_checkpoint_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bytes_, inodes, fits in (
        (100, None, True),
        (99, None, False),
        (100, LEAST_INODES, True),
        (100, LEAST_INODES - 1, False),
    ):
        monkeypatch.setattr(durable_files, "free_bytes", lambda _, n=bytes_: n)
        monkeypatch.setattr(durable_files, "free_inodes", lambda _, n=inodes: n)
        with contextlib.nullcontext() if fits else pytest.raises(CheckpointError):
            durable_files.require_room(tmp_path, 100)


def test_starting_over_moves_all_that_a_run_writes_but_what_each_start_replaces(tmp_path: Path) -> None:
    replaced = {
        ".lock", "run_status.json", ".run_failed", ".stepped", ".begun", "config.yaml", ".heartbeats", "stacks"
    }  # fmt: skip
    for name in (*(WRITTEN_NAMES - FOLDER_NAMES), "train.log"):
        (tmp_path / name).write_text("of the run before")
    for name in (*FOLDER_NAMES, "old-1"):
        (tmp_path / name).mkdir()
    start_over(tmp_path)
    assert {path.name for path in (tmp_path / "old-2").iterdir()} == WRITTEN_NAMES - replaced
    assert {path.name for path in tmp_path.iterdir()} == {*replaced, "train.log", "old-1", "old-2"}
    assert not list((tmp_path / "old-1").iterdir())


@pytest.mark.slow
def test_a_run_with_skipped_steps_continues_as_if_it_had_not_stopped(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        cfg = configure(*values, "checkpoint.keep=9", to=name)
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
