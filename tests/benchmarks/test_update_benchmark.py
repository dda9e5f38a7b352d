"""benchmarks/update.py times two ways that update weights alike."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_smallest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    arguments = "--weights", "2", "--rounds", "1", "--steps", "2"
    monkeypatch.setattr("sys.argv", ["update.py", str(tmp_path), *arguments])
    importlib.import_module("update").main()
    (path,) = tmp_path.glob("update-cpu-*.json")
    assert all(len(row["cpu_seconds"]["all"]) == 2 for row in json.loads(path.read_text())["rows"])
