"""Columns that one process computes and writes into the index folder, and that all processes of a machine then map.

Each of them would otherwise hold its own copy, which at 100 million records takes gigabytes for every rank and worker.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from llava_fsdp.data.index.build import locked
from llava_fsdp.data.index.integrity import damaged, read_column
from llava_fsdp.data.index.worker_pool import write_header
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.log import log

LOCK = "lock"


def shared_column(path: Path, count: int, dtype: np.dtype, make: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """Return the column in a file of an index as a memory-mapped array. If the file is missing, it is written first, by
    one process while the others wait. If it cannot be written (the index is read-only, or its disk is full), the column
    is returned in memory.

    Args:
        path: the file, in a folder for such columns; its name must change with everything that the values depend on.
        count: number of values.
        make: function that computes the values, in pieces.

    Raises:
        DamagedError: the file is not what was written.
    """
    if not path.is_file():
        try:
            path.parent.mkdir(exist_ok=True)
            with locked(path.parent / LOCK):
                if not path.is_file():
                    write(path, count, dtype, make())
        except OSError as error:
            log().warning("%s cannot be written (%s): each process holds a copy in memory", path, error)
            return in_memory(count, dtype, make())
    values = read_column(path)
    if values.dtype != dtype or values.shape != (count,):
        raise damaged(path, "it is not what was written")
    return values


def write(path: Path, count: int, dtype: np.dtype, pieces: Iterable[np.ndarray]) -> None:
    for left in path.parent.glob("*.tmp"):  # of a process that died; nobody else writes here while the lock is held
        left.unlink(missing_ok=True)
    with replacing(path, durable=True) as file:
        write_header(file, dtype, count)
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype).data)


def in_memory(count: int, dtype: np.dtype, pieces: Iterable[np.ndarray]) -> np.ndarray:
    values, end = np.empty(count, dtype=dtype), 0
    for piece in pieces:
        begin, end = end, end + len(piece)
        values[begin:end] = piece
    assert end == count, (end, count)
    return values
