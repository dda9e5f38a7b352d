"""Tensors in files, read a stretch of rows at a time."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llava_fsdp.errors import ModelError

WHOLE_MODEL = ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"]
PROJECTOR = ["mm_projector.safetensors", "mm_projector.bin"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; nothing is read before `rows`."""

    file: Path
    name: str
    handle: Any

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.handle, dict):
            return tuple(self.handle[self.name].shape)
        return tuple(self.handle.get_slice(self.name).get_shape())

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of dimension 0."""
        if isinstance(self.handle, dict):
            return self.handle[self.name][begin:end]
        return self.handle.get_slice(self.name)[begin:end]


def open_tensors(path: Path, projector_only: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of a file, or of a model folder, by its name there.

    Raises:
        ModelError: there are no weights, a shard is missing, or a file is not what its name says.
    """
    if path.is_file():
        return open_file(path)
    for name in (PROJECTOR if projector_only else []) + WHOLE_MODEL + PROJECTOR:
        if (path / name).is_file():
            return open_index(path / name) if name.endswith(".index.json") else open_file(path / name)
    raise ModelError(
        f"{path} has no weights: none of {', '.join(WHOLE_MODEL + PROJECTOR)}; of a run, give its folder or its export"
    )


def open_index(path: Path) -> dict[str, StoredTensor]:
    names = json.loads(path.read_text())["weight_map"]
    missing = sorted({f for f in names.values() if not (path.parent / f).is_file()})
    if missing:
        raise ModelError(f"{path} lists {missing[0]}, which does not exist; was the download interrupted?")
    files = {f: open_file(path.parent / f) for f in sorted(set(names.values()))}
    absent = [n for n, f in names.items() if n not in files[f]]
    if absent:
        raise ModelError(f"{path} says {absent[0]} is in {names[absent[0]]}, which lacks it")
    return {n: files[f][n] for n, f in names.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == ".safetensors":
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        return {name: StoredTensor(path, name, handle) for name in handle.keys()}
    if path.suffix not in (".bin", ".pt", ".pth"):
        raise ModelError(f"{path} is no file of tensors; give a .safetensors or .bin file, or a model folder")
    try:  # weights_only: such a file can carry a program; mmap: it can be larger than the memory
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises anything from KeyError to UnpicklingError here
        why = str(error).splitlines()[0]  # the rest is torch's advice to load it without protection
        raise ModelError(f"{path} cannot be read as a file of tensors: {why}") from error
    return {name: StoredTensor(path, name, tensors) for name in tensors}
