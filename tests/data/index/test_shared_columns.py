"""Columns that one process writes and all others map."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llava_fsdp.data.index.shared_columns import shared_column
from llava_fsdp.runtime.errors import DamagedError

INT32 = np.dtype(np.int32)
PIECES = [np.arange(5, dtype=np.int32), np.arange(5, 103, dtype=np.int32)]


def test_one_writes_and_all_map(tmp_path: Path) -> None:
    """Whoever comes meanwhile waits, and whoever comes later finds it."""
    made, columns = [], []

    def make() -> Iterator[np.ndarray]:
        made.append(1)
        time.sleep(0.2)
        yield from PIECES

    def use() -> None:
        columns.append(shared_column(tmp_path / "own" / "a.npy", 103, INT32, make))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    use()
    assert len(made) == 1 and len(columns) == 5
    assert all(isinstance(c, np.memmap) and c.dtype == INT32 and c.tolist() == list(range(103)) for c in columns)


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.npy.0123.tmp").write_bytes(b"half")
    shared_column(tmp_path / "own" / "a.npy", 103, INT32, lambda: PIECES)
    assert {p.name for p in (tmp_path / "own").iterdir()} == {"a.npy", "lock"}


def test_without_a_place_it_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"a file where the folder should be")
    column = shared_column(tmp_path / "own" / "a.npy", 103, INT32, lambda: PIECES)
    assert not isinstance(column, np.memmap) and column.dtype == INT32 and column.tolist() == list(range(103))


def test_a_failed_write_leaves_nothing_and_is_in_memory(tmp_path: Path) -> None:
    calls = []

    def make() -> Iterator[np.ndarray]:
        calls.append(1)
        yield PIECES[0]
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        yield PIECES[1]

    column = shared_column(tmp_path / "own" / "a.npy", 103, INT32, make)
    assert column.tolist() == list(range(103)) and {p.name for p in (tmp_path / "own").iterdir()} == {"lock"}


def test_no_values(tmp_path: Path) -> None:
    for _ in range(2):
        assert shared_column(tmp_path / "own" / "a.npy", 0, INT32, list).tolist() == []


@pytest.mark.parametrize("fault", ["cut", "another length", "another type", "no array"])
def test_a_damaged_file_is_refused(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "own" / "a.npy"
    shared_column(path, 103, INT32, lambda: PIECES)
    match fault:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "another length":
            np.save(path, np.arange(102, dtype=np.int32))
        case "another type":
            np.save(path, np.arange(103, dtype=np.int64))
        case _:
            path.write_bytes(b"text")
    with pytest.raises(DamagedError):
        shared_column(path, 103, INT32, lambda: PIECES)
