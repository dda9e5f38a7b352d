"""The page of a run that is under way, and how it ends."""

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from imagined import lines, validation
from small import Configure, make_config

from llava_fsdp.report.run_reader import read_run
from llava_fsdp.train import live_page
from llava_fsdp.train import main as train
from llava_fsdp.train.live_page import LivePage


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_training_leaves_a_page(configure: Configure, tmp_path: Path) -> None:
    """A resumed one tells where it was."""
    words = "optim.schedule=constant", "optim.warmup_ratio=0"
    for steps, starts in ((2, [0]), (4, [0, 2])):
        run = train.RunParts()
        train.train(configure(f"max_steps={steps}", *words, to="run"), run)
        assert run.reporter is not None
        run.reporter.end()
        assert [row["step"] for row in rows_of(tmp_path / "run" / "starts.jsonl")] == starts
    run = read_run(tmp_path / "run")
    assert run.history.steps == 4 and list(run.history.sources) == ["mixed"]
    assert ["max_steps", "null", "4"] in run.about["recipe"] and run.about["trains"][1][1] > 0
    assert {"torch", "transformers", "python"} <= run.about["versions"].keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "of 4 steps" in page and "started after step 2" in page
    assert stat.S_IMODE((tmp_path / "run" / "report.html").stat().st_mode) == 0o600


def test_a_page_that_cannot_be_written_is_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    train.train(configure("max_steps=2", to="run"))
    assert len([r for r in caplog.records if "report.html cannot be written" in r.message]) == 1
    assert len(rows_of(tmp_path / "run" / "metrics.jsonl")) == 2
    assert not list((tmp_path / "run").glob("*.tmp")) and not list((tmp_path / "run").glob(".*.tmp"))


def live(parts: Path, dataset: Path, folder: Path, first_step: int = 0) -> LivePage:
    folder.mkdir(exist_ok=True)
    return LivePage(make_config(parts, dataset, folder), first_step, {"time": 1.0, "total_steps": 9})


@pytest.mark.parametrize(("seconds", "between"), [(2, 202), (0.0625, 10.0625)])
def test_pages_take_a_hundredth_of_the_time(
    seconds: float, between: float, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an imagined clock: if one takes 2 seconds, the next one waits for 200; and it waits for 10 at least."""
    clock, written = [1000.0], []

    def draw(*_: Any) -> str:
        clock[0] += seconds
        written.append(clock[0])
        return "page"

    monkeypatch.setattr(live_page.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live_page, "report_page", draw)
    page = live(parts, dataset, tmp_path / "run")
    for step in range(1, 1001):
        clock[0] += 1
        page.add({"step": step, "loss": 1.0})
    assert [b - a for a, b in itertools.pairwise(written)] == [between] * (len(written) - 1)
    assert len(written) >= 6


def test_a_page_that_can_never_be_written_is_one_warning(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    page = live(parts, dataset, tmp_path / "run")
    page.write()
    page.write()
    assert len([r for r in caplog.records if "report.html cannot be written" in r.message]) == 1


def test_every_start_is_kept_up_to_the_step_that_the_run_continues_from(
    parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Also two from the same step; a finished run has no more of them."""
    cfg, file = make_config(parts, dataset, tmp_path), tmp_path / "starts.jsonl"
    for first_step, kept in ((0, [0]), (3, [0, 3]), (5, [0, 3, 5]), (3, [0, 3, 3]), (9, [0, 3, 3]), (0, [0])):
        LivePage(cfg, first_step, {"step": first_step, "time": 1.0, "total_steps": 9})
        assert [row["step"] for row in rows_of(file)] == kept


def test_validations_are_read_as_they_come(parts: Path, dataset: Path, tmp_path: Path) -> None:
    page, told = live(parts, dataset, tmp_path / "run"), []
    page.on_validation = lambda row: told.append(row["step"])
    for step in (2, 4):
        page.add({"step": step, "loss": 1.0})
        lines(tmp_path / "run" / "validation.jsonl", (validation(s, [None], ("a",)) for s in range(2, step + 1, 2)))
        page.write()
        page.write()
    assert told == [2, 4]
    assert "Sample answers, step 4" in (tmp_path / "run" / "report.html").read_text()


def test_a_validation_that_was_owed_is_told(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of the step that a run continues from; what an earlier start told is no news."""
    for owed in (False, True):
        run = tmp_path / str(owed)
        run.mkdir()
        lines(run / "metrics.jsonl", ({"step": step, "loss": 1.0} for step in (1, 2, 3, 4)))
        lines(run / "validation.jsonl", (validation(step, [None], ("a",)) for step in ([2] if owed else [2, 4])))
        page, told = live(parts, dataset, run, 4), []
        page.on_validation = lambda row, told=told: told.append(row["step"])
        lines(run / "validation.jsonl", (validation(step, [None], ("a",)) for step in (2, 4)))
        page.write()
        assert told == ([4] if owed else [])
