"""What benchmarks/peers.py asserts before it times, whom it leaves out and why, and README's table of it."""

import argparse
import copy
import importlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ROUND = {"cpu": 2.0, "wall": 1.0, "losses": [3.0, 2.0], "norms": [1.0, 0.5]}


def imported(name: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module(name)


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    yield from imported("peers")


@pytest.fixture(scope="module")
def table() -> Iterator[ModuleType]:
    yield from imported("peers_table")


@pytest.fixture(scope="module")
def packed() -> Iterator[ModuleType]:
    yield from imported("peers_packed")


@pytest.fixture(scope="module")
def environments() -> Iterator[ModuleType]:
    yield from imported("peers_environments")


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    yield from imported("peers_data")


def seen(**changed: Any) -> dict[str, list[dict[str, Any]]]:
    return {name: [copy.deepcopy(ROUND) | changed] for name in ("mixed", "equal")}


def test_a_peer_that_computes_something_else_is_not_timed(peers: ModuleType) -> None:
    near = seen(losses=[3.0 * (1 + 5e-6), 2.0])
    assert peers.check_equal({"a": seen(), "b": near})["first losses"] == pytest.approx(5e-6)
    peers.check_equal({"a": seen(), "b": seen(norms=[])})  # not every peer tells its norm
    with pytest.raises(SystemExit, match=r"b, mixed: losses .* are not those of a"):
        peers.check_equal({"a": seen(), "b": seen(losses=[3.0 * (1 + 2e-5), 2.0])})
    with pytest.raises(SystemExit, match="b, mixed: losses"):  # a later step shows another update
        peers.check_equal({"a": seen(), "b": seen(losses=[3.0, 2.1])})
    with pytest.raises(SystemExit, match="b, mixed: norms"):
        peers.check_equal({"a": seen(), "b": seen(norms=[1.1, 0.5])})
    with pytest.raises(SystemExit, match="b, mixed: losses"):
        peers.check_equal({"a": seen(), "b": seen(losses=[float("nan"), 2.0])})


def test_who_cannot_run_is_said(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "DeepSpeed is not installed here" in peers.missing("zero3")
    assert "accelerate" in peers.missing("hf")
    assert peers.missing("by hand") is None and peers.missing("ours packed") is None


def test_goals_are_of_the_fastest_peer_that_ran(peers: ModuleType) -> None:
    speeds = {"ours packed": 16.0, "ours padded": 12.0, "by hand": 10.0, "zero3": 8.0, "by hand, our model": 16.5}
    rows = [
        {"data": data, "peer": peer, "times_ours": [16 / speed, 99.0, 0.0]}
        for data in ("mixed", "equal")
        for peer, speed in speeds.items()
    ]
    goals = {g["what"]: (g["value"], g["met"]) for g in peers.goals_of(rows)}
    assert goals["mixed lengths: ours packed / the best padded peer"] == (1.6, True)
    assert goals["equal lengths: ours packed / DeepSpeed ZeRO-3"] == (2.0, True)
    assert goals["mixed lengths: the trainer beside the loop by hand, our model"] == (16 / 16.5, False)
    alone = peers.goals_of([r for r in rows if r["peer"] == "ours packed"])
    assert alone == []


@pytest.mark.parametrize("layout", ["grouped", "ours"])
def test_every_layout_has_the_samples_of_the_step(data: ModuleType, layout: str) -> None:
    order = data.Fixed(2, layout, 2, 16)
    for step in range(2):
        numbers = order.samples(step)
        assert numbers == list(range(step * 32, step * 32 + 32))
        cuts = order.assignment(step)
        assert (cuts is None) == (layout == "ours")
        assert cuts is None or [n for rank in cuts for micro in rank for n in micro] == numbers


def test_lengths_are_llavas_and_equal_ones_have_nothing_to_pad(data: ModuleType) -> None:
    options = argparse.Namespace(steps=3, ranks=4, rows=5)
    mixed, equal, text = (data.lengths_of(name, options) for name in ("mixed", "equal", "text"))
    assert len(mixed) == len(equal) == 3 * 20
    assert text == [(length, False) for length, _ in mixed]
    assert all(shown for _, shown in mixed) and len(set(equal)) == 1
    mean = sum(n for n, _ in mixed) / len(mixed)
    assert mean == pytest.approx(equal[0][0], rel=0.1)


def result(**changed: Any) -> dict[str, Any]:
    rows = [
        {"data": data, "peer": peer, "real_tokens_per_cpu_second_median": speed, "times_ours": [9.0, times, 0.1]}
        for peer, speeds, ratios in (
            ("ours packed", (2000.0, 1500.0), (1.0, 1.0)),
            ("by hand", (1000.0, 1500.0), (2.0, 1.1)),
        )
        for data, speed, times in zip(("mixed", "equal"), speeds, ratios, strict=True)
    ]
    return {
        "rows": rows, "peers": {"ours packed": "ours", "by hand": "a loop", "zero3": "DeepSpeed"},
        "not_run": {"zero3": "not installed"}, "options": {"hidden": 512, "layers": 8, "repeats": 6,
        "steps": 3, "padded": "grouped", "data": ["mixed", "equal"]}, "machine": {"device": "a processor"},
        "versions": {"torch": "2.13.0"}, "ranks": 2,
        "precision": "fp32", "command": "python benchmarks/peers.py", "commit": "0123456789abcdef",
        "equality": {"first losses": 2e-7}, "torch": "2.13.0", "date": "2026-01-01",
    } | changed  # fmt: skip


def test_the_table_shows_both_data_sets_and_who_did_not_run(table: ModuleType) -> None:
    text = table.markdown(result(), "benchmarks/results/x.json")
    assert "| ours | 1,500 | 1.00 x | 2,000 | 1.00 x |" in text
    assert "| a loop | 1,500 | 1.10 x | 1,000 | 2.00 x |" in text
    assert "| DeepSpeed | NOT RUN: not installed |" in text
    assert "nothing of kernels" in text and "(benchmarks/results/x.png)" in text


def test_only_what_is_between_the_markers_is_rewritten(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, stored = tmp_path / "README.md", tmp_path / "results" / "peers-cpu-2026-01-01.json"
    stored.parent.mkdir()
    stored.write_text(json.dumps(result()))
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nbehind\n")
    table.rewrite_readme(stored, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n| |") and text.endswith(f"\n{table.END}\nbehind\n")
    assert "old" not in text.split() and "(results/peers-cpu-2026-01-01.json)" in text
    table.rewrite_readme(stored, readme)
    assert readme.read_text() == text
    for wrong in ("{}", "no json"):
        stored.write_text(wrong)
        with pytest.raises(SystemExit, match=r"is no result of benchmarks/peers\.py"):
            table.rewrite_readme(stored, readme)
    assert readme.read_text() == text
    with pytest.raises(SystemExit, match=r"README\.md needs one"):
        table.replaced("no markers", "block")


def test_readme_shows_the_newest_stored_result(table: ModuleType) -> None:
    """Nothing in it is typed by hand: `python benchmarks/peers.py --readme` of that file changes nothing."""
    text = (ROOT / "README.md").read_text()
    block = text.split(table.BEGIN)[1].split(table.END)[0].strip("\n")
    stored = sorted((ROOT / "benchmarks" / "results").glob("peers-cpu-*.json"))
    if not stored:
        assert block == table.NO_RESULT
    else:
        report = json.loads(stored[-1].read_text())
        assert block == table.markdown(report, stored[-1].relative_to(ROOT).as_posix())


def test_options_are_checked(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (["--hidden", "100"], ["--repeats", "0"], ["--peers", "nobody"]):
        monkeypatch.setattr("sys.argv", ["peers.py", *wrong])
        with pytest.raises(SystemExit) as ended:
            peers.parse()
        assert ended.value.code == 2
    monkeypatch.setattr("sys.argv", ["peers.py", "--quick"])
    options = peers.parse()
    assert isinstance(options, argparse.Namespace) and (options.hidden, options.steps) == (64, 1)
    assert options.data == ["mixed", "equal"] and "row" not in options.peers
    monkeypatch.setattr("sys.argv", ["peers.py", "--against", "packed", "--rows", "3"])
    options = peers.parse()
    assert (options.ranks, options.rows, options.data) == (4, 3, ["mixed", "equal", "text"])
    assert {"row", "trl"} < {*options.peers}


def test_a_round_is_compared_with_ours_beside_it(peers: ModuleType) -> None:
    """Not with those of another group, which ran at another time."""
    seen: dict[str, Any] = {}
    for ours, other in ((2.0, 3.0), (8.0, 4.0)):
        both = [argparse.Namespace(name=name, data=["text"], seen={"text": [{"cpu": 1.0}, {"cpu": cpu}]})
                for name, cpu in (("ours packed", ours), ("row", other))]  # fmt: skip
        peers.merge(seen, both)
    assert [r["times_ours"] for r in seen["row"]["text"][1:]] == [1.5, 0.5]
    assert [r["times_ours"] for r in seen["ours packed"]["text"][1:]] == [1.0, 1.0]


def test_text_is_trained_in_groups_of_its_own(peers: ModuleType) -> None:
    """All peers of a group begin with the same data, hence with the same weights."""
    names = ["ours packed", "row", "by hand", "trl"]
    assert peers.groups(names, ["mixed", "equal", "text"]) == [
        (["ours packed", "row", "by hand"], ["mixed", "equal"]),
        (["ours packed", "row", "trl"], ["text"]),
    ]
    assert peers.groups([*names, "rows", "by hand, our model"], ["text"]) == [
        (["ours packed", "row", "trl", "rows"], ["text"]),
        (["ours packed", "by hand, our model"], ["text"]),
    ]
    assert peers.groups(["ours packed"], ["equal"]) == [(["ours packed"], ["equal"])]


def test_samples_are_packed_as_they_would_be_by_hand(packed: ModuleType) -> None:
    """Ids, labels and positions of each sample are the same in a padded micro-batch, in filled rows and in one row."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 0, 0, 0], [2, 1, 0, 0, 0], [9, 9, 9, 9, 9]])
    labels = torch.where(ids > 5, ids, -100)
    labels[1, 1], labels[2, 1] = 4, 1
    labels[3] = -100  # a row of a blank image
    mask = (ids > 0).long()
    samples = packed.samples_of({"0.0.input_ids": ids, "0.0.labels": labels, "0.0.attention_mask": mask}, 0)
    assert [s["input_ids"].tolist() for s in samples] == [[5, 6, 7, 8, 9], [3, 4], [2, 1]]
    assert all(int(s["labels"][0]) == -100 for s in samples)
    row = packed.in_one_row(samples)
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1]] and row["cu_seqlens"].tolist() == [0, 5, 7, 9]
    rows = packed.filled_rows(samples)
    assert rows["input_ids"].tolist() == [[5, 6, 7, 8, 9], [3, 4, 2, 1, 0]]
    assert rows["labels"].tolist() == [[-100, 6, 7, 8, 9], [-100, 4, -100, 1, -100]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]]


def test_an_environment_is_made_once_and_cannot_replace_torch(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environments.environment_of("row", tmp_path) == sys.executable and not [*tmp_path.iterdir()]
    notes = "tiny-1.dist-info"
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr(f"{notes}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\nRequires-Dist: torch<2\n")
        wheel.writestr(f"{notes}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{notes}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(environments, "FOREIGN", {"other": {"tiny": "1"}})
    python = environments.environment_of("other", tmp_path)
    run = [python, "-c", "import tiny, sys, importlib.util as u; print(u.find_spec('torch').origin, sys.prefix)"]
    where, prefix = subprocess.check_output(run, text=True).split()
    assert (where, prefix) == (torch.__file__, str(tmp_path / "other"))
    (tmp_path / "other" / "kept").touch()
    assert environments.environment_of("other", tmp_path) == python and (tmp_path / "other" / "kept").exists()
    monkeypatch.setattr(environments, "FOREIGN", {"other": {"tiny": "2"}})
    with pytest.raises(SystemExit, match=r"other: .* failed"):
        environments.environment_of("other", tmp_path)
    assert not (tmp_path / "other" / "installed").exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_two_peers_run_and_agree(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ours packed", "by hand"]
    monkeypatch.setattr("sys.argv", ["peers.py", str(tmp_path), "--quick", "--peers", *names])
    peers.main()
    (path,) = tmp_path.glob("peers-cpu-*.json")
    report = json.loads(path.read_text())
    assert [(r["peer"], r["data"]) for r in report["rows"]] == [(n, d) for d in ("mixed", "equal") for n in names]
    assert report["equality"]["first losses"] < 1e-5 and str(tmp_path) not in path.read_text()
    mixed, equal = (r for r in report["rows"] if r["peer"] == "by hand")
    assert mixed["computed_positions"] > mixed["real_tokens"]
    assert equal["computed_positions"] == equal["real_tokens"]
