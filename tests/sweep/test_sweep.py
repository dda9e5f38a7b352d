"""One torchrun a job: a job that fails does so alone, and the sweep ends with its exit code and a table."""

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from imagined import imagine
from small import command_config
from tiers import slow_after

from llava_fsdp.config import SweepConfig, SweepMetric
from llava_fsdp.config.command_line.cli import quoted
from llava_fsdp.report.results import Results, read_results
from llava_fsdp.report.run_reader import JOB_FILE, runs_in
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files.run_dir import restoring_umask
from llava_fsdp.runtime.files.status_file import mode_of
from llava_fsdp.runtime.text.log import setup_logging
from llava_fsdp.sweep import gpu_locks, hydra_process, torchrun
from llava_fsdp.sweep import main as sweep
from llava_fsdp.sweep.gpu_locks import Device, check_devices, list_devices, locking_devices
from llava_fsdp.sweep.hydra_process import run_jobs
from llava_fsdp.sweep.job import Job, check_job, make_job_folder, read_jobs, record_failure, train_command, value_of
from llava_fsdp.sweep.results import best_of, differing_overrides, print_results, write_results
from llava_fsdp.sweep.stop import NOW, SAVE, StopRequest, supervise


def config(*overrides: str) -> SweepConfig:
    return command_config(SweepConfig, "sweep", *overrides)


