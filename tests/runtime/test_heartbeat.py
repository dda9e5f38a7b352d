"""Which rank is late, from heartbeats alone."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from llava_fsdp.runtime.files import heartbeat
from llava_fsdp.runtime.files.heartbeat import FOLDER, Beat, Phase, Watcher, put_beat

BEAT = Beat(0, "host", 1, step=5, phase=Phase.COMPUTE.value, work=40, detail="", count=1)


def beats(folder: Path, **changes: dict) -> None:
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, change in changes.items():
        put_beat(folder, replace(BEAT, rank=int(name[1:]), **change))


def late(folder: Path, frozen_after: float = 60, own: Beat = BEAT, size: int = 4) -> list[str]:
    return [str(each) for each in Watcher(folder, frozen_after).late_ranks(own, list(range(size)))]


def test_nobody_is_late_where_all_are_at_one_place(tmp_path: Path) -> None:
    beats(tmp_path, r0={}, r1={}, r2={}, r3={"work": 41})
    assert late(tmp_path) == []


def test_the_furthest_behind_is_the_late_one(tmp_path: Path) -> None:
    """An earlier step, an earlier phase of the step, or fewer collectives begun in it."""
    data = {"phase": Phase.DATA.value, "detail": "data worker 0 is at a.json, record 3"}
    beats(tmp_path, r0={}, r1={"work": 39}, r2=data, r3={})
    (said,) = late(tmp_path)
    assert said.startswith("rank 2 (process 1 on host) has been in the same place for 0 seconds: waiting for data")
    assert said.endswith("(step 6): data worker 0 is at a.json, record 3")
    beats(tmp_path, r2={})
    (said,) = late(tmp_path)
    assert said.startswith("rank 1 ") and said.endswith("forward and backward (step 6)")
    beats(tmp_path, r1={}, r3={"step": 4, "work": 99})
    assert [said[:7] for said in late(tmp_path)] == ["rank 3 "]


def test_a_process_that_does_not_beat_is_late_wherever_it_is(tmp_path: Path) -> None:
    beats(tmp_path, r0={}, r1={"work": 50})
    watcher = Watcher(tmp_path, frozen_after=0.05)
    assert watcher.late_ranks(BEAT, [0, 1]) == []
    time.sleep(0.1)
    beats(tmp_path, r0={"count": 2})
    (found,) = watcher.late_ranks(replace(BEAT, count=2), [0, 1])
    assert found.beat.rank == 1 and found.is_frozen and "does not answer" in str(found)


def test_the_seconds_are_those_since_a_rank_last_made_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that go on at one place are none; a rank that answers again is no longer frozen."""
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    watcher = Watcher(tmp_path, frozen_after=10)
    seen = []
    for second, work, count in ((0, 1, 1), (4, 2, 2), (9, 2, 3), (19, 2, 3), (20, 2, 3), (21, 2, 4)):
        clock[0] = 100.0 + second
        beats(tmp_path, r1={"work": work, "count": count})
        (found,) = watcher.late_ranks(BEAT, [0, 1])
        seen.append((found.seconds, found.is_frozen))
    assert seen == [(0, False), (0, False), (5, False), (15, False), (16, True), (17, False)]


def test_a_torn_file_is_as_good_as_the_one_before(tmp_path: Path) -> None:
    beats(tmp_path, r1={"work": 1})
    watcher = Watcher(tmp_path, 60)
    assert len(watcher.late_ranks(BEAT, [1])) == 1
    (tmp_path / FOLDER / "rank-1.json").write_text('{"rank": 1, ')
    assert len(watcher.late_ranks(BEAT, [1])) == 1


def test_phases_are_in_the_order_of_a_step() -> None:
    """A rank's place grows through a step, and from step to step; collectives count within a phase."""
    order = [
        Phase.LOADING, Phase.REPORT, Phase.CHECKPOINT, Phase.VALIDATION, Phase.DATA, Phase.AGREEING, Phase.COMPUTE,
        Phase.OPTIMIZER, Phase.EXPORT,
    ]  # fmt: skip
    beats = [
        replace(BEAT, step=step, phase=phase.value, work=work) for step in (4, 5) for phase in order for work in (8, 9)
    ]
    places = [beat.place for beat in beats]
    assert places == sorted(set(places)) and len(order) == len(Phase)
