"""One browser for all tests of pages that run one after the other."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import launched


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Not one for all folders: while it is open its event loop runs, and code of other tests cannot start one."""
    with launched() as found:
        yield found
