"""Signals, deaths and restarts of real processes under torchrun."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lives import TELLS_ALWAYS, Run, children, gone

from llava_fsdp.runtime.files.heartbeat import Phase, read_beat
from llava_fsdp.runtime.process.watchdog import SAME_KEY_PRESS

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
LIMIT = 240
"""Seconds for a run on a machine that does other things too."""


def tracebacks(run: Run) -> int:
    """Of what ranks say themselves, without torchrun's summary, which repeats the first failure's."""
    return run.said.partition("ChildFailedError")[0].count("Traceback (most recent call last)") - 1


def family(pid: int) -> list[str]:
    """Names of all that a process has started, and what that has."""
    found = []
    for child in children(pid):
        try:
            found += [Path(f"/proc/{child}/comm").read_text(), *family(child)]
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
def test_save_now_then_stop_and_no_restart(start: Start) -> None:
    """SIGUSR1 and SIGTERM at one rank alone: all ranks save at one step, and torchrun's restarts end at once."""
    run = start("max_steps=500", "checkpoint.every=null", pace=0.1, restarts=2)
    run.until_step(2)
    pids = run.pids()
    os.kill(run.pids(1)[0], signal.SIGUSR1)
    run.until(lambda: bool(run.checkpoints) and not run.checkpoints[0].endswith(".tmp"))
    first = run.checkpoints[0]
    run.until_step(int(first[-6:]) + 2)
    os.kill(run.pids(1)[0], signal.SIGTERM)
    run.wait(LIMIT)
    assert gone(pids, 2)
    status = run.status
    assert (status["status"], status["class"], status["exit_code"], status["attempt"]) == ("stopped", "stopped", 75, 0)
    assert run.checkpoints == [first, f"step-{status['step']:06d}"] and run.rows[-1]["step"] == status["step"]
    assert tracebacks(run) == 0 and run.said.count("the same command continues there") <= 2  # ours, and torchrun's


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_restart_continues(start: Start) -> None:
    run = start("max_steps=5", fault="kill:1:3", restarts=1, pace=0.4)
    assert run.wait(LIMIT) == 0, run.said
    killed = "was killed by signal 9 (out of host memory? see dmesg)"
    unknown = "ended without a report; the kernel kills processes when memory runs out (see dmesg)"
    assert "rank 1 (process" in run.said
    assert killed in run.said or (unknown in run.said and not TELLS_ALWAYS)  # torchrun may have asked first
    assert tracebacks(run) <= 0
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    assert (run.status["status"], run.status["attempt"]) == ("done", 1)
    assert "continuing after step 2 of 5" in run.said


@pytest.mark.slow
def test_an_error_that_stays_is_said_once(start: Start) -> None:
    """One root cause on the screen; torchrun starts its workers again, and they end at once and say nothing."""
    run = start(fault="data:1:3!", restarts=3)
    assert run.wait(LIMIT) != 0
    assert tracebacks(run) == 0
    assert run.said.partition("ChildFailedError")[0].count("DataError: data.json, record 7") == 1
    assert "Connection closed" not in run.said
    status = run.status
    assert (status["class"], status["exit_code"], status["attempt"], status["rank"]) == ("data", 2, 0, 1)
    assert status["culprit"]["record"] == "data.json, record 7" and status["culprit"]["rank"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said", "ending", "told"),
    [
        ("bug:1:3", "ZeroDivisionError: a bug of ours", ("bug", 1), 1),
        ("exit:1:3", "ended with exit code 0 in the middle of the run", ("communication", 5), 0),
    ],
)
def test_an_end_of_one_rank_is_told_once(
    fault: str, said: str, ending: tuple[str, int], told: int, start: Start
) -> None:
    run = start(fault=fault)
    assert run.wait(LIMIT) != 0
    assert said in run.said and tracebacks(run) == told
    assert told or "rank 1 (process" in run.said
    assert (run.status["class"], run.status["exit_code"], run.status["culprit"]["rank"]) == (*ending, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sleep:1:3", "forward and backward (step 4)"),
        ("freeze:1:3", "and its process does not answer: "),
        ("stall:1:3", "waiting for data (step 4): data worker 0 is at data.json, record 7"),
        ("sleep:0:3", "forward and backward (step 4)"),
    ],
)
def test_a_stalled_rank_is_named_before_the_timeout(fault: str, said: str, start: Start) -> None:
    run = start("comm.timeout=20", "comm.warn_after=5", fault=fault)
    run.until_step(3)
    began, pids = time.monotonic(), run.pids()
    assert run.wait(60) != 0
    assert gone(pids, 0.5) and time.monotonic() - began < 20 + 10
    late = fault.split(":")[1]
    assert "waiting for" in run.said and f"rank {late} (process" in run.said and said in run.said
    status = run.status
    assert (status["class"], status["exit_code"]) == ("communication", 5)
    assert f"rank {late} " in status["reason"] and said in status["reason"]
    assert status["culprit"]["rank"] == int(late)
    assert " in fit\n" in (run.output / "stacks" / f"rank-{1 - int(late)}.txt").read_text()


