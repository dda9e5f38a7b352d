"""The scripts of examples/, what they left in examples/results, and docs/examples.md, which shows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import find_chromium
from documents import ROOT, composed, entries, entry_of
from PIL import Image

EXAMPLES = ROOT / "examples"
RESULTS = EXAMPLES / "results"
SCRIPTS = {path.stem: path for path in sorted(EXAMPLES.glob("*.sh")) if path.stem != "common"}
STORED = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
SHORT = {"embedded": "max_steps=4", "lora": "max_steps=4", "sweep": "global_batch_size=8", "killed": "seed=7"}
"""Keys that make the runs of a test short, or others than the stored ones."""
FAILING = {"killed": [0, 5, 0, 0]}
"""Exit codes of the commands of an example that has one which must fail."""
NOTING = r"""
begin() { out="outputs/examples/$1"; }
run() { printf '%s\0' "$@" >>words; printf '\n' >>words; code=0; }
must() { run "$@"; }
die() { :; }
finish() { :; }
"""
"""A common.sh that notes commands instead of running them."""


def commands(script: Path, folder: Path) -> list[list[str]]:
    """The commands of an example, with their variables filled in by bash."""
    shutil.copy(script, folder)
    (folder / "common.sh").write_text(NOTING)
    subprocess.run(["bash", script.name], cwd=folder, check=True, capture_output=True, timeout=30)
    return [line.split("\0")[:-1] for line in (folder / "words").read_text().split("\n")[:-1]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_of_an_example_compose_and_are_those_of_its_result(name: str, tmp_path: Path) -> None:
    """A result may have more words: keys that were given to the script. An example that was never run has no result."""
    found = commands(SCRIPTS[name], tmp_path)
    for words in found:
        entry = entry_of(words)
        assert entry is not None, words
        if entry[0] in entries():
            composed(entry[0], tuple(entry[1]), tmp_path)
    if name in STORED:
        stored = [command["words"] for command in STORED[name]["commands"]]
        assert [[w for w in ran if w in words] for words, ran in zip(found, stored, strict=True)] == found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_head_of_a_script_says_what_it_shows_and_how_long_it_takes(name: str) -> None:
    head = SCRIPTS[name].read_text().partition("set -euo")[0]
    assert "\n# Shows " in head and re.search(r"minutes? on two idle cores", head) and "\n# Usage: examples/" in head


def check(name: str, result: dict[str, Any], folder: Path) -> None:
    """What holds for every result, of whatever length its runs are."""
    codes = [command["exit_code"] for command in result["commands"]]
    assert codes == FAILING.get(name, [0] * len(codes))
    silent = [command["words"][1] for command in result["commands"] if not command["output"]]
    assert set(silent) <= {"chat"}, "a model of few steps may answer nothing"
    assert result["runs"] and result["commit"]
    assert re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr)/", json.dumps(result)) is None, "a path of one machine"
    if result["image"]:
        path = folder / result["image"]
        assert path.stat().st_size < 150_000 and Image.open(path).size == (1000, 840)
    if name == "killed":
        whole, killed = (result["runs"][run]["losses"] for run in ("whole", "killed"))
        assert len(killed) == 24 and killed == pytest.approx(whole, rel=1e-5)
        starts = result["runs"]["killed"]["starts"]
        assert [start["ranks"] for start in starts] == [2, 3] and 5 <= starts[1]["step"] < 24


@pytest.mark.parametrize("name", STORED)
def test_a_stored_result_is_whole(name: str) -> None:
    check(name, STORED[name], RESULTS)
    assert STORED[name]["name"] == name and STORED[name]["image"] == f"{name}.png"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_and_leaves_its_result(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"EXAMPLE_RESULTS": str(tmp_path / "results"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [SCRIPTS[name], SHORT[name]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    check(name, result, tmp_path / "results")
    assert (result["image"] is not None) == (find_chromium() is not None)
    again = subprocess.run(
        [SCRIPTS[name]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert again.returncode == 2 and f"outputs/examples/{name} is there" in again.stderr
