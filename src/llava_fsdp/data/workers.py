"""Steps from worker processes, and what a worker was reading when it stalled or died.

Workers write what they are at into memory that the main process shares, so that a decoder that crashes, a process that
the kernel kills for memory and a file system that hangs are reported with the record and the picture.
"""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from torch.utils.data import DataLoader, Dataset, get_worker_info

from llava_fsdp.errors import WorkerError, WorkerLost
from llava_fsdp.parent import end_with
from llava_fsdp.terminal import shown_name

PLACE_BYTES = 2000
POLL = 1
"""Seconds between two looks at workers that are waited for."""
IDLE = -1
KILLED = (
    "the kernel kills processes when memory runs out (see dmesg): fewer data.workers or a smaller data.prefetch take "
    "less; and a decoder may crash on a broken file"
)


class Watch:
    """What each worker is at: its process, its step, its record or picture. In the main process marks do nothing."""

    def __init__(self, workers: int = 0):
        self.pids = RawArray("q", workers)
        self.steps = RawArray("q", [IDLE] * workers)
        self.places = [RawArray("c", PLACE_BYTES) for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self.pids)

    def begin(self, step: int) -> None:
        """The worker begins to prepare a step."""
        worker = get_worker_info()
        if worker is not None and self.workers:
            self.places[worker.id].value = b""
            self.steps[worker.id] = step

    def at(self, record: str, picture: Path | None = None) -> None:
        """The worker begins to read a record, by its `where`, or one of its pictures."""
        worker = get_worker_info()
        if worker is not None and self.workers:
            place = record if picture is None else f"{record}, picture {picture}"
            self.places[worker.id].value = shown_name(place).encode()[: PLACE_BYTES - 1]

    def end(self) -> None:
        self.begin(IDLE)

    def place(self, worker: int) -> str:
        """What a message says of a worker."""
        if self.steps[worker] == IDLE:
            return "between two steps"
        at = self.places[worker].value.decode(errors="replace")
        return f"at {at or 'no record yet'} (for step {self.steps[worker] + 1})"

    def late(self, step: int) -> str:
        """Where the worker is that prepares this step."""
        for worker in range(self.workers):
            if self.steps[worker] == step:
                return f"data worker {worker} is {self.place(worker)}"
        return f"no data worker has begun step {step + 1}"

    def check(self) -> None:
        """Raises WorkerError, with its record, where a worker has died."""
        alive = {child.pid for child in multiprocessing.active_children()}
        for worker, pid in enumerate(self.pids):
            if pid and pid not in alive:
                said = f"data worker {worker} (process {pid}) died, {self.place(worker)}; {KILLED}"
                if self.steps[worker] == IDLE:
                    raise WorkerLost(said)
                raise WorkerError(said).about(record=self.place(worker))

    def forget(self) -> None:
        """The workers may end from here on."""
        for worker in range(self.workers):
            self.pids[worker] = 0


class WatchedSteps(Dataset):
    """Steps that say when they begin and end."""

    def __init__(self, steps: Dataset, watch: Watch):
        self.steps = steps
        self.watch = watch

    def __getitem__(self, step: int) -> object:
        self.watch.begin(step)
        made = self.steps[step]
        self.watch.end()
        return made


class StartWorker:
    """Runs in each worker before its first step."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self.parent = os.getpid()

    def __call__(self, worker: int) -> None:
        signal.set_wakeup_fd(-1)  # the main process's, which would take our signals for its own
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to the group; the main process decides
            signal.signal(number, signal.SIG_IGN)
        end_with(self.parent)
        gc.enable()  # off in the main process, which collects by plan
        self.watch.pids[worker] = os.getpid()


def from_workers(
    steps: Dataset,
    numbers: range,
    watch: Watch,
    prefetch: int,
    stall: float,
    pin_memory: bool,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[object]:
    """`steps[n]` for every number, in order; without workers from this very process, where nobody watches.

    Args:
        give_up: asked every second while a step is waited for; where it says yes, None comes instead, and no more.

    Raises:
        WorkerError: a worker died, or none moved on for `stall` seconds while the next step was waited for.
    """
    if not watch.workers:
        yield from DataLoader(steps, batch_size=None, sampler=numbers, pin_memory=pin_memory)
        return
    loader = DataLoader(
        WatchedSteps(steps, watch),
        batch_size=None,
        sampler=numbers,
        num_workers=watch.workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        worker_init_fn=StartWorker(watch),
        timeout=min(POLL, stall),
    )
    arriving = iter(loader)
    try:
        for number in numbers:
            step = next_step(arriving, number, watch, stall, give_up)
            yield step
            if step is None:
                return
    finally:
        watch.forget()


def next_step(
    arriving: Iterator[object], number: int, watch: Watch, stall: float, give_up: Callable[[], bool]
) -> object:
    seen, since = watch.late(number), time.monotonic()
    while True:
        try:
            return next(arriving)
        except RuntimeError as error:
            watch.check()
            if str(error).startswith("DataLoader worker (pid"):  # it died before it could say where it was
                raise WorkerError(f"{error}; {KILLED}") from error
            if not str(error).startswith("DataLoader timed out"):  # a worker's own error, with its traceback
                raise
        if give_up():
            return None
        now = watch.late(number)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= stall:
            raise WorkerError(
                f"no data came for {stall:g} seconds: {now}; does the file system answer? data.stall allows more time"
            )
