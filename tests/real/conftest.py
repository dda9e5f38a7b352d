"""Published weights for the tests of this folder: SmolLM2-135M, DINOv2-small and the questions of easy-vqa.

examples/real/fetch.py puts them into a folder outside the tree. Without them every test here is skipped."""

from pathlib import Path

import pytest
from real_parts import (
    LANGUAGE,
    PRETRAINED,
    VISION,
    Theirs,
    lacks,
    real_folder,
    write_like_transformers,
    write_shortened,
)
from real_parts import write_records as write
from small import Configure, make_config

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder with published parts and records."""
    folder = real_folder()
    if missing := lacks(folder):
        pytest.skip(f"{folder} has no {', '.join(missing)}: python examples/real/fetch.py fetches them")
    return folder


@pytest.fixture(scope="session")
def parts(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `language` and `vision` of the whole published models."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "language").symlink_to(real / "parts" / LANGUAGE)
    (folder / "vision").symlink_to(real / "parts" / VISION)
    return folder


@pytest.fixture(scope="session")
def short(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the first 4 blocks of each model: where a test trains many times, and depth adds nothing."""
    return write_shortened(parts, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def dataset(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mixed.json` with 40 records of every kind, and their images."""
    return write(real, tmp_path_factory.mktemp("records") / "data")


@pytest.fixture(scope="session")
def theirs(parts: Path, dataset: Path) -> dict[str, Theirs]:
    """Each record by its id, as transformers' tokenizer, chat template and image processor make it."""
    return {record.id: record for record in write_like_transformers(parts, dataset)}


@pytest.fixture
def configure(parts: Path, dataset: Path, tmp_path: Path) -> Configure:
    """Makes configurations of trainings of the whole published models into `tmp_path / to`."""
    return lambda *overrides, to="", stage="finetune": make_config(
        parts, dataset, tmp_path / to, *PRETRAINED, *overrides, stage=stage
    )
