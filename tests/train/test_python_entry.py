"""`llava_fsdp.compose`, `llava_fsdp.plan` and `llava_fsdp.train`: the way in for a Python program."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import TORCHRUN
from machine import ROOT
from small import Configure

import llava_fsdp
from llava_fsdp.config import Config, PlanConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.plan import main as planning
from llava_fsdp.runtime.errors import ConfigError, EventError, Stopped
from llava_fsdp.runtime.files.status_file import read_status
from llava_fsdp.train.events.run_events import RunEvents, RunStart

SHORT = "max_steps=2", "export.enabled=false", "checkpoint.asynchronous=false"


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys; before = set(sys.modules); import llava_fsdp; print(sorted(set(sys.modules) - before));"
        "llava_fsdp.compose('finetune'); print('torch' in sys.modules, callable(llava_fsdp.train));"
        "print(llava_fsdp.RunEvents.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['llava_fsdp']", "False True", "RunEvents False"]
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        llava_fsdp.trian  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_composed_configuration_is_that_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model.language=/models/a b", "data.path=a=b.json", "optim.lr=3e-4"]
    monkeypatch.setattr(sys, "argv", ["train", "stage=pretrain", *words])
    node = cli.compose("train", Config)
    assert node is not None
    found = llava_fsdp.compose("pretrain", words)
    assert found == cli.load(Config, node)
    assert (found.model.name, found.model.language, found.optim.lr) == ("own", "/models/a b", 3e-4)
    assert words[0] == "model.language=/models/a b", "the caller's words stay as they are"


@pytest.mark.parametrize(
    ("stage", "words", "said"),
    [
        ("finetune", ["optm.lr=1"], r"optm\.lr is not a key .*optim\.lr"),
        ("fintune", [], "stage=fintune"),
        ("finetune", ["optim.lr=fast"], r"optim\.lr=fast must be"),
        ("finetune", ["model"], "model"),
        ("finetune", ["--cfg"], "--cfg is a flag of the command line"),
        ("finetune", ["hydra.verbose=true"], "hydra.verbose=true is a flag of the command line"),
    ],
)
def test_what_the_command_line_refuses_is_refused(stage: str, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        llava_fsdp.compose(stage, words)


@pytest.mark.slow
def test_a_plan_has_the_rows_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["stage=finetune", "gpus=2", "gpu=h100", "format=json"]
    planning.plan(cli.configure(words, "plan", PlanConfig), words)
    printed = json.loads(capsys.readouterr().out)["rows"]
    rows = llava_fsdp.plan(llava_fsdp.compose("finetune"), gpus=2, gpu="h100")
    assert len(rows) == len(printed) and rows[0].fits
    assert [row.tokens_per_second for row in rows] == [own["tokens_per_second"] for own in printed]
    assert not capsys.readouterr().out


def test_a_training_leaves_the_process_as_it_was(configure: Configure, tmp_path: Path) -> None:
    """And its folder as the command does."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    logger = logging.getLogger("llava_fsdp")
    before = list(logger.handlers), logger.level, logger.propagate, sys.stdout, sys.stderr
    umask = os.umask(0o022)
    os.umask(umask)
    cfg = configure(*SHORT, to="run")
    result = llava_fsdp.train(cfg)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert (list(logger.handlers), logger.level, logger.propagate, sys.stdout, sys.stderr) == before
    assert os.umask(umask) == umask
    assert (result.folder, result.step, result.export) == (tmp_path / "run", 2, None)
    assert result.loss == result.metrics[-1]["loss"] and [row["step"] for row in result.metrics] == [1, 2]
    status = read_status(tmp_path / "run") or {}
    assert (status["status"], status["exit_code"], status["step"]) == ("done", 0, 2)
    assert "of 2 steps" in (tmp_path / "run" / "report.html").read_text()
    again = llava_fsdp.train(cfg)
    assert (again.step, again.loss) == (2, None), "the run had finished"


class Failing(RunEvents):
    def after_step(self, result: object) -> None:
        raise LookupError("mine")


def test_an_error_is_raised_and_recorded_and_the_same_process_may_go_on(configure: Configure, tmp_path: Path) -> None:
    cfg = configure(*SHORT, "checkpoint.every=1", to="run")
    with pytest.raises(EventError, match=r"Failing\.after_step"):
        llava_fsdp.train(cfg, events=[Failing()])
    status = read_status(tmp_path / "run") or {}
    assert (status["status"], status["class"], status["exit_code"], status["step"]) == ("failed", "config", 2, 1)
    assert status["culprit"]["event"] == "Failing"
    assert llava_fsdp.train(cfg).step == 2, "it continues from the checkpoint"
    with pytest.raises(ConfigError, match="dry_run"):
        llava_fsdp.train(configure("dry_run=1"))


@pytest.mark.parametrize(("moment", "raised", "status"), [
    ("on_start", KeyboardInterrupt, "interrupted"), ("after_step", Stopped, "stopped"),
])  # fmt: skip
def test_ctrl_c_does_not_end_the_process(
    moment: str, raised: type[BaseException], status: str, configure: Configure, tmp_path: Path
) -> None:
    """Before the steps it is Python's own exception; in a step it stops the run with a checkpoint. Where tests are
    started in the background, a shell has made Python ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    class Interrupting(RunEvents):
        def on_start(self, run: RunStart) -> None:
            if moment == "on_start":
                signal.raise_signal(signal.SIGINT)

        def after_step(self, result: Any) -> None:
            if result.facts.step == 0 and moment == "after_step":
                signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(raised):
            llava_fsdp.train(configure("max_steps=50", *SHORT[1:], to="run"), events=[Interrupting()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (read_status(tmp_path / "run") or {})["status"] == status
    kept = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert bool(kept) is (raised is Stopped)


PROGRAM = """
import os, time
import llava_fsdp

class Early(llava_fsdp.RunEvents):
    def after_step(self, result):
        if os.environ["RANK"] == "1":
            open("failed", "w").write(str(time.time()))
            raise LookupError("on one rank")

if __name__ == "__main__":
    words = ["model.projector=random", "output_dir=out", "max_steps=9", "global_batch_size=4", "precision=fp32",
             "export.enabled=false", "compile=false", "log_every=1"]
    llava_fsdp.train(llava_fsdp.compose("finetune", words), events=[Early()])
    print("went on")
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_an_observer_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    """The other rank is in a collective then; it ends with the first one, and not after a timeout."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*TORCHRUN, "2", "mine.py"], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    took = (tmp_path / "out" / "run_status.json").stat().st_mtime - float((tmp_path / "failed").read_text())
    status = read_status(tmp_path / "out") or {}
    assert done.returncode != 0 and "went on" not in done.stdout and took < 60, f"{took} s"
    assert (status["class"], status["rank"]) == ("config", 1) and "Early.after_step" in status["reason"]
    assert "EventError: Early.after_step" in done.stderr
