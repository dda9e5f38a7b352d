"""A process beside a rank kills it if its watchdog's thread stands still, in a call that holds Python's lock."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llava_fsdp.runtime.exit_codes import ENDINGS
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.files.status_file import STATUS_FILE, Outcome, first_failure, put_status, write_ending
from llava_fsdp.runtime.process import watchdog as module
from llava_fsdp.runtime.process.watchdog import SHORTEST_SILENCE, SILENT_STEPS, Watchdog

STUCK = """
import ctypes, os, signal, sys
from pathlib import Path
from llava_fsdp.runtime.process.watchdog import Watchdog
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
with Watchdog(folder, 1, limit, None) as watchdog, watchdog.watching_peers([(1, "here", os.getpid())], is_guarded=True):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it goes to another thread, and does not end the sleep
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(100)  # holds Python's lock, as the launch of a kernel into a full queue does
"""
GUARD = """
import json, sys
from pathlib import Path
from llava_fsdp.runtime.files import status_file
from llava_fsdp.runtime.process import guard
guard.SILENT, guard.GRACE, guard.STOPPED = 0.3, 0.3, float(sys.argv[4])
status_file.PATIENCE = 0.1  # else a rank that is killed by mistake outlives the test
print("ready", flush=True)
guard.guard(Path(sys.argv[1]), 1, int(sys.argv[2]), [(0, int(sys.argv[3]))])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "own")  # one launch for this process and its children
    put_status(tmp_path, "running", mode=0o600)
    return tmp_path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_rank_that_stands_still_in_a_call_is_killed_and_the_run_says_why(folder: Path) -> None:
    """SIGTERM does not reach it any more: Python's handler runs in threads that wait for the lock."""
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", STUCK, folder, "2"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)  # the call has begun
    process.terminate()
    assert process.wait(60) == -signal.SIGKILL and time.monotonic() - begun < 30
    status = json.loads((folder / STATUS_FILE).read_text())
    assert (status["class"], status["exit_code"], status["culprit"]["rank"]) == (
        "communication",
        5,
        1,
    )
    assert (first_failure(folder) or {})["rank"] == 1


def start_guard(folder: Path, rank: int, peer: int, stopped: float = 5) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", GUARD, str(folder), str(rank), str(peer), str(stopped)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("beats", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_after_the_end_of_another_rank_only_one_that_stands_still_is_killed(
    beats: bool, folder: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """One that goes on ends itself, and reports."""
    own, peer = (subprocess.Popen(["sleep", "60"], text=True) for _ in range(2))
    guard = start_guard(folder, own.pid, peer.pid)
    processes += [own, peer, guard]
    assert guard.stdin is not None and guard.stdout is not None and guard.stdout.readline() == "ready\n"
    guard.stdin.write("100\n")
    guard.stdin.flush()
    time.sleep(0.5)
    assert own.poll() is None, "silent, but all ranks are there"
    peer.kill()
    peer.wait()
    until = time.monotonic() + (1.2 if beats else 20)
    while own.poll() is None and time.monotonic() < until:
        if beats:
            guard.stdin.write("100\n")
            guard.stdin.flush()
        time.sleep(0.05)
    assert own.poll() == (None if beats else -signal.SIGKILL)
    failure = first_failure(folder)
    assert (failure is None) if beats else (failure is not None and "rank 0" in failure["reason"])


def test_what_has_failed_first_stays_the_reason(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    write_ending(folder, Outcome(ENDINGS["data"], "record 5"))
    own = subprocess.Popen(["sleep", "60"], text=True)
    guard = start_guard(folder, own.pid, os.getpid())
    processes += [own, guard]
    guard.communicate("0.1\n")  # it closes the pipe
    assert guard.returncode == 0
    assert own.poll() is None, "a closed pipe is a rank that has ended in order"
    guard = start_guard(folder, own.pid, os.getpid())
    processes.append(guard)
    assert guard.stdin is not None
    guard.stdin.write("0.1\n")
    guard.stdin.flush()
    assert own.wait(20) == -signal.SIGKILL
    assert (first_failure(folder) or {})["class"] == "data"


@pytest.mark.slow
def test_a_job_that_was_stopped_and_goes_on_is_not_killed(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    """As by `scontrol suspend`: the guard may go on before the rank has given a sign of life."""
    own = subprocess.Popen(["sleep", "60"], text=True)
    guard = start_guard(folder, own.pid, os.getpid(), stopped=1.5)
    processes += [own, guard]
    assert guard.stdin is not None and guard.stdout is not None and guard.stdout.readline() == "ready\n"
    guard.stdin.write("3\n")
    guard.stdin.flush()
    time.sleep(0.2)
    guard.send_signal(signal.SIGSTOP)
    time.sleep(4)
    guard.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert own.poll() is None, "it gets the time again for which the guard was stopped"
    assert own.wait(20) == -signal.SIGKILL


def test_a_guard_ends_with_its_rank(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    own = subprocess.Popen(["sleep", "60"], text=True)
    guard = start_guard(folder, own.pid, os.getpid())
    processes += [own, guard]
    own.kill()
    own.wait()
    assert guard.wait(20) == 0 and first_failure(folder) is None


def ignores(pid: int, number: signal.Signals) -> bool:
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_run_in_order_leaves_no_guard_and_nothing_in_its_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the thread may stand still."""
    monkeypatch.setattr(module, "BEAT", 0.1)
    with Watchdog(folder, 1, 1) as watchdog, watchdog.watching_peers([(1, "here", os.getpid())], is_guarded=True):
        assert watchdog.guard is not None
        process = watchdog.guard.process
        while not ignores(process.pid, signal.SIGTERM):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(1.7)
        assert process.poll() is None, "it ignores signals that are sent to all processes"
    assert process.returncode is not None and first_failure(folder) is None


def test_how_long_a_thread_may_stand_still_comes_from_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only within steps after the first, which may compile; never longer than a collective may wait."""
    watchdog, clock = Watchdog(limit=1800), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog.at(Phase.COMPUTE)
    assert watchdog.silence == 1800
    for seconds, expected in ((50, 1800), (3, SHORTEST_SILENCE), (17, 17 * SILENT_STEPS), (4, 17 * SILENT_STEPS)):
        clock[0] += seconds
        watchdog.step_done()
        assert watchdog.silence == expected
    watchdog.limit = 200
    assert watchdog.silence == 200
    watchdog.at(Phase.CHECKPOINT)
    watchdog.limit = 1800
    assert watchdog.silence == 1800
