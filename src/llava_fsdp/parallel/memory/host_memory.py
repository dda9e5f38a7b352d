"""Allocate tensors outside of torch's allocators: in anonymous memory, which may be pinned, or in a mapped file.

The files have no name (Linux `O_TMPFILE`; elsewhere the name is removed before anything is written). So no other
process can open them, and their disk space is freed when the process ends, even if it is killed. They are never
explicitly flushed to disk, because nothing reads them after the process has ended.
"""

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from llava_fsdp.runtime.errors import OffloadError

PAGE = mmap.PAGESIZE
GIB = 1 << 30


class Arena:
    """A region of zeroed host memory, or a mapped file, in which each tensor has memory pages of its own."""

    def __init__(self, nbytes: int, folder: Path | None = None, pin: bool = False):
        """Allocate anonymous memory, or create and map a file.

        Args:
            nbytes: at least the sum of `Arena.room` over all tensors that `take` will allocate.
            folder: folder of the file, which has no name in it; None means anonymous memory.
            pin: pin the anonymous memory, for asynchronous copies to and from the GPU. torch's own pinned allocator
                would round every tensor up to a power of two.

        Raises:
            OffloadError: memory or disk space is not enough, or the memory cannot be mapped or pinned.
        """
        self.size = max(nbytes, PAGE)
        self.is_file_backed = folder is not None
        self.taken = 0
        try:
            self.memory = (
                Memory(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if folder is None
                else mapped_file(self.size, folder)
            )
        except OSError as error:
            where = folder or "host memory"
            reason = error.strerror or error
            raise OffloadError(f"offload needs {self.size / GIB:.3g} GiB of {where}: {reason}") from error
        if folder is None and hasattr(mmap, "MADV_HUGEPAGE"):
            # 512 times fewer page faults; before memory is pinned, since pinning makes the pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.base = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        if pin:
            self.memory.register(self.base, self.size)

    @staticmethod
    def room(shape: Iterable[int], dtype: torch.dtype) -> int:
        """Return the bytes that a tensor takes in an arena: its size rounded up to whole memory pages."""
        return -(-math.prod(shape) * dtype.itemsize // PAGE) * PAGE

    def take(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor with a storage of its own, so that saving or copying it does not include other tensors."""
        shape = tuple(shape)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        begin = self.taken
        self.taken += self.room(shape, dtype)
        assert self.taken <= self.size, f"an arena of {self.size} bytes was asked for {self.taken}"
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin).view(shape)

    def fetch(self, tensor: torch.Tensor) -> None:
        """Read a tensor of a mapped file from disk before it is used; return when it has been read."""
        assert self.is_file_backed
        begin, length = self.pages(tensor)
        if length:
            self.memory.madvise(mmap.MADV_WILLNEED, begin, length)
            # reads one byte of every page, so that page faults happen here; torch releases the GIL during the sum
            torch.frombuffer(self.memory, dtype=torch.uint8, count=length, offset=begin)[::PAGE].sum()

    def release(self, tensor: torch.Tensor) -> None:
        """Remove a tensor of a mapped file from this process's memory. It can be read again from page cache or disk."""
        assert self.is_file_backed, "anonymous memory would be lost"
        begin, length = self.pages(tensor)
        if length:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def release_all(self) -> None:
        """Remove all tensors of a mapped file from this process's memory. Their data can be read again."""
        assert self.is_file_backed
        self.memory.madvise(mmap.MADV_DONTNEED, 0, self.size)

    def owns(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.base < self.size

    def pages(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return byte offset in the arena and length of the memory pages that hold a contiguous tensor."""
        if not tensor.numel():
            return 0, 0
        begin = tensor.data_ptr() - self.base
        end = begin + tensor.nbytes
        assert 0 <= begin and end <= self.size, "a tensor of another arena"
        first = begin // PAGE * PAGE
        return first, min(self.size, -(-end // PAGE) * PAGE) - first


class Memory(mmap.mmap):
    """A memory mapping that can be pinned for CUDA, and is unpinned before it is unmapped. Tensors keep it alive."""

    registered: int | None = None
    """Address of the pinned memory; None if it is not pinned."""

    def register(self, base: int, size: int) -> None:
        """Pin the mapping at the address `base` for CUDA. Raises OffloadError if CUDA refuses."""
        code = torch.cuda.cudart().cudaHostRegister(base, size, 0)  # pyright: ignore[reportOptionalMemberAccess]
        if int(code) != 0:
            raise OffloadError(
                f"{size / GIB:.3g} GiB of host memory could not be pinned (CUDA error {int(code)}); offload=nvme "
                "pins none"
            )
        self.registered = base

    def __del__(self) -> None:
        if self.registered is not None:
            with contextlib.suppress(Exception):  # CUDA may already be shut down when the interpreter ends
                torch.cuda.cudart().cudaHostUnregister(self.registered)  # pyright: ignore[reportOptionalMemberAccess]


def mapped_file(size: int, folder: Path) -> Memory:
    """Create a file without a name and map it into memory. Raises OffloadError if the disk has too little room."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = nameless_file(folder)
    try:
        disk = os.fstatvfs(descriptor)
        free = disk.f_bavail * disk.f_frsize
        if free < size:
            raise OffloadError(
                f"offload=nvme needs {size / GIB:.3g} GiB more in {folder}, where {free / GIB:.3g} GiB are free; give "
                "a folder on a larger local disk: offload.folder=DIR"
            )
        # all disk blocks are reserved now: if the disk were full at a later page fault, SIGBUS would end the process
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        return Memory(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise OffloadError(
            f"offload=nvme cannot map a file of {size / GIB:.3g} GiB in {folder} ({error.strerror or error}); give a "
            "folder on a local disk with that much room: offload.folder=DIR"
        ) from error
    finally:
        os.close(descriptor)  # the mapping has its own copy of the descriptor


def nameless_file(folder: Path) -> int:
    """Create a file without a name, which is deleted when nothing uses it any more. Return its descriptor."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (OSError, AttributeError):  # the filesystem or the operating system has no O_TMPFILE
        descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=folder)
        os.unlink(name)
        return descriptor
