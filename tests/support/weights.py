"""Tensors of exported folders, and whether two of them are equal."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and bits are equal."""
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one
    )
