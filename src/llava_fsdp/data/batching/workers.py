"""Worker processes that prepare training steps, and error messages about them.

Workers write the names of the record and image that they are reading to memory that they share with the main process.
So if a decoder crashes, the kernel kills a worker for memory, or a file system hangs, the error message names the
record and the image.

Steps count from 0. `status` is this memory, and determines the number of workers; `prefetch` is the number of steps
that each worker prepares in advance, `stall` the seconds that a worker may stay at one record.
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
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from llava_fsdp.config import DataConfig
from llava_fsdp.data.batching.batch import Step
from llava_fsdp.data.batching.memory_files import HAS_MEMORY_FILES, Outbox, Sent
from llava_fsdp.data.images.check import ImageFile
from llava_fsdp.runtime.errors import OutOfMemory, WorkerError, WorkerLost
from llava_fsdp.runtime.process.process_end import end_with
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.terminal_text import shown_name

CURRENT_BYTES = 2000
"""Number of bytes that a worker has for the name of its current record and image."""
POLL_SECONDS = 1
"""Interval in seconds at which the main process, while it waits for a step, checks that the workers are alive."""
IDLE = -1
"""Stands for the step of a worker that prepares none."""
LESS_MEMORY = "fewer data.workers or a smaller data.prefetch take less memory"
KILLED = (
    f"the kernel kills processes when memory runs out (see dmesg): {LESS_MEMORY}; and a decoder may crash on a broken "
    "file"
)
CURES = {
    errno.ENOSPC: "Their locks lie in /dev/shm, which is full: docker run --shm-size=1g, or --ipc=host",
    errno.EMFILE: "More open files: ulimit -n 65536",
    errno.EAGAIN: "More processes: ulimit -u, or docker run --pids-limit",
}
"""{errno: advice for the message about workers that cannot be started}."""


class WorkerStatus:
    """Memory shared with data workers, in which each writes its process id, its current step, and its current record or
    image.

    Workers call `begin`, `at` and `end`. In the main process, these methods do nothing.
    """

    def __init__(self, workers: int = 0):
        """Make shared memory for each worker's process id, step, and name of the current record or image."""
        self.pids = shared_array(ctypes.c_int64 * workers)
        self.steps = shared_array(ctypes.c_int64 * workers)
        self.steps[:] = [IDLE] * workers
        self.current = [shared_array(ctypes.c_char * CURRENT_BYTES) for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self.pids)

    def begin(self, step: int) -> None:
        """Note that this worker begins to prepare a step; IDLE: that it prepares none."""
        worker = get_worker_info()
        if worker is not None and self.workers:
            self.current[worker.id].value = b""
            self.steps[worker.id] = step

    def at(self, record: str, image: ImageFile | None = None) -> None:
        """Note that this worker begins to read a record, or one of its images."""
        worker = get_worker_info()
        if worker is not None and self.workers:
            name = record if image is None else f"{record}, image {image}"
            self.current[worker.id].value = shown_name(name).encode()[: CURRENT_BYTES - 1]

    def end(self) -> None:
        self.begin(IDLE)

    def describe_worker(self, worker: int) -> str:
        """Return text for an error message that says what a worker is reading."""
        if self.steps[worker] == IDLE:
            return "between two steps"
        at = self.current[worker].value.decode(errors="replace")
        return f"at {at or 'no record yet'} (for step {self.steps[worker] + 1})"

    def describe_step(self, step: int) -> str:
        """Return text for an error message that says which worker prepares a step, and what it is reading."""
        for worker in range(self.workers):
            if self.steps[worker] == step:
                return f"data worker {worker} is {self.describe_worker(worker)}"
        return f"no data worker has begun step {step + 1}"

    def check(self) -> None:
        """Raise WorkerError if a worker has died while it prepared a step, or WorkerLost if it died between two steps.
        The message names the record that the worker was reading."""
        alive = {child.pid for child in multiprocessing.active_children()}
        for worker, pid in enumerate(self.pids):
            if pid and pid not in alive:
                message = f"data worker {worker} (process {pid}) died, {self.describe_worker(worker)}; {KILLED}"
                if self.steps[worker] == IDLE:
                    raise WorkerLost(message)
                raise WorkerError(message).about(record=self.describe_worker(worker))

    def forget(self) -> None:
        """Stop checking whether the workers are alive. The array of process ids is replaced, because a worker that is
        still starting will write its id to the old array."""
        self.pids = shared_array(ctypes.c_int64 * self.workers)


