"""That benchmarks/live_page.py times each kind of page, and stores every time."""

import json
from pathlib import Path

import live_page
import pytest


def test_smallest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", f"x --steps 9 --rounds 1 --seconds 0.2 --out {tmp_path}".split())
    live_page.main()
    (path,) = tmp_path.glob("live-page-cpu-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows] == list(live_page.KINDS)
    for row in rows:
        (series,) = row["series"]
        assert len(series["gap_ms"]) == len(series["step_ms"]) >= live_page.DUE
        assert row["longest_gap_ms"] >= series["gap_ms"][live_page.DUE - 1] > 0
