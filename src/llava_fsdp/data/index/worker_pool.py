"""Compute columns of a dataset in worker processes, one chunk (consecutive records) at a time, and join the columns of
all chunks.

The result of a chunk is one file, which a later run reuses. Workers are spawned, and import only what their task needs:
torch would take a third of a gigabyte in each. A spawned process imports the main module of its parent again, unless
that is the `__main__` of a package, as in all commands that make an index.
"""

import contextlib
import io
import json
import os
import signal
import time
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llava_fsdp.data.columns import ROWS, Columns, column, columns_of, rows_column, write_column
from llava_fsdp.data.index.integrity import read_column, write_done
from llava_fsdp.runtime.errors import WorkerError
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.process.process_end import end_with
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import Advance
from llava_fsdp.runtime.text.terminal_text import guard_streams

ALONE_SECONDS = 2.0
"""Number of seconds for which this process computes chunks before it starts workers. Starting them takes as long."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class ChunkTask(Protocol):
    """A computation on one chunk of a dataset, given the chunk's number."""

    def __call__(self, chunk: int) -> Columns: ...


def chunk_file(folder: Path, chunk: int) -> Path:
    return folder / f"{chunk:08d}.npz"


def chunk_files(folder: Path, chunks: int) -> list[Path]:
    return [chunk_file(folder, chunk) for chunk in range(chunks)]


def run_chunks(task: ChunkTask, files: Sequence[Path], workers: int, advance: Advance) -> None:
    """Compute the results of each chunk whose file is missing or incomplete, and write the file: in this process for
    ALONE_SECONDS, then in worker processes.

    Args:
        files: the file for the results of each chunk.
        workers: number of worker processes; with 1, this process computes all chunks.
        advance: called with the number of chunks completed since the last call.

    Raises:
        LlavaFsdpError: the error that a chunk raised; WorkerError if a worker died.
        OSError: a file cannot be written.
    """
    for folder in {file.parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
    pending = deque(n for n, file in enumerate(files) if not is_whole(file))
    advance(len(files) - len(pending))
    start = time.monotonic()
    while pending and time.monotonic() < start + ALONE_SECONDS:
        compute_chunk(task, files, pending.popleft())
        advance(1)
    if (workers := min(workers, len(pending))) > 1:
        context = RecordingContext()
        try:
            pool = ProcessPoolExecutor(workers, context, initializer=begin_worker, initargs=(os.getpid(), task, files))
        except (OSError, ImportError) as error:  # the pool's queues have locks in /dev/shm
            log().warning("no worker processes (%s): this process does all; is /dev/shm full or missing?", error)
        else:
            return run_in_workers(pool, context, pending, advance)
    for chunk in pending:
        compute_chunk(task, files, chunk)
        advance(1)


class RecordingContext(SpawnContext):
    """multiprocessing context that lists the processes it starts, so that they can be killed and their exit codes
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # noqa: N802  multiprocessing's name
        self.workers.append(SpawnProcess(*args, **options))
        return self.workers[-1]


def run_in_workers(
    pool: ProcessPoolExecutor, context: RecordingContext, pending: Iterable[int], advance: Advance
) -> None:
    """Compute the chunks (consecutive records) with the numbers `pending` in the pool's processes, which write a file
    each. If one fails, the workers are killed; a WorkerError says that a process has died."""
    try:
        with pool, one_thread_each():
            try:
                for future in as_completed([pool.submit(compute_in_worker, chunk) for chunk in pending]):
                    future.result()
                    advance(1)
            except BrokenProcessPool:
                raise
            except BaseException:
                for worker in context.workers:
                    if worker.pid is not None:  # it was started
                        worker.kill()  # not awaited, as a chunk may take long
                raise
    except BrokenProcessPool:
        # the pool ends the other workers with SIGTERM
        codes = [worker.exitcode for worker in context.workers if worker.exitcode]
        code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
        raise WorkerError(
            f"a worker process ended with {code} while the dataset was examined (-9: killed, often for memory); what "
            "is done is kept: run it again, with fewer of them if memory was short (prepare: prepare.workers=)"
        ) from None


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Context manager: processes started in it use one thread per library, because there is one worker per core."""
    before = dict(os.environ)
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name in ONE_THREAD:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


WORK: list[Callable[[int], None]] = []
"""In a worker process, the function that computes and writes a chunk; empty in the main process."""


def begin_worker(parent: int, task: ChunkTask, files: Sequence[Path]) -> None:
    """Initialize a worker process: it computes chunks, ends when the process `parent` ends, and ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    os.dup2(2, 1)  # libraries' messages are not part of the command's output
    # control characters in messages are escaped
    guard_streams()
    WORK.append(partial(compute_chunk, task, files))


def compute_in_worker(chunk: int) -> None:
    """Compute a chunk with what `begin_worker` has given to this worker process: only its number is sent for each
    chunk."""
    WORK[0](chunk)


def is_whole(path: Path) -> bool:
    """Return whether the file of a chunk is a complete zip archive. After a power loss, its end may be missing."""
    return path.is_file() and zipfile.is_zipfile(path)


def compute_chunk(task: ChunkTask, files: Sequence[Path], chunk: int) -> None:
    """Compute the columns of a chunk and write them to its file."""
    columns = task(chunk)
    # a worker may outlive the process that started it, and write the same chunk as a worker of the next one
    with replacing(files[chunk], durable=True) as file:
        archive = io.BytesIO()  # np.savez writes the headers of its members twice
        np.savez(archive, **columns)  # pyright: ignore[reportArgumentType]
        file.write(archive.getbuffer())


def join(
    files: Sequence[Path],
    offsets: Sequence[int],
    target: Path,
    finish: Callable[[Path], dict[str, Any]],
    not_joined: Collection[str] = (),
) -> None:
    """Concatenate the results of all chunks: each column becomes a .npy file in `target`, ROWS becomes `rows.jsonl`.

    Only one column of one chunk is in memory at a time.

    Args:
        offsets: for each chunk, the number to add to the record numbers in its column ROWS, numbered within their file.
        finish: called with the folder of the concatenated columns; may add files, and returns values for its
            `done.json`.
        not_joined: names of columns that are not concatenated, because only `finish` needs them.

    Raises:
        SourceError: the file of a chunk is broken. It is deleted, so that the next run makes it again.
    """
    staged = target.with_name(f"{target.name}.tmp")
    staged.mkdir(exist_ok=True)
    dtypes = {name: values.dtype for name, values in columns_of(files[0]).items() if name not in not_joined}
    for name, dtype in dtypes.items():
        pieces = (column(file, name) for file in files)
        if name == ROWS:
            with (staged / f"{ROWS}.jsonl").open("wb") as file:
                for piece, first in zip(pieces, offsets, strict=True):
                    file.write(renumber(piece.tobytes(), first))
        else:
            write_column(staged / f"{name}.npy", pieces, dtype)
    write_done(staged, finish(staged))
    os.replace(staged, target)


def renumber(rows: bytes, first: int) -> bytes:
    """Return JSON Lines with `first` added to the value of `record` in each line."""
    if not first:
        return rows
    parsed_rows = (json.loads(line) for line in rows.splitlines())
    return rows_column([{**row, "record": row["record"] + first} for row in parsed_rows]).tobytes()


def open_column(folder: Path, name: str) -> np.ndarray:
    """Return a column of the index, memory-mapped; raise DamagedError if its file is missing or damaged."""
    return read_column(folder / f"{name}.npy")