def shared_array(kind: Any) -> Any:
    """Return a ctypes array of zeros in memory that forked processes share: an anonymous mapping, which does not need
    /dev/shm."""
    return kind.from_buffer(mmap.mmap(-1, max(1, ctypes.sizeof(kind))))


class WatchedSteps(Dataset):
    """Dataset of steps for use in data workers. It notes when a worker begins and ends a step, and transfers the step
    to the rank's process through a memory file."""

    def __init__(self, steps: Dataset, status: WorkerStatus, prefetch: int):
        """Open the memory files of all workers, enough for the `prefetch` steps that each prepares in advance. Raise
        OSError if the process has too many files open."""
        self.steps = steps
        self.status = status
        # one more than is prefetched: the rank requests the next step before it has received this one
        self.outboxes = [Outbox(prefetch + 1) for _ in range(status.workers)] if HAS_MEMORY_FILES else []

    def __getitem__(self, step: int) -> object:
        """Prepare a step. In a worker, note in `status` when this begins and ends, and return the step as it is sent
        through a memory file (`Sent`)."""
        self.status.begin(step)
        prepared, worker = self.steps[step], get_worker_info()
        if isinstance(prepared, Step) and worker is not None and self.outboxes:
            prepared = self.send(prepared, worker.id)
        self.status.end()
        return prepared

    def send(self, step: Step, worker: int) -> Sent | OutOfMemory:
        """Write a step to a memory file of a worker; return an OutOfMemory error if the system has no memory for it."""
        try:
            return self.outboxes[worker].put(step)
        except OSError as error:
            return OutOfMemory(
                f"data worker {worker} cannot hand over step {step.facts.step + 1} ({error}); {LESS_MEMORY}"
            )


class StartWorker:
    """Initialises a data worker; passed to torch's DataLoader as worker_init_fn."""

    def __init__(self, status: WorkerStatus):
        self.status = status
        self.parent = os.getpid()

    def __call__(self, worker: int) -> None:
        """Undo what a data worker has inherited from the main process, and note the worker's process id."""
        signal.set_wakeup_fd(-1)  # inherited: the main process would take this worker's signals for its own
        # these signals reach the whole process group, and the main process handles them
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        end_with(self.parent)  # the kernel ends this worker when its parent ends
        gc.enable()  # the main process turned it off and collects at chosen times
        self.status.pids[worker] = os.getpid()


