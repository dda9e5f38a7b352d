"""Folders of tiny whole models, and torchvision on a torch without CUDA."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """Declare the operators without which torchvision is not imported.

    The package index has torchvision for CUDA. With a torch without CUDA its compiled operators do not load, and then
    its import fails, because it says what shapes they return. transformers' processors use none of them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


declare_operators()
from whole_models import WholeModel, write_whole_model  # noqa: E402  (they import transformers)


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
