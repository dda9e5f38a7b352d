"""That benchmarks/order_memory.py takes its steps from an index as it is, and writes what it measured."""

import json
from pathlib import Path

import order_memory
import pytest


@pytest.mark.parametrize("left_out", [0, 1])
def test_steps_are_taken_from_columns_alone(
    left_out: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_memory, "STEPS", 8)
    order_memory.write_index(tmp_path, 1000, left_out)
    order_memory.take_steps(tmp_path, 1000, "computed_shuffle")
    row = json.loads(capsys.readouterr().out)
    assert {"private_mib", "mapped_mib", "step_ms"} <= set(row)
    kept = {path.stem for path in tmp_path.glob("state/kept-*/*.npy")}
    assert ({"numbers", "length", "labels"} <= kept) if left_out else not kept


@pytest.mark.slow
def test_smallest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["order_memory.py", str(tmp_path), "--records", "1000"])
    order_memory.main()
    (path,) = tmp_path.glob("order-memory-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["left_out"], row["sampler"], row["process"]) for row in rows] == [
        (left_out, sampler, process)
        for left_out in (0, 1)
        for sampler in order_memory.SAMPLERS
        for process in ("first", "second")
    ]
    assert all(row["private_mib"] < 100 for row in rows)
