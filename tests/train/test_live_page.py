"""The page of a run that is under way, and how it ends."""

import contextlib
import itertools
import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from imagined import lines, validation
from small import Configure, make_config

from llava_fsdp.report.run_reader import read_run
from llava_fsdp.train import main as train
from llava_fsdp.train.events.reporting import live_page
from llava_fsdp.train.events.reporting.live_page import LivePage


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_training_leaves_a_page(configure: Configure, tmp_path: Path) -> None:
    """A resumed one tells where it was."""
    words = "optim.schedule=constant", "optim.warmup_ratio=0"
    for steps, starts in ((2, [0]), (4, [0, 2])):
        run = train.RunParts()
        train.train(configure(f"max_steps={steps}", *words, to="run"), run)
        assert run.reports is not None
        run.reports.end()
        assert [row["step"] for row in rows_of(tmp_path / "run" / "starts.jsonl")] == starts
    run = read_run(tmp_path / "run")
    assert run.history.num_rows == 4 and list(run.history.sources) == ["mixed"]
    assert ["max_steps", "null", "4"] in run.about["recipe"] and run.about["trains"][1][1] > 0
    assert {"torch", "transformers", "python"} <= run.about["versions"].keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "of 4 steps" in page and "started after step 2" in page
    assert stat.S_IMODE((tmp_path / "run" / "report.html").stat().st_mode) == 0o600


def test_a_page_that_cannot_be_written_is_a_warning(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in its place is made after the start, which would refuse it."""
    claiming = train.claiming_folder

    @contextlib.contextmanager
    def claim(folder: Path, *given: Any) -> Iterator[Any]:
        with claiming(folder, *given) as lock:
            (folder / "report.html").mkdir()
            yield lock

    monkeypatch.setattr(train, "claiming_folder", claim)
    train.train(configure("max_steps=2", to="run"))
    assert len([r for r in caplog.records if "report.html cannot be written" in r.message]) == 1
    assert len(rows_of(tmp_path / "run" / "metrics.jsonl")) == 2
    assert not list((tmp_path / "run").glob("*.tmp")) and not list((tmp_path / "run").glob(".*.tmp"))


def live(parts: Path, dataset: Path, folder: Path, first_step: int = 0) -> LivePage:
    folder.mkdir(exist_ok=True)
    return LivePage(make_config(parts, dataset, folder), first_step, {"time": 1.0, "total_steps": 9})


@pytest.mark.parametrize(("seconds", "between"), [(2, 203), (0.03125, 10)])
def test_pages_take_a_hundredth_of_the_time(
    seconds: float, between: float, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an imagined clock, with a step a second: if a process takes 2 CPU seconds, and 3 seconds by the clock,
    the next one starts 200 seconds after its end; and it starts 10 after the start of the one before at least."""
    clock, started = [1000.0], []

    def start(_: Path) -> SimpleNamespace:
        started.append(clock[0])
        return SimpleNamespace(pid=7)

    def wait4(pid: int, _: int) -> tuple[int, int, SimpleNamespace]:
        is_ended = clock[0] >= started[-1] + 3
        return (pid if is_ended else 0), 0, SimpleNamespace(ru_utime=0.75 * seconds, ru_stime=0.25 * seconds)

    monkeypatch.setattr(live_page.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live_page, "start_process", start)
    monkeypatch.setattr(live_page.os, "wait4", wait4)
    page = live(parts, dataset, tmp_path / "run")
    for step in range(1, 1001):
        clock[0] += 1
        page.step({"step": step, "loss": 1.0})
    assert started[0] == 1010
    assert [b - a for a, b in itertools.pairwise(started)] == [between] * (len(started) - 1)
    assert len(started) >= 5 and not page.has_warned


def test_no_step_builds_a_page(parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process does, from the files; the steps take part in nothing but its start and its end."""
    folder = tmp_path / "run"
    page, here = live(parts, dataset, folder), []
    monkeypatch.setattr(live_page, "report_page", lambda *_: here.append("built") or "")
    monkeypatch.setattr(live_page, "put_page", lambda *_: here.append("written"))
    page.next_at = 0.0
    lines(folder / "metrics.jsonl", ({"step": step, "loss": 1.0} for step in (1, 2)))
    page.step({"step": 1, "loss": 1.0})
    process, ends = page.process, time.monotonic() + 60
    assert here == [] and process is not None
    while page.process is not None and time.monotonic() < ends:
        page.step({"step": 2, "loss": 1.0})
        time.sleep(0.05)
    assert process.returncode == 0 and not page.has_warned and here == []
    assert "<b>2</b><span>of 9 steps" in (folder / "report.html").read_text()


def test_the_last_page_is_the_complete_one(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """A process that still writes an earlier one is ended before, even if it does not end by itself."""
    page = live(parts, dataset, tmp_path / "run")
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    page.process = process
    page.step({"step": 5, "loss": 1.0})
    page.write()
    assert process.returncode == -signal.SIGKILL and page.process is None and not page.has_warned
    assert "<b>5</b><span>of 9 steps" in (tmp_path / "run" / "report.html").read_text()


def test_a_process_that_is_ended_leaves_no_part_of_a_page(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """It is interrupted while it writes."""
    folder = tmp_path / "run"
    live(parts, dataset, folder)
    before = (folder / "report.html").read_text()
    interrupted = """
import os, signal, sys
from llava_fsdp.train.events.reporting import live_page
from llava_fsdp.runtime.files.durable_files import replacing

def write_half(path, page, *folders):
    with replacing(path) as file:
        file.write(page[:99].encode())
        os.kill(os.getpid(), signal.SIGTERM)

live_page.put_page = write_half
sys.argv[1:] = [str(os.getppid()), sys.argv[1]]
live_page.main()
"""
    assert subprocess.run([sys.executable, "-c", interrupted, folder], check=False).returncode == 1
    assert (folder / "report.html").read_text() == before and not list(folder.glob("*.tmp"))


def test_a_process_that_fails_is_one_warning(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And so is one that cannot be started; later ones are tried all the same."""
    started = []

    def start(_: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
        if len(started) == 2:
            raise OSError("no more processes")
        return started[-1]

    monkeypatch.setattr(live_page, "start_process", start)
    monkeypatch.setattr(live_page, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "CPU_SHARE", 1e9)
    page, ends = live(parts, dataset, tmp_path / "run"), time.monotonic() + 60
    while len(started) < 4 and time.monotonic() < ends:
        page.step({"step": 1, "loss": 1.0})
    page.end_process()
    started[1].wait()
    assert len(started) == 4 and started[0].returncode == 3
    assert len([r for r in caplog.records if "report.html cannot be written" in r.message]) == 1


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


def test_the_page_has_the_validations_so_far(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Not those of later steps, which a resumed run does again; a line that cannot be read is counted once."""
    page = live(parts, dataset, tmp_path / "run")
    for step in (2, 4):
        page.step({"step": step, "loss": 1.0})
        lines(tmp_path / "run" / "validation.jsonl", (validation(s, [None], ("a",)) for s in range(2, step + 3, 2)))
        with (tmp_path / "run" / "validation.jsonl").open("a") as file:
            file.write("no object\n")
        page.write()
        page.write()
        assert [row["step"] for row in page.run.validations] == list(range(2, step + 1, 2))
    assert page.run.unread == {"validation.jsonl": 1}
    assert "Sample answers, step 4" in (tmp_path / "run" / "report.html").read_text()
