"""One browser for all tests of a file about pages."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import launched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not one for several files: while it is open its event loop runs, and code of other tests cannot start one. The
    scope `package` would be the whole session here, as the folders of tests are no packages."""
    with launched() as found:
        yield found
