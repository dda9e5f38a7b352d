"""A file of JSON Lines that a run adds to, and that does not end the run when the disk is full."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llava_fsdp.log import log

MOST_WAITING = 200_000
"""Rows that are kept in memory, a few hundred bytes each."""


class Rows:
    """Appends rows. What cannot be written now waits in memory and is written, in order, as soon as that works.

    A day of training is worth more than its log, so an error is a warning: once when it begins, and once at the end if
    rows are lost.
    """

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []
        self.lost = 0

    def add(self, row: dict[str, Any]) -> None:
        failing = bool(self.waiting)
        self.waiting.append(json.dumps(row) + "\n")
        if len(self.waiting) > MOST_WAITING:
            self.waiting.pop(0)
            self.lost += 1
        error = self.write()
        if error is not None and not failing:
            log().warning(
                "%s cannot be written (%s); the run goes on, and its rows wait in memory until it can", self.path, error
            )
        elif error is None and failing:
            log().warning("%s can be written again, and has the rows that waited", self.path)

    def write(self) -> OSError | None:
        """All rows that wait, or none of them: a line that a full disk cut short would spoil the next."""
        if not self.waiting:
            return None
        data = "".join(self.waiting).encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            return error
        try:
            before = os.fstat(handle).st_size
            try:
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, before)
                return error
        finally:
            with contextlib.suppress(OSError):  # what a network's disk tells only now has been told before, or will be
                os.close(handle)
        self.waiting.clear()
        return None

    def close(self) -> None:
        """A last try."""
        error = self.write()
        if error is not None or self.lost:
            lost = self.lost + len(self.waiting)
            log().warning("%s lacks %d rows, which could not be written: %s", self.path, lost, error)


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file anew, beside it first."""
    staged = path.with_suffix(".tmp")
    with staged.open("w") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())  # else a loss of power may leave neither the old lines nor these
    os.replace(staged, path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file. A line that a crash or a full disk cut short is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(row)
    return found
