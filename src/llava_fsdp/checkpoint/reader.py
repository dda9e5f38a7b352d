"""Read the tensors of a verified checkpoint: this rank's rows (slices of dimension 0) of all tensors, or any range of
rows of one tensor."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_fsdp.checkpoint.layout import held_rows
from llava_fsdp.checkpoint.manifest import Manifest, RowRange, TensorEntry
from llava_fsdp.checkpoint.safetensors_stream import open_file, read_header, read_rows
from llava_fsdp.checkpoint.verify import Checkpoint, name_in_errors
from llava_fsdp.parallel.local_shards import local, local_columns
from llava_fsdp.runtime.errors import CheckpointError

Columns = tuple[int, int] | None
"""Range of columns (indices of dimension 1) of a tensor; None: all."""
DTypeAndShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""
LARGE_ROW = 1 << 16
"""Bytes. From a row that is at least as large, the wanted columns are read alone. Smaller rows are read whole, because
many small reads are slow."""
WEIGHT_PREFIX = "model."
"""Prefix of the names of trained weights in a checkpoint."""
AVERAGE_PREFIX = "ema."
"""Prefix of the names of a moving average of the weights. All other tensors are the optimizer's state."""


@torch.no_grad()
def load(
    checkpoint: Checkpoint, into: dict[str, torch.Tensor], elsewhere: Mapping[str, DTypeAndShape] | None = None
) -> None:
    """Fill tensors with the values in a checkpoint. Only the rows that this rank holds are read and, from large rows,
    only the columns that it holds.

    Args:
        into: the tensors that this rank has a part of, by name.
        elsewhere: dtype and shape of the tensors that only other ranks have, by name.

    Raises:
        CheckpointError: the tensors of `into` and `elsewhere` together have other names, shapes or dtypes than those of
            the checkpoint, or a file cannot be read.
    """
    with name_in_errors(checkpoint.folder):
        targets = {name: (*held_rows(tensor), local_columns(tensor)) for name, tensor in into.items()}
        require_same_tensors(checkpoint.manifest, {**(elsewhere or {}), **described_tensors(into)})
        fill(checkpoint.folder, checkpoint.manifest.tensors, targets)


def described_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, DTypeAndShape]:
    """Return dtype and shape of each tensor as a checkpoint has it, by name."""
    return {name: (local(tensor).dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def require_same_tensors(manifest: Manifest, expected: dict[str, DTypeAndShape]) -> None:
    """Raise CheckpointError, naming a tensor, unless a checkpoint's tensors have exactly the expected names, shapes and
    dtypes: no tensor may be cast, truncated or skipped."""
    differing = sorted(manifest.tensors.keys() ^ expected.keys())
    if differing:
        name = differing[0]
        owner, other = ("it", "this run") if name in manifest.tensors else ("this run", "it")
        raise CheckpointError(f"{len(differing)} tensors differ: {owner} has {name}, and {other} has not")
    for name, (dtype, shape) in expected.items():
        entry = manifest.tensors[name]
        if entry.shape != shape:
            raise CheckpointError(f"{name} has shape {list(entry.shape)} in it, and {list(shape)} in this run")
        if entry.dtype != dtype:
            raise CheckpointError(f"{name} is {entry.dtype} in it, and {dtype} in this run")


def fill(
    folder: Path, entries: Mapping[str, TensorEntry], targets: dict[str, tuple[int, torch.Tensor, Columns]]
) -> None:
    """Read ranges of rows of a checkpoint's tensors. Each file that contains some of these rows is opened once.

    `targets`: by tensor name, the first row to read, the tensor to fill [rows, ...], the columns to read (None: all).
    """
    by_file: dict[str, list[tuple[str, RowRange]]] = {}  # {file: (tensor, rows of it in the file) to read}
    for name, (first, values, columns) in targets.items():
        last, entry = first + (len(values) if values.ndim else 1), entries[name]
        for rows in entry.ranges:
            left, right = overlap(entry.columns_of(rows), columns)
            if max(rows.begin, first) < min(rows.end, last) and left < right:
                by_file.setdefault(rows.file, []).append((name, rows))
    for file, ranges in sorted(by_file.items()):
        descriptor = open_file(folder / file)
        try:
            header = read_header(descriptor, file)
            for name, rows in ranges:
                first, values, columns = targets[name]
                begin, end = max(rows.begin, first), min(rows.end, first + (len(values) if values.ndim else 1))
                entry, file_columns = entries[name], entries[name].columns_of(rows)
                shape = entry.shape_of(rows)
                row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
                place = header[name].begin + (begin - rows.begin) * row_bytes
                target = values[begin - first : end - first] if values.ndim else values
                if columns == rows.columns:
                    read_rows(descriptor, file, place, target)
                    continue
                left, right = overlap(file_columns, columns)
                start = columns[0] if columns is not None else 0
                target = target[:, left - start : right - start]
                column_bytes = row_bytes // (file_columns[1] - file_columns[0])
                if row_bytes >= LARGE_ROW:  # only the columns are read; small rows are faster to read whole
                    for row, part in enumerate(target):
                        skipped = row * row_bytes + (left - file_columns[0]) * column_bytes
                        read_rows(descriptor, file, place + skipped, part)
                    continue
                whole_rows = torch.empty(end - begin, *shape[1:], dtype=entry.dtype)
                read_rows(descriptor, file, place, whole_rows)
                target.copy_(whole_rows[:, left - file_columns[0] : right - file_columns[0]])
        finally:
            os.close(descriptor)


def overlap(file_columns: tuple[int, int], columns: Columns) -> tuple[int, int]:
    """Return the range [begin, end) of the columns that are in a file and among the wanted `columns`. If there are
    none, its end is not above its begin."""
    if columns is None:
        return file_columns
    return max(file_columns[0], columns[0]), min(file_columns[1], columns[1])


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, whose rows may be in the files of several ranks. They are not read before `rows` is
    called."""

    folder: Path
    key: str
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Read rows [begin, end) of this tensor into a new CPU tensor. Raise CheckpointError if they are unreadable."""
        values = torch.empty(end - begin, *self.shape[1:], dtype=self.dtype)
        with name_in_errors(self.folder):
            fill(self.folder, {self.key: self.entry}, {self.key: (begin, values, None)})
        return values


def saved_weights(checkpoint: Checkpoint, prefix: str = WEIGHT_PREFIX) -> dict[str, SavedTensor]:
    """Return the trained weights in a verified checkpoint by parameter name, in the dtype in which the optimizer
    updates them, not read yet."""
    return {
        key.removeprefix(prefix): SavedTensor(checkpoint.folder, key, entry)
        for key, entry in checkpoint.manifest.tensors.items()
        if key.startswith(prefix)
    }
