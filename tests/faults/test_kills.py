"""Whatever worker is killed, whenever, the run ends as if none had been."""

import json
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest
from containers import write_container
from runs import Run, Runs, assert_same_state, metrics
from traps import note_samples

pytestmark = pytest.mark.ranks
RANKS = 2
EVERY = 2


class Losses:
    """Every loss that a run has ever reported for a step, those that were replayed included."""

    def __init__(self) -> None:
        self.by_step: dict[int, set[float]] = defaultdict(set)

    def note(self, run: Run) -> None:
        for row in run.rows():
            self.by_step[row["step"]].add(row["loss"])


def records_read(folder: Path) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """Every list of records that a rank read for a step, by rank and step."""
    found = defaultdict(set)
    for path in folder.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["rank"], row["step"]].add(tuple(row["records"]))
    return found


def kill_again_and_again(run: Run, kills: int, steps: int, dice: random.Random, losses: Losses) -> int:
    """Kill one rank so many times: at any moment, within a save, and while all start; how many were within a save."""
    in_saves = 0
    for number in range(kills):
        run.until(lambda: len(run.ranks()) == RANKS, "all ranks", within=60)
        delay = dice.uniform(0, 1.5)
        if number % 3 != 2:
            at = 1 + number * (steps - 6) // kills  # what it must have come to, so that it goes on
            run.until(lambda at=at: losses.note(run) or run.last_step() >= at, f"step {at}", within=90)
            delay = dice.uniform(0, 0.3)
        if number % 3 == 1:
            run.until(lambda: losses.note(run) or run.saving(), "a save", within=60)
            delay = dice.uniform(0, 0.02)
        time.sleep(delay)
        losses.note(run)
        in_saves += run.saving()
        hit = run.ranks()
        assert run.kill(dice.randrange(RANKS)), f"kill {number}: the run had ended\n{run.said()[-3000:]}"
        run.until(lambda hit=hit: not {*hit.values()} & {*run.ranks().values()}, "the end of all ranks", within=60)
        losses.note(run)
    return in_saves


def kills_change_nothing(runs: Runs, folder: Path, kills: int, steps: int, *data: str) -> None:
    words = [f"max_steps={steps}", f"checkpoint.every={EVERY}", *data]
    calm, hurt = folder / "calm", folder / "hurt"
    ended = runs.run(*words, folder=calm, trap=note_samples, notes=str(calm), timeout=300)
    assert ended.code == 0 and not ended.left, ended.stderr

    losses = Losses()
    run = runs.start(*words, folder=hurt, restarts=kills, timeout=60 + 40 * kills, trap=note_samples, notes=str(hurt))
    in_saves = kill_again_and_again(run, kills, steps, random.Random(kills), losses)
    ended = run.wait()
    losses.note(run)
    assert ended.code == 0 and not ended.left, ended.stderr
    assert in_saves, "some kills are within a save"

    assert_same_state(calm / "out", hurt / "out")
    expected = {row["step"]: row for row in metrics(calm / "out")}
    found = run.rows()
    assert [row["step"] for row in found] == list(range(1, steps + 1)), "every step is told once"
    assert losses.by_step == {step: {row["loss"]} for step, row in expected.items()}, "replayed losses are the same"
    assert len(expected) == steps
    for key in ("samples", "tokens", "label_tokens", "images", "lr", "grad_norm"):
        assert [row[key] for row in found] == [row[key] for row in expected.values()]
    read = records_read(hurt)
    assert read == records_read(calm), "no sample is lost, none is seen twice"
    assert {step for _, step in read} == set(range(1, steps + 1)) and all(len(own) == 1 for own in read.values())


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_five_kills(runs: Runs, tmp_path: Path) -> None:
    kills_change_nothing(runs, tmp_path, kills=5, steps=20)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tar", "parquet with images"])
def test_kills_with_images_in_the_files(kind: str, runs: Runs, dataset: Path, tmp_path: Path) -> None:
    rows = json.loads((dataset / "mixed.json").read_text())
    write_container(kind, tmp_path / "shards", rows, dataset / "images", 3)
    data = "data=llava_json", f"data.path={tmp_path / 'shards'}", "data.images=null", f"data.index={tmp_path / 'index'}"
    kills_change_nothing(runs, tmp_path, 5, 20, *data, "epochs=9")


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_ten_kills(runs: Runs, tmp_path: Path) -> None:
    kills_change_nothing(runs, tmp_path, kills=10, steps=48)


@pytest.mark.faults
@pytest.mark.timeout(4000)
def test_a_hundred_kills(runs: Runs, tmp_path: Path) -> None:
    kills_change_nothing(runs, tmp_path, kills=100, steps=220)
