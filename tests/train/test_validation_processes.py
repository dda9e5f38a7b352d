"""What ends a run in the middle of a validation, in real processes under torchrun."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lives import Run, gone
from small import write_json

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LIMIT = 240


def phases(run: Run) -> list[str]:
    return [json.loads(path.read_text())["phase"] for path in sorted((run.output / ".heartbeats").glob("rank-*.json"))]


def measured(run: Run) -> list[int]:
    path = run.output / "validation.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def test_a_stop_is_heard_between_batches_and_the_rest_is_done_once(start: Callable[..., Run], dataset: Path) -> None:
    """Asked of one rank, in a validation that would take minutes."""
    held = ["val.every=2", f"val.path={dataset / 'mixed.json'}"]
    run = start(*held, "val.answers=44", "val.batch_size=1", "val.max_new_tokens=200", "checkpoint.every=5")
    run.until(lambda: bool(run.rows) and phases(run) == ["validating", "validating"], LIMIT)
    pids = run.pids()
    os.kill(run.pids(1)[0], signal.SIGTERM)
    run.wait(LIMIT)
    assert gone(pids, 5)
    assert (run.status["status"], run.status["exit_code"], run.status["step"]) == ("stopped", 75, 2), run.said
    assert run.checkpoints == ["step-000002"] and measured(run) == []
    run = start(*held, "val.answers=2", "val.max_new_tokens=4")
    assert run.wait(LIMIT) == 0, run.said
    assert "the validation of step 2 is still to be done" in run.said
    assert measured(run) == [2, 4, 6] and [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]


def test_one_rank_that_meets_a_broken_picture_ends_all(
    start: Callable[..., Run], dataset: Path, tmp_path: Path
) -> None:
    """The picture was whole when the run began."""
    shutil.copytree(dataset / "images", tmp_path / "held")
    records = json.loads((dataset / "captions.json").read_text())[:8]
    shutil.copy(tmp_path / "held" / "1.png", tmp_path / "held" / "alone.png")
    records[5]["image"] = "alone.png"
    write_json(tmp_path / "held.json", records)
    held = ["val.every=4", f"val.path={tmp_path / 'held.json'}", f"val.images={tmp_path / 'held'}"]
    run = start(*held, "val.answers=2", pace=0.5)
    run.until_step(1)
    (tmp_path / "held" / "alone.png").unlink()
    pids = run.pids()
    assert run.wait(LIMIT) != 0
    assert gone(pids, 5)
    assert run.status["exit_code"] == 2 and "alone.png does not exist" in run.status["reason"], run.said
    assert "held.json, line 1, record 5 (id c5)" in run.status["reason"] and run.rows[-1]["step"] == 4
    assert measured(run) == []
