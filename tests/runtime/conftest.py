"""Fixtures for trainings in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lives import Run


@pytest.fixture
def start(tmp_path: Path, parts: Path, dataset: Path) -> Iterator[Callable[..., Run]]:
    """Starts trainings in one folder, one after the other or beside each other; what is left of them is ended."""
    started: list[Run] = []

    def begin(*overrides: str, folder: Path = tmp_path, **settings: object) -> Run:
        started.append(Run(folder, parts, dataset, *overrides, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for run in started:
        run.end()
