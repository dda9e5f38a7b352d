"""Read the tensors of a verified checkpoint: this rank's rows of all of them, or any rows of one."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_fsdp.checkpoint.layout import Part, held_parts, row_bytes
from llava_fsdp.checkpoint.manifest import STATE_FILE, Manifest, Saved
from llava_fsdp.checkpoint.safetensors_stream import open_file, read_header, read_rows
from llava_fsdp.checkpoint.verify import Checkpoint, naming
from llava_fsdp.runtime.errors import CheckpointError

WEIGHT = "model."


@torch.no_grad()
def load(found: Checkpoint, into: dict[str, torch.Tensor]) -> None:
    """Fill this rank's rows of every tensor.

    Raises:
        CheckpointError: the checkpoint holds other tensors, or a file of it cannot be read.
    """
    with naming(found.folder):
        parts = held_parts(into)
        require_same(found.manifest, parts)
        for file in sorted(found.manifest.files.keys() - {STATE_FILE}):
            fill_from(found, file, parts)


def require_same(manifest: Manifest, parts: dict[str, Part]) -> None:
    """The same names, shapes and dtypes: nothing is cast, cut or left out.

    Raises:
        CheckpointError: naming one that differs, and both.
    """
    differing = sorted(manifest.tensors.keys() ^ parts.keys())
    if differing:
        name = differing[0]
        has, lacks = ("it", "this run") if name in manifest.tensors else ("this run", "it")
        raise CheckpointError(f"{len(differing)} tensors differ: {has} has {name}, and {lacks} has not")
    for name, part in parts.items():
        saved = manifest.tensors[name]
        if saved.shape != part.shape:
            raise CheckpointError(f"{name} has shape {list(saved.shape)} in it, and {list(part.shape)} in this run")
        if saved.dtype != part.dtype:
            raise CheckpointError(f"{name} is {saved.dtype} in it, and {part.dtype} in this run")


def fill_from(found: Checkpoint, file: str, parts: dict[str, Part]) -> None:
    """What a file has of the rows that this rank holds."""
    wanted = []
    for name, part in parts.items():
        for piece in found.manifest.tensors[name].pieces:
            begin, end = max(piece.begin, part.begin), min(piece.end, part.end)
            if piece.file == file and begin < end:
                wanted.append((name, begin, end, begin - piece.begin))
    if not wanted:
        return
    descriptor = open_file(found.folder / file)
    try:
        header = read_header(descriptor, file)
        for name, begin, end, skipped in wanted:
            part = parts[name]
            place = header[name].begin + skipped * row_bytes(part.dtype, part.shape)
            target = part.values[begin - part.begin : end - part.begin] if part.shape else part.values
            read_rows(descriptor, file, place, target)
    finally:
        os.close(descriptor)


def saved_rows(folder: Path, name: str, saved: Saved, begin: int, end: int) -> torch.Tensor:
    """Rows of one tensor, whatever ranks wrote them, on the CPU.

    Raises:
        CheckpointError: they cannot be read.
    """
    with naming(folder):
        values = torch.empty(end - begin, *saved.shape[1:], dtype=saved.dtype)
        part = Part(saved.dtype, saved.shape, begin, end, values)
        found = Checkpoint(folder, Manifest(0, {}, {name: saved}), {})
        for file in sorted({piece.file for piece in saved.pieces}):
            fill_from(found, file, {name: part})
    return values


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, whatever ranks wrote it; nothing is read before `rows`."""

    folder: Path
    key: str
    saved: Saved

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.saved.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of dimension 0.

        Raises:
            CheckpointError: they cannot be read.
        """
        return saved_rows(self.folder, self.key, self.saved, begin, end)


def saved_weights(found: Checkpoint) -> dict[str, SavedTensor]:
    """The trained weights of a checkpoint that has been verified, in the dtype of the masters, by parameter name."""
    return {
        key.removeprefix(WEIGHT): SavedTensor(found.folder, key, saved)
        for key, saved in found.manifest.tensors.items()
        if key.startswith(WEIGHT)
    }
