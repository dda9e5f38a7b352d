"""Heartbeats: every second each rank writes its step and what it is doing into a file, and reads the files of other
ranks. Imports no torch.

The files are in the run's folder, which all machines share. The clocks of the machines are not compared: a rank is late
if its file has not changed for long, or shows less progress than the files of other ranks.
"""

import json
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.small_json import BadJson, kinds_of, read_object

FOLDER = ".heartbeats"


class Phase(Enum):
    """What a rank is doing, in the order in which it occurs in a training step."""

    LOADING = "loading weights and data"
    REPORT = "reporting the step"
    CHECKPOINT = "saving a checkpoint"
    VALIDATION = "validating"
    DATA = "waiting for data"
    AGREEING = "agreeing about the next step"
    COMPUTE = "forward and backward"
    OPTIMIZER = "updating the weights"
    EXPORT = "exporting"


ORDER = {phase.value: number for number, phase in enumerate(Phase)}


@dataclass(frozen=True)
class Beat:
    """A heartbeat: what a rank is doing and how far it is."""

    rank: int
    host: str
    pid: int
    step: int
    """Number of finished steps."""
    phase: str
    work: int
    """Number of collectives that the rank has started. Among ranks in the same phase, a late rank has started fewer."""
    detail: str
    """The record or image that the rank is waiting for; empty if it waits for nothing."""
    count: int
    """Number of heartbeats written. It stops growing if the process is frozen."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The rank's progress, which only grows: (finished steps, number of the phase, started collectives)."""
        return self.step, ORDER.get(self.phase, 0), self.work

    @property
    def doing(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.phase} (step {self.step + 1}){detail}"

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def put_beat(folder: Path, beat: Beat) -> None:
    """Write the heartbeat of a rank into the run's folder, in place of its last one."""
    replace_file(folder / FOLDER / f"rank-{beat.rank}.json", json.dumps(asdict(beat)).encode())


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Return the last heartbeat of a rank; None if there is none, or it cannot be read."""
    try:
        return Beat(**read_object(folder / FOLDER / f"rank-{rank}.json", kinds_of(Beat)))
    except (BadJson, TypeError):  # TypeError: the file has unknown keys
        return None


@dataclass(frozen=True)
class Late:
    """A rank that other ranks are waiting for, and for how long it has made no progress."""

    beat: Beat
    seconds: float
    is_frozen: bool
    """Whether the rank writes no heartbeats: its process is stopped or its machine is gone."""

    def __str__(self) -> str:
        silent = ", and its process does not answer" if self.is_frozen else ""
        return f"{self.beat.name} has been in the same place for {self.seconds:.0f} seconds{silent}: {self.beat.doing}"


class Watcher:
    """Reads the heartbeats of other ranks, and records when each last changed."""

    def __init__(self, folder: Path, frozen_after: float):
        """Prepare to read the heartbeats of a run. `frozen_after`: seconds without one after which a rank is frozen."""
        self.folder = folder
        self.frozen_after = frozen_after
        self.counts: dict[int, tuple[int, float]] = {}
        """{rank: (number of its heartbeats, time since which it has this number)}, by the monotonic clock."""
        self.places: dict[int, tuple[tuple[int, int, int], float]] = {}
        """{rank: (its progress as in `Beat.place`, time since which it has made none)}."""
        self.last: dict[int, Beat] = {}
        """{rank: its last heartbeat}."""

    def late_ranks(self, own_beat: Beat, ranks: list[int]) -> list[Late]:
        """Return those of `ranks` that this rank, whose heartbeat is `own_beat`, is waiting for: frozen ranks, and the
        slowest ranks if they have made less progress than this one. The progress of a rank is the `place` in its
        heartbeat: (finished steps, number of the phase, started collectives)."""
        now = time.monotonic()
        for rank in ranks:
            beat = read_beat(self.folder, rank)
            if beat is None:
                continue
            self.last[rank] = beat
            if self.counts.get(rank, (-1, 0.0))[0] != beat.count:
                self.counts[rank] = beat.count, now
            if rank not in self.places or self.places[rank][0] != beat.place:
                self.places[rank] = beat.place, now
        behind = []
        for rank, beat in self.last.items():
            (_, beating_until), (_, same_place_since) = self.counts[rank], self.places[rank]
            is_frozen = now - beating_until > self.frozen_after
            if rank != own_beat.rank and (is_frozen or beat.place < own_beat.place):
                behind.append(Late(beat, now - same_place_since, is_frozen))
        slowest = min((late.beat.place for late in behind), default=None)
        return [late for late in behind if late.is_frozen or late.beat.place == slowest]


def seconds_before_limit(limit: int) -> float:
    """Return by how many seconds before a time limit a waiting rank gives up, so that its report, which names the late
    rank, comes before torch's error."""
    return min(10, 0.1 * limit)


def beat_age(folder: Path, rank: int) -> float:
    """Return the seconds since a rank on this machine wrote its last heartbeat."""
    return time.time() - (folder / FOLDER / f"rank-{rank}.json").stat().st_mtime
