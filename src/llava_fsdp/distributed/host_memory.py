"""Memory for tensors outside of torch's allocators: anonymous, pinned where asked; or that of a file.

A file has no name (Linux `O_TMPFILE`; elsewhere its name is taken away before it gets a byte), so that no other process
opens it, no later run reads it, and its space is free again when the process ends, however it ends. Nothing is ever
flushed: what is in it need not outlive the process, and the kernel writes pages back when it wants their memory.
"""

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.runtime.errors import OffloadError

PAGE = mmap.PAGESIZE
GIB = 1 << 30


class Arena:
    """A stretch of memory that tensors are cut from, each beginning on a page of its own; it begins as zeros."""

    def __init__(self, nbytes: int, folder: Path | None = None, pin: bool = False):
        """
        Args:
            nbytes: at least the sum of `room` over all tensors that will be taken.
            folder: of the file; None: anonymous memory.
            pin: lock anonymous memory for copies to and from the GPU that nothing waits for. Registered instead of
                taken from torch's pinned allocator, which rounds every tensor up to a power of two.

        Raises:
            OffloadError: there is no room, or no way to map it.
        """
        self.size = max(nbytes, PAGE)
        self.of_file = folder is not None
        self.taken = 0
        try:
            self.memory = anonymous(self.size) if folder is None else file_mapped(self.size, folder)
        except OSError as error:
            what = "host memory" if folder is None else f"{folder}"
            raise OffloadError(
                f"offload needs {self.size / GIB:.3g} GiB of {what}, and the system says: {error.strerror or error}"
            ) from error
        self.base = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        if pin:
            self.memory.register(self.base, self.size)

    @staticmethod
    def room(shape: Iterable[int], dtype: torch.dtype) -> int:
        """Bytes that a tensor takes of an arena: its own, rounded up to a page."""
        nbytes = math.prod(shape) * dtype.itemsize
        return -(-nbytes // PAGE) * PAGE

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own, so that nobody copies it to be rid of its neighbours."""
        shape = tuple(shape)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        begin = self.taken
        self.taken += self.room(shape, dtype)
        assert self.taken <= self.size, f"an arena of {self.size} bytes was asked for {self.taken}"
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin).view(shape)

    def fetch(self, tensor: torch.Tensor) -> None:
        """Read a tensor of a file into memory, ahead of its use; returns when it is there."""
        assert self.of_file
        begin, length = self.stretch(tensor)
        if length:
            self.memory.madvise(mmap.MADV_WILLNEED, begin, length)
            # one byte of every page: faults are taken here, and torch holds no lock meanwhile
            torch.frombuffer(self.memory, dtype=torch.uint8, count=length, offset=begin)[::PAGE].sum()

    def release(self, tensor: torch.Tensor) -> None:
        """This process is done with a tensor of a file for now; its pages stay in the system's cache, or go to disk."""
        assert self.of_file, "the pages of anonymous memory would come back as zeros"
        begin, length = self.stretch(tensor)
        if length:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def release_all(self) -> None:
        assert self.of_file
        self.memory.madvise(mmap.MADV_DONTNEED, 0, self.size)

    def owns(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.base < self.size

    def stretch(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Where the pages of a contiguous tensor begin, and how long they are."""
        if not tensor.numel():
            return 0, 0
        begin = tensor.data_ptr() - self.base
        end = begin + tensor.nbytes
        assert 0 <= begin and end <= self.size, "a tensor of another arena"
        first = begin // PAGE * PAGE
        return first, min(self.size, -(-end // PAGE) * PAGE) - first


class Memory(mmap.mmap):
    """Mapped memory, unregistered before it is unmapped. Tensors hold it."""

    registered: int | None = None

    def register(self, base: int, size: int) -> None:
        """Raises OffloadError where CUDA pins no more."""
        code = cuda_runtime().cudaHostRegister(base, size, 0)
        if int(code) != 0:
            raise OffloadError(
                f"{size / GIB:.3g} GiB of host memory could not be pinned (CUDA error {int(code)}); offload=nvme needs "
                "none pinned"
            )
        self.registered = base

    def __del__(self) -> None:
        if self.registered is not None:
            with contextlib.suppress(Exception):  # CUDA may be gone when the interpreter ends
                cuda_runtime().cudaHostUnregister(self.registered)


def cuda_runtime() -> Any:
    return torch.cuda.cudart()


def anonymous(size: int) -> Memory:
    return Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def file_mapped(size: int, folder: Path) -> Memory:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = nameless_file(folder)
    try:
        found = os.fstatvfs(descriptor)
        free = found.f_bavail * found.f_frsize
        if free < size:
            raise OffloadError(
                f"offload=nvme needs {size / GIB:.3g} GiB more in {folder}, where {free / GIB:.3g} GiB are free; give "
                "a folder on a larger local disk: offload.folder=DIR"
            )
        # every block now: a page that finds the disk full later would end the process with SIGBUS
        getattr(os, "posix_fallocate", truncate)(descriptor, 0, size)
        return Memory(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise OffloadError(
            f"offload=nvme cannot map a file of {size / GIB:.3g} GiB in {folder} ({error.strerror or error}); give a "
            "folder on a local disk with that much room: offload.folder=DIR"
        ) from error
    finally:
        os.close(descriptor)  # the mapping has its own


def truncate(descriptor: int, begin: int, size: int) -> None:
    """Where there is no `posix_fallocate`: a file of holes."""
    os.ftruncate(descriptor, begin + size)


def nameless_file(folder: Path) -> int:
    """A descriptor of a new file that no folder lists."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (OSError, AttributeError):  # the filesystem, or the system, has no such files
        descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=folder)
        os.unlink(name)
        return descriptor
