"""launch/slurm.sbatch under Slurm's own daemons: two nodes that are this machine, with one rank each."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import checkout
from slurm import Cluster, missing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm here: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as made:
        yield made


class Job:
    """A job of two nodes that trains the embedded default."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str, options: tuple[str, ...] = (), pace: float = 0):
        env = checkout(folder)
        self.cluster, self.output, self.log = cluster, folder / "out", folder / "job.txt"
        training = [
            "stage=pretrain", f"output_dir={self.output}", "global_batch_size=4", "micro_batch_size=2",
            "data.workers=0", "precision=fp32", "activation_checkpointing=none", "compile=false",
            "export.enabled=false",
            "checkpoint.every=null", *words,
        ]  # fmt: skip
        self.number = cluster.submit(
            "--nodes=2", "--gpus-per-node=1", f"--output={self.log}", *options, "launch/slurm.sbatch", *training,
            folder=folder, PACE=str(pace), RDZV_HOST="127.0.0.1", **env,
        )  # fmt: skip

    @property
    def rows(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def until_step(self, step: int) -> None:
        self.cluster.until(lambda: self.rows and self.rows[-1]["step"] >= step, 180, f"step {step}")

    def end(self, seconds: float) -> dict[str, str]:
        """What Slurm says of the job when it has ended for good."""

        def is_over() -> bool:
            return self.cluster.job(self.number).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

        self.cluster.until(is_over, seconds, f"the end of job {self.number}")
        return self.cluster.job(self.number)

    @property
    def status(self) -> dict:
        return json.loads((self.output / "run_status.json").read_text())


@pytest.mark.timeout(1500)
def test_a_job_whose_time_is_up_goes_on_in_the_next(cluster: Cluster, tmp_path: Path) -> None:
    """Saved before Slurm would kill it, put back by itself, and finished at the step that was asked for."""
    job = Job(cluster, tmp_path, "max_steps=50", options=("--time=3", "--signal=B:USR1@45"), pace=3)
    ended = job.end(1200)
    said = job.log.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    starts = int(ended["Restarts"]) + 1
    assert starts >= 2 and said.count("goes back into the queue (exit code 75)") == starts - 1
    assert said.count("continuing after step") == starts - 1 and "DUE TO TIME LIMIT" not in said
    assert (job.status["status"], job.status["exit_code"]) == ("done", 0)
    assert [row["step"] for row in job.rows] == list(range(1, 51))
    assert all(row["samples"] == 4 for row in job.rows)
    assert {path.name for path in (tmp_path / "outputs" / "logs" / f"slurm-{job.number}").iterdir()} == {
        f"start-{number}" for number in range(starts)
    }


def test_scancel_saves_and_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "max_steps=500", pace=0.5)
    job.until_step(2)
    cluster.ask("scancel", job.number)
    ended = job.end(60)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job.log.read_text()
    assert (job.status["status"], job.status["exit_code"]) == ("stopped", 75)
    saved = [path.name for path in (job.output / "checkpoints").glob("step-*")]
    assert saved == [f"step-{job.rows[-1]['step']:06d}"]


def test_a_mistake_is_said_and_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    """At once where a key does not exist; by the ranks where it is their business to find out."""
    (tmp_path / "one").mkdir()
    mistyped = Job(cluster, tmp_path / "one", "optim.lrr=1")
    ended = mistyped.end(60)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert "optim.lrr is not a key of the configuration" in mistyped.log.read_text()
    (tmp_path / "two").mkdir()
    wrong = Job(cluster, tmp_path / "two", "sharding=hybrid", "sharding.shard_size=3")
    ended = wrong.end(120)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), wrong.log.read_text()
    assert "sharding.shard_size=3 does not divide the 2 ranks" in wrong.log.read_text()
