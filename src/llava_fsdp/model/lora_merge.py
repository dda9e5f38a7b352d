"""Adapters merged into the weights that they adapt: in fp32, a stretch of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llava_fsdp.model.lora import row_lengths
from llava_fsdp.model.lora_names import BASE, LORA_A, LORA_B, MAGNITUDE, is_adapter, without_base
from llava_fsdp.model.tensor_files import Stored

BASE_WEIGHT = f"{BASE}weight"


@dataclass(frozen=True)
class Merged:
    """W + scaling * B A; with magnitudes (DoRA) its rows have these lengths."""

    weight: Stored
    """[out, in]"""
    a: Stored
    """[r, in]"""
    b: Stored
    """[out, r]"""
    magnitude: Stored | None
    """[out]"""
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """That holds base and adapter alike: what is kept when nobody asks for another."""
        parts = torch.promote_types(self.a.dtype, self.b.dtype)
        return torch.promote_types(self.weight.dtype, parts)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """float32 [end - begin, in]; whoever writes it rounds, once."""
        a = self.a.rows(0, self.a.shape[0]).float()
        summed = self.weight.rows(begin, end).float() + (self.b.rows(begin, end).float() @ a) * self.scaling
        if self.magnitude is None:
            return summed
        return summed * (self.magnitude.rows(begin, end).float() / row_lengths(summed))[:, None]


def merged(sources: Mapping[str, Stored], scaling: float) -> dict[str, Stored]:
    """Where every parameter of the model without adapters comes from.

    Args:
        sources: of the model with adapters, by the names that it has there.
    """
    found: dict[str, Stored] = {}
    for name, source in sources.items():
        if is_adapter(name):
            continue
        module = name.removesuffix(BASE_WEIGHT)
        if module != name:
            a, b = sources[module + LORA_A], sources[module + LORA_B]
            source = Merged(source, a, b, sources.get(module + MAGNITUDE), scaling)
        found[without_base(name)] = source
    return found


@dataclass(frozen=True)
class RowLengths:
    """DoRA's magnitudes of an adapter that adds nothing yet: the lengths of the weight's rows."""

    weight: Stored
    """Where the weight comes from."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[:1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return row_lengths(self.weight.rows(begin, end))
