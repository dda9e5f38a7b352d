"""The table of planted bugs fits the tree; `./launch/test.sh --mutants` plants them."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bugs import ROOT, TABLE, Bug, planted, read_bugs
from harness import RanksFailed
from outcomes import is_right

from llava_fsdp.runtime.errors import DataError

BUGS = read_bugs()


def test_every_row_can_be_planted() -> None:
    for bug in BUGS:
        assert bug.old != bug.new, bug
        assert planted((ROOT / bug.path).read_text(encoding="utf-8"), bug)


@pytest.mark.slow
def test_planted_files_are_python() -> None:
    for bug in BUGS:
        ast.parse(planted((ROOT / bug.path).read_text(encoding="utf-8"), bug))


def test_rows_are_told_apart() -> None:
    assert max(Counter(bug.bug for bug in BUGS).values()) == 1
    assert len({(bug.path, bug.old, bug.new) for bug in BUGS}) == len(BUGS) >= 60


def test_every_test_that_is_named_exists() -> None:
    functions: dict[str, set[str]] = {}
    for bug in BUGS:
        if bug.test_file not in functions:
            tree = ast.parse((ROOT / bug.test_file).read_text(encoding="utf-8"))
            functions[bug.test_file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function_of(bug) in functions[bug.test_file], bug.test


def function_of(bug: Bug) -> str:
    return bug.test.partition("::")[2].partition("[")[0]


def raised(error: type[BaseException]) -> list[str]:
    return [kind.__name__ for kind in error.__mro__]


def test_what_counts_as_caught() -> None:
    """An assertion or an error of the project's own, also of a rank; nothing that any broken line would raise."""
    with pytest.raises(pytest.fail.Exception) as nothing_raised, pytest.raises(ValueError):
        pass
    right = [AssertionError("1 != 2"), DataError("a record"), nothing_raised.value]
    right += [RanksFailed("rank 1", [raised(AssertionError)]), RanksFailed("both", [raised(DataError)] * 2)]
    wrong = [NameError("x"), TypeError("x"), ImportError("x"), pytest.fail.Exception("Timeout >600.0s")]
    wrong += [RanksFailed("no answer", []), RanksFailed("rank 0", [raised(AssertionError), raised(NameError)])]
    assert all(map(is_right, right)) and not any(map(is_right, wrong))


ROW = """
[[rows]]
bug = "{0}"
path = "src/llava_fsdp/evaluate/scoring.py"
old = "{1}"
new = "{2}"
test = "tests/evaluate/test_scoring.py::test_rates_of_nothing_are_zero"
"""


@pytest.mark.slow
def test_rows_that_are_wrong_are_told(tmp_path: Path) -> None:
    rows = [
        ("another rate", "if whole else 0.0", "if whole else 1.0"),
        ("nothing", "if whole else 0.0", "if whole else 0.00"),
        ("no such name", "if whole else 0.0", "if whole else nothing"),
        ("no import", "from collections import Counter", "from collections import Countery"),
        ("twice there", "true_yes + false_yes", "0"),
    ]
    table = tmp_path / "bugs.toml"
    table.write_text("".join(ROW.format(*row) for row in rows))
    before = (ROOT / "src/llava_fsdp/evaluate/scoring.py").read_bytes()
    command = [sys.executable, str(TABLE.with_name("run_bugs.py")), "--table", str(table)]
    own = {**os.environ, "COLD": "1"}  # not forked from a process that has imported the package
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=own)
    said = [line for line in done.stdout.splitlines() if "[rows]" in line and not line.startswith("WRONG")]
    starts = sorted(line.replace("FAILED THE WRONG WAY", "WRONG WAY").split()[0] for line in said)
    assert starts == ["BROKEN", "NOT", "WRONG", "WRONG", "caught"], done.stdout + done.stderr
    assert done.returncode == 1 and "5 planted bugs, 4 wrong" in done.stdout
    assert (ROOT / "src/llava_fsdp/evaluate/scoring.py").read_bytes() == before
