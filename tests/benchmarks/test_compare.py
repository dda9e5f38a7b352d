"""benchmarks/compare.py: what it compares, in which direction, and what it refuses."""

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULT: dict[str, Any] = {
    "command": "python benchmarks/peers.py --steps 3",
    "machine": {"device": "a processor", "cpus": 2},
    "options": {"steps": 3, "folder": "here", "seconds": 5},
    "rows": [
        {"peer": "a", "data": "x", "ranks": 2, "cpu_seconds": {"min": 2.0, "all": [9.0, 2.0]}, "bytes": 7, "loss": 3.0},
        {"peer": "a", "data": "x", "ranks": 4, "cpu_seconds": {"min": 4.0, "all": [4.0]}, "tokens_per_second": 8.0},
    ],
    "seconds": {"raw": [3.0, 1.0, 2.0]},
    "goals": [{"cpu_seconds": 1.0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("compare")


Compared = Callable[..., tuple[int, str]]


@pytest.fixture
def compared(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compared:
    """(old, new, *arguments) -> exit code and what was printed."""

    def run(old: object, new: object, *arguments: str) -> tuple[int, str]:
        paths = []
        for name, report in (("old", old), ("new", new)):
            paths.append(tmp_path / f"{name}.json")
            paths[-1].write_text(report if isinstance(report, str) else json.dumps(report))
        monkeypatch.setattr("sys.argv", ["compare.py", *map(str, paths), *arguments])
        with pytest.raises(SystemExit) as ended:
            compare.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out + printed.err

    return run


def changed(**new: Any) -> dict[str, Any]:
    return copy.deepcopy(RESULT) | new


def test_times_and_rates_count_each_in_its_bad_direction(compared: Compared) -> None:
    code, said = compared(RESULT, RESULT)
    assert code == 0 and "4 compared, 0 more than 1.05 times as slow" in said
    slower = changed()
    slower["rows"][0]["cpu_seconds"]["min"] = 2.2
    code, said = compared(RESULT, slower)
    assert code == 1 and "1.100" in said and "4 compared, 1 more" in said
    assert compared(slower, RESULT)[0] == 0  # faster is no failure
    assert compared(RESULT, slower, "--limit", "1.2")[0] == 0
    assert compared(RESULT, slower, "--only", "per_second")[0] == 0
    fewer = changed()
    fewer["rows"][1]["tokens_per_second"] = 4.0
    code, said = compared(RESULT, fewer)
    assert code == 1 and "2.000" in said
    assert compared(fewer, RESULT)[0] == 0
    best = changed(seconds={"raw": [5.0, 1.0]})  # of repeats the best counts
    assert compared(RESULT, best)[0] == 0
    assert compared(RESULT, changed(seconds={"raw": [3.0, 2.0]}))[0] == 1


def test_rows_are_known_by_what_they_say(compared: Compared) -> None:
    turned = changed()
    turned["rows"].reverse()
    assert compared(RESULT, turned)[0] == 0
    one = changed()
    del one["rows"][1]["tokens_per_second"]
    code, said = compared(RESULT, one)
    assert code == 0 and "not compared" in said and "is only in OLD" in said


def test_a_part_of_a_result_is_compared_with_all_of_it(compared: Compared) -> None:
    """A row's name does not depend on the others: alone it must not meet a row of other ranks."""
    first, second = RESULT["rows"]
    code, said = compared(RESULT, changed(rows=[first], seconds={}))
    assert code == 0 and "1 compared" in said and "[a, x, ranks=2].cpu_seconds.min" in said
    chosen = {name: RESULT["options"] | {"peers": peers} for name, peers in (("all", None), ("one", ["a"]))}
    code, said = compared(changed(options=chosen["all"]), changed(options=chosen["one"], rows=[first], seconds={}))
    assert code == 0 and "1 compared" in said, "a list chooses rows"
    code, said = compared(changed(rows=[first]), changed(rows=[second]), "--only", "cpu")
    assert code == 2 and "no time and no rate in common" in said
    failed = [{**second, "why": "out of memory"}, first]
    assert "3 compared" in compared(RESULT, changed(rows=failed, seconds={}))[1]
    twins = changed(rows=[first, first])
    assert "[a, x, ranks=2; 2 of 2].cpu_seconds.min" in compared(twins, twins)[1]
    code, said = compared(twins, changed(rows=[first], seconds={}))
    assert code == 2, "which of the two it was nobody knows"


def test_both_sides_are_said(compared: Compared) -> None:
    old = changed(commit="0123abc", torch="2.12.0", versions={"deepspeed": "0.18"})
    code, said = compared(old, changed(commit="4567def", torch="2.13.0"))
    assert code == 0
    for name, was, is_ in (
        ("commit", "0123abc", "4567def"),
        ("torch", "2.12.0", "2.13.0"),
        ("deepspeed", "0.18", "not"),
    ):
        line = next(line for line in said.splitlines() if name in line)
        assert was in line and is_ in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (RESULT, changed(command="python benchmarks/data.py"), "different benchmarks: peers.py and data.py"),
        (RESULT, changed(machine={"device": "another"}), "different machines"),
        (RESULT, changed(options={"steps": 4, "seconds": 5}), "option steps was 3 and is 4"),
        (RESULT, changed(options={"steps": 3}), "option seconds was 5 and is None"),
        (RESULT, changed(ranks=4), "ranks was None and is 4"),
        (RESULT, changed(rows=[], seconds={}), "no time and no rate in common"),
        (RESULT, "{", "cannot be read"),
        (RESULT, [], "is no result of a benchmark"),
        (RESULT, {"machine": {}}, "it needs `machine`, `command` and `options`"),
    ],
)
def test_what_is_not_alike_is_refused(old: object, new: object, said: str, compared: Compared) -> None:
    code, message = compared(old, new)
    assert code == 2 and said in message, message


def test_machines_are_compared_where_that_is_asked_for(compared: Compared) -> None:
    code, said = compared(RESULT, changed(machine={"device": "another"}, options=RESULT["options"]), "--across")
    assert code == 0, said


def test_in_every_stored_result_there_is_something_to_compare(compare: ModuleType) -> None:
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        found = dict(compare.measured(json.loads(path.read_text())))
        assert any(value > 0 for value, _ in found.values()), path.name
        assert not any(part in name for name in found for part in ("options", "machine")), path.name
