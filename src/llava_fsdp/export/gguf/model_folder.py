"""Read the model folder, in transformers' format, from which GGUF files are made."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.runtime.errors import ModelError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PREFIXES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^language_model\.(model|lm_head)\b"), r"\1"),
    (re.compile(r"^language_model\."), "model."),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
)
"""Beginnings of tensor names that differ between versions of transformers, and what replaces them."""


@dataclass(frozen=True)
class FolderTensor:
    """A tensor in a safetensors file, which `read` reads."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a LLaVA model in transformers' format."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Configuration, with the values that its file leaves to transformers."""
        return read_config(self.path, "source").to_dict()

    @property
    def language(self) -> dict[str, Any]:
        """Configuration of the language model."""
        return self.config["text_config"]

    @property
    def vision(self) -> dict[str, Any]:
        """Configuration of the vision tower."""
        return self.config["vision_config"]

    @cached_property
    def tensors(self) -> dict[str, FolderTensor]:
        """All tensors. Names of the language model are those of its own class: `model.layers.0...`, `lm_head.weight`;
        the others begin with `vision_tower.` and `multi_modal_projector.`. Raises ModelError for another dtype than
        float32, float16 or bfloat16."""
        found = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    piece = opened.get_slice(name)
                    if piece.get_dtype() not in DTYPES:
                        raise ModelError(f"{file} has {name} in {piece.get_dtype()}, which format=gguf does not write")
                    tensor = FolderTensor(
                        tuple(piece.get_shape()), DTYPES[piece.get_dtype()], partial(read_tensor, file, name)
                    )
                    found[plain_name(name)] = tensor
        return found


def plain_name(name: str) -> str:
    """Return a tensor's name without the beginnings that differ between versions of transformers."""
    for pattern, replacement in PREFIXES:
        name = pattern.sub(replacement, name)
    return name


def read_tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)