def start_sweep(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    # what a torchrun around the sweep would leave behind; a job that saw it would wait for nine ranks
    around = {"WORLD_SIZE": "9", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    found = {**os.environ, "OMP_NUM_THREADS": "1", **around, **more}
    found.pop("RANK", None)
    command = [sys.executable, "-m", "llava_fsdp.sweep", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=found, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_sweep(*arguments: str, cwd: Path, **more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = start_sweep(*arguments, cwd=cwd, **more)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@pytest.fixture
def hydra_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra runs in this process, whose root logger is afterwards as it was."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(StopRequest, "take_signals", lambda self: None)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_job_that_fails_does_so_alone(tmp_path: Path, dataset: Path) -> None:
    """The first job is refused before its launch, and the second trains to its end."""
    code, out, err = run_sweep(
        "-m", "stage=pretrain", "data.max_length=1,200", "launch.nproc_per_node=1", "hydra.sweep.dir=two",
        "data=llava_json", f"data.path={dataset}/mixed.json", f"data.images={dataset}/images", "data.workers=0",
        "max_steps=1", "global_batch_size=2", "micro_batch_size=2", "export.enabled=false",
        cwd=tmp_path,
    )  # fmt: skip
    folder = tmp_path / "two"
    jobs = [json.loads((folder / str(n) / "job.json").read_text()) for n in range(2)]
    assert [(job["status"], job["exit_code"]) for job in jobs] == [("user", 2), ("done", 0)], err
    loss = json.loads((folder / "1" / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert code == ExitCode.USER and jobs[1]["value"] == jobs[1]["numbers"]["loss"] == loss
    for words in (
        "job 0: failed", "data.max_length=1 must be at least 2", "job 1: step 1/1  loss",
        f"job 1: done in {jobs[1]['seconds']:.0f} s, loss of last 20 steps {loss:.4f}",
    ):  # fmt: skip
        assert words in err, words
    assert not (folder / "0" / "train.log").exists()
    assert "step 1/1" in (folder / "1" / "train.log").read_text()
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [("failed (user)" in row, "done" in row) for row in rows] == [(True, False), (False, True)]
    assert f"{loss:.4f}" in rows[1] and "best by loss of last 20 steps: job 1: data.max_length=200\n" in out
    results = json.loads((folder / "results.json").read_text())
    assert results["best"] == 1 and results["metric"] == "loss"
    assert [job["differs"] for job in results["jobs"]] == [["data.max_length=1"], ["data.max_length=200"]]


@pytest.mark.usefixtures("hydra_here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    slow_after(
        5,
        [
            (["-m", "optim.lrr=1,2"], "optim.lrr is not a key of the configuration; did you mean optim.lr?"),
            (["-m", "stage=pretrain,nope"], "Could not find 'stage/nope'"),
            (["optim.lr=1,2"], "To sweep over it, add --multirun"),
            (["-m", "seed=1", "hydra.sweep.dir=a/${seed}"], "hydra.sweep.dir=a/${seed} must be a plain folder"),
            (
                ["-m", "seed=1", "sweep.metric=val_loss"],
                "needs validations, and val.every=null has none: set val.every=",
            ),
            (["-m", "sweep.metric=val_score", "val.every=1", "val.answers=0"], "needs answers, and val.answers=0"),
            (["-m", "seed=1", "launch.nnodes=2"], "start each run on several machines with launch/multinode.sh"),
            (["-m", "seed=1", "launch.nproc_per_node=0"], "launch.nproc_per_node=0 must be at least 1"),
            (["-m", "seed=1", "output_dir=here"], "give hydra.sweep.dir=FOLDER instead"),
            (["-m", "seed=1", "hydra.sweeper.direction=maximize"], "the sweeper must minimize"),
        ],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_costs_no_launch(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process that runs Hydra is this one."""

    def run_here(words: list[str], stop: StopRequest) -> int:
        monkeypatch.setattr(sys, "argv", list(words))
        with pytest.raises(SystemExit) as ended:
            hydra_process.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    monkeypatch.setattr(sweep, "supervise", run_here)
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and ended.value.code == ExitCode.USER
    assert not list(tmp_path.rglob("train.log"))


def test_command_of_a_job() -> None:
    overrides = ["stage=pretrain", "launch.nproc_per_node=4", "+launch.nnodes=1", "sweep.last_steps=2", "optim.lr=0.1"]
    command = train_command(config(*overrides[:2]), overrides, Path("/sweeps/3"), ["/my/conf"])
    assert command[0] == sys.executable
    assert command[1:] == [
        "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "llava_fsdp.train",
        "--config-dir", "/my/conf", "stage=pretrain", "optim.lr=0.1", "output_dir=/sweeps/3",
    ]  # fmt: skip


def test_a_finetuning_job_starts_from_the_projector_that_a_single_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def projectors(*overrides: str) -> list[str]:
        command = train_command(config("stage=finetune", *overrides), list(overrides), Path("/3"), [])
        return [word for word in command if word.startswith("model.projector")]

    assert projectors() == []
    (tmp_path / "outputs" / "pretrain").mkdir(parents=True)
    assert projectors() == [f"model.projector={tmp_path}/outputs/pretrain"]
    assert projectors("model.projector=random") == ["model.projector=random"]


@pytest.mark.parametrize(
    "name", ["/plain/0", "/a b", "/it's", "/a,b=c", "/back\\slash", "/back\\'s", "/(x)[y]{z}", "日本/é"]
)
def test_any_text_survives_the_override_grammar(name: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"output_dir={quoted(name)}"])
    value = override.value()
    assert getattr(value, "text", value) == name


@pytest.mark.parametrize("seconds", [None, "7"])
def test_torchrun_gets_no_launcher_variables_and_time_to_save(
    seconds: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its end is enough where a worker of it lives on with the log open."""
    launcher = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "ROLE_NAME",
                "TORCHELASTIC_RUN_ID"]  # fmt: skip
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    for name in (*launcher, "RANKING", *(["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] if seconds else [])):
        monkeypatch.setenv(name, "7")
    code = "import json, os, subprocess; print(json.dumps(dict(os.environ))); subprocess.Popen(['sleep', '20'])"
    started = time.monotonic()
    torchrun.run_torchrun([sys.executable, "-c", code], tmp_path, "job 0")
    assert time.monotonic() - started < 15
    seen = json.loads((tmp_path / "train.log").read_text())
    assert seen["RANKING"] == "7" and seen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == (seconds or "600")
    assert not {name for name in seen if name.startswith(("MASTER_", "TORCHELASTIC_"))} | ({*launcher} & {*seen})


def test_reason_of_a_failure(tmp_path: Path) -> None:
    """From `run_status.json`; where no worker lived to write it, the end of the log; never an earlier run's."""
    earlier = {"status": "failed", "exit_code": 3, "reason": "of an earlier run"}
    (tmp_path / "run_status.json").write_text(json.dumps(earlier))
    with pytest.raises(torchrun.JobFailed, match="torchrun ended with exit code 9: no memory") as caught:
        torchrun.run_torchrun([sys.executable, "-c", "print('no memory'); raise SystemExit(9)"], tmp_path, "job 0")
    assert "earlier" not in str(caught.value)
    assert caught.value.code is ExitCode.BUG and not caught.value.took_steps

    status = json.dumps({"status": "failed", "exit_code": 4, "reason": "step 7: loss nan"})
    code = f"open('{tmp_path}/run_status.json', 'w').write('''{status}'''); raise SystemExit(1)"
    with pytest.raises(torchrun.JobFailed, match=r"^step 7: loss nan$") as caught:
        torchrun.run_torchrun([sys.executable, "-c", code], tmp_path, "job 0")
    assert caught.value.code is ExitCode.NUMERIC and caught.value.took_steps


REFUSED = """
import pathlib, sys
from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.run_dir import claiming_folder
from llava_fsdp.runtime.files.status_file import Outcome, write_ending
folder = pathlib.Path(sys.argv[1])
with claiming_folder(folder, 0):
    write_ending(folder, Outcome(ENDINGS[sys.argv[2]], "another recipe's"))
raise SystemExit(sys.argv[2] != "done")
"""


def test_a_job_that_took_no_step_has_no_results_of_an_earlier_run(tmp_path: Path) -> None:
    """The folder may hold another job's run; one that finished and is run again keeps its results."""
    folder = imagine(tmp_path / "0", 60)

    def start(how: str) -> Job:
        job = Job(number=0, overrides=["optim.lr=5e-4"], folder=str(folder), command="torchrun")
        try:
            torchrun.run_torchrun([sys.executable, "-c", REFUSED, str(folder), how], folder, "job 0")
        except torchrun.JobFailed as error:
            record_failure(job, error, False)
        job.write()
        write_results(tmp_path, [job])
        return job

    start("done")
    assert runs_in(tmp_path)[0].history.last_step == 60 and "<figcaption>Loss" in (tmp_path / "report.html").read_text()
    job = start("checkpoint")
    assert (job.exit_code, job.reason, job.numbers) == (ExitCode.CHECKPOINT, "another recipe's", Results())
    (run,) = runs_in(tmp_path)
    assert (run.state, run.reason, run.config, run.history.last_step) == ("failed", "another recipe's", {}, 0)
    assert "<figure" not in (tmp_path / "report.html").read_text()


def test_folder_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(*words: str) -> Path | None:
        monkeypatch.setattr(sys, "argv", ["sweep", *words])
        return sweep.sweep_folder()

    monkeypatch.chdir(tmp_path)
    assert folder("seed=1") is None
    found = folder("-m", "seed=1,2")
    assert found is not None and found.parent == Path("outputs/sweeps")
    assert sys.argv[-1] == f"hydra.sweep.dir={found}"  # what Hydra then uses
    (tmp_path / "mine" / "0").mkdir(parents=True)
    (tmp_path / "mine" / "0" / JOB_FILE).write_text("{}")
    assert folder("-m", "hydra.sweep.dir=other", "hydra.sweep.dir='mine'") == Path("mine"), "the last one counts"
    assert read_jobs(Path("mine")) == []  # results of an earlier sweep are not shown as this one's


FAKE_SMI = """#!/bin/sh
echo "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)"
echo "GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb)"
"""
TRAIN = ["stage=pretrain", "launch.nproc_per_node=1", "global_batch_size=2", "micro_batch_size=2",
         "export.enabled=false", "data.workers=0", "data.max_length=200"]  # fmt: skip
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def jobs_in(folder: Path) -> list[Job]:
    with contextlib.chdir(folder.parent):
        return read_jobs(Path(folder.name))


@pytest.mark.e2e
@pytest.mark.slow
def test_two_jobs_at_once_each_on_a_gpu_of_its_own(tmp_path: Path) -> None:
    """Two of four fail; the others continue, two at a time, on different GPUs. torch finds none, and trains on CPU."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(FAKE_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
    words = ["-m", *TRAIN, *JOBLIB, "max_steps=2", "optim.lr=1e-3,2e-3", "optim.weight_decay=0.0,-1.0"]
    words += ["hydra.sweep.dir=four"]
    code, _, err = run_sweep(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1", **variables)
    jobs = jobs_in(tmp_path / "four")
    assert code == ExitCode.USER and [job.status for job in jobs] == ["done", "user", "done", "user"], err
    assert {tuple(job.devices) for job in jobs if job.is_done} <= {("0",), ("1",)}
    assert json.loads((tmp_path / "four" / "results.json").read_text())["best"] in (0, 2)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], JOBLIB], ids=["one at a time", "joblib"])
def test_a_stopped_sweep_leaves_no_process_and_is_continued(launcher: list[str], tmp_path: Path) -> None:
    """SIGTERM to the sweep alone: running jobs save, others do not begin; the same command then trains all to their
    ends, and does not repeat what was done."""
    words = ["-m", *TRAIN, *launcher, "max_steps=120", "optim.lr=1e-3,2e-3,3e-3", "hydra.sweep.dir=all"]
    begun, folder = 2 if launcher else 1, tmp_path / "all"
    process, until = start_sweep(*words, cwd=tmp_path), time.monotonic() + 200
    while not all((folder / str(n) / "metrics.jsonl").exists() for n in range(begun)):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=100)[1]
    assert process.returncode == ExitCode.STOPPED, err
    jobs = jobs_in(folder)
    assert [job.exit_code for job in jobs] == [ExitCode.STOPPED] * 3
    assert [bool(job.command) for job in jobs] == [True] * begun + [False] * (3 - begun)
    assert not processes_of(tmp_path)
    stopped = [job.numbers.steps for job in jobs[:begun]]
    assert all(0 < steps < 120 for steps in stopped)

    assert run_sweep(*words, cwd=tmp_path)[0] == 0
    done = jobs_in(folder)
    assert [job.numbers.steps for job in done] == [120] * 3
    assert f"continuing after step {stopped[0]} of 120" in (folder / "0" / "train.log").read_text()
    if launcher:
        assert run_sweep(*words, cwd=tmp_path)[0] == 0
        assert [job.numbers.loss for job in jobs_in(folder)] == [job.numbers.loss for job in done]
        assert "this run has finished after step 120" in (folder / "2" / "train.log").read_text()


def processes_of(folder: Path) -> list[str]:
    """Command lines that name it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if entry.name.isdecimal() and str(folder) in line and "llava_fsdp" in line:
                found.append(line)
    return found


def test_levels_of_a_stop_request(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "new" / ".stop")
    assert stop.level() == 0 and stop.is_main()
    for level, found in ((SAVE, SAVE), (NOW, NOW), (SAVE, NOW)):
        stop.raise_to(level)
        assert stop.level() == found
    stop.clear()
    assert stop.level() == 0
    gone = subprocess.Popen(["true"])
    gone.wait()
    stop.main = (stop.main[0], gone.pid)
    assert stop.level() == SAVE, "nobody is left to hand a result to"
    stop.main = ("another machine", gone.pid)
    assert stop.level() == 0


def test_signals_to_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first asks its jobs to save, the second to end, and the third ends all."""
    request, seen = StopRequest(tmp_path / ".stop"), []

    class Child:
        def __init__(self, words: list[str], start_new_session: bool) -> None:
            assert start_new_session and words[-5:] == [sys.executable, "-P", "-m", "module", "word"]

        def wait(self) -> int:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
                seen.append(request.level())
            return -9

        def kill(self) -> None:
            seen.append("killed")

    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(os, "_exit", seen.append)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyError):  # the third signal ends the real process before it is reported
            supervise(["module", "word"], request)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert seen == [SAVE, NOW, "killed", ExitCode.INTERRUPTED]


def test_a_sweep_whose_hydra_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its results so far are written and printed."""

    def killed(words: list[str], stop: StopRequest) -> int:
        (tmp_path / "s").mkdir()
        job_of(0, tmp_path / "s" / "0", 1.0, "seed=1")
        return -9

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", "seed=1", "hydra.sweep.dir=s"])
    monkeypatch.setattr(sweep, "supervise", killed)
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == ExitCode.BUG and "seed=1" in capsys.readouterr().out
    assert json.loads((tmp_path / "s" / "results.json").read_text())["best"] == 0


def test_the_latest_step_of_a_job_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child: Any = SimpleNamespace(wait=lambda timeout: 0, returncode=0)
    with caplog.at_level(logging.INFO):
        torchrun.follow(child, io.StringIO("step 1/9  loss 2\nstep 2/9  loss 1\nsaved\n"), "job 5", int)
    assert [record.getMessage() for record in caplog.records] == ["job 5: step 2/9  loss 1"]
    log = tmp_path / "train.log"
    log.write_text("\n".join(f"line {n}\n" for n in range(9)))
    assert torchrun.tail(log).splitlines() == [f"line {n}" for n in range(4, 9)]


@pytest.mark.parametrize(("recorded", "code"), [({}, ExitCode.BUG), ({"exit_code": 75}, ExitCode.STOPPED),
                                                ({"exit_code": 99}, ExitCode.BUG)])  # fmt: skip
def test_exit_code_that_a_rank_recorded(recorded: dict, code: ExitCode) -> None:
    assert torchrun.failure_code(recorded) is code


SAVES = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('on', flush=True)"
WAITS = "[time.sleep(0.1) for _ in range(600)]"  # a signal just before one long sleep would wait for its end


@pytest.mark.parametrize(("level", "code"), [(SAVE, "ended with exit code 75: on"), (NOW, "was killed by signal 9")])
def test_a_stop_request_reaches_torchrun(level: int, code: str, tmp_path: Path) -> None:
    def requested() -> int:
        return level if (tmp_path / "train.log").read_text() == "on\n" else 0

    with pytest.raises(torchrun.JobFailed, match=code):
        torchrun.run_torchrun([sys.executable, "-c", f"{SAVES}; {WAITS}"], tmp_path, "job 0", requested)


def test_torchrun_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """By SIGTERM, not SIGKILL."""
    code = f"{SAVES.replace('sys.exit(75)', '(open(sys.argv[1], chr(119)).close(), sys.exit())')}; {WAITS}"
    program = f"""if True:
        import pathlib, sys
        from llava_fsdp.sweep.torchrun import run_torchrun
        run_torchrun([sys.executable, "-c", {code!r}, "{tmp_path}/ended"], pathlib.Path("{tmp_path}"), "job 0")"""
    log, until = tmp_path / "train.log", time.monotonic() + 30
    process = subprocess.Popen([sys.executable, "-c", program])
    while not log.exists() or log.read_text() != "on\n":
        assert time.monotonic() < until, log.read_text() if log.exists() else "not begun"
        time.sleep(0.1)
    process.kill()
    process.wait()
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def write_jsonl(path: Path, *rows: object) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


def test_results_of_a_run(tmp_path: Path) -> None:
    assert read_results(tmp_path, 10) == Results()
    row = {"label_tokens": 10, "tokens_per_second": 50.0, "seconds": 2.0, "data_seconds": 1.0, "peak_memory_bytes": 5}
    write_jsonl(
        tmp_path / "metrics.jsonl",
        {"step": 1, "loss": 9.0, **row, "tokens_per_second": 2.0},
        {"step": 2, "loss": 3.0, **row},
        {"step": 3, "loss": None, **row, "peak_memory_bytes": 7, "skipped": True},
        {"step": 4, "loss": 1.5, **row, "label_tokens": 30},
        '{"step": 5, "lo',
    )
    found = read_results(tmp_path, 2)
    assert found.loss == (3.0 * 10 + 1.5 * 30) / 40 == found.lowest_loss and found.steps == 4
    assert found.tokens_per_second == 50, "without the first half, which compiles"
    assert (found.peak_memory_bytes, found.train_seconds, found.data_share, found.skipped_steps) == (7, 8.0, 0.5, 1)
    assert read_results(tmp_path, 1).loss == 1.5
    assert found.val_loss is None and value_of(found, SweepMetric.val_loss) is None
    write_jsonl(
        tmp_path / "validation.jsonl",
        {"step": 2, "loss": 2.0, "score": 0.5},
        {"step": 3, "loss": 1.0, "score": 0.75},
        {"step": 4, "loss": 1.25, "score": None},
    )
    assert [value_of(read_results(tmp_path, 1), metric) for metric in SweepMetric] == [1.5, 1.0, -0.75]
    write_jsonl(tmp_path / "metrics.jsonl", "nonsense")
    assert read_results(tmp_path, 1) == Results()


def job_of(number: int, folder: Path, value: float | None, *overrides: str) -> Job:
    """A job whose file is in its folder."""
    code, status = (ExitCode.BUG, "numeric") if value is None else (ExitCode.DONE, "done")
    job = Job(number=number, overrides=[*overrides], folder=str(folder), exit_code=code, value=value, status=status)
    folder.mkdir()
    job.write()
    return job


def test_results_of_a_sweep(tmp_path: Path) -> None:
    """What differs names the jobs; the best one is marked; a text of the user's is not markup."""
    jobs = [
        job_of(0, tmp_path / "0", 2.0, "seed=1", "optim.lr=1"),
        job_of(1, tmp_path / "1", None, "seed=1", "data.path='<b>&'"),
        job_of(2, tmp_path / "2", 1.0, "seed=1", "optim.lr=2"),
    ]
    for job in jobs[:2]:
        write_jsonl(tmp_path / str(job.number) / "metrics.jsonl", {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0})
    assert differing_overrides(jobs) == [["optim.lr=1"], ["data.path='<b>&'"], ["optim.lr=2"]]
    assert differing_overrides(jobs[:1]) == [["seed=1", "optim.lr=1"]]
    assert best_of(jobs) is jobs[2] and best_of(jobs[1:2]) is None
    write_results(tmp_path, jobs)
    page = (tmp_path / "report.html").read_text()
    assert "3 runs" in page and "&lt;b&gt;" in page and "<b>&" not in page and ", best" in page
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["best"] == 2 and [job["number"] for job in found["jobs"]] == [0, 1, 2]


def test_jobs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Not of their folders' names, which sort as text and may be the user's; the first of equally good jobs is best."""
    for number, name in ((10, "10"), (2, "2"), (0, "z")):
        job_of(number, tmp_path / name, 1.0, f"seed={number}")
    jobs = read_jobs(tmp_path)
    assert [job.number for job in jobs] == [0, 2, 10] and {job.status for job in jobs} == {"done"}
    best = best_of(jobs)
    assert best is not None and best.number == 0
    assert [run.overrides for run in runs_in(tmp_path)] == [{"seed": 0}, {"seed": 2}, {"seed": 10}]


def test_the_printed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job_of(n, tmp_path / str(n), value, f"seed={n}") for n, value in enumerate((2.0, 1.0, None))]
    jobs[0].numbers, jobs[1].numbers = Results(steps=3, loss=2.0), Results(steps=4, loss=1.0)
    jobs[2].reason, jobs[2].last_steps = "its own", 5
    print_results(jobs)
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line[:1] == "│"]
    assert [row[:5] for row in rows if row[0]] == [
        ["0", "seed=0", "done", "3", "2.0000"], ["1", "seed=1", "done, best", "4", "1.0000"],
        ["2", "seed=2", "failed (numeric)", "-", "-"],
    ]  # fmt: skip
    assert "loss of last 20 steps" in printed and "best by loss of last 20 steps: job 1: seed=1\n" in printed
    assert "job 2 failed (numeric): its own\n" in printed and "log:" not in printed
    print_results(jobs[:1])
    assert "best by" not in capsys.readouterr().out


def test_results_are_private_if_one_job_is(tmp_path: Path) -> None:
    jobs = [job_of(n, tmp_path / str(n), 1.0) for n in range(2)]
    jobs[0].private = False
    with restoring_umask():
        os.umask(0o022)
        write_results(tmp_path, jobs)
    assert mode_of(tmp_path / "results.json") == 0o600


@pytest.mark.parametrize(
    ("codes", "succeeded", "was_stopped", "errors", "code"),
    [
        ([0, 0], True, False, "", None),
        ([0, 3, 4], False, False, "", 3),
        ([75, 4, 3], False, True, "", 4),
        ([0, 75], False, False, "", ExitCode.STOPPED),
        ([0], True, True, "", ExitCode.STOPPED),
        ([], False, False, "optim.lrr is wrong", ExitCode.USER),
        ([], False, False, "Traceback of Hydra", ExitCode.BUG),
        ([0], False, False, "the launcher is wrong", ExitCode.BUG),
    ],
)
def test_exit_code_of_a_sweep(
    codes: list[int], succeeded: bool, was_stopped: bool, errors: str, code: int | None
) -> None:
    jobs = [Job(number=n, overrides=[], folder="", exit_code=code) for n, code in enumerate(codes)]
    with pytest.raises(SystemExit) if code is not None else contextlib.nullcontext() as ended:
        hydra_process.exit_as_jobs_ended(jobs, succeeded, was_stopped, errors)
    assert ended is None or ended.value.code == code


@pytest.mark.parametrize(("left_with", "succeeded"), [(None, True), (0, True), (1, False)])
def test_whether_hydra_succeeded(left_with: int | None, succeeded: bool) -> None:
    def program() -> None:
        raise SystemExit(left_with)

    assert hydra_process.run_hydra(program, io.StringIO()) is succeeded


def test_what_a_job_may_not_have() -> None:
    plain = config()
    answers, every = replace(plain.val, answers=1), replace(plain.val, answers=0, every=1)
    loss, score = replace(plain.sweep, metric=SweepMetric.val_loss), replace(plain.sweep, metric=SweepMetric.val_score)
    more: dict[str, Any]
    for more, words, is_sweep, message in (
        ({"launch": replace(plain.launch, nproc_per_node=0)}, [], True, "at least 1"),
        ({"launch": replace(plain.launch, nnodes=2)}, [], True, "one machine"),
        ({}, ["output_dir=x"], True, "hydra.sweep.dir"),
        ({}, ["++output_dir=x"], True, "hydra.sweep.dir"),
        ({}, ["output_dir=x"], False, None),
        ({"sweep": loss}, [], True, "val.every"),
        ({"sweep": score, "val": answers}, [], True, "val.every"),
        ({"sweep": score, "val": every}, [], True, "val.answers"),
        ({"sweep": loss, "val": every}, [], True, None),
    ):
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check_job(replace(plain, **more), words, is_sweep)
    for word in ("hydra.sweeper.direction=MAXIMIZE", "+hydra.sweeper.direction=maximize"):
        with pytest.raises(ConfigError, match="must minimize"):
            sweep.refuse_maximizing(["-m", word])
    sweep.refuse_maximizing(["-m", "hydra.sweeper.direction=minimize"])


@pytest.mark.usefixtures("hydra_here")
def test_a_job_has_gpus_of_its_own_unless_they_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of --config-dir reach the training."""
    (tmp_path / "mine").mkdir()
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_locks.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("llava_fsdp.sweep.job.devices_here", lambda: [Device("3", "GPU-c"), Device("4", "GPU-d")])
    monkeypatch.setattr("llava_fsdp.sweep.job.run_torchrun", lambda *given: seen.append(given))
    words = ["--config-dir", "mine", "-m", "stage=pretrain", "hydra.sweep.dir=s", "launch.devices=own,shared"]
    monkeypatch.setattr(sys, "argv", ["sweep", *words, "launch.nproc_per_node=1"])
    setup_logging()
    jobs, *_ = run_jobs(StopRequest(tmp_path / ".stop"))
    assert [given[1:3] for given in seen] == [(Path("s/0"), "job 0"), (Path("s/1"), "job 1")]
    assert [(visible, len(locks)) for *_, visible, locks in seen] == [("3", 1), (None, 0)]
    assert [job.devices for job in jobs] == [["3"], []]
    for command, *_ in seen:
        assert command.count("--config-dir") == 1
        assert command[command.index("--config-dir") + 1] == str(tmp_path / "mine")
    assert all(job.exit_code == ExitCode.BUG and job.has_own_run and "has no loss" in job.reason for job in jobs)


def test_an_error_of_the_page_costs_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(runs: list[Any]) -> str:
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr("llava_fsdp.sweep.results.comparison_page", broken)
    write_results(tmp_path, [job_of(0, tmp_path / "0", 2.0, "seed=1")])
    assert json.loads((tmp_path / "results.json").read_text())["best"] == 0
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == f"{tmp_path / 'report.html'} cannot be written (ZeroDivisionError: of a chart)"


def test_a_job_whose_process_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0").mkdir()
    Job(number=0, overrides=["seed=1"], folder="0").write()
    (job,) = read_jobs(tmp_path)
    assert job.status == "lost" and job.exit_code == ExitCode.BUG and "was killed" in job.reason
    (tmp_path / "0" / JOB_FILE).write_text('{"number": 0}')
    assert read_jobs(tmp_path) == [], "of another version"


@pytest.mark.usefixtures("hydra_here")
@pytest.mark.parametrize(
    ("private", "folder_mode", "mode"), slow_after(1, [(True, 0o700, 0o600), (False, 0o755, 0o644)])
)
def test_files_of_a_sweep_are_private(
    private: bool,
    folder_mode: int,
    mode: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hydra's own way to a job, with a torchrun that fails at once."""
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 9\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    words = ["-m", "stage=pretrain", f"private={str(private).lower()}", "hydra.sweep.dir=s", "launch.devices=shared"]
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    with restoring_umask():
        os.umask(0o022)
        setup_logging()
        jobs, succeeded, said = run_jobs(StopRequest(tmp_path / ".stop"))
        write_results(Path("s"), jobs)
        assert os.umask(0o022) == 0o022
    (job,) = jobs
    print_results(jobs)
    printed = capsys.readouterr()
    assert "  log: s/0/train.log" in printed.out and f"  command: {python} -P -m torch.distributed.run" in printed.err
    assert not succeeded and job.reason.startswith("torchrun ended with exit code 9"), said
    assert mode_of(Path("s/0")) == folder_mode
    for name in ("0/job.json", "0/train.log", "results.json"):
        assert mode_of(Path("s") / name) == mode, name
    os.chmod("s/0", 0o750)
    make_job_folder(Path("s/0"), True, True)
    assert mode_of(Path("s/0")) == 0o750, "one that a run has been in stays as it is"


@pytest.mark.usefixtures("hydra_here")
@pytest.mark.parametrize("ends", [True, False])
def test_the_loss_of_a_job_is_that_of_its_last_steps(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as sweep.last_steps says, also of a job that fails."""

    def train_here(config: SweepConfig, job: Job, level: Callable[[], int]) -> None:
        rows = [{"step": n, "loss": float(loss), "label_tokens": 1} for n, loss in enumerate((90, 80, 3, 2, 1), 1)]
        write_jsonl(Path(job.folder) / "metrics.jsonl", *rows)
        if not ends:
            raise torchrun.JobFailed("its own", ExitCode.NUMERIC, took_steps=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llava_fsdp.sweep.job.train", train_here)
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", "stage=pretrain", "sweep.last_steps=3", "hydra.sweep.dir=s"])
    setup_logging()
    (job,), *_ = run_jobs(StopRequest(tmp_path / ".stop"))
    assert (job.numbers.loss, job.numbers.lowest_loss, job.value) == (2.0, 2.0, 2.0 if ends else None)
    (written,), (shown,) = read_jobs(Path("s")), runs_in(Path("s"))
    assert (written.last_steps, written.numbers, written.value) == (3, job.numbers, job.value)
    assert shown.history.loss == 2.0


def test_a_job_that_was_stopped_before_it_began(tmp_path: Path) -> None:
    """The end of an earlier start is not that of this one; its results still count."""
    (tmp_path / "run_status.json").write_text(json.dumps({"exit_code": 2, "reason": "of an earlier start"}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "label_tokens": 5}\n')

    def ended(error: LlavaFsdpError, is_stopping: bool, command: str = "") -> Job:
        job = Job(number=0, overrides=[], folder=str(tmp_path), command=command)
        record_failure(job, error, is_stopping)
        return job

    job = ended(torchrun.JobFailed("stopped"), True)
    assert (job.status, job.exit_code, job.reason) == ("stopped", ExitCode.STOPPED, "stopped before it began")
    assert job.numbers.loss == 3.0 and job.numbers.steps == 1
    assert ended(torchrun.JobFailed("its own", ExitCode.USER), True, "torchrun").exit_code == ExitCode.USER
    ending = ended(torchrun.JobFailed("it was killed"), True, "torchrun")
    assert (ending.exit_code, ending.reason, ending.numbers.loss) == (ExitCode.STOPPED, "it was killed", 3.0)
    assert ended(torchrun.JobFailed("it was killed"), False, "torchrun").exit_code == ExitCode.BUG
    refused = ended(ConfigError("seed=x is wrong"), True)
    assert (refused.exit_code, refused.reason, refused.numbers) == (ExitCode.USER, "seed=x is wrong", Results())


LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb-2)
  MIG 1g.5gb      Device  0: (UUID: MIG-cccc-3)
  MIG 1g.5gb      Device  1: (UUID: MIG-dddd-4)
"""


@pytest.mark.parametrize(
    ("visible", "names", "keys"),
    [
        (None, ["0", "MIG-cccc-3", "MIG-dddd-4"], ["GPU-aaaa-1", "MIG-cccc-3", "MIG-dddd-4"]),
        ("1,0", ["1", "0"], ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb"], ["GPU-bbbb-2"]),
        ("MIG-dddd-4", ["MIG-dddd-4"], ["MIG-dddd-4"]),
        ("0,-1,1", ["0"], ["GPU-aaaa-1"]),
        ("", [], []),
    ],
)
def test_gpus_that_a_job_would_see(visible: str | None, names: list[str], keys: list[str]) -> None:
    found = list_devices(LISTED, visible)
    assert [device.name for device in found] == names and [device.key for device in found] == keys


def test_more_ranks_than_gpus_are_refused() -> None:
    gpus = [Device("0", "GPU-a"), Device("1", "GPU-b")]
    check_devices([], 8)  # ranks on the CPU
    check_devices(gpus, 2)
    check_devices([Device("a", "MIG-a"), Device("b", "MIG-b")], 1)
    with pytest.raises(ConfigError, match=r"there are 2; set launch.nproc_per_node=2"):
        check_devices(gpus, 3)
    with pytest.raises(ConfigError, match="MIG"):
        check_devices([Device("a", "MIG-a"), Device("b", "MIG-b")], 2)


def test_no_two_jobs_have_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_locks.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_locks, "WAIT_SECONDS", 0.01)
    gpus = [Device(str(n), f"GPU-{n}") for n in range(3)]

    def names(held: tuple[list[Device], list]) -> list[str]:
        return [device.name for device in held[0]]

    with locking_devices(gpus, 1, "a", int) as one:
        with locking_devices(gpus, 2, "b", int) as two:
            assert (names(one), names(two)) == (["0"], ["1", "2"])
            looks = iter([0, 1])
            with locking_devices(gpus, 1, "c", lambda: next(looks)) as none:  # waits until it is told not to
                assert names(none) == []
        with locking_devices(gpus, 1, "d", int) as three:
            assert names(three) == ["1"]
            with locking_devices(gpus, 2, "e", lambda: 1) as none:  # one is free, which is not enough
                assert names(none) == []
            with locking_devices(gpus, 1, "f", int) as four:
                assert names(four) == ["2"], "what was not enough has been given back"
    with locking_devices([], 4, "on the CPU", int) as nothing:
        assert names(nothing) == []
