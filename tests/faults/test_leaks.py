"""A run of many saves holds as much at its end as after its first ones."""

import json
import statistics
from pathlib import Path

import pytest
from runs import Runs
from traps import note_resources

MiB = 1 << 20


def slope_of(values: list[float]) -> float:
    """Least squares: what is added with each."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    above = sum((n - middle) * (value - mean) for n, value in enumerate(values))
    return above / sum((n - middle) ** 2 for n in range(len(values)))


def nothing_grows(runs: Runs, folder: Path, steps: int, saves: int, bytes_a_step: float) -> None:
    ended = runs.run(
        f"max_steps={steps}", f"checkpoint.every={steps // saves}", folder=folder, ranks=1, timeout=500,
        trap=note_resources, notes=str(folder / "resources.jsonl"),
    )  # fmt: skip
    assert ended.code == 0 and not ended.left, ended.stderr
    rows = [json.loads(line) for line in (folder / "resources.jsonl").read_text().splitlines()]
    assert len(rows) == steps
    later = rows[steps // 4 :]  # allocators have what they want by then
    for what in ("files", "threads"):
        counts = [row[what] for row in later]
        first, last = (statistics.median(part) for part in (counts[: len(counts) // 3], counts[-len(counts) // 3 :]))
        # a save, a heartbeat and a row that are being written when it is looked hold a file each
        assert last <= first and max(counts) - min(counts) <= 3, f"{what}: {counts}"
    growth = slope_of([row["memory"] for row in later])
    assert growth < bytes_a_step, f"{growth / MiB:.3f} MiB a step: {[row['memory'] // MiB for row in later]}"
    assert len(list((folder / "out" / "checkpoints").glob("step-*"))) == 2, "old checkpoints are gone"


@pytest.mark.faults
@pytest.mark.timeout(200)
def test_sixty_steps_with_fifteen_saves(runs: Runs, tmp_path: Path) -> None:
    nothing_grows(runs, tmp_path, steps=60, saves=15, bytes_a_step=0.5 * MiB)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_four_hundred_steps_with_a_hundred_saves(runs: Runs, tmp_path: Path) -> None:
    """Less than 1 MB in 100 steps. What the allocator holds goes up and down by 5 MB: over 200 steps that alone is a
    slope of up to 1 MB, over 400 a third of it."""
    nothing_grows(runs, tmp_path, steps=400, saves=100, bytes_a_step=1e4)
