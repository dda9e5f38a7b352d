"""Read JSON Lines files and append rows to them. On a full disk, rows wait in memory, and the run goes on."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.files.durable_files import replace_file, write_all
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.text.log import log

MOST_WAITING = 200_000
"""Maximum number of rows kept in memory while they cannot be written. A row has a few hundred bytes."""


class RowWriter:
    """Appends rows to a JSON Lines file. Rows that cannot be written are kept in memory and written later. A warning is
    logged when writing first fails, and at the end if rows were lost."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting_rows: list[str] = []
        self.num_lost = 0

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the file. While writing fails, up to MOST_WAITING rows are kept in memory, and the oldest are
        dropped after that. Log a warning when writing begins to fail, and when it succeeds again."""
        was_failing = bool(self.waiting_rows)
        self.waiting_rows.append(json.dumps(row) + "\n")
        if len(self.waiting_rows) > MOST_WAITING:
            self.waiting_rows.pop(0)
            self.num_lost += 1
        error = self.write()
        if error is not None and not was_failing:
            log().warning(
                "%s cannot be written (%s); the run continues, and its rows wait in memory until then",
                self.path, why(error, self.path),
            )  # fmt: skip
        elif error is None and was_failing:
            log().warning("%s can be written again, and has all rows that waited", self.path)

    def write(self) -> OSError | None:
        """Append the rows in memory to the file: all or none, because a partial line would make the next row
        unreadable. Return the error, if there was one."""
        if not self.waiting_rows:
            return None
        try:
            append(self.path, "".join(self.waiting_rows).encode())
        except OSError as error:
            return error
        self.waiting_rows.clear()
        return None

    def close(self) -> None:
        """Append what is still in memory, and log a warning if any row is lost."""
        error = self.write()
        if error is not None or self.num_lost:
            num_missing = self.num_lost + len(self.waiting_rows)
            reason = why(error, self.path) if error is not None else "too many waited"
            log().warning("%s lacks %d rows, which could not be written: %s", self.path, num_missing, reason)


def append(path: Path, data: bytes) -> None:
    """Append all of `data` to a file, or nothing if there is an error. Refuses symbolic links, and pipes that nobody
    reads. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o666)
    try:
        size_before = os.fstat(handle).st_size
        try:
            write_all(handle, memoryview(data))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size_before)
            raise
    finally:
        with contextlib.suppress(OSError):  # on a network file system, closing may report a write's error again
            os.close(handle)


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file by lines, atomically. A line break is added to each."""
    replace_file(path, "".join(line + "\n" for line in lines).encode(), durable=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file; empty without a regular file. Incomplete lines (crash or full disk) are skipped."""
    rows = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows
