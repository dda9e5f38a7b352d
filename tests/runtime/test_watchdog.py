"""When a rank warns, gives up and ends with the others: decisions of the watchdog, without its thread."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llava_fsdp.runtime.exit_codes import ENDINGS, ExitCode
from llava_fsdp.runtime.files.heartbeat import FOLDER, Beat, Late, Phase, Watcher, put_beat, read_beat
from llava_fsdp.runtime.files.status_file import Outcome
from llava_fsdp.runtime.process import watchdog as module
from llava_fsdp.runtime.process.process_end import AGENT, end_agent, end_torchrun
from llava_fsdp.runtime.process.watchdog import FROZEN, Watchdog

HERE = socket.gethostname()
BEAT = Beat(0, HERE, 7, step=4, phase=Phase.COMPUTE.value, work=9, detail="", count=1)


class Ended(BaseException):
    """Stands for the end of the process."""


class Clock:
    """Time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Recorded(Watchdog):
    """A watchdog that lists how it would have ended the process."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.ended: list[Outcome] = []

    def end(self, outcome: Outcome) -> None:
        self.ended.append(outcome)


Make = Callable[..., Watchdog]


@pytest.fixture
def make(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Watchdogs that are not entered: no thread, no signal handlers. Their ends are in `ended`."""
    (tmp_path / FOLDER).mkdir()
    monkeypatch.setenv("WORLD_SIZE", "3")
    files = []

    def made(rank: int = 0, size: int = 3, limit: int = 60, warn_after: int | None = 20) -> Watchdog:
        own = Recorded(tmp_path, rank, limit, warn_after)
        own.size, own.has_met, own.watcher = size, True, Watcher(tmp_path, FROZEN)
        own.stacks = (tmp_path / f"stacks-{rank}.txt").open("w")
        files.append(own.stacks)
        own.at(Phase.COMPUTE, 4)
        own.run.collectives = lambda: 9
        return own

    yield made
    for file in files:
        file.close()


def ends(watchdog: Watchdog) -> list[Outcome]:
    assert isinstance(watchdog, Recorded)
    return watchdog.ended


def put(folder: Path, *ranks: int, **changes: Any) -> None:
    for rank in ranks:
        put_beat(folder, replace(BEAT, rank=rank, **changes))


@pytest.mark.parametrize(("limit", "rank", "seconds"), [(60, 0, 54), (60, 1, 55), (200, 0, 190), (200, 2, 191)])
def test_a_rank_gives_up_shortly_before_the_timeout_and_the_first_one_first(
    limit: int, rank: int, seconds: int, make: Make, clock: Clock, tmp_path: Path
) -> None:
    """A tenth earlier, at most ten seconds; and it names who is late, and what that one waits for."""
    own = make(rank, limit=limit)
    for count, passed in enumerate((0, seconds - 0.5, 0.5)):
        assert not ends(own)
        clock.now += passed
        put(tmp_path, 0, 1, 2, count=count)
        put(tmp_path, 0 if rank else 1, step=3, phase=Phase.DATA.value, detail="record 5", count=count)
        own.beat()
    (outcome,) = ends(own)
    assert outcome.ending is ENDINGS["communication"]
    late = {"rank": 0 if rank else 1, "host": HERE, "phase": Phase.DATA.value, "record": "record 5"}
    assert outcome.culprit == late and f"waited for {seconds} seconds" in outcome.reason


def test_progress_begins_the_wait_anew(make: Make, clock: Clock, tmp_path: Path) -> None:
    put(tmp_path, 1, 2, step=3)
    own = make()
    own.beat()
    for _ in range(3):
        clock.now += 50
        own.step += 1
        own.beat()
    assert not ends(own) and not os.fstat(own.stacks.fileno()).st_size


def test_who_is_behind_does_not_give_up_and_who_is_alone_does_not_either(
    make: Make, clock: Clock, tmp_path: Path
) -> None:
    """Another rank, which waits, names this one."""
    put(tmp_path, 1, step=5)
    put(tmp_path, 2, step=3)
    behind, alone, unwatched = make(), make(size=1), make(warn_after=None)
    for own in (behind, alone, unwatched):
        own.beat()
    clock.now += 500
    for own in (behind, alone, unwatched):
        own.beat()
        assert not ends(own)
    assert (read_beat(tmp_path, 0) or BEAT).count == 2, "it beats all the same"


