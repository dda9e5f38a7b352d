"""Writes the figures of docs/data.md from benchmarks/results: `python docs/make_data.py`."""

import sys

from make_performance import newest, origin
from pages import DOCS, replaced, table

PAGE = DOCS / "data.md"
LABELS = {
    "exact": "`labels=exact`",
    "between": "what stands between the assistant's marker and the next end marker",
    "behind": "all behind the assistant's first marker, without end markers, as padding is the same token",
}
SHARES = {"call": "right call", "stop": "stops after it", "invented": "invents the result", "all": "right to the end"}


def tool_calls() -> str:
    path, report = newest("tool-calls-cpu")
    rows = [[LABELS[row["labels"]], *(f"{row[name]:.0%}" for name in SHARES)] for row in report["rows"]]
    shown = table(["what is learnt", *SHARES.values()], rows, "lrrrr")
    guess = f"a blind guess is right in {report['chance']:.0%}"
    steps = f"{report['steps']} steps, {report['held_out']} held-out images; {guess}"
    again = "Again: `python benchmarks/tool_calls.py`, `pytest -m slow tests/train/test_learns_tools.py`"
    return f"{shown}\n\n{steps}. {again}. {origin(path, report)}"


def page() -> str:
    return replaced(PAGE.read_text(), "tool calls", tool_calls())


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
