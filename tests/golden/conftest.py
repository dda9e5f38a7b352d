"""Counts of golden cases by kind, shown at the end of a run."""

from collections import Counter

import pytest

COUNTS = pytest.StashKey[dict[str, Counter]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = {}


@pytest.fixture
def count(request: pytest.FixtureRequest):
    """`count(kind, outcome)` adds one case; a case that was not compared must say so by its outcome."""
    counts = request.config.stash[COUNTS]

    def add(kind: str, outcome: str, number: int = 1) -> None:
        counts.setdefault(kind, Counter())[outcome] += number

    return add


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of a process of pytest-xdist
    if output is not None:
        output["golden"] = {kind: dict(outcomes) for kind, outcomes in session.config.stash[COUNTS].items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    for kind, outcomes in getattr(node, "workeroutput", {}).get("golden", {}).items():
        node.config.stash[COUNTS].setdefault(kind, Counter()).update(outcomes)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    counts = config.stash[COUNTS]
    if counts:
        terminalreporter.section("golden cases")
    for kind, outcomes in sorted(counts.items()):
        terminalreporter.write_line(f"{kind}: " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