@pytest.mark.slow
def test_no_orphan_stays_and_the_folder_is_free_at_once(start: Start) -> None:
    """torchrun is killed; before that, a second run in the folder is refused and leaves the first one's status."""
    run = start("max_steps=2000", pace=0.2)
    run.until_step(1)
    for ranks in (0, 2):
        second = start(ranks=ranks)
        assert second.wait(LIMIT) == (1 if ranks else 2)
        assert f"belongs to a run that is under way: process {run.pids(0)[0]} on " in second.said
        assert "outside of the steps" not in second.said and run.status["status"] == "running"
    pids = run.pids()
    assert len(pids) == 4
    os.kill(run.process.pid, signal.SIGKILL)
    assert gone(pids, 2)
    step = run.rows[-1]["step"]
    third = start(f"max_steps={step + 3}")
    assert third.wait(LIMIT) == 0, third.said


@pytest.mark.slow
def test_a_signal_to_the_whole_group_and_while_data_stall(start: Start) -> None:
    """As schedulers send it, to data workers too; one rank waits for data that never come."""
    run = start("max_steps=500", "checkpoint.every=null", fault="stall:1:4")
    run.until_step(4)
    time.sleep(1)
    began, pids = time.monotonic(), run.pids()
    for pid in (run.process.pid, *pids):
        os.kill(pid, signal.SIGTERM)
    run.wait(40)
    assert gone(pids, 1) and time.monotonic() - began < 20
    assert (run.status["class"], run.status["step"], run.checkpoints) == ("stopped", 4, ["step-000004"])


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_at_once(start: Start) -> None:
    run = start(ranks=0)
    run.until((run.output / ".heartbeats" / "rank-0.json").is_file)
    run.process.terminate()
    assert run.wait(5) == 75
    assert run.status["class"] == "stopped" and "loading" in run.status["reason"]


@pytest.mark.slow
def test_a_signal_in_the_first_step_does_not_wait_for_its_end(start: Start) -> None:
    """torchrun would kill the ranks before."""
    run = start(fault="sleep:1:0")
    beat = run.output / ".heartbeats" / "rank-1.json"
    run.until(lambda: beat.is_file() and "forward and backward" in beat.read_text())
    run.process.terminate()
    run.wait(15)
    status = run.status
    assert (status["status"], status["class"], status["exit_code"]) == ("stopped", "stopped", 75)
    assert "before the first step was over, forward and backward" in status["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, "stopped"), (signal.SIGINT, "interrupted")])
def test_a_signal_to_the_group_while_the_first_step_compiles(number: int, ending: str, start: Start) -> None:
    """The C++ compiler dies of it too, and that is no bug of ours."""
    with tempfile.TemporaryDirectory() as cache:
        run = start("compile=true", ranks=0, env={"TORCHINDUCTOR_CACHE_DIR": cache})
        run.until(lambda: any(name.startswith(("g++", "cc1plus")) for pid in run.pids() for name in family(pid)))
        os.killpg(run.process.pid, number)
        assert run.wait(20) == {"stopped": 75, "interrupted": 130}[ending]
        assert run.status["class"] == ending and "Traceback" not in run.said


@pytest.mark.slow
def test_ctrl_c_stops_and_twice_ends_at_once(start: Start) -> None:
    run = start("max_steps=500", "checkpoint.every=null", ranks=0, pace=0.5)
    run.until_step(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 75 and len(run.checkpoints) == 1
    steps = len(run.rows)
    run = start("max_steps=500", "checkpoint.every=null", ranks=0, pace=5)
    run.until(lambda: (beat := read_beat(run.output, 0)) and beat.step > steps and beat.phase == Phase.COMPUTE.value)
    for _ in range(2):  # between two steps the first of them would have stopped it already
        run.process.send_signal(signal.SIGINT)
        time.sleep(2 * SAME_KEY_PRESS)
    assert run.wait(5) == 130 and run.status["class"] == "interrupted"


@pytest.mark.slow
def test_fifty_runs_end_well(start: Start) -> None:
    for number in range(50):
        run = start(f"max_steps={number + 1}")
        assert run.wait(LIMIT) == 0, run.said
        assert run.status["status"] == "done" and "terminate called" not in run.said


@pytest.mark.slow
def test_stacks_on_demand(start: Start) -> None:
    run = start("max_steps=500", ranks=0, pace=0.5)
    run.until_step(1)
    run.process.send_signal(signal.SIGUSR2)
    stacks = run.output / "stacks" / "rank-0.txt"
    run.until(lambda: "in fit" in stacks.read_text(), 5)  # whatever it is doing there
    run.until_step(len(run.rows) + 2)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGINT, 130), pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow)],
)
def test_signals_before_anything_is_loaded(number: int, code: int, tmp_path: Path) -> None:
    """While torch is imported nothing could save yet; SIGUSR1 is not deadly, and the mistyped key is what is said."""
    begun = "import sys, llava_fsdp.config.command_line.cli as c; c.start_process('train', None); "
    begun += "print('begun', flush=True); "
    begun += "import runpy; sys.argv[1:] = ['optim.lrr=1']; runpy.run_module('llava_fsdp.train', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", begun], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code and "Traceback" not in said, said
