"""Columns of a dataset, which are arrays with one value per record or image, as files: .npy, or those of a chunk."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.runtime.errors import SourceError

Columns = dict[str, np.ndarray]
"""{name: column} for one chunk; a column is an array with one value per record or one per image."""
ROWS = "rows"
"""Name of the column that lists problems of records: JSON Lines as bytes, uint8 [bytes]."""
BLOCK = 1 << 20
"""Number of values of a column that are in memory at the same time."""


def column(path: Path, name: str) -> np.ndarray:
    return columns_of(path, name)[name]


def columns_of(path: Path, *names: str) -> Columns:
    """Read columns, by default all, from the file of a chunk, which has the columns of some of a dataset's records. If
    the file is broken, delete it and raise SourceError."""
    try:
        with np.load(path, allow_pickle=False) as chunk:
            return {name: chunk[name] for name in names or chunk.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError) as error:
        path.unlink(missing_ok=True)
        raise SourceError(f"{path} is broken ({error}), and was removed: run it again, and it is made again") from error


def write_column(path: Path, pieces: Iterator[np.ndarray], dtype: np.dtype) -> None:
    """Write a one-dimensional array, given in pieces, to a .npy file. Its header, which has the same size for every
    length, is written last, when the length is known."""
    total = 0
    with path.open("wb") as file:
        file.seek(len(npy_header(dtype, 0)))
        for piece in pieces:
            assert piece.dtype == dtype, (path, piece.dtype)
            file.write(piece.tobytes())
            total += len(piece)
        file.seek(0)
        file.write(npy_header(dtype, total))


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """Return the header of a one-dimensional .npy file (format version 1.0), 128 bytes for any length."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({length},), }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def rows_column(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return JSON objects as JSON Lines, uint8 [bytes]."""
    return np.frombuffer("".join(json.dumps(row) + "\n" for row in rows).encode(), dtype=np.uint8)
