"""Writes the table of whole models in docs/models.md, from what the tests found:

    ./launch/test.sh --any --junitxml=FILE.xml
    python docs/make_models.py FILE.xml

The first keeps what each test of tests/any found. The second puts it into tests/any/found.json, and from there into the
page. Without a file only the page is written.
"""

import json
import sys
from collections.abc import Iterable
from xml.etree import ElementTree

from pages import DOCS, code, replaced, table

TESTS = DOCS.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))
from whole_models import NO_CHAT, PADDED, WHOLE  # noqa: E402

FOUND = TESTS / "any" / "found.json"
COLUMNS = {
    "test_ids_are_the_processors_and_labels_the_answers_with_their_ends": "ids and labels",
    "test_what_is_read_is_what_transformers_reads": "weights",
    "test_loss_and_gradients_of_a_row_are_the_sum_over_its_samples": "gradients",
    "test_a_rank_without_images_trains_with_one_that_has_some": "two ranks",
}
"""{test: the column of the table}."""
TYPES = {"pixtral_llava": "`llava` with a `pixtral` tower"}
"""{name of a family: what the table calls it, if it is not its type alone}."""


def read_reports(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return {family: {column: `equal`, `differs` or `not run`}} from reports of pytest in the form of JUnit."""
    found = {name: dict.fromkeys(COLUMNS.values(), "not run") for name in WHOLE}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        test, _, own = case.attrib["name"].rstrip("]").partition("[")
        families = [part for part in own.split("-") if part in found]
        if test in COLUMNS and families and case.find("skipped") is None:
            fails = case.find("failure") is not None or case.find("error") is not None
            column = found[families[0]]
            if column[COLUMNS[test]] != "differs":
                column[COLUMNS[test]] = "differs" if fails else "equal"
    return found


def block() -> str:
    """The table: a row for all families of which the same was found."""
    found = json.loads(FOUND.read_text())
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in WHOLE:
        rows = f"padded: {PADDED[name]}" if name in PADDED else "packed"
        groups.setdefault((rows, *(found[name][column] for column in COLUMNS.values())), []).append(name)
    lines = [(", ".join(TYPES.get(name) or code(name) for name in names), *cells) for cells, names in groups.items()]
    why = "refused: its processor takes no conversation"
    lines += [(code(name), why, *[""] * len(COLUMNS)) for name in NO_CHAT]
    return table(["type of the model", "rows", *COLUMNS.values()], lines)


def page() -> str:
    return replaced((DOCS / "models.md").read_text(), "whole models", block())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        FOUND.write_text(json.dumps(read_reports(sys.argv[1:]), indent=1) + "\n")
    (DOCS / "models.md").write_text(page())
