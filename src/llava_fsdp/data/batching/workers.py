"""Steps from worker processes, and what a worker was reading when it stalled or died.

Workers write what they are at into memory that the main process shares, so that a decoder that crashes, a process that
the kernel kills for memory and a file system that hangs are reported with the record and the picture.
"""

import atexit
import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from llava_fsdp.data.batching.batch import Step
from llava_fsdp.data.batching.memory_files import HAS_MEMORY_FILES, Outbox, Sent
from llava_fsdp.runtime.errors import OutOfMemory, WorkerError, WorkerLost
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.process_end import end_with
from llava_fsdp.runtime.terminal_text import shown_name

PLACE_BYTES = 2000
POLL = 1
"""Seconds between two looks at workers that are waited for."""
IDLE = -1
LESS = "fewer data.workers or a smaller data.prefetch take less memory"
KILLED = (
    f"the kernel kills processes when memory runs out (see dmesg): {LESS}; and a decoder may crash on a broken file"
)
CURES = {
    errno.ENOSPC: "Their locks lie in /dev/shm, which is full: docker run --shm-size=1g, or --ipc=host",
    errno.EMFILE: "More open files: ulimit -n 65536",
    errno.EAGAIN: "More processes: ulimit -u, or docker run --pids-limit",
}
"""What helps, by the system's error."""


class Watch:
    """What each worker is at: its process, its step, its record or picture. In the main process marks do nothing."""

    def __init__(self, workers: int = 0):
        self.pids = shared(ctypes.c_int64 * workers)
        self.steps = shared(ctypes.c_int64 * workers)
        self.steps[:] = [IDLE] * workers
        self.places = [shared(ctypes.c_char * PLACE_BYTES) for _ in range(workers)]

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
        """The workers may end from here on. One that is only starting writes its number where nobody looks any more."""
        self.pids = shared(ctypes.c_int64 * self.workers)


def shared(kind: Any) -> Any:
    """A ctypes array of zeros that forked processes share.

    multiprocessing's own lie in /dev/shm, where a process dies that writes to them once others have filled it.
    """
    return kind.from_buffer(mmap.mmap(-1, max(1, ctypes.sizeof(kind))))


class WatchedSteps(Dataset):
    """Steps that say when they begin and end, and leave a worker through its files."""

    def __init__(self, steps: Dataset, watch: Watch, prefetch: int):
        """
        Raises:
            OSError: too many files are open.
        """
        self.steps = steps
        self.watch = watch
        # one more than is prepared ahead: the rank asks for the next step before it has taken this one
        self.outboxes = [Outbox(prefetch + 1) for _ in range(watch.workers)] if HAS_MEMORY_FILES else []

    def __getitem__(self, step: int) -> object:
        self.watch.begin(step)
        made, worker = self.steps[step], get_worker_info()
        if isinstance(made, Step) and worker is not None and self.outboxes:
            made = self.send(made, worker.id)
        self.watch.end()
        return made

    def send(self, step: Step, worker: int) -> Sent | OutOfMemory:
        try:
            return self.outboxes[worker].put(step)
        except OSError as error:
            said = f"data worker {worker} cannot hand step {step.facts.step + 1} over ({error}); {LESS}"
            return OutOfMemory(said)


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

    Workers that cannot be started are done without, with a warning.

    Args:
        give_up: asked every second while a step is waited for; where it says yes, None comes instead, and no more.

    Raises:
        WorkerError: a worker died, or none moved on for `stall` seconds while the next step was waited for.
    """
    arriving = start_workers(steps, numbers, watch, prefetch, stall, pin_memory) if watch.workers else None
    if arriving is None:
        yield from DataLoader(steps, batch_size=None, sampler=numbers, pin_memory=pin_memory)
        return
    end_workers_at_exit(arriving)
    try:
        for number in numbers:
            step = next_step(arriving, number, watch, stall, give_up)
            yield step.receive() if isinstance(step, Sent) else step
            if step is None:
                return
    finally:
        watch.forget()


def end_workers_at_exit(arriving: Any) -> None:
    """End what is left of the workers of a DataLoader's iterator when the process exits.

    A traceback may still hold the iterator, and a worker may hang. multiprocessing would send the workers SIGTERM,
    which they ignore, and wait for them forever.
    """
    workers = arriving._workers  # torch/utils/data/dataloader.py

    def end() -> None:
        iterator = alive()
        if iterator is not None:
            iterator._shutdown_workers()  # what it does when it is deleted
        for worker in workers:
            worker.kill()

    def unregister(_: object) -> None:
        if all(worker.exitcode is not None for worker in workers):
            atexit.unregister(end)

    alive = weakref.ref(arriving, unregister)
    atexit.register(end)


def start_workers(
    steps: Dataset, numbers: range, watch: Watch, prefetch: int, stall: float, pin_memory: bool
) -> Iterator[object] | None:
    """What workers prepare, in order; None where the system has no room for them, which a warning says."""
    before = multiprocessing.active_children()
    try:
        loader = DataLoader(
            WatchedSteps(steps, watch, prefetch),
            batch_size=None,
            sampler=numbers,
            num_workers=watch.workers,
            prefetch_factor=prefetch,
            pin_memory=pin_memory,
            worker_init_fn=StartWorker(watch),
            timeout=min(POLL, stall),
        )
        # tried here first: where the DataLoader fails half-way, its destructor prints a traceback
        del [multiprocessing.Queue() for _ in range(num_queues(watch.workers))][:]
        return iter(loader)
    except OSError as error:
        for child in set(multiprocessing.active_children()).difference(before):
            child.kill()
        watch.forget()
        log().warning(
            "data.workers=%d cannot be started (%s): steps are prepared between steps, as with data.workers=0. %s",
            watch.workers, str(error), CURES.get(error.errno or 0, LESS),
        )  # fmt: skip
        return None


def num_queues(workers: int) -> int:
    """Twice as many as a DataLoader has, which makes an event and a handle of each process as well."""
    return 2 * (workers + 1)


def lock_bytes(workers: int) -> int:
    """Bytes of /dev/shm that a training's workers take: three locks a queue, a page each; and those of a validation."""
    return 2 * 3 * num_queues(workers) * mmap.PAGESIZE if workers else 0


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
