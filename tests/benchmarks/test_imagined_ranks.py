"""benchmarks/imagined_ranks.py measures what the planner says, for as many ranks as it is told."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_what_is_counted_is_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", ["imagined_ranks.py", str(tmp_path), "--quick"])
    importlib.import_module("imagined_ranks").main()
    (path,) = tmp_path.glob("imagined-ranks-cpu-*.json")
    assert str(tmp_path) not in path.read_text()
    eight, sixteen = json.loads(path.read_text())["rows"]
    for row in (eight, sixteen):
        for name in ("at_rest", "collectives", "sent", "weights_and_moments"):
            assert row[name]["measured"] == row[name]["planned"] > 0, name
    assert eight["at_rest"]["measured"] > sixteen["at_rest"]["measured"]
    assert eight["ranges"] < sixteen["ranges"] < 2 * eight["ranges"]  # few scalars, which one rank writes
