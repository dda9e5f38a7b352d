"""One torchrun a job: a job that fails does so alone, and the sweep ends with its exit code and a table."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from llava_fsdp import sweep
from llava_fsdp.cli import quoted
from llava_fsdp.config import SweepConfig, config_dir, load
from llava_fsdp.errors import ConfigError, ExitCode


def config(*overrides: str) -> SweepConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(SweepConfig, compose("sweep", overrides=list(overrides)))


def run_sweep(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "llava_fsdp.sweep", *arguments]
    # what a torchrun around the sweep would leave behind; a job that saw it would wait for nine ranks
    around = {"WORLD_SIZE": "9", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **around}
    environment.pop("RANK", None)
    return subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.e2e
def test_a_job_that_fails_does_so_alone(tmp_path: Path, dataset: Path) -> None:
    """The first job fails in training, the second at the door, and the third trains to its end."""
    done = run_sweep(
        "-m", "stage=pretrain", "data.max_length=100000,1,200", "launch.nproc_per_node=1", "hydra.sweep.dir=three",
        "data=llava_json", f"data.path={dataset}/mixed.json", f"data.images={dataset}/images", "data.workers=0",
        "max_steps=1", "global_batch_size=2", "micro_batch_size=2", "export.enabled=false",
        cwd=tmp_path,
    )  # fmt: skip
    jobs = [json.loads((tmp_path / "three" / str(n) / "job.json").read_text()) for n in range(3)]
    assert [(job["status"], job["exit_code"]) for job in jobs] == [("user", 2), ("user", 2), ("done", 0)], done.stderr
    assert done.returncode == ExitCode.USER

    assert "job 0: failed" in done.stderr and "data.max_length=100000 is above" in done.stderr
    assert "command: " in done.stderr and "-m llava_fsdp.train stage=pretrain data.max_length=100000" in done.stderr
    assert "data.max_length=1 must be at least 2" in done.stderr
    assert not (tmp_path / "three" / "1" / "train.log").exists()  # refused at the door: nothing was launched
    assert "Traceback" not in done.stderr
    assert "job 2: step 1/1  loss" in done.stderr

    last = json.loads((tmp_path / "three" / "2" / "metrics.jsonl").read_text().splitlines()[-1])
    assert jobs[2]["loss"] == last["loss"]
    assert f"job 2: done in {jobs[2]['seconds']:.0f} s, last loss {last['loss']:.4f}" in done.stderr
    rows = [line for line in done.stdout.splitlines() if "three/" in line]
    assert [("failed (user)" in row, "done" in row) for row in rows] == [(True, False), (True, False), (False, True)]
    assert f"{last['loss']:.4f}" in rows[2]
    assert "step 1/1" in (tmp_path / "three" / "2" / "train.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "optim.lrr=1,2"], "optim.lrr is not a key of the configuration; did you mean optim.lr?"),
        (["-m", "stage=pretrain,nope"], "Could not find 'stage/nope'"),
        (["optim.lr=1,2"], "To sweep over it, add --multirun"),
        (["-m", "seed=1", "hydra.sweep.dir=a/${seed}"], "hydra.sweep.dir=a/${seed} must be a plain folder"),
        (["-m", "seed=1", "launch.nnodes=2"], "start each run on several machines with launch/multinode.sh"),
        (["-m", "seed=1", "launch.nproc_per_node=0"], "launch.nproc_per_node=0 must be at least 1"),
        (["-m", "seed=1", "output_dir=here"], "give hydra.sweep.dir=FOLDER instead"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_costs_no_launch(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_sweep(*arguments, cwd=tmp_path)
    assert message in done.stderr
    assert done.returncode == ExitCode.USER
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("train.log"))


def test_command_of_a_job(tmp_path: Path) -> None:
    overrides = ["stage=pretrain", "launch.nproc_per_node=4", "+launch.nnodes=1", "optim.lr=0.1"]
    command = sweep.train_command(config(*overrides[:2]), overrides, Path("/sweeps/3"), ["/my/conf"])
    assert command[0] == sys.executable
    assert command[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "llava_fsdp.train",
        "--config-dir", "/my/conf", "stage=pretrain", "optim.lr=0.1", "output_dir=/sweeps/3",
    ]  # fmt: skip


def test_finetuning_job_starts_from_the_projector_that_the_run_alone_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["stage=finetune"]
    assert "projector" not in " ".join(sweep.train_command(config(*overrides), overrides, Path("/3"), []))
    (tmp_path / "outputs" / "pretrain").mkdir(parents=True)
    command = sweep.train_command(config(*overrides), overrides, Path("/3"), [])
    assert f"model.projector={tmp_path}/outputs/pretrain" in command
    chosen = [*overrides, "model.projector=random"]
    command = sweep.train_command(config(*chosen), chosen, Path("/3"), [])
    assert [part for part in command if part.startswith("model.projector")] == ["model.projector=random"]


@pytest.mark.parametrize(
    "name", ["/plain/0", "/a b", "/it's", "/a,b=c", "/back\\slash", "/back\\'s", "/(x)[y]{z}", "日本/é"]
)
def test_any_text_survives_the_override_grammar(name: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"output_dir={quoted(name)}"])
    value = override.value()
    assert getattr(value, "text", value) == name


def test_torchrun_gets_no_launcher_variables_and_its_end_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a worker of it lives on with the log open."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "ROLE_NAME"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANKING", "kept")
    code = "import os, subprocess; print(sorted(os.environ)); subprocess.Popen(['sleep', '20'])"
    started = time.monotonic()
    sweep.run_torchrun([sys.executable, "-c", code], tmp_path, "job 0")
    assert time.monotonic() - started < 15
    seen = (tmp_path / "train.log").read_text()
    assert "'RANKING'" in seen
    for name in ("'RANK'", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_"):
        assert name not in seen


def test_reason_of_a_failure(tmp_path: Path) -> None:
    """From `run_status.json`; where no worker lived to write it, the end of the log; never an earlier run's."""
    (tmp_path / "run_status.json").write_text(json.dumps({"exit_code": 3, "reason": "of an earlier run"}))
    with pytest.raises(sweep.JobFailed, match="torchrun returned 9: no memory") as caught:
        sweep.run_torchrun([sys.executable, "-c", "print('no memory'); raise SystemExit(9)"], tmp_path, "job 0")
    assert "earlier" not in str(caught.value)
    assert sweep.failure_code(tmp_path) is ExitCode.BUG

    status = json.dumps({"exit_code": 4, "reason": "step 7: loss nan"})
    code = f"open('{tmp_path}/run_status.json', 'w').write('''{status}'''); raise SystemExit(1)"
    with pytest.raises(sweep.JobFailed, match=r"^step 7: loss nan$"):
        sweep.run_torchrun([sys.executable, "-c", code], tmp_path, "job 0")
    assert sweep.failure_code(tmp_path) is ExitCode.NUMERIC


def test_last_loss(tmp_path: Path) -> None:
    with pytest.raises(sweep.JobFailed, match="has no step in it"):
        sweep.last_loss(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.25}\n')
    assert sweep.last_loss(tmp_path) == 2.25


def test_folder_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sweep", "seed=1"])
    assert sweep.sweep_folder() is None
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", "seed=1,2"])
    folder = sweep.sweep_folder()
    assert folder is not None and folder.parent == Path("outputs/sweeps")
    assert sys.argv[-1] == f"hydra.sweep.dir={folder}"  # what Hydra then uses
    (tmp_path / "mine" / "0").mkdir(parents=True)
    (tmp_path / "mine" / "0" / sweep.JOB_FILE).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", "seed=1,2", "hydra.sweep.dir='mine'"])
    assert sweep.sweep_folder() == Path("mine")
    assert sweep.read_jobs(Path("mine")) == []  # results of an earlier sweep are not shown as this one's
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", "hydra.sweep.dir=a${seed}"])
    with pytest.raises(ConfigError, match="must be a plain folder"):
        sweep.sweep_folder()
