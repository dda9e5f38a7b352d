"""Share large arrays between the processes of a machine: one process writes an array to a file, and all processes
memory-map the file.

With 100 million records, a copy in each rank and data worker would take gigabytes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from llava_fsdp.data.columns import npy_header
from llava_fsdp.data.index.build import holding_lock
from llava_fsdp.data.index.integrity import damaged_index, read_column
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.text.log import log

LOCK = "lock"


def shared_column(path: Path, count: int, dtype: np.dtype, make: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """Return a one-dimensional array [count] from a .npy file, memory-mapped. If the file is missing, one process
    writes it first while the others wait; if that fails (disk full, folder read-only), the array is in memory.

    Args:
        path: the file, in a folder for such arrays; its name must change with everything that the values depend on.
        make: function that computes the values, in pieces.

    Raises:
        DamagedError: the file is not what was written.
    """
    if not path.is_file():
        try:
            path.parent.mkdir(exist_ok=True)
            with holding_lock(path.parent / LOCK):
                if not path.is_file():
                    write_column_file(path, count, dtype, make())
        except OSError as error:
            log().warning("%s cannot be written (%s): each process holds a copy in memory", path, error)
            return join_in_memory(count, dtype, make())
    values = read_column(path)
    if values.dtype != dtype or values.shape != (count,):
        raise damaged_index(path, "it is not what was written")
    return values


def write_column_file(path: Path, count: int, dtype: np.dtype, pieces: Iterable[np.ndarray]) -> None:
    """Write the pieces of an array [count] to a .npy file, atomically. The caller must have locked the folder."""
    # left by a process that died: while this process has the lock, no other one writes here
    for leftover in path.parent.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    with replacing(path, durable=True) as file:
        file.write(npy_header(dtype, count))
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype).data)


def join_in_memory(count: int, dtype: np.dtype, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Return an array [count] that is given in pieces."""
    values, end = np.empty(count, dtype=dtype), 0
    for piece in pieces:
        begin, end = end, end + len(piece)
        values[begin:end] = piece
    assert end == count, (end, count)
    return values
