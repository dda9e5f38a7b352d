"""Detect damage in a dataset's index (a folder of arrays). Each of its subfolders has a file `done.json` with the
names, sizes and checksums of its files.

Sizes are checked whenever an index is opened, and checksums when everything is examined again. A damaged file is never
repaired in place, because another process may have it mapped.
"""

import contextlib
import json
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.runtime.errors import DamagedError
from llava_fsdp.runtime.files.small_json import parse_object

DONE = "done.json"
FILES = "files"
BLOCK = 1 << 20
NOT_NUMPY = (ValueError, EOFError, OverflowError, SyntaxError, TypeError, tokenize.TokenError)
"""Exceptions that NumPy raises for files that are not .npy files."""


def damaged_index(path: Path, what: str) -> DamagedError:
    """Return a DamagedError that says `what` is wrong with a file of an index. The folder of the whole index is taken
    to be three levels above the file."""
    folder = path.parents[min(2, len(path.parents) - 1)]
    within = path.relative_to(folder)
    return DamagedError(f"the index {folder} is damaged ({within}: {what}); delete it, and it is made again")


@contextlib.contextmanager
def reading_index(path: Path) -> Iterator[None]:
    """Context manager: FileNotFoundError for a file of an index becomes DamagedError, another OSError SourceError."""
    with reading(path):
        try:
            yield
        except FileNotFoundError as error:
            raise damaged_index(path, "it is missing") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of an index; raise DamagedError if it is invalid."""
    with reading_index(path):
        try:
            return parse_object(path.read_bytes())
        except ValueError as error:
            raise damaged_index(path, str(error)) from error


def read_column(path: Path) -> np.ndarray:
    """Open a .npy file of an index as a read-only, memory-mapped array; an empty array is read into memory. Raise
    DamagedError if the file is missing or not a whole .npy file."""
    with reading_index(path):
        try:
            mapped = path.stat().st_size > 128  # size of the header; an empty array cannot be mapped
            return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        except NOT_NUMPY as error:
            raise damaged_index(path, "it is not a whole .npy file") from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the problems in a JSON Lines file of an index as dicts with record, id, kind and reason."""
    with reading_index(path), path.open("rb") as file:
        for line in file:
            try:
                row = parse_object(line)
            except ValueError as error:
                raise damaged_index(path, f"in a line, {error}") from error
            if not {"record", "id", "kind", "reason"} <= set(row):
                raise damaged_index(path, "it is not what was written")
            yield row


def write_done(folder: Path, facts: dict[str, Any]) -> None:
    """Write an index folder's `done.json`, after all other files: `facts`, and the size and checksum of each file."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != DONE]
    files = {path.name: [path.stat().st_size, check_sum(path)] for path in paths}
    (folder / DONE).write_text(json.dumps({**facts, FILES: files}))


def check_sum(path: Path) -> int:
    """Return the CRC-32 checksum of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total = zlib.crc32(block, total)
    return total


def check_part(folder: Path, whole: bool) -> None:
    """Raise DamagedError if a file in a folder of an index is missing or its size has changed; with `whole`, also if
    its checksum has changed."""
    files = read_json(folder / DONE).get(FILES)
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise damaged_index(folder / DONE, "it is not what was written")
    for name, (known_size, known_sum) in files.items():
        path = folder / name
        with reading_index(path):
            found_size = path.stat().st_size
            if found_size != known_size:
                raise damaged_index(path, f"{found_size} bytes, and {known_size} were written")
            if whole and check_sum(path) != known_sum:
                raise damaged_index(path, "its content is not what was written")
