"""A worker that dies or stalls is reported with what it was reading; a bug keeps its traceback."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import alone
from loaders import agreed_steps
from PIL import Image
from small import make_config
from steps import Calls
from test_loader import open_loader
from tiers import slow_after
from torch.utils.data import _utils

from llava_fsdp.data.batching.workers import StartWorker, WorkerStatus
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.records.record import Record
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.runtime.errors import WorkerError
from llava_fsdp.train.loop import fit
from llava_fsdp.train.setup.build_state import build_state


@pytest.fixture(autouse=True)
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits five seconds for each worker that does not end."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


class Trapped:
    """An encoder that something happens to at one record."""

    def __init__(self, encoder: Encoder, trap: Callable[[], None], at: str):
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.trap = trap
        self.at = at

    def __call__(self, record: Record, turns: tuple[int, int] | None = None) -> Sample | None:
        if record.id == self.at:
            self.trap()
        return self.encoder(record, turns)


def trapped(parts: Path, dataset: Path, trap: Callable[[], None], *overrides: str) -> tuple[Loader, str]:
    """A loader with a trap at some record of step 3, and that record's `where`."""
    loader = open_loader(parts, dataset, "data.workers=2", "max_steps=8", "global_batch_size=4", *overrides)
    record = loader.steps.records[loader.steps.sampler.samples(2)[1]]
    loader.steps.encoder = Trapped(loader.steps.encoder, trap, record.id)
    return loader, record.where


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(1000)


def failure(loader: Loader, arrived: list[int] | None = None) -> str:
    """What the run says at its end; the traceback of pytest.raises would hold the workers."""
    try:
        for step in agreed_steps(loader):
            (arrived if arrived is not None else []).append(step.facts.step)
    except WorkerError as error:
        return str(error)
    raise AssertionError("nothing went wrong")


def test_a_worker_that_is_killed(parts: Path, dataset: Path) -> None:
    loader, where = trapped(parts, dataset, die)
    assert f"died, at {where} (for step 3); the kernel kills processes when memory runs out" in failure(loader)


def test_a_death_that_reaches_the_loop_elsewhere(parts: Path, dataset: Path) -> None:
    """The DataLoader's signal handler raises in the main thread, wherever that is: not only while it waits for data."""
    loader, where = trapped(parts, dataset, die, "data.prefetch=1")  # step 3 is asked for when step 1 is here
    steps = agreed_steps(loader)
    next(steps)
    with pytest.raises(RuntimeError, match="killed by signal"):
        time.sleep(60)
    with pytest.raises(WorkerError) as caught:
        loader.status.check()
    assert where in str(caught.value)
    steps.close()
    loader.status.check()  # ended as they should: nothing to tell


def test_a_worker_that_starts_when_the_others_have_ended() -> None:
    """It leaves no process number behind: once it has ended too, it would be taken for one that died."""
    context, watch = multiprocessing.get_context("fork"), WorkerStatus(1)
    start, may_start = StartWorker(watch), context.Event()
    late = context.Process(target=lambda: (may_start.wait(), start(0)))
    late.start()
    watch.forget()
    may_start.set()
    late.join()
    assert late.exitcode == 0
    watch.check()


def test_a_worker_that_stalls(parts: Path, dataset: Path, tmp_path: Path) -> None:
    def hang_until_told() -> None:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)

    loader, where = trapped(parts, dataset, hang_until_told, "data.stall=1", "data.prefetch=1")
    arrived: list[int] = []
    said = failure(loader, arrived)
    (tmp_path / "told").touch()
    assert arrived == [0, 1]
    assert said.startswith("no data came for 1 seconds: data worker ") and f"is at {where} (for step 3)" in said


@pytest.mark.slow
def test_slow_records_are_no_stall(parts: Path, dataset: Path) -> None:
    """A step may take longer than data.stall while its records progress."""
    loader = open_loader(parts, dataset, "data.workers=1", "max_steps=1", "global_batch_size=4", "data.stall=1")
    encoder = loader.steps.encoder
    for record in (loader.steps.records[n] for n in loader.steps.sampler.samples(0)):
        encoder = Trapped(encoder, lambda: time.sleep(0.4), record.id)
    loader.steps.encoder = encoder
    began = time.monotonic()
    assert len(list(agreed_steps(loader))) == 1 and time.monotonic() - began > 1.5


def test_the_image_is_named(parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = open_loader(parts, dataset, "data.workers=1", "max_steps=1")
    monkeypatch.setattr(Image.Image, "resize", lambda *_, **__: die())
    assert re.search(r"record \d+ \(id r\d+\), image .*/images/\d+\.(png|jpg) \(for step 1\)", failure(loader))


def bug() -> None:
    raise RuntimeError("ours")


def test_a_bug_keeps_its_traceback(parts: Path, dataset: Path) -> None:
    loader, _ = trapped(parts, dataset, bug, "data.workers=1")
    with pytest.raises(RuntimeError, match=r"(?s)Original Traceback.*def bug|in bug.*ours") as caught:
        list(agreed_steps(loader))
    assert not isinstance(caught.value, WorkerError)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_workers_leave_ctrl_c_to_the_main_process(parts: Path, dataset: Path) -> None:
    loader, _ = trapped(parts, dataset, interrupt)
    assert len(list(agreed_steps(loader))) == 8


ORPHANS = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1].split(os.pathsep)
from loaders import agreed_steps
from test_workers import _utils, hang, trapped
_utils.MP_STATUS_CHECK_INTERVAL = 0.2
loader, _ = trapped(Path(sys.argv[2]), Path(sys.argv[3]), hang)
steps = agreed_steps(loader)
next(steps)
while not all(loader.status.pids):
    time.sleep(0.01)
print(*loader.status.pids, flush=True)
if sys.argv[4] == "after an error":
    try:
        steps.throw(ValueError())
    except ValueError as error:
        held = error.__traceback__
if sys.argv[4] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux to end them")
@pytest.mark.parametrize("end", slow_after(1, ["killed", "at its end", "after an error"]))
def test_workers_end_with_the_process_that_they_work_for(end: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A process that ends while it still holds its iterator must not wait for workers that ignore SIGTERM."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, str(script), paths, str(parts), str(dataset), end],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    workers = [int(pid) for pid in run.stdout.split()]
    assert len(workers) == 2, run.stderr
    until = time.monotonic() + 20
    while any(is_running(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in workers)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_death_in_training_is_told_with_its_record(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, "data.workers=1", "max_steps=8", "global_batch_size=4")
    state = build_state(cfg, alone(cfg))
    record = state.loader.steps.records[state.loader.steps.sampler.samples(2)[1]]
    state.loader.steps.encoder = Trapped(state.loader.steps.encoder, die, record.id)
    with pytest.raises(WorkerError) as caught:
        fit(state, cfg, Calls(lambda _: time.sleep(60)))
    assert record.where in str(caught.value)
