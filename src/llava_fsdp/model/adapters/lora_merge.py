"""Merge LoRA adapters into the weights that they adapt, in fp32 and some rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llava_fsdp.model.adapters.lora import row_lengths
from llava_fsdp.model.adapters.lora_names import BASE, LORA_A, LORA_B, MAGNITUDE, is_adapter, without_base
from llava_fsdp.model.weights.tensor_files import Stored

BASE_WEIGHT = f"{BASE}weight"


@dataclass(frozen=True)
class Merged:
    """A weight into which its LoRA adapter is merged: W + scaling * B A; with DoRA, its rows are then scaled to DoRA's
    magnitudes. Rows are computed when they are read."""

    weight: Stored
    """W: [out, in]"""
    a: Stored
    """A: [r, in]"""
    b: Stored
    """B: [out, r]"""
    magnitude: Stored | None
    """DoRA's magnitudes: [out]; None without DoRA"""
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """A dtype that can represent the values of a weight and of the LoRA adapter that is merged into it."""
        parts = torch.promote_types(self.a.dtype, self.b.dtype)
        return torch.promote_types(self.weight.dtype, parts)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return rows [begin, end) of the weight with its LoRA adapter merged, W + scaling * B A, float32 [end - begin,
        in], not rounded to `dtype`; with DoRA, each row is scaled to its magnitude."""
        a = self.a.rows(0, self.a.shape[0]).float()
        weight = self.weight.rows(begin, end).float() + (self.b.rows(begin, end).float() @ a) * self.scaling
        if self.magnitude is None:
            return weight
        return weight * (self.magnitude.rows(begin, end).float() / row_lengths(weight))[:, None]


def merge_adapters(sources: Mapping[str, Stored], scaling: float) -> dict[str, Stored]:
    """Return the parameters of a model with its LoRA adapters merged into the weights, by their names in the model
    without adapters. Nothing is computed yet: rows of a weight are merged when they are read."""
    result: dict[str, Stored] = {}
    for name, source in sources.items():
        if is_adapter(name):
            continue
        module = name.removesuffix(BASE_WEIGHT)
        if module != name:
            a, b = sources[module + LORA_A], sources[module + LORA_B]
            source = Merged(source, a, b, sources.get(module + MAGNITUDE), scaling)
        result[without_base(name)] = source
    return result


@dataclass(frozen=True)
class RowLengths:
    """The initial values of DoRA's magnitudes: the norms of a stored weight's rows, computed when they are read."""

    weight: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[:1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return row_lengths(self.weight.rows(begin, end))
