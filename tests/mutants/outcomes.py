"""How the tests of a row went, and whether one failed for what it asserts."""

from __future__ import annotations

from typing import Any

import pytest


class Recorder:
    """A plugin of pytest that notes how every test went."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self.note(item.nodeid, report.when, report.outcome, call.excinfo)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.seen.append(
                {"node": report.nodeid, "phase": "collect", "outcome": "failed", "right": False,
                 "why": last_line(str(report.longrepr))}
            )  # fmt: skip

    def note(self, node: str, phase: str, outcome: str, raised: pytest.ExceptionInfo | None) -> None:
        error = raised.value if raised is not None and outcome == "failed" else None
        self.seen.append(
            {"node": node, "phase": phase, "outcome": outcome,
             "right": phase == "call" and error is not None and is_right(error),
             "why": "" if error is None else f"{type(error).__name__}: {last_line(str(error))}"}
        )  # fmt: skip


def is_right(error: BaseException) -> bool:
    """Whether a test failed by what it asserts, or by an error that the project raises on purpose."""
    kinds = getattr(
        error, "kinds", None
    )  # of the ranks of tests/support/harness.py, each the names of an error's classes
    if kinds is not None:
        return bool(kinds) and all(is_named_right(names) for names in kinds)
    if isinstance(error, pytest.fail.Exception):  # by pytest.raises and pytest.warns, or by pytest-timeout
        return str(error).startswith("DID NOT")
    return is_named_right([kind.__name__ for kind in type(error).__mro__])


def is_named_right(classes: list[str]) -> bool:
    return "AssertionError" in classes or "LlavaFsdpError" in classes


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""
