"""Which cases of a parametrized test belong to the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow_after(number: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """Return the cases as arguments of `pytest.mark.parametrize`; those after the first `number` are marked slow.

    Args:
        cases: as `parametrize` takes them; a tuple holds the values of several arguments.
    """
    found = []
    for place, case in enumerate(cases):
        if not isinstance(case, ParameterSet):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        found.append(case if place < number else case._replace(marks=[*case.marks, pytest.mark.slow]))
    return found


def any_but(fast: Iterable[str], cases: Iterable[str]) -> list[ParameterSet]:
    """Return the cases as arguments of `pytest.mark.parametrize`; those not in `fast` are marked any."""
    chosen = set(fast)
    return [pytest.param(case, marks=[] if case in chosen else [pytest.mark.any]) for case in cases]
