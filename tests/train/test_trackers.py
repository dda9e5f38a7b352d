"""The trackers, for real: what they were told is read back from what they wrote."""

import importlib.util
import json
import pickle
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import config_of, make_config

from llava_fsdp.config import Config
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.status_file import Outcome, write_ending
from llava_fsdp.train.events.reporting import trackers
from llava_fsdp.train.events.reporting.reports import Reports
from llava_fsdp.train.events.reporting.step_report import StepReport
from llava_fsdp.train.events.reporting.tracker_classes import CLASSES
from llava_fsdp.train.events.reporting.trackers import Trackers, check_installed, values_of_step, values_of_validation

SECRET = "hf_abcdefghij0123456789xyz"
PLANTED = {
    "data.path": f"https://me:pass-word-7@host/{SECRET}.json",
    "hub.token": "pass-word-7",
    "data.token": [SECRET],
}
ROW = {
    "step": 1, "loss": 2.5, "lr": 0.1, "grad_norm": None, "skipped_steps": 0, "tokens_per_second": 10.0, "mfu": None,
    "seconds": 1.0, "data_seconds": 0.5, "peak_memory_bytes": 7,
    "sources": {"a": {"loss": 2.0, "label_tokens": 1}, "b": {"loss": None, "label_tokens": 0}},
}  # fmt: skip


@pytest.fixture
def cfg(parts: Path, dataset: Path, tmp_path: Path) -> Any:
    return lambda *words: make_config(parts, dataset, tmp_path / "run", *words)


def follow(cfg: Config, first: int, last: int, run: str = "abc123", **more: Any) -> Trackers:
    """A start of a run that takes these steps."""
    Path(cfg.output_dir).mkdir(exist_ok=True)
    found = Trackers(cfg, first, run, {"command": f"train hub_token={SECRET}"}, {"optim.lr": 0.1, **PLANTED}, **more)
    for step in range(first + 1, last + 1):
        found.step({**ROW, "step": step, "loss": 10.0 * first + step})
    return found


def test_what_a_row_is_called() -> None:
    found = values_of_step(ROW)
    assert found["train/loss"] == 2.5 and found["loss_by_source/a"] == 2.0 and found["speed/data_seconds"] == 0.5
    assert "speed/mfu" not in found and "loss_by_source/b" not in found and "train/gradient_norm" not in found
    row = {"step": 3, "loss": 1.0, "score": None, "seconds": 2.0, "sources": {"a": {"loss": 1.0, "label_tokens": 4}}}
    assert values_of_validation(row) == {"validation/loss": 1.0, "validation/seconds": 2.0}
    row |= {"score": 0.0, "sources": {"a": {"loss": 1.0, "score": 0.0}, "b": {"loss": None}, "c": {"loss": 0.0}}}
    assert values_of_validation(row) == {
        "validation/loss": 1.0, "validation/score": 0.0, "validation/seconds": 2.0, "validation_loss_by_source/a": 1.0,
        "validation_loss_by_source/c": 0.0, "validation_score_by_source/a": 0.0,
    }  # fmt: skip


