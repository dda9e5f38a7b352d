"""A step's way from a worker process to its rank: through files in memory that have no name and no place in /dev/shm.

torch hands tensors over in /dev/shm, which Docker makes 64 MiB unless told: a worker that finds it full dies or waits.
Here the only limit is the memory of the machine or container. The files are opened before the workers are forked, so
that no file descriptor has to be sent, and a step of any number of tensors takes one.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llava_fsdp.data.batching.batch import Step

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as memory of torch's own allocators does."""
HAS_MEMORY_FILES = sys.platform.startswith("linux")


class Outbox:
    """One worker's files: each holds one step on its way. An empty file is free."""

    def __init__(self, files: int):
        """
        Args:
            files: the most steps that are on their way at once.

        Raises:
            OSError: too many files are open.
        """
        self.files: list[int] = []
        weakref.finalize(self, close, self.files).atexit = False  # by the system, then: a thread may still read
        for _ in range(files):
            self.files.append(memory_file())

    def put(self, step: Step) -> Sent:
        """Write the tensors of a step to a free file; called in the worker.

        Raises:
            OSError: the system has no more memory to give.
        """
        file = next((file for file in self.files if not os.fstat(file).st_size), None)
        assert file is not None, "as many files as steps on their way"
        size = 0

        def write(values: torch.Tensor) -> torch.Tensor:
            nonlocal size
            if values.nbytes:  # an empty tensor may have a stride of 0, and then no view as bytes
                data = values.contiguous().flatten().view(torch.uint8)
                each_byte(data, lambda rest, done: os.pwrite(file, rest, size + done))
            size += room(values)
            return values.to("meta")

        try:
            return Sent(step.map(write), file, size)
        except OSError:
            os.ftruncate(file, 0)
            raise


@dataclass(frozen=True)
class Sent:
    """A step whose tensors lie in a file, one after the other, each from a multiple of `ALIGNMENT` bytes on."""

    step: Step
    """With tensors that have a type and a shape alone, on the device `meta`."""
    file: int
    """Its descriptor, the same in the worker and in the rank."""
    size: int
    """Bytes."""

    def receive(self, pin_memory: bool = False) -> Step:
        """The step, in memory of this process; its file is free again. Called once, in the rank."""
        memory, begin = torch.empty(self.size, dtype=torch.uint8, pin_memory=pin_memory), 0
        written = memory[: os.fstat(self.file).st_size]
        each_byte(written, lambda rest, done: os.preadv(self.file, [rest], done))
        os.ftruncate(self.file, 0)

        def cut(values: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            found = memory[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
            begin += room(values)
            return found

        return self.step.map(cut)

    def pin_memory(self) -> Step:
        """In page-locked memory, so that copies to a GPU need not wait; the DataLoader calls this, in a thread."""
        return self.receive(pin_memory=True)


def room(values: torch.Tensor) -> int:
    """Bytes from where a tensor begins in a file to where the next one does."""
    return -(-values.nbytes // ALIGNMENT) * ALIGNMENT


def each_byte(values: torch.Tensor, move: Callable[[memoryview, int], int]) -> None:
    """Moves all bytes of a uint8 tensor; the system moves 2 GiB at once at most.

    Args:
        move: (the bytes that remain, how many went before) -> how many of them were moved.
    """
    data, done = values.numpy().data, 0
    while done < len(data):
        moved = move(data[done:], done)
        assert moved > 0, "files have the bytes that were written"
        done += moved


def memory_file() -> int:
    """The descriptor of a new, empty file in memory, which forked processes share.

    By the C library itself, which torch's wheels need in a version that has it: `os.memfd_create` is missing where
    Python was built against an older one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    close_on_exec = 1
    file = libc.memfd_create(b"llava_fsdp-step", close_on_exec)
    if file < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return file


def close(files: list[int]) -> None:
    for file in files:
        os.close(file)
