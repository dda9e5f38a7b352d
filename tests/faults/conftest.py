"""Fixtures of the faults suite."""

from collections.abc import Iterator

import pytest
from runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts runs of the embedded default; ends all of them when the session does."""
    made = Runs(tmp_path_factory.mktemp("shapes") / "shapes")
    yield made
    made.close()
