"""Which points benchmarks/scaling.py measures, and that one of them comes out as it must."""

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scaling() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("scaling")


def chosen(scaling: ModuleType, quick: bool = False, curves: tuple[str, ...] = ()) -> list[Any]:
    return scaling.points(argparse.Namespace(quick=quick, curves=curves or scaling.CURVES))


def test_a_curve_changes_what_it_is_named_after_and_nothing_else(scaling: ModuleType) -> None:
    means = {"length": "length", "pictures": "pictures", "parameters": "hidden", "ranks": "ranks"}
    found = chosen(scaling)
    for curve, field in means.items():
        own = [p for p in found if p.curve == curve]
        assert [getattr(p, field) for p in own] == [p.at for p in own] == sorted({p.at for p in own})
        follows = {"curve", "at", field} | ({"length"} if curve == "pictures" else set())
        assert len({tuple((k, v) for k, v in vars(p).items() if k not in follows) for p in own}) == 1
    assert [p.imagined for p in found if p.curve == "imagined"] == [8, 64, 256, 1024]
    assert max(p.ranks for p in found) == 4
    quick = chosen(scaling, quick=True, curves=("length", "ranks"))
    assert [(p.curve, p.at) for p in quick] == [("length", 128), ("length", 256), ("ranks", 1), ("ranks", 2)]


def test_a_point_holds_what_it_says(scaling: ModuleType) -> None:
    for point in chosen(scaling):
        contents = scaling.contents_of(point)
        assert contents.tokens == point.length * point.samples
        assert contents.tiles == point.samples * point.pictures
        assert 0 < contents.labels < contents.tokens


@pytest.mark.slow
def test_sharding_shrinks_what_a_rank_holds(
    scaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--quick", "--steps", "1", "--curves", "imagined", "dataset"]
    monkeypatch.setattr("sys.argv", ["scaling.py", *arguments])
    scaling.main()
    (path,) = tmp_path.glob("scaling-cpu-*.json")
    report = json.loads(path.read_text())
    eight, many, *datasets = report["rows"]
    assert (eight["at"], many["at"]) == (8, 64) and eight["bytes_at_rest"] > many["bytes_at_rest"]
    assert 0 < scaling.sent(eight) < scaling.sent(many)  # (n - 1) / n of the same bytes
    assert [row["at"] for row in datasets] == [100, 1000]
    assert str(tmp_path) not in path.read_text()
