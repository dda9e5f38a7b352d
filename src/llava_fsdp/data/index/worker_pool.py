"""A pass over a dataset, chunk by chunk: in worker processes, resumable, its columns joined at the end.

A chunk's result is one file, written beside and renamed; what is there is never done again. Workers are fresh
interpreters that import what a task needs and no more: with multiprocessing each would import the entry, and torch
with it, a third of a gigabyte a core.
"""

import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from llava_fsdp.data.index.integrity import read_column, seal
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.errors import LlavaFsdpError, SourceError, WorkerError
from llava_fsdp.runtime.progress import Advance

Columns = dict[str, np.ndarray]
"""By name; a column holds a value a record, or one a picture, of one chunk."""
ROWS = "rows"
"""The column of text: JSON Lines as bytes."""
BLOCK = 1 << 20
"""Values of a column that are looked at together."""


class Task(Protocol):
    def __call__(self, chunk: int) -> Columns: ...


def chunk_file(folder: Path, chunk: int) -> Path:
    return folder / f"{chunk:08d}.npz"


def run_chunks(task: Task, folder: Path, chunks: int, workers: int, advance: Advance) -> None:
    """Do every chunk whose file is not there yet, or is not whole.

    Args:
        workers: processes; with 1, or one chunk left, none is started.

    Raises:
        LlavaFsdpError: what a chunk raised, or a worker that died.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.tmp"):
        left.unlink(missing_ok=True)
    pending = [n for n in range(chunks) if not is_whole(chunk_file(folder, n))]
    advance(chunks - len(pending))
    workers = min(workers, len(pending))
    if workers <= 1:
        for chunk in pending:
            do(task, folder, chunk)
            advance(1)
        return
    pool: list[Worker] = []
    try:
        pool += [Worker(task, folder) for _ in range(workers)]
        serve(pool, iter(pending), advance)
    finally:
        for worker in pool:
            worker.close()


def is_whole(path: Path) -> bool:
    """Its last bytes are a zip archive's; what a machine that lost power left has none, or zeros."""
    return path.is_file() and zipfile.is_zipfile(path)


def do(task: Task, folder: Path, chunk: int) -> None:
    columns = task(chunk)
    # a worker may outlive the process that started it, and write the same chunk as a worker of the next one
    with replacing(chunk_file(folder, chunk), durable=True) as file:
        np.savez(file, **columns)  # pyright: ignore[reportArgumentType]


class Worker:
    """A process that has been given the task, and does the chunks that it is asked for."""

    def __init__(self, task: Task, folder: Path):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # what this process found its modules by
        command = [sys.executable, "-m", "llava_fsdp.data.index.worker_main", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.send(pickle.dumps((task, folder)))

    def send(self, what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died; reading from it says so
            self.requests.write(what)
            self.requests.flush()

    def ask(self, pending: Iterator[int]) -> bool:
        """For the next chunk; false where there is none."""
        chunk = next(pending, None)
        if chunk is not None:
            self.send(b"%d\n" % chunk)
        return chunk is not None

    def check(self) -> None:
        """Wait until the chunk is done.

        Raises:
            LlavaFsdpError: what the chunk raised, or the process has died.
            OSError: what the chunk raised.
        """
        try:
            error = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError):
            raise WorkerError(
                f"a worker process ended with {self.process.wait()} while the dataset was examined (-9: killed, often "
                "for memory); what is done is kept: run it again, with fewer of them if memory was short "
                "(prepare: prepare.workers=)"
            ) from None
        if isinstance(error, (LlavaFsdpError, OSError)):
            raise error
        assert error is None, error

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve(pool: list[Worker], pending: Iterator[int], advance: Advance) -> None:
    """Give every worker a chunk, and the next one whenever it is done with one."""
    with selectors.DefaultSelector() as selector:
        for worker in pool:
            if worker.ask(pending):
                selector.register(worker.answers, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                worker.check()
                advance(1)
                if not worker.ask(pending):
                    selector.unregister(worker.answers)


def work(requests: IO[bytes], answers: IO[bytes]) -> None:
    """A worker's life: a task, then numbers of chunks, each answered with None or with what it raised."""
    task, folder = pickle.load(requests)
    for line in requests:
        try:
            do(task, folder, int(line))
            answer: object = None
        except (LlavaFsdpError, OSError) as error:
            answer = error.with_traceback(None)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


def join(source: Path, chunks: int, target: Path, finish: Callable[[Path], dict[str, Any]]) -> None:
    """All chunks' columns laid end to end, each as one .npy file; the text column as one `rows.jsonl`.

    One chunk's column is in memory at a time. `finish` may add to the folder of columns, and returns its facts, which
    are written last.

    Raises:
        SourceError: a chunk's file is broken; it is taken away, so that it is made again.
    """
    staged = target.with_name(f"{target.name}.tmp")
    staged.mkdir(exist_ok=True)
    dtypes = {name: values.dtype for name, values in columns_of(chunk_file(source, 0)).items()}
    for name, dtype in dtypes.items():
        pieces = (column(chunk_file(source, n), name) for n in range(chunks))
        if name == ROWS:
            with (staged / f"{ROWS}.jsonl").open("wb") as file:
                for piece in pieces:
                    file.write(piece.tobytes())
        else:
            write_column(staged / f"{name}.npy", pieces, dtype)
    seal(staged, finish(staged))
    os.replace(staged, target)


def column(path: Path, name: str) -> np.ndarray:
    return columns_of(path, name)[name]


def columns_of(path: Path, *names: str) -> Columns:
    """The named columns of a chunk; all, where none is named."""
    try:
        with np.load(path, allow_pickle=False) as chunk:
            return {name: chunk[name] for name in names or chunk.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError) as error:
        path.unlink(missing_ok=True)
        raise SourceError(f"{path} is broken ({error}), and was removed: run it again, and it is made again") from error


def write_column(path: Path, pieces: Iterator[np.ndarray], dtype: np.dtype) -> None:
    """A .npy file of pieces; its header has room for a length that is known at the end."""
    total = 0
    with path.open("wb") as file:
        write_header(file, dtype, 10**18)  # as wide as any length may be
        begin = file.tell()
        for piece in pieces:
            assert piece.dtype == dtype, (path, piece.dtype)
            file.write(piece.tobytes())
            total += len(piece)
        file.seek(0)
        write_header(file, dtype, total)
        assert file.tell() == begin


def write_header(file: IO[bytes], dtype: np.dtype, length: int) -> None:
    """Version 1.0 of the format, padded to 128 bytes."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({length},), }}".ljust(117) + "\n"
    file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())


def open_column(folder: Path, name: str) -> np.ndarray:
    return read_column(folder / f"{name}.npy")


def rows_column(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """uint8: rows as JSON Lines."""
    return np.frombuffer("".join(json.dumps(row) + "\n" for row in rows).encode(), dtype=np.uint8)
