"""The table of planted bugs fits the tree; `./launch/test.sh --mutants` plants them."""

import ast
from collections import Counter

from planted import ROOT, Bug, planted, read_bugs

BUGS = read_bugs()


def test_every_row_can_be_planted() -> None:
    for bug in BUGS:
        assert bug.old != bug.new, bug
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
