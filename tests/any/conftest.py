"""Folders of tiny whole models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torchvision_on_cpu  # noqa: F401  (before transformers)
from whole_models import WholeModel, write_whole_model


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist's `--dist loadgroup`, all tests of a family run in one process, and share its model and its
    plain loop; so do those of a file that are of no family."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            item.add_marker(pytest.mark.xdist_group(values.get("name", item.path.stem)))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], WholeModel]:
    """Writes a family's model once, with images and records."""
    made: dict[str, WholeModel] = {}

    def write(name: str) -> WholeModel:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            try:
                made[name] = write_whole_model(name, folder)
            except ImportError as error:
                pytest.skip(f"needs torchvision (launch/test.sh --any): {error.msg.splitlines()[0]}")
        return made[name]

    return write
