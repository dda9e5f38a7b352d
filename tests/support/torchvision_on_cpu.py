"""Imports torchvision on a torch without CUDA; imported before transformers, which asks for torchvision."""

import importlib.util
import sys

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