@pytest.mark.parametrize("phase", Phase)
def test_where_all_ranks_are_at_one_place_only_what_they_do_together_is_given_up(
    phase: Phase, make: Make, clock: Clock, tmp_path: Path
) -> None:
    put(tmp_path, 0, 1, 2, phase=phase.value)
    own = make()
    own.at(phase)
    own.beat()
    clock.now += 60
    put(tmp_path, 1, 2, phase=phase.value, count=2)
    own.beat()
    assert bool(ends(own)) is (phase in module.TOGETHER)
    assert all(not outcome.culprit and "no rank goes on" in outcome.reason for outcome in ends(own))


@pytest.mark.parametrize(
    ("rank", "frozen", "is_said"), [(0, False, True), (1, False, True), (2, False, False), (2, True, True)]
)
def test_late_ranks_are_reported_by_few_and_less_and_less_often(
    rank: int, frozen: bool, is_said: bool, make: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    own = make(rank)
    own.warned_at = 0.0
    late = [Late(replace(BEAT, rank=3), 30.0, frozen)]
    seen = []
    for waiting, passed in ((30, 0), (80, 50), (90, 10), (240, 150), (299, 59), (361, 62), (370, 59), (420, 61)):
        clock.now += passed
        before = len(caplog.records)
        module.log().propagate = True
        own.warn(waiting, late)
        seen.append(len(caplog.records) > before)
    assert seen == ([True, False, True, True, False, False, False, True] if is_said else [False] * 8)
    size = os.fstat(own.stacks.fileno()).st_size
    assert size, "every rank writes its stacks"
    own.warn(400, [])
    assert os.fstat(own.stacks.fileno()).st_size == size, "once in a place"


@pytest.mark.parametrize(
    ("first", "signalled", "code", "torchrun", "agent"),
    [
        (None, False, ExitCode.COMMUNICATION, False, False),
        ("bug", False, ExitCode.BUG, False, False),
        ("config", False, ExitCode.USER, False, True),
        ("numeric", False, ExitCode.NUMERIC, False, True),
        ("stopped", False, ExitCode.STOPPED, True, False),
        ("stopped", True, ExitCode.STOPPED, False, False),
        ("interrupted", False, ExitCode.INTERRUPTED, False, False),
    ],
)
def test_a_rank_ends_with_the_code_of_the_one_that_failed_first(
    first: str | None, signalled: bool, code: int, torchrun: bool, agent: bool, make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Restarts that cannot help are prevented; of a stop that was asked for elsewhere, torchrun here is told."""
    own, told = make(), []
    report = None if first is None else {"class": first, "exit_code": int(ENDINGS[first].exit_code), "rank": 1}
    monkeypatch.setattr(module, "first_failure", lambda _: report)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(module, "end_torchrun", lambda: told.append("torchrun"))
    monkeypatch.setattr(module, "end_agent", lambda: told.append("agent"))
    monkeypatch.setattr(own, "exit", told.append)
    own.was_signalled = signalled
    own.end_after_failure()
    assert told == ["torchrun"] * torchrun + ["agent"] * agent + [code]


def test_a_failure_elsewhere_ends_a_rank_that_others_do_not_watch_yet(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not a process that is alone, and whose report is its own."""

    def ended() -> None:
        raise Ended

    monkeypatch.setattr(module, "first_failure", lambda _: {"class": "bug", "exit_code": 1})
    own = make(size=1)
    monkeypatch.setattr(own, "end_after_failure", ended)
    with pytest.raises(Ended):
        own.beat()
    monkeypatch.setenv("WORLD_SIZE", "1")
    own.beat()


def test_the_end_of_another_process_is_told_by_one_rank(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ended = make(), []
    monkeypatch.setattr(module, "ending_of", lambda pidfd, pid: f"ended {pidfd} {pid}")
    monkeypatch.setattr(own, "end_after_failure", lambda: ended.append("with it"))
    own.end_with_peer(11, 2, 4321)
    (outcome,) = ends(own)
    assert outcome.culprit == {"rank": 2, "host": HERE} and outcome.ending is ENDINGS["communication"]
    assert outcome.reason == f"rank 2 (process 4321 on {HERE}) ended 11 4321"
    monkeypatch.setattr(module, "first_failure", lambda _: {"class": "bug", "exit_code": 1})
    own.end_with_peer(11, 2, 4321)
    assert ends(own) == [outcome] and ended[-1] == "with it"


@pytest.mark.parametrize("first", [None, {"class": "data", "exit_code": 2, "rank": 1}])
def test_an_end_has_the_step_and_the_code_of_the_first_failure(
    first: dict | None, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, told = make(), []
    monkeypatch.setattr(module, "write_ending", lambda folder, outcome: told.append((folder, outcome.step)) or first)
    monkeypatch.setattr(own, "exit", told.append)
    Watchdog.end(own, Outcome(ENDINGS["communication"], "lost"))
    assert told == [(tmp_path, 4), ExitCode.COMMUNICATION if first is None else 2]


def test_a_rank_that_is_blocked_before_the_ranks_have_met_ends_at_the_limit(
    make: Make, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kills the ranks that torchrun has started beside it and that do not beat: they may be deaf to SIGTERM."""
    killed: list[int] = []
    monkeypatch.setattr(module, "siblings", lambda: {100, 200, 300})
    monkeypatch.setattr(module.os, "kill", lambda pid, _: killed.append(pid))
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    own = make(1, size=1)
    own.has_met = False
    put(tmp_path, 0, pid=100)
    put(tmp_path, 2, pid=200)
    long_ago = os.stat(tmp_path / FOLDER / "rank-2.json").st_mtime - FROZEN - 1
    os.utime(tmp_path / FOLDER / "rank-2.json", (long_ago, long_ago))
    clock.now += 59
    own.beat()
    assert not ends(own)
    clock.now += 1
    own.beat()
    (outcome,) = ends(own)
    assert outcome.ending is ENDINGS["communication"] and sorted(killed) == [200, 300]


def test_frozen_ranks_of_this_machine_are_killed(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, killed = make(), []
    own.peers = {21: (1, 100), 22: (2, 200), 23: (3, 300)}
    monkeypatch.setattr(module.signal, "pidfd_send_signal", lambda handle, number: killed.append((handle, number)))
    put(tmp_path, 1, 2)
    now = os.stat(tmp_path / FOLDER / "rank-1.json").st_mtime
    monkeypatch.setattr("llava_fsdp.runtime.files.heartbeat.time.time", lambda: now + FROZEN + 1)
    os.utime(tmp_path / FOLDER / "rank-2.json", (now + 2, now + 2))
    own.kill_silent_peers()
    assert killed == [(21, signal.SIGKILL)], "rank 2 is just in time, and rank 3 has not begun"


def test_a_stop_is_waited_for_as_long_as_a_signal_may_take(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, begun = make(), clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds
        own.stop = "SIGTERM" if stops and clock.now > begun + 0.2 else ""

    monkeypatch.setattr(module.time, "sleep", sleep)
    stops = False
    assert not own.wants_stop_soon() and clock.now - begun >= module.SIGNAL_DELAY
    begun, stops = clock.now, True
    assert own.wants_stop_soon() and clock.now - begun < 0.5


def test_each_request_to_save_is_taken_once(make: Make) -> None:
    own = make()
    own.is_ending = module.threading.Event()
    assert not own.wants_save()
    for _ in range(2):
        own.handle_signal(signal.SIGUSR1)
    assert own.wants_save() and not own.wants_save() and not own.wants_stop()
    own.handle_signal(signal.SIGUSR1)
    assert own.wants_save()


@pytest.mark.parametrize(
    ("changes", "torchrun", "agent"),
    [
        ({}, True, False),
        ({"LOCAL_RANK": "1"}, False, False),
        ({"GROUP_WORLD_SIZE": "1"}, False, False),
        ({"TORCHELASTIC_RUN_ID": None}, False, False),
        ({AGENT: f"{os.getppid()}:99"}, True, True),
        ({AGENT: f"{os.getppid()}:99", "LOCAL_RANK": "1"}, False, False),
        ({AGENT: f"{os.getppid() + 1}:99"}, True, False),
    ],
)
def test_who_is_told_to_end(
    changes: dict[str, str | None], torchrun: bool, agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun of a run on several machines, and the agent; the first rank of a machine tells its parent alone."""
    for name, value in (
        {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", AGENT: None} | changes
    ).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: told.append(call))
    end_torchrun()
    assert told == [(os.getppid(), signal.SIGTERM)] * torchrun
    told.clear()
    end_agent({"code": 2})
    assert told == [(os.getppid(), signal.SIGTERM)] * agent


def test_a_rank_that_watches_the_first_alone_looks_for_all_before_it_gives_up(
    make: Make, clock: Clock, tmp_path: Path
) -> None:
    """Rank 2 is late; rank 1 stands where rank 0 stands."""
    put(tmp_path, 0, 1)
    put(tmp_path, 2, step=3)
    own = make(1)
    own.beat()
    clock.now += 60
    put(tmp_path, 0, 1, count=2)
    put(tmp_path, 2, step=3, count=2)
    own.beat()
    assert [outcome.culprit.get("rank") for outcome in ends(own)] == [2]


def test_stacks_and_warnings_begin_anew_with_progress(
    make: Make, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each place where a rank waits has its stacks, and is reported at once."""
    module.log().propagate = True
    own = make(limit=1000)
    for place in (1, 2):
        own.step += 1
        put(tmp_path, 1, 2, step=3, count=2 * place)
        own.beat()
        clock.now += 21
        put(tmp_path, 1, 2, step=3, count=2 * place + 1)
        own.beat()
        size = os.fstat(own.stacks.fileno()).st_size
        assert size > (place - 1) * 100 and len(caplog.messages) == 2 * place, "two late ranks"
        if place == 1:
            first = size
    assert size > first


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("phase", [Phase.DATA, Phase.COMPUTE])
def test_what_a_heartbeat_says(size: int, phase: Phase, make: Make, tmp_path: Path) -> None:
    """The record that is waited for only where data are; collectives only where there are other ranks."""
    own = make(size=size)
    own.run.data_position = lambda: "record 5"
    own.at(phase)
    beat = own.write_beat()
    assert beat == read_beat(tmp_path, 0) and (beat.pid, beat.host, beat.step) == (os.getpid(), HERE, 4)
    assert (beat.detail, beat.work) == ("record 5" if phase is Phase.DATA else "", 9 if size > 1 else 0)


@pytest.mark.parametrize("failure", [None, {"class": "data", "exit_code": 2, "rank": 1}])
def test_a_signal_of_torchrun_because_of_another_rank_is_no_request_to_stop(
    failure: dict | None, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of the other rank may come a moment after the signal."""
    own, begun = make(rank=1), clock.now

    def wait(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(own, "wait", wait)
    monkeypatch.setattr(module, "first_failure", lambda _: failure if clock.now > begun + 0.1 else None)
    own.is_ending, own.is_in_steps = module.threading.Event(), True
    own.handle_signal(signal.SIGTERM)
    assert own.was_signalled and own.wants_stop() is (failure is None) and not ends(own)


def test_processes_of_this_machine_are_watched(make: Make) -> None:
    """A process of another machine may have the number of any process of this one; an error leaves them watched."""
    own = make(size=1)
    ranks = [(0, HERE, os.getpid()), (1, HERE, os.getppid()), (2, "elsewhere", os.getppid()), (3, HERE, 1 << 22)]
    try:
        with own.watching_peers(ranks):
            assert own.size == 4 and [*own.peers.values()] == [(1, os.getppid())]
        assert own.size == 1
        with pytest.raises(Ended), own.watching_peers(ranks[:1]):
            own.size = 4
            raise Ended
        assert own.size == 4
    finally:
        for handle in own.peers:
            os.close(handle)


@pytest.mark.parametrize("is_own", [True, False])
def test_frozen_ranks_are_killed_before_a_process_ends(
    is_own: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because of itself or because of another rank: torchrun would wait for them."""
    own, done = make(), list[object]()
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(module, "write_ending", lambda *_: None)
    monkeypatch.setattr(module, "first_failure", lambda _: {"class": "bug", "exit_code": 1, "rank": 1})
    monkeypatch.setattr(own, "kill_silent_peers", lambda: done.append("killed"))
    monkeypatch.setattr(own, "exit", done.append)
    if is_own:
        Watchdog.end(own, Outcome(ENDINGS["data"], "a record"))
    else:
        own.end_after_failure()
    assert done == ["killed", ExitCode.USER if is_own else 1]


def test_a_report_that_fails_does_not_keep_a_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own, done = make(), list[object]()

    def report() -> None:
        done.append("reported")
        raise ValueError("a page cannot be made")

    own.run.report_end = report
    monkeypatch.setattr(module.os, "_exit", done.append)
    Watchdog.exit(own, 5)
    assert done == ["reported", 5]
