"""Whether a part of an index is what was written: names, sizes and sums of its files, kept in its `done.json`.

Sizes are looked at whenever an index is opened, sums when all is looked at again. What is damaged is never mended in
place: somebody may have it mapped.
"""

import contextlib
import json
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.records.record import reading
from llava_fsdp.runtime.errors import DamagedError
from llava_fsdp.runtime.small_json import parse_object

DONE = "done.json"
FILES = "files"
BLOCK = 1 << 20
# what NumPy raises of files that it has not written
NOT_NUMPY = (ValueError, EOFError, OverflowError, SyntaxError, TypeError, tokenize.TokenError)


def damaged(path: Path, what: str) -> DamagedError:
    """Of a file INDEX/STATE/PART/NAME."""
    folder = path.parents[min(2, len(path.parents) - 1)]
    within = path.relative_to(folder)
    return DamagedError(f"the index {folder} is damaged ({within}: {what}); delete it, and it is made again")


@contextlib.contextmanager
def from_index(path: Path) -> Iterator[None]:
    """Raises DamagedError where a file of an index is not there, SourceError where it cannot be read now."""
    with reading(path):
        try:
            yield
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises DamagedError where it holds no object of JSON."""
    with from_index(path):
        try:
            return parse_object(path.read_bytes())
        except ValueError as error:
            raise damaged(path, str(error)) from error


def read_column(path: Path, mmap_mode: str | None = "r") -> np.ndarray:
    """A .npy file, mapped.

    Raises:
        DamagedError: it is none, or is not whole.
    """
    with from_index(path):
        try:
            mapped = path.stat().st_size > 128  # nothing cannot be mapped
            return np.load(path, mmap_mode=mmap_mode if mapped else None, allow_pickle=False)  # pyright: ignore[reportArgumentType]
        except NOT_NUMPY as error:
            raise damaged(path, "it is not a whole .npy file") from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON Lines."""
    with from_index(path), path.open("rb") as file:
        for line in file:
            try:
                row = parse_object(line)
            except ValueError as error:
                raise damaged(path, f"in a line, {error}") from error
            if not {"record", "id", "kind", "reason"} <= set(row):
                raise damaged(path, "it is not what was written")
            yield row


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write `facts` and what the folder's files are, behind all of them."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != DONE]
    files = {path.name: [path.stat().st_size, check_sum(path)] for path in paths}
    (folder / DONE).write_text(json.dumps({**facts, FILES: files}))


def check_sum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total = zlib.crc32(block, total)
    return total


def check_part(folder: Path, whole: bool) -> None:
    """Raises DamagedError where a file of the part is missing or has another size, or with `whole` another content."""
    files = read_json(folder / DONE).get(FILES)
    if not isinstance(files, dict) or not all(isinstance(own, list) and len(own) == 2 for own in files.values()):
        raise damaged(folder / DONE, "it is not what was written")
    for name, (size, known) in files.items():
        path = folder / name
        with from_index(path):
            found = path.stat().st_size
            if found != size:
                raise damaged(path, f"{found} bytes, and {size} were written")
            if whole and check_sum(path) != known:
                raise damaged(path, "its bytes are not those that were written")
