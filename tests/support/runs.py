"""Real runs for tests of faults: started, watched, hurt and looked at when they have ended.

Every run has a folder of its own, which is the working directory of all its processes: that is how they are found,
however they were orphaned. Output goes to `stdout.txt` and `stderr.txt` there, and the run's own folder is `out`.

    run = runs.start("max_steps=8", folder=tmp_path, ranks=2, restarts=1)
    run.until(lambda: run.last_step() >= 3)
    run.kill(rank=1)
    ended = run.wait()
    assert ended.code == 0 and not ended.left
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commands import TORCHRUN
from rank import TRAP
from safetensors import safe_open

HERE = Path(__file__).parent
OUT = "out"
QUICK = [
    "stage=finetune", "model.projector=random", f"output_dir={OUT}", "precision=fp32", "sharding=zero2",
    "global_batch_size=4", "micro_batch_size=2", "data.max_length=256", "log_every=1000", "export.enabled=false",
]  # fmt: skip
"""The embedded default in small steps; later words win."""


class Late(AssertionError):
    """Something did not happen in time; the message has what the run had said by then."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    """Of torchrun: 0, or 1 if anything failed."""
    seconds: float
    stdout: str
    stderr: str
    status: dict[str, Any]
    """`run_status.json`; empty where there is none."""
    left: list[str]
    """Processes of the run that outlived it, which have been killed since."""


class Run:
    """A run under way. `wait` ends it."""

    def __init__(self, folder: Path, timeout: float, process: subprocess.Popen):
        self.folder = folder
        self.agent = process.pid
        self.process = process
        self.began = time.monotonic()
        self.deadline = self.began + timeout

    @property
    def out(self) -> Path:
        return self.folder / OUT

    def ranks(self) -> dict[int, int]:
        """Pids of the rank processes that are alive, by rank."""
        found = {}
        for pid in processes_in(self.folder):
            if parent_of(pid) == self.agent and pid != self.agent:
                rank = rank_of(pid)
                if rank is not None:
                    found[rank] = pid
        return found

    def children(self, rank: int) -> list[int]:
        """Pids of a rank's own processes: its data workers."""
        own = self.ranks().get(rank)
        return [pid for pid in processes_in(self.folder) if own is not None and parent_of(pid) == own]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> bool:
        """Send a signal to one rank; False where it is not there any more."""
        pid = self.ranks().get(rank)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                return True
        return False

    def signal(self, number: int) -> None:
        """Send a signal to torchrun."""
        with suppress(ProcessLookupError):
            os.kill(self.agent, number)

    def alive(self) -> bool:
        return self.process.poll() is None

    def until(self, happened: Callable[[], Any], what: str = "what was waited for", within: float | None = None) -> Any:
        """Wait until something is true, and give it back.

        Raises:
            Late: the run ended before, or the time is over.
        """
        last = self.deadline if within is None else min(self.deadline, time.monotonic() + within)
        while True:
            running = self.alive()
            found = happened()
            if found:
                return found
            if not running or time.monotonic() > last:
                why = "took too long" if running else "the run ended first"
                raise Late(f"{what}: {why}\n{self.said()[-6000:]}")
            time.sleep(0.005)

    def said(self) -> str:
        path = self.folder / "stderr.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def rows(self) -> list[dict[str, Any]]:
        return metrics(self.out)

    def last_step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def heartbeat(self, rank: int) -> dict[str, Any]:
        """What a rank last said that it is doing; empty where it has not said so yet."""
        with suppress(OSError, ValueError):
            return json.loads(next(self.out.glob(f"**/heartbeat*{rank}.json")).read_text())
        return {}

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.out / "checkpoints").glob("step-*.tmp"))

    def wait(self, within: float | None = None) -> Ended:
        """How it ended. Whatever is left of it then is listed and killed.

        Raises:
            Late: it did not end in time; it has been killed.
        """
        last = self.deadline if within is None else min(self.deadline, time.monotonic() + within)
        while self.alive() and time.monotonic() < last:
            time.sleep(0.02)
        late = self.alive()
        seconds = time.monotonic() - self.began
        if not late:
            time.sleep(0.3)  # what the kernel ends with its parent needs a moment
        left = [describe(pid) for pid in processes_in(self.folder)]
        self.stop()
        if late:
            raise Late(f"the run did not end in {seconds:.0f} s; alive: {left}\n{self.said()[-6000:]}")
        said = [(self.folder / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt")]
        return Ended(self.process.wait(), seconds, said[0], said[1], status(self.out), left)

    def stop(self) -> None:
        """Kill every process of the run."""
        for _ in range(3):
            for pid in processes_in(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not processes_in(self.folder):
                return
            time.sleep(0.05)


class Runs:
    """Starts runs under torchrun."""

    def __init__(self, shapes: Path):
        """
        Args:
            shapes: where the embedded dataset is drawn, once for all.
        """
        self.shapes = shapes
        self.begun: list[Run] = []

    def start(
        self,
        *words: str,
        folder: Path,
        ranks: int = 2,
        restarts: int = 0,
        timeout: float = 120,
        trap: Callable[..., None] | None = None,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Run:
        """Begin a run of the embedded default in `folder`, which is made; its output goes to `folder/out`.

        Args:
            words: overrides behind those of `QUICK`.
            restarts: as torchrun's --max-restarts.
            timeout: seconds after which it is over, whatever it does.
            trap: a function of a module of this folder, called in every rank before the training, with `arguments`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        given = [*QUICK, f"data.root={self.shapes}", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", TRAP: trap_words(trap, arguments)}
        command = [*TORCHRUN, str(ranks), "--max-restarts", str(restarts), str(HERE / "rank.py"), *given]
        with (folder / "stdout.txt").open("w") as out, (folder / "stderr.txt").open("w") as err:
            process = subprocess.Popen(
                command, cwd=folder, env=environment | (env or {}), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self.begun.append(Run(folder, timeout, process))
        return self.begun[-1]

    def run(self, *words: str, folder: Path, **how: Any) -> Ended:
        """A run from its beginning to its end."""
        return self.start(*words, folder=folder, **how).wait()

    def close(self) -> None:
        for run in self.begun:
            run.stop()


def trap_words(trap: Callable[..., None] | None, arguments: dict[str, Any]) -> str:
    if trap is None:
        assert not arguments, arguments
        return ""
    return f"{trap.__module__}:{trap.__name__}:{json.dumps(arguments)}"


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that are whole."""
    path = out / "metrics.jsonl"
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def status(out: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads((out / "run_status.json").read_text())
    return {}


def checkpoints(out: Path) -> list[Path]:
    """Folders that are named as finished checkpoints, oldest first."""
    found = [p for p in (out / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def saved_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, weights and moments, as it lies in the files, for a comparison bit by bit.

    Two checkpoints can be compared if the same number of ranks wrote them.
    """
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(handle.keys()):
                yield f"{file.name}: {name}", handle.get_tensor(name)
    if (checkpoint / ".metadata").exists():
        import torch.distributed.checkpoint as dcp

        sizes = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        read = {name: torch.empty(own.size, dtype=own.properties.dtype) for name, own in sorted(sizes.items())}
        dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
        yield from read.items()


def assert_same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs are of one step, and every weight and moment has the same bits."""
    first, second = checkpoints(one)[-1], checkpoints(other)[-1]
    assert first.name == second.name
    ours, theirs = dict(saved_tensors(first)), dict(saved_tensors(second))
    assert ours and ours.keys() == theirs.keys()
    differing = [name for name in ours if not same_bits(ours[name], theirs[name])]
    assert not differing, f"{len(differing)} of {len(ours)} differ, {differing[0]} for one"
    facts = [json.loads((path / "state.json").read_text()) for path in (first, second)]
    assert all(facts[0][key] == facts[1][key] for key in ("step", "samples", "skipped"))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is `folder`, zombies left out."""
    wanted, found = os.path.realpath(folder), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == wanted and int(entry) != os.getpid():
                    found.append(int(entry))
    return sorted(found)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def rank_of(pid: int) -> int | None:
    """By the name that warm.py gives it, or by torchrun's environment."""
    with suppress(OSError, ValueError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith("rank-"):
            return int(name.removeprefix("rank-"))
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                return int(word[5:])
    return None


def describe(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{pid} (rank {rank_of(pid)}): {words[:120]}"
    return str(pid)
