"""Rows of a run's files that were lost are told when it continues, and on its page."""

import json
from pathlib import Path

import pytest

from llava_fsdp.report.run_page import header
from llava_fsdp.report.run_reader import read_run
from llava_fsdp.train.events.reporting.lost_rows import format_ranges, lost_rows

STEPS = 40


def written(folder: Path, start: int = 0) -> Path:
    """A run that has saved after step 40, started at 0 and 24, and left out a record at step 7."""
    saved = folder / "checkpoints" / f"step-{STEPS:06d}"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"config": {"val": {"every": 5}}}))
    steps = range(start + 1, STEPS + 3)  # what was taken behind the checkpoint is done again
    rows = [{"step": n, "loss": 1.0, "skipped_records": int(n == 7), "unlabelled": 0} for n in steps]
    put(folder / "metrics.jsonl", rows)
    put(folder / "starts.jsonl", [{"step": n, "time": 1.0} for n in sorted({start, 24})])
    put(folder / "validation.jsonl", [{"step": n, "loss": 1.0} for n in range(5, STEPS, 5)])
    put(folder / "skipped_records.jsonl", [{"step": 0, "record": "a"}, {"step": 7, "record": "b"}])
    return folder


def put(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cut(path: Path, lines: slice) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[lines]))


def damage(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = lines[number][:9] + "\n"
    path.write_text("".join(lines))


def test_nothing_is_said_of_a_whole_run(tmp_path: Path) -> None:
    assert lost_rows(written(tmp_path / "run"), STEPS) == []
    assert lost_rows(written(tmp_path / "later", start=9), STEPS) == [], "it began at another folder's step 9"
    assert lost_rows(tmp_path / "new", STEPS) == [], "its first start continues another folder's checkpoint"


@pytest.mark.parametrize(
    ("name", "hurt", "expected"),
    [
        ("metrics.jsonl", lambda p: cut(p, slice(16, None)), ["lacks the rows of 16 of 40 steps (1 to 16)"]),
        ("metrics.jsonl", lambda p: cut(p, slice(0, 31)), ["lacks the rows of 9 of 40 steps (32 to 40)"]),
        ("metrics.jsonl", lambda p: p.write_text(""), ["lacks the rows of 40 of 40 steps (1 to 40)"]),
        ("metrics.jsonl", lambda p: p.unlink(), ["lacks the rows of 40 of 40 steps (1 to 40)"]),
        ("metrics.jsonl", lambda p: damage(p, 19), ["lacks the rows of 1 of 40 steps (20)"]),
        ("skipped_records.jsonl", lambda p: p.unlink(), ["lacks records that metrics.jsonl counts, of steps 7"]),
        ("starts.jsonl", lambda p: p.write_text(""), ["has no start before step 40"]),
        ("validation.jsonl", lambda p: damage(p, 5), ["lacks the rows of steps 30"]),
    ],
)
def test_what_is_missing_is_counted(name: str, hurt, expected: list[str], tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    hurt(folder / name)
    assert lost_rows(folder, STEPS) == [f"{name} {said}" for said in expected]


def test_the_page_counts_steps_without_a_row(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    assert read_run(folder).num_lost == 0 and "no row" not in header(read_run(folder))
    cut(folder / "metrics.jsonl", slice(16, None))
    damage(folder / "metrics.jsonl", 3)
    assert read_run(folder).num_lost == 17
    assert "17 of 42 steps have no row" in header(read_run(folder))
    assert read_run(written(tmp_path / "later", start=9)).num_lost == 0


def test_stretches() -> None:
    assert (
        format_ranges([]) == ""
        and format_ranges([3]) == "3"
        and format_ranges([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
    )
    assert format_ranges(range(1, 41, 2)).endswith("15 and 12 more stretches")
