"""Several ranks on gloo for tests: forked once, kept, and given functions to run.

A pool's processes stay between tests, so that a test costs its own work and not an import of torch. Every call has a
hard time limit: a rank that hangs fails the test that made it hang, and the pool is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from llava_fsdp.config import Config
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World

CPU = torch.device("cpu")


def single_world() -> World:
    return World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)


def alone(cfg: Config) -> Parallelism:
    """The parallelism of a run of one rank, which has none."""
    return Parallelism.of(cfg, single_world())


class RanksFailed(AssertionError):
    """At least one rank raised, died, or did not answer in time."""

    def __init__(self, message: str, kinds: list[list[str]]):
        super().__init__(message)
        self.kinds = kinds
        """One list for each rank that raised, in the order in which they did: the names of its error's class and of the
        classes above it."""


class RankPool:
    """`size` forked processes that are the ranks of a gloo process group."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Call `function(world, *args)` on every rank; the results by rank.

        Raises:
            RanksFailed: with the traceback of every rank that raised, or the ranks that did not answer.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        errors: list[str] = []
        kinds: list[list[str]] = []
        while len(results) + len(errors) < self.size and not (errors and time.monotonic() > deadline):
            for rank, pipe in enumerate(self.pipes):
                if rank not in results and pipe.poll(0.01):
                    try:
                        good, value = pipe.recv()
                    except EOFError:
                        good, value = False, ([], "the process has died")
                    if good:
                        results[rank] = value
                    else:
                        kind, text = value
                        kinds.append(kind)
                        errors.append(f"rank {rank}:\n{text}")
                        deadline = min(deadline, time.monotonic() + 3)  # the others may wait for it forever
            if time.monotonic() > deadline:
                break
        if errors or len(results) < self.size:
            silent = [r for r in range(self.size) if r not in results]
            self.close()
            raise RanksFailed("\n".join(errors) or f"ranks {silent} did not answer within {timeout} s", kinds)
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        store = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.size, store, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes = [], []


def serve(rank: int, size: int, store: Path, pipe: Any) -> None:
    """What a forked rank does: run what it is sent until it is killed.

    Each call has process groups of its own, which are destroyed behind it. A group has a thread that wakes a hundred
    times a second (gloo's tcp/loop.cc), and the groups of all tests before would slow every later one.
    """
    torch.set_num_threads(1)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, device=CPU)
    # A fork copies the parent's memory, but not its threads. Collecting a process group of the parent would wait for
    # threads that do not exist here.
    gc.freeze()
    clear_caches()
    for number in itertools.count():
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            files = dist.FileStore(f"{store}-{number}", size)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=size, timeout=timedelta(seconds=60))
            with contextlib.redirect_stderr(io.StringIO()):
                value = function(world, *args)
            pipe.send((True, value))
            # A rank whose function asks no other rank may be done before another has made its connections, which
            # closing them would end with an error there.
            if dist.is_initialized():
                dist.barrier()
        except BaseException as error:  # whatever it is, the test must see it
            kind = [one.__name__ for one in type(error).__mro__]
            pipe.send((False, (kind, traceback.format_exc())))
        function = args = value = files = None
        forget_groups()
        gc.freeze()  # what this call has imported and cached stays, and is not walked through in the next ones


def forget_groups() -> None:
    """Destroy all process groups, and clear DTensor's caches."""
    if dist.is_initialized():
        dist.destroy_process_group()
    clear_caches()
    gc.collect()  # meshes that refer to each other hold groups


def clear_caches() -> None:
    """Clear DTensor's caches. They are keyed by mesh: an equal mesh of another call, or of another rank, would get the
    process groups and the rank coordinates of this one."""
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):  # not in every torch
        getattr(debug, name, lambda: None)()
