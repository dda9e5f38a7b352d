"""What is said of data workers, and when they are given up, without starting any."""

import multiprocessing
from collections.abc import Iterator
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest

from llava_fsdp.data.batching import workers
from llava_fsdp.data.batching.workers import CURRENT_BYTES, WorkerStatus, lock_bytes, next_step, num_queues
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
