"""Trainings in processes of their own, and what became of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FAULTY = Path(__file__).with_name("faulty.py")
TELLS_ALWAYS = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 15)
"""This kernel says how a process ended after its parent has asked, too."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Run:
    """A training of the small model that was started."""

    def __init__(
        self,
        folder: Path,
        parts: Path,
        dataset: Path,
        *overrides: str,
        launch: list[str] | None = None,
        ranks: int = 2,
        restarts: int = 0,
        fault: str = "slow:-1:0",
        pace: float = 0.0,
        env: dict[str, str] | None = None,
        script: list[str] | None = None,
    ):
        """
        Args:
            launch: arguments of torchrun; by default those of one machine.
            pace: seconds that every step takes longer.
            script: a launch script, and what stands before it, in place of torchrun; a `checkout` of it (machine.py).
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "out"
        start = launch if launch is not None else ["--standalone", f"--max-restarts={restarts}"]
        started = [*TORCHRUN, *start, f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
        started = script if script is not None else [*started, str(FAULTY)]
        words = [
            "stage=finetune", f"output_dir={self.output}", f"model.language={parts / 'language'}",
            f"model.vision={parts / 'vision'}", "model.projector=random", "model.random_weights=true",
            "data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.images={dataset / 'images'}",
            "data.workers=1", "data.max_length=256", "precision=fp32", "activation_checkpointing=none",
            "export.enabled=false",
            "global_batch_size=4", "micro_batch_size=2", "max_steps=6", "epochs=9", "checkpoint.every=2", *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault, "PACE": str(pace), **(env or {})}
        self.log = folder / f"log-{time.monotonic_ns()}.txt"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*started, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def rows(self) -> list[dict]:
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    @property
    def status(self) -> dict:
        return json.loads((self.output / "run_status.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.output / "checkpoints").glob("step-*"))

    def until(self, reached: Callable[[], bool], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"not reached in {seconds} s:\n{self.said}"
            assert self.process.poll() is None, self.said
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: bool(self.rows) and self.rows[-1]["step"] >= step)

    def pids(self, rank: int | None = None) -> list[int]:
        """Of the ranks, by their heartbeats, and of their data workers."""
        found = []
        for path in sorted((self.output / ".heartbeats").glob("rank-*.json")):
            beat = json.loads(path.read_text())
            if rank in (None, beat["rank"]):
                found += [beat["pid"], *children(beat["pid"])]
        return found

    def wait(self, seconds: float = 90) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still there after {seconds} s:\n{self.said}") from None

    def end(self) -> None:
        for pid in [*self.pids(), self.process.pid]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all of them have ended within so long."""
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))
