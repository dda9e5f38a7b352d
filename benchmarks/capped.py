"""Ranks on gloo under one limit on private memory, forked anew for every attempt, and what the largest batch is there.

The limit is RLIMIT_DATA, set on each process after its imports: it counts private writable memory (heap, stacks,
anonymous mappings), touched or not, and no mapped files. Freed blocks of 1 MiB and more go back to the system at once.
"""

import gc
import multiprocessing
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_fsdp.parallel.malloc import return_freed_memory
from llava_fsdp.parallel.memory.offload import NO_ROOM
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import OutOfMemory

RANKS = 2
ABORTED = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""A process ends so where memory runs out in a thread of gloo's, which has nobody to tell."""


class Fits:
    """What an attempt came to: what its ranks returned, or why memory did not suffice."""

    def __init__(self, results: list[Any] | None, why: str = ""):
        self.results = results
        self.why = why

    def __bool__(self) -> bool:
        return self.results is not None


def attempt(
    limit: int | None, function: Callable[..., Any], *args: Any, timeout: float = 900, size: int = RANKS
) -> Fits:
    """Call `function(world, *args)` on every rank, in processes that may have `limit` bytes of private memory each.

    Raises:
        RuntimeError: a rank failed for another reason than memory, or did not answer in time.
    """
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        store = Path(folder) / "store"
        pipes, ranks = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            own = rank, size, store, there, limit, function, args
            process = context.Process(target=serve, args=own)
            process.start()
            there.close()
            pipes.append(here)
            ranks.append(process)
        try:
            return collect(pipes, ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def collect(pipes: list[Any], ranks: list[Any], timeout: float) -> Fits:
    """The answers of all ranks; the first that fails speaks for all, because the others wait for it."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ranks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {timeout} s")
        for rank, pipe in enumerate(pipes):
            if rank in results or not pipe.poll(0.05):
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                ranks[rank].join()
                kind, value = ("memory" if ranks[rank].exitcode in ABORTED else "error"), ranks[rank].exitcode
            if kind == "memory":
                return Fits(None, str(value))
            if kind == "error":
                raise RuntimeError(f"rank {rank}: {value}")
            results[rank] = value
    return Fits([results[rank] for rank in range(len(ranks))])


def serve(
    rank: int, size: int, store: Path, pipe: Any, limit: int | None, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    return_freed_memory()  # the same for all: else the heap's holes are measured
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=timedelta(minutes=20)
        )
        pipe.send(("done", function(World(rank, size, rank, size, torch.device("cpu")), *args)))
    except BaseException as error:
        memory = isinstance(error, MemoryError | OutOfMemory) or NO_ROOM.search(str(error))
        pipe.send(("memory", str(error).splitlines()[0][:200]) if memory else ("error", traceback.format_exc()))
    time.sleep(3600)  # it is killed; gloo's threads may abort a process that ends by itself


def private_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )


class PeakPrivate:
    """The most private memory that the process held meanwhile, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.ended.wait(0.003):
            self.bytes = max(self.bytes, private_bytes())

    def __enter__(self) -> "PeakPrivate":
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ended.set()
        self.thread.join()


def largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest batch that fits, by doubling from `start` and then bisection; 0 where not even one sample does."""
    good, bad = 0, start
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