def steps_from_workers(
    steps: Dataset,
    numbers: range,
    status: WorkerStatus,
    cfg: DataConfig,
    pin_memory: bool,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[object]:
    """Yield `steps[n]` for each n of `numbers`, in order, prepared by worker processes. Without workers, or if they
    cannot be started (which is logged as a warning), this process prepares the steps itself.

    Args:
        status: memory in which each worker notes its process id, step and record.
        give_up: called about every second while waiting; if it returns True, None is yielded and the iteration ends.

    Raises:
        WorkerError: a worker died, or stayed at one record of the next step for `data.stall` seconds.
    """
    arriving = start_workers(steps, numbers, status, cfg.prefetch, cfg.stall, pin_memory) if status.workers else None
    if arriving is None:
        yield from DataLoader(steps, batch_size=None, sampler=numbers, pin_memory=pin_memory)
        return
    end_workers_at_exit(arriving)
    try:
        for number in numbers:
            step = next_step(arriving, number, status, cfg.stall, give_up)
            yield step.receive() if isinstance(step, Sent) else step  # Sent: the tensors are in a memory file
            if step is None:
                return
    finally:
        status.forget()


def end_workers_at_exit(arriving: Any) -> None:
    """Register a function that kills the workers of a DataLoader iterator, if they still run, when this process exits.
    Otherwise multiprocessing would wait for them forever."""
    workers = arriving._workers  # torch/utils/data/dataloader.py

    def end_workers() -> None:
        """Kill the workers, after shutting down the iterator if it still exists."""
        iterator = alive()
        if iterator is not None:
            iterator._shutdown_workers()  # as its destructor does
        for worker in workers:
            worker.kill()

    def unregister(_: object) -> None:
        if all(worker.exitcode is not None for worker in workers):
            atexit.unregister(end_workers)

    alive = weakref.ref(arriving, unregister)
    atexit.register(end_workers)


def start_workers(
    steps: Dataset, numbers: range, status: WorkerStatus, prefetch: int, stall: float, pin_memory: bool
) -> Iterator[object] | None:
    """Start workers and return an iterator over their steps. Its `next` raises RuntimeError if no step comes within
    POLL_SECONDS seconds, or within `stall` if that is less. If they cannot be started, warn and return None."""
    children_before = multiprocessing.active_children()
    try:
        loader = DataLoader(
            WatchedSteps(steps, status, prefetch),
            batch_size=None,
            sampler=numbers,
            num_workers=status.workers,
            prefetch_factor=prefetch,
            pin_memory=pin_memory,
            worker_init_fn=StartWorker(status),
            timeout=min(POLL_SECONDS, stall),
        )
        # create queues on trial: if the DataLoader failed half-way, its destructor would print a traceback
        del [multiprocessing.Queue() for _ in range(num_queues(status.workers))][:]
        return iter(loader)
    except OSError as error:
        for child in set(multiprocessing.active_children()).difference(children_before):
            child.kill()
        status.forget()
        log().warning(
            "data.workers=%d cannot be started (%s): steps are prepared between steps, as with data.workers=0. %s",
            status.workers, str(error), CURES.get(error.errno or 0, LESS_MEMORY),
        )  # fmt: skip
        return None


def num_queues(workers: int) -> int:
    """Return how many multiprocessing queues to create on trial, before a DataLoader is made. It creates workers + 1
    queues itself; the other half stands for the locks of its event and the handles of its processes."""
    return 2 * (workers + 1)


def lock_bytes(workers: int) -> int:
    """Return how many bytes of /dev/shm the locks of the workers take, if training and validation have `workers`
    each."""
    return 2 * 3 * num_queues(workers) * mmap.PAGESIZE if workers else 0


def next_step(
    arriving: Iterator[object], number: int, status: WorkerStatus, stall: float, give_up: Callable[[], bool]
) -> object:
    """Return the next step that the workers have prepared; None if `give_up`, called about every second, returned True.

    Raises:
        WorkerError: a worker died, or stayed at one record for `stall` seconds.
        WorkerLost: a worker died between two steps.
    """
    last_state, since_time = status.describe_step(number), time.monotonic()
    while True:
        try:
            return next(arriving)
        except RuntimeError as error:
            status.check()
            if str(error).startswith("DataLoader worker (pid"):  # the worker died before it could note its process id
                raise WorkerError(f"{error}; {KILLED}") from error
            if not str(error).startswith("DataLoader timed out"):  # an exception of the worker, with its traceback
                raise
        if give_up():
            return None
        state = status.describe_step(number)
        if state != last_state:
            last_state, since_time = state, time.monotonic()
        elif time.monotonic() - since_time >= stall:
            raise WorkerError(
                f"no data came for {stall:g} seconds: {state}; does the file system answer? data.stall allows more time"
            )