def test_tensorboard_files_are_read_back(cfg: Any, caplog: pytest.LogCaptureFixture) -> None:
    """After a resume at step 2 the steps that were done twice have their second values alone."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    configured = cfg("track.tensorboard=true")
    follow(configured, 0, 4).end()
    second = follow(configured, 2, 5)
    second.validation({"step": 5, "loss": 1.5, "score": 0.25, "sources": {}})
    second.end()
    events = EventAccumulator(str(Path(configured.output_dir) / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]
    assert [e.value for e in events.Scalars("validation/score")] == [0.25]
    assert events.Scalars("loss_by_source/a")[0].value == 2.0
    written = b"".join(p.read_bytes() for p in Path(configured.output_dir).rglob("events*"))
    assert b"optim.lr" in written and b"hf_abcdefghij" not in written and b"pass-word-7" not in written
    assert not [record for record in caplog.records if record.name == "llava_fsdp"]


def test_mlflow_has_one_run_of_two_starts(
    cfg: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = (tmp_path / "mlruns").as_uri()
    configured = cfg(f"track.mlflow={place}", "track.project=seen", "track.name=a b")
    follow(configured, 0, 2).end(patience=60)
    second = follow(configured, 2, 4)
    second.validation({"step": 3, "loss": 1.5, "score": None, "sources": {}})
    second.end(exit_code=3, patience=60)
    client = mlflow.MlflowClient(tracking_uri=place)
    (run,) = client.search_runs([client.get_experiment_by_name("seen").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["optim.lr"]) == ("a b", "FAILED", "0.1")
    losses = [(own.step, own.value) for own in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(losses) == [(1, 1), (2, 2), (3, 23), (4, 24)]
    assert [own.value for own in client.get_metric_history(run.info.run_id, "validation/loss")] == [1.5]
    written = b"".join(path.read_bytes() for path in (tmp_path / "mlruns").rglob("*") if path.is_file())
    assert b"hf_abcdefghij" not in written and b"pass-word-7" not in written
    assert not [record for record in caplog.records if record.name == "llava_fsdp"]


@pytest.mark.slow
def test_trackio_has_one_run_of_two_starts(
    cfg: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    configured = cfg("track.trackio=true", "track.project=seen", "track.name=a b")
    program = (
        "import sys; sys.path[:0] = [{tests!r}, {support!r}]\n"
        "from test_trackers import follow, config_of\n"
        "from pathlib import Path\nimport pickle\n"
        "cfg = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "follow(cfg, 0, 2).end(patience=60); follow(cfg, 2, 4).end(patience=60)\n"
    ).format(tests=str(Path(__file__).parent), support=str(Path(__file__).parents[1] / "support"))
    (tmp_path / "cfg").write_bytes(pickle.dumps(configured))
    # its folder is chosen when it is imported
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "cfg")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "cannot log" not in done.stderr, done.stderr[-2000:]
    (file,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(file) as opened:
        rows = opened.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {"a b-abc123"}
    assert [(step, json.loads(text)["train/loss"]) for _, step, text in rows] == [(1, 1), (2, 2), (3, 23), (4, 24)]
    assert b"hf_abcdefghij" not in file.read_bytes() and b"pass-word-7" not in file.read_bytes()


@pytest.mark.slow
def test_weights_and_biases_offline(cfg: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both starts of a run are one run there, and no secret is written."""
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr(sys, "argv", ["train.py", f"hub_token={SECRET}", "of-this-command-line"])
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    configured = cfg("track.wandb=offline", "track.project=seen", "track.name=a b")
    follow(configured, 0, 2).end(patience=60)
    second = follow(configured, 2, 4)
    second.validation({"step": 3, "loss": 1.5, "score": None, "sources": {}})
    second.end(patience=60)
    files = sorted(Path(configured.output_dir).glob("wandb/offline-run-*/*.wandb"))
    assert len(files) >= 1 and {file.stem for file in files} == {"run-abc123"}
    steps, runs = [], []
    for file in files:
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.append((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                own = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                steps.append((own["_step"], own["train/loss"], own.get("validation/loss")))
    assert sorted(steps) == [(1, 1, None), (2, 2, None), (3, 23, None), (4, 24, 1.5)]
    assert set(runs) == {("abc123", "seen", "a b")}
    for path in Path(configured.output_dir).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for planted in ("0123456789abcdef0123", "hf_abcdefghij", "pass-word-7", "of-this-command-line"):
                assert planted.encode() not in data, (path, planted)
            host = re.escape(socket.gethostname().encode())  # as a word: a short one is in many a random name
            assert not re.search(rb"(?<![A-Za-z0-9])" + host + rb"(?![A-Za-z0-9])", data), path
    assert wandb.run is None


def records_of(content: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB, records of which are whole or in pieces."""
    at, piece = 7, b""  # behind the file's own head
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        piece += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield piece
            piece = b""


class FakeWandb:
    """Notes what Weights & Biases is told."""

    def __init__(self) -> None:
        self.begun: dict[str, Any] = {}
        self.told: list[tuple[Any, ...]] = []
        self.Settings = SimpleNamespace

    def init(self, **given: Any) -> "FakeWandb":
        self.begun = given
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.told.append(("metric", name, step_metric))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.told.append(("log", values, step))

    def finish(self, exit_code: int) -> None:
        self.told.append(("finish", exit_code))

    def teardown(self) -> None:
        self.told.append(("teardown",))


@pytest.mark.parametrize(("mode", "resumes"), [("online", "allow"), ("offline", None)])
def test_weights_and_biases_is_told_of_steps_in_order(
    mode: str, resumes: str | None, cfg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online a run that resumes is the same run. A validation has its own step; the end has the run's exit code."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    found = follow(cfg(f"track.wandb={mode}", "track.project=seen"), 2, 3)
    found.validation({"step": 3, "loss": 1.5, "score": None, "sources": {}})
    found.end(exit_code=7)
    begun = wandb.begun
    assert (begun["id"], begun["project"], begun["name"], begun["mode"]) == ("abc123", "seen", "run", mode)
    assert begun["resume"] == resumes
    assert begun["settings"].x_disable_meta is True and begun["config"]["optim.lr"] == 0.1
    assert SECRET not in str(begun) and "pass-word-7" not in str(begun)
    assert [own for own in wandb.told if own[0] == "metric"] == [
        ("metric", "validation/step", None),
        ("metric", "validation*", "validation/step"),
    ]
    (_, step_values, step), (_, values, none) = [own for own in wandb.told if own[0] == "log"]
    assert (step, step_values["train/loss"]) == (3, 23.0)
    assert none is None and values == {"validation/step": 3, "validation/loss": 1.5}
    assert wandb.told[-2:] == [("finish", 7), ("teardown",)]


def test_a_tracker_that_fails_leaves_the_other_one(
    cfg: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unopened:
        def __init__(self, *given: object):
            raise OSError("no folder")

    monkeypatch.setitem(CLASSES, "tensorboard", Unopened)
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    follow(cfg("track.tensorboard=true", "track.wandb=offline"), 0, 2).end()
    assert [step for kind, _, step in (own for own in wandb.told if own[0] == "log")] == [1, 2]
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_what_a_tracker_raises_is_a_warning(
    cfg: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, *given: object):
            pass

        def log(self, step: int, values: dict[str, float]) -> None:
            raise RuntimeError("no room")

    monkeypatch.setitem(CLASSES, "tensorboard", Broken)
    follow(cfg("track.tensorboard=true"), 0, 3).end()
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "no room" in caplog.text


def test_a_tracker_that_hangs_holds_nothing_up(
    cfg: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck:
        def __init__(self, *given: object):
            time.sleep(3600)

    monkeypatch.setitem(CLASSES, "tensorboard", Stuck)
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    found = follow(cfg("track.tensorboard=true"), 0, 10)
    found.end(patience=0.2)
    assert "3 rows behind" in caplog.text and "not finished" in caplog.text
    assert found.num_dropped == 7 and len(caplog.records) == 2, "each is told once"


def test_the_end_has_one_deadline(cfg: Any) -> None:
    """However the wait for room in the queue and that for the thread share it."""
    found, joined = Trackers(cfg(), 0, "abc", {}, {}), []
    found.thread = SimpleNamespace(join=joined.append, is_alive=lambda: False)  # pyright: ignore[reportAttributeAccessIssue]
    found.queue = SimpleNamespace(put=lambda row, timeout: time.sleep(0.05))  # pyright: ignore[reportAttributeAccessIssue]
    found.end(patience=1.0)
    assert len(joined) == 1 and joined[0] <= 0.95


def test_the_end_of_a_run_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """Every report learns the exit code that `run_status.json` has."""
    given: list[tuple[int, float]] = []

    class Noted(StepReport):
        def end(self, exit_code: int, patience: float) -> None:
            given.append((exit_code, patience))

    write_ending(tmp_path, Outcome(ENDINGS["numeric"], "why"))
    reports = Reports([Noted()], folder=tmp_path)
    reports.end()
    reports.end(trackers.HURRY)
    code = ENDINGS["numeric"].exit_code
    assert code and given == [(code, trackers.PATIENCE), (code, trackers.HURRY)] and trackers.HURRY < trackers.PATIENCE


def test_without_a_wish_there_is_no_thread(cfg: Any) -> None:
    assert follow(cfg(), 0, 2).thread is None


@pytest.mark.parametrize(
    ("name", "value"), [("tensorboard", "true"), ("wandb", "online"), ("mlflow", "file:runs"), ("trackio", "true")]
)
def test_a_missing_package_is_said_at_the_door(
    name: str, value: str, cfg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda found: None)
    with pytest.raises(ConfigError, match=rf"track\.{name}={value} needs .*llava-fsdp\[{name}\]"):
        check_installed(cfg(f"track.{name}={value}").track)
    check_installed(cfg().track)


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"track\.wandb=maybe must be one of \[off, offline, online\]"):
        config_of(["track.wandb=maybe"])
