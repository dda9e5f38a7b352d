"""Transfer training steps from data worker processes to the rank's process through anonymous files in memory
(memfd_create).

torch transfers tensors through /dev/shm, which has 64 MiB in a Docker container by default: a worker that finds it full
dies or hangs. Memory files are limited by the memory of the machine or container alone. They are opened before the
workers are forked, so that no file descriptor has to be sent; a step takes one file, whatever its number of tensors.
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
"""Each tensor begins at a multiple of this many bytes, as in memory of torch's allocators."""
HAS_MEMORY_FILES = sys.platform.startswith("linux")


class Outbox:
    """The memory files of one data worker. Each contains a step in transfer to the rank's process, or is empty."""

    def __init__(self, files: int):
        """Create `files` empty memory files, closed when this object is deleted. OSError: too many files are open."""
        self.files: list[int] = []
        weakref.finalize(self, close, self.files).atexit = False  # not at exit: a thread may still be reading
        for _ in range(files):
            self.files.append(memory_file())

    def put(self, step: Step) -> Sent:
        """Write the tensors of a step to an empty file, and return what the rank needs to read them (`Sent`). Raise
        OSError if the system is out of memory."""
        file = next((file for file in self.files if not os.fstat(file).st_size), None)
        assert file is not None, "there are as many files as steps in transfer"
        size = 0

        def write(values: torch.Tensor) -> torch.Tensor:
            """Write the bytes of a tensor to the file, and return a tensor of its shape on the meta device."""
            nonlocal size
            if values.nbytes:  # an empty tensor may have a stride of 0, and then no view as bytes
                data = values.contiguous().flatten().view(torch.uint8)
                transfer_all(data, lambda rest, done: os.pwrite(file, rest, size + done))
            size += padded_size(values)
            return values.to("meta")

        try:
            return Sent(step.map(write), file, size)
        except OSError:
            os.ftruncate(file, 0)
            raise


@dataclass(frozen=True)
class Sent:
    """A step whose tensors are in a memory file, each at a multiple of ALIGNMENT bytes."""

    step: Step
    """The step with its tensors on the meta device."""
    file: int
    """Descriptor, the same number in the worker's and in the rank's process."""
    size: int
    """Total size of the tensors in bytes, including padding."""

    def receive(self, pin_memory: bool = False) -> Step:
        """Copy the step into memory of this process, page-locked with `pin_memory`, and empty the file. This must be
        called once, in the rank's process."""
        memory, begin = torch.empty(self.size, dtype=torch.uint8, pin_memory=pin_memory), 0
        written = memory[: os.fstat(self.file).st_size]
        transfer_all(written, lambda rest, done: os.preadv(self.file, [rest], done))
        os.ftruncate(self.file, 0)

        def read(values: torch.Tensor) -> torch.Tensor:
            """Return the next tensor of the memory; `values`, on the meta device, has its shape and dtype."""
            nonlocal begin
            tensor = memory[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
            begin += padded_size(values)
            return tensor

        return self.step.map(read)

    def pin_memory(self) -> Step:
        """Receive the step into page-locked memory, for asynchronous copies to a GPU; torch's DataLoader calls this in
        a thread."""
        return self.receive(pin_memory=True)


def padded_size(values: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a memory file: a multiple of ALIGNMENT."""
    return -(-values.nbytes // ALIGNMENT) * ALIGNMENT


def transfer_all(values: torch.Tensor, move: Callable[[memoryview, int], int]) -> None:
    """Call `move` until all bytes of a uint8 tensor on the CPU are transferred, because one system call transfers at
    most 2 GiB. `move`: function (remaining bytes, number of bytes already moved) -> number of bytes that it moved."""
    data, num_moved = values.numpy().data, 0
    while num_moved < len(data):
        moved = move(data[num_moved:], num_moved)
        assert moved > 0, "the file is shorter than what was written to it"
        num_moved += moved


def memory_file() -> int:
    """Create a memory file with the C library: a Python that was built with an old one lacks `os.memfd_create`."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.memfd_create(b"llava_fsdp-step", 1)  # 1: closed on exec
    if file < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return file


def close(files: list[int]) -> None:
    for file in files:
        os.close(file)
