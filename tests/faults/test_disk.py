"""Disks that are full, read only or not there: one message with the path, nothing half written, no lost day."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from runs import Runs, metrics
from small import conversion, make_config
from traps import full_log

from llava_fsdp.export.main import export
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.jsonl import RowWriter
from llava_fsdp.train import main as train


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_rows_wait_for_room(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = RowWriter(small_disk / "metrics.jsonl")
    rows.add({"step": 0})
    (small_disk / "other").write_bytes(bytes(300_000 - 8192))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "more").write_bytes(bytes(300_000))
    wide = {"text": "x" * 5000}
    for step in range(1, 9):
        rows.add({"step": step, **wide})
    whole = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert rows.waiting_rows and [row["step"] for row in whole] == list(range(len(whole))), "no line is cut short"
    (small_disk / "other").unlink()
    (small_disk / "more").unlink()
    rows.add({"step": 9})
    assert [json.loads(line)["step"] for line in rows.path.read_text().splitlines()] == list(range(10))
    assert not rows.waiting_rows


@pytest.mark.faults
def test_training_outlives_its_log(runs: Runs, tmp_path: Path) -> None:
    """Rows that cannot be written for a while are there in the end."""
    ended = runs.run("max_steps=8", folder=tmp_path, ranks=1, trap=full_log, first=3, last=5)
    assert ended.code == 0, ended.stderr
    assert [row["step"] for row in metrics(tmp_path / "out")] == list(range(1, 9))
    assert ended.stderr.count("metrics.jsonl cannot be written (No space left on device: the disk of ") == 1
    assert "can be written again, and has all rows that waited" in ended.stderr


@pytest.mark.faults
def test_a_log_that_is_never_written_again(runs: Runs, tmp_path: Path) -> None:
    ended = runs.run("max_steps=4", folder=tmp_path, ranks=1, trap=full_log, first=2, last=99)
    assert ended.code == 0 and "lacks 3 rows, which could not be written" in ended.stderr


def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("")
    return {
        "a file": str(tmp_path / "file"),
        "in a file": str(tmp_path / "file" / "x"),
        "too long": str(tmp_path / ("x" * 300)),
        "not for writing": "/proc/x",
    }


@pytest.mark.parametrize("name", ["a file", "in a file", "too long", "not for writing"])
def test_no_place_to_write(name: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    place = places(tmp_path)[name]
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        train.train(make_config(parts, dataset, Path(place)))
    assert place in str(caught.value)


def test_folders_with_any_name(parts: Path, dataset: Path, tmp_path: Path) -> None:
    place = tmp_path / "größe, a (1) 'b' 中文"
    train.train(replace(make_config(parts, dataset, tmp_path, "max_steps=1"), output_dir=str(place)))
    assert (place / "metrics.jsonl").is_file()


def test_a_disk_that_is_full_when_a_run_begins(parts: Path, dataset: Path, small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "other").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match=r"small/out.* cannot be written .*No space left"):
        train.train(make_config(parts, dataset, small_disk / "out"))


def test_export_to_a_full_disk(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The one of a run, and the command: an error that says so, and nothing half written stays."""
    run = tmp_path / "run"
    train.train(make_config(parts, dataset, run, "max_steps=1"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*(too large|No space)"):
            export(conversion(run, tmp_path / "to", "verify=false"))
        with pytest.raises(CheckpointError, match=r"cannot be rehearsed.*(too large|No space)"):
            train.train(make_config(parts, dataset, run, "max_steps=1", "export.enabled=true"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    left = {path.name for path in [*tmp_path.iterdir(), *run.iterdir()]}
    assert not {"to", "to.tmp", "export", "export.tmp"} & left
    assert os.listdir(run / "checkpoints")
