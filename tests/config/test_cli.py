"""What every entry does at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llava_fsdp.config import cli

SCRIPT = """\
import os, sys
from rich.console import Console
from llava_fsdp.config import cli
from llava_fsdp.config import ChatConfig

def plain(cfg):
    print("x")

def much(cfg):
    print("x\\n" * 100_000)

def by_rich(cfg):
    Console().print("x")

def other_pipe(cfg):
    reads, writes = os.pipe()
    os.close(reads)
    os.write(writes, b"x")

def mistake(cfg):
    print("x")
    raise cli.ConfigError("of the user")

task = globals()[sys.argv.pop()]
cli.run("chat", ChatConfig, task, cli.no_status if sys.argv.pop() == "entry" else lambda folder, outcome: None)
"""


def with_no_reader(kind: str, task: str, gone: bool = True) -> subprocess.CompletedProcess:
    """Its output goes into a pipe that nobody reads any more, as `| head -0` leaves it."""
    reads, writes = os.pipe()
    command = [sys.executable, "-c", SCRIPT, "image=null", kind, task]
    try:
        if gone:
            os.close(reads)
        return subprocess.run(
            command, check=False, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": ""},  # a short text then is written at the end
        )  # fmt: skip
    finally:
        os.close(writes)
        if not gone:
            os.close(reads)


@pytest.mark.parametrize("task", ["plain", "much", "by_rich"])
def test_a_reader_that_has_left_ends_an_entry_quietly(task: str) -> None:
    done = with_no_reader("entry", task)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_is_no_reader() -> None:
    done = with_no_reader("entry", "other_pipe", gone=False)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_training_does_not_end_as_done_for_a_reader() -> None:
    done = with_no_reader("training", "much")
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_mistake_keeps_its_exit_code_without_a_reader() -> None:
    done = with_no_reader("entry", "mistake")
    assert done.returncode == 2 and "of the user" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["output_dir=a", "output_dir=b"], Path("b")), (["seed=1"], None), (["dry_run=2", "output_dir=a"], None),
        (["output_dir=a", "seed=1", "dry_run=2"], None), (["val.dry_run=2", "output_dir=a"], Path("a")),
    ],
)  # fmt: skip
def test_a_dry_run_records_no_mistake(words: list[str], folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *words])
    assert cli.typed_output_dir() == folder
