"""The table of planted bugs fits the tree; `./launch/test.sh --mutants` plants them."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from bugs import ROOT, TABLE, Bug, Tree, read_bugs
from harness import RanksFailed
from outcomes import is_right

from llava_fsdp.runtime.errors import DataError

CODE = """
LIMIT = 3


class Rows:
    size: int = 2

    @property
    def total(self):
        if self.size > LIMIT:  # too many
            return sum(
                [self.size, "a, # b"],
                start=1.5e-3,
            )
        return 0


def total(size):
    return size, size
"""


def tree_of(folder: Path, **modules: str) -> Tree:
    for name, code in modules.items():
        path = folder / "src/llava_fsdp" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return Tree(folder)


def row(where: str, old: str, new: str, **more: str) -> Bug:
    return Bug("rows", "wrong", where, old, new, "tests/test_x.py::test_x", **more)


def test_a_row_is_planted_wherever_its_function_is(tmp_path: Path) -> None:
    """White space, line breaks, comments and trailing commas do not matter; new lines are indented as the old ones."""
    cases = [
        ("Rows.total", '[self.size,"a, # b"]', "[]", '[self.size, "a, # b"]', "[]"),
        ("Rows.total", "start=1.5e-3)", "start=2)", "start=1.5e-3", "start=2"),
        ("Rows.total", "if self.size>LIMIT: return", "if True:\n    x = 1\n    return",
         "if self.size > LIMIT:", "if True:\n            x = 1"),
        ("Rows", "size: int = 2", "size: int = 3", "size: int = 2", "size: int = 3"),
        ("LIMIT", "\n3", "4", "LIMIT = 3", "LIMIT = 4"),
        ("total", "size, size\n", "size", "return size, size", "return size"),
    ]  # fmt: skip
    for indented in (False, True):
        deeper = (lambda code: "if LIMIT:\n" + textwrap.indent(code, "    ")) if indented else str
        tree = tree_of(tmp_path, **{"data.rows": deeper(CODE), "other": "def rows():\n    return 3\n"})
        for where, old, new, line, instead in cases:
            planted = tree.plant(row(where, old, new))
            assert CODE.count(line) == 1
            assert ast.dump(ast.parse(planted.content)) == ast.dump(ast.parse(deeper(CODE.replace(line, instead))))
            assert planted.path == "src/llava_fsdp/data/rows.py"


def test_a_row_that_is_not_found_once_is_named(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, rows=CODE)
    pairs = [("total", "return 0"), ("total", "size"), ("Rows.sum", "return 0"), ("total", "turn size"), ("total", "")]
    for where, old in pairs:
        with pytest.raises(ValueError, match=re.escape(f"[rows] wrong: {where} ")):
            tree.plant(row(where, old, "1"))


def test_a_module_tells_functions_of_one_name_apart(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, **{"rows": CODE, "data.rows.__init__": "", "data.lines": CODE})
    with pytest.raises(ValueError, match="2 times"):
        tree.plant(row("LIMIT", "3", "4"))
    for module in ("rows", "lines"):
        assert Path(tree.plant(row("LIMIT", "3", "4", module=module)).path).stem == module
    alone = tree_of(tmp_path / "alone", moved=CODE)
    assert alone.plant(row("LIMIT", "3", "4", module="rows")).path == "src/llava_fsdp/moved.py"
    (tmp_path / "speed.py").write_text(CODE)
    assert tree.plant(row("LIMIT", "3", "4", path="speed.py")).path == "speed.py"


@pytest.mark.slow
def test_every_row_can_be_planted() -> None:
    """Each into one place, as Python that differs from what was there; its test exists."""
    bugs, tree = read_bugs(), Tree()
    functions: dict[str, set[str]] = {}
    wrong = [f"two rows: {title}" for title, rows in Counter(bug.bug for bug in bugs).items() if rows > 1]
    seen = set()
    for bug in bugs:
        if bug.test_file not in functions:
            file = ROOT / bug.test_file
            body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
            functions[bug.test_file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if bug.test.partition("::")[2].partition("[")[0] not in functions[bug.test_file]:
            wrong.append(f"{bug.name}: no test {bug.test}")
        try:
            planted = tree.plant(bug)
            ast.parse(planted.content)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{bug.name}: {error}")
            continue
        if planted.content in seen | {tree.contents[planted.path]}:
            wrong.append(f"{bug.name}: plants nothing, or what another row plants")
        seen.add(planted.content)
    assert not wrong, "\n".join(wrong)


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
where = "{1}"
old = "{2}"
new = "{3}"
test = "tests/evaluate/test_scoring.py::test_rates_of_nothing_are_zero"
"""


@pytest.mark.slow
def test_rows_that_are_wrong_are_told(tmp_path: Path) -> None:
    rows = [
        ("another rate", "rate", "if whole else 0.0", "if whole else 1.0"),
        ("nothing", "rate", "if whole else 0.0", "if whole else 0.00"),
        ("no such name", "rate", "if whole else 0.0", "if whole else nothing"),
        ("no import", "NEGATIONS", "frozenset", "frozen"),
        ("twice there", "rate", "whole", "0"),
    ]
    table = tmp_path / "bugs.toml"
    table.write_text("".join(ROW.format(*row) for row in rows))
    before = (ROOT / "src/llava_fsdp/evaluate/benchmarks/scoring.py").read_bytes()
    command = [sys.executable, str(TABLE.with_name("run_bugs.py")), "--table", str(table)]
    own = {**os.environ, "COLD": "1"}  # not forked from a process that has imported the package
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=own)
    said = [line for line in done.stdout.splitlines() if "[rows]" in line and not line.startswith("WRONG")]
    starts = sorted(line.replace("FAILED THE WRONG WAY", "WRONG WAY").split()[0] for line in said)
    assert starts == ["BROKEN", "NOT", "WRONG", "WRONG", "caught"], done.stdout + done.stderr
    assert done.returncode == 1 and "4 planted bugs, 4 wrong" in done.stdout
    assert (ROOT / "src/llava_fsdp/evaluate/benchmarks/scoring.py").read_bytes() == before
