"""What is said of data workers, when they are given up, and how they are started and ended, without a dataset."""

import errno
import gc
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from mmap import PAGESIZE
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from llava_fsdp.data.batching import workers
from llava_fsdp.data.batching.memory_files import HAS_MEMORY_FILES
from llava_fsdp.data.batching.workers import (
    CURRENT_BYTES,
    StartWorker,
    WatchedSteps,
    WorkerStatus,
    lock_bytes,
    next_step,
    num_queues,
    start_workers,
    steps_from_workers,
)
from llava_fsdp.runtime.errors import WorkerError, WorkerLost


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> WorkerStatus:
    """Two workers; this process is the second one."""
    monkeypatch.setattr(workers, "get_worker_info", lambda: SimpleNamespace(id=1))
    return WorkerStatus(2)


def test_what_a_worker_is_doing(status: WorkerStatus) -> None:
    """Steps are counted from 1 in messages."""
    assert status.describe_step(4) == "no data worker has begun step 5"
    assert status.describe_worker(1) == "between two steps"
    status.begin(4)
    assert status.describe_worker(1) == "at no record yet (for step 5)"
    status.at("a.json, record 3")
    assert status.describe_step(4) == "data worker 1 is at a.json, record 3 (for step 5)"
    status.at("é" * CURRENT_BYTES)
    assert 900 < status.describe_worker(1).count("é") < 1000
    status.begin(0)
    assert status.describe_worker(1) == "at no record yet (for step 1)", "the record of the step before is forgotten"
    status.end()
    assert (status.describe_worker(1), status.describe_worker(0)) == ("between two steps", "between two steps")


def test_a_death_between_steps_is_no_fault_of_a_record(status: WorkerStatus) -> None:
    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()
    pid = child.pid
    child.join()
    assert pid is not None
    status.pids[1] = pid
    with pytest.raises(WorkerLost, match=f"data worker 1 .process {pid}. died, between two steps"):
        status.check()
    status.begin(2)
    with pytest.raises(WorkerError, match=r"for step 3") as caught:
        status.check()
    assert not isinstance(caught.value, WorkerLost)
    status.forget()
    status.check()


class Late:
    """An iterator of a DataLoader whose steps do not come for some time: each wait takes three seconds."""

    def __init__(self, waits: int, monkeypatch: pytest.MonkeyPatch, says: str = "DataLoader timed out after 1 seconds"):
        self.now, self.left, self.says = 1000.0, waits, says
        monkeypatch.setattr(workers.time, "monotonic", lambda: self.now)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if not self.left:
            return "step"
        self.left, self.now = self.left - 1, self.now + 3
        raise RuntimeError(self.says)


def test_a_stall_is_time_without_progress(status: WorkerStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> bool:
        return False

    status.begin(0)
    assert next_step(Late(2, monkeypatch), 0, status, 6.5, none) == "step"
    with pytest.raises(WorkerError, match=r"no data came for 6 seconds: data worker 1 is at no record yet"):
        next_step(Late(2, monkeypatch), 0, status, 6, none)
    late = Late(10, monkeypatch)

    def progress() -> bool:
        status.at(f"record {late.left // 2}")  # a record takes two waits
        return False

    assert next_step(late, 0, status, 6, progress) == "step"
    assert next_step(Late(9, monkeypatch), 0, status, 6, lambda: True) is None


def test_a_worker_that_died_before_it_noted_itself(status: WorkerStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match="pid 7"):
        next_step(Late(1, monkeypatch, "DataLoader worker (pid 7) is killed"), 0, status, 6, lambda: False)
    with pytest.raises(RuntimeError, match="ours") as caught:
        next_step(Late(1, monkeypatch, "ours"), 0, status, 6, lambda: False)
    assert not isinstance(caught.value, WorkerError)


def test_memory_of_locks() -> None:
    """Two loaders, each with two queues a worker and two of its own, of three locks each."""
    assert (lock_bytes(0), num_queues(2), lock_bytes(2)) == (0, 6, 2 * 6 * 3 * PAGESIZE)


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def test_a_worker_leaves_signals_to_the_main_process_and_collects_garbage() -> None:
    """It inherits what the main process has set up for itself."""
    status, (ours, theirs) = WorkerStatus(2), socket.socketpair()
    theirs.setblocking(False)
    start, (read, write) = StartWorker(status), multiprocessing.Pipe(duplex=False)

    def work(result: Connection) -> None:
        gc.disable()
        signal.set_wakeup_fd(theirs.fileno())
        for number in HANDLED:
            signal.signal(number, signal.default_int_handler)
        start(1)
        result.send(
            ([signal.getsignal(n) is signal.SIG_IGN for n in HANDLED], gc.isenabled(), signal.set_wakeup_fd(-1))
        )

    child = multiprocessing.get_context("fork").Process(target=work, args=(write,))
    child.start()
    found = read.recv() if read.poll(20) else None
    child.join()
    ours.close(), theirs.close()
    assert found == ([True, True, True], True, -1)
    assert list(status.pids) == [0, child.pid]


def test_workers_that_cannot_all_be_started_are_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One is running when the next one fails. It is no longer watched, so its end is told to nobody."""
    started: list[Any] = []
    given: list[dict[str, Any]] = []

    class HalfWay:
        def __init__(self, steps: Any, **keys: Any):
            given.append(keys)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            started.append(child)
            keys["worker_init_fn"].status.pids[0] = child.pid
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(workers, "DataLoader", HalfWay)
    for stall, wait in ((0.25, 0.25), (60.0, workers.POLL_SECONDS)):
        status = WorkerStatus(2)
        steps: Any = range(3)
        with caplog.at_level("WARNING"):
            assert start_workers(steps, range(3), status, 5, stall, pin_memory=False) is None
        started[-1].join(20)
        assert started[-1].exitcode == -signal.SIGKILL
        status.check()
        assert (given[-1]["timeout"], given[-1]["num_workers"], given[-1]["prefetch_factor"]) == (wait, 2, 5)
    assert len(caplog.records) == 2


@pytest.mark.skipif(not HAS_MEMORY_FILES, reason="Linux alone has memory files")
def test_a_step_that_is_asked_for_early_has_a_file_too() -> None:
    """A rank asks for the next step before it has taken this one."""
    steps: Any = range(3)
    outboxes = WatchedSteps(steps, WorkerStatus(2), prefetch=3).outboxes
    assert [len(outbox.files) for outbox in outboxes] == [4, 4]


def test_nothing_comes_after_workers_are_given_up(status: WorkerStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the iteration ends, workers are no longer watched then."""
    steps: Any = range(9)
    late = Late(0, monkeypatch)
    monkeypatch.setattr(workers, "start_workers", lambda *_: late)
    monkeypatch.setattr(workers, "end_workers_at_exit", lambda arriving: None)
    status.pids[1] = 2**22 + 1  # no process has this number
    cfg: Any = SimpleNamespace(prefetch=2, stall=60)
    found = list(steps_from_workers(steps, range(3), status, cfg, pin_memory=False))
    assert found == ["step"] * 3 and list(status.pids) == [0, 0]
    late.left = 1
    status.begin(0)
    monkeypatch.setattr(status, "check", lambda: None)
    assert list(steps_from_workers(steps, range(3), status, cfg, pin_memory=False, give_up=lambda: True)) == [None]
