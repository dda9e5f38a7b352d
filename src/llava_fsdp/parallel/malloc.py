"""Set for this process how torch's CUDA allocator makes segments, what glibc's allocator does with freed memory, and
how many kernels oneDNN caches.

By default glibc maps each block of memory above a threshold separately, and returns such a block to the system when it
is freed. The threshold rises to the size of the largest mapped block that was freed, up to 32 MiB. Smaller blocks are
on the heap, and only free memory at the heap's end goes back to the system. Other allocators are not affected.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SMALLEST, LARGEST = 128 * 2**10, 32 * 2**20
"""Least (glibc's default) and greatest bytes of the threshold above which glibc maps a block separately."""
NEVER = -1
"""Trim threshold with which glibc never returns free memory at the heap's end."""
KERNELS = 256
"""Maximum number of compiled kernels in oneDNN's cache. The matrix products of a block use about 30."""


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's CUDA allocator; the first is the newer name."""


def extend_segments() -> None:
    """Make torch's CUDA allocator extend its segments (ranges of reserved memory) instead of adding new ones, unless
    the user has set its environment variable. Must be called before this process uses the GPU.

    Each packed row has another length, and each length asks for blocks of other sizes. Free parts of segments that
    cannot grow are then often too small for the next row.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def return_freed_memory() -> None:
    """Make glibc return each block of 128 KiB or more to the system as soon as it is freed.

    Otherwise the heap gets holes, because FSDP gathers and frees units of different sizes in turn: with zero3, half of
    a process's memory was measured to be holes. This takes time, as every large tensor needs new pages.
    """
    set_thresholds(SMALLEST, SMALLEST)


def keep_freed_memory() -> None:
    """Make glibc keep free memory at the end of the heap instead of returning it to the system.

    By default, depending on earlier allocations, glibc may return a step's memory to the system and request it again in
    every step. This was measured to cost up to 40,000 page faults per step and 5 % of the CPU time.
    """
    set_thresholds(LARGEST, NEVER)  # setting either threshold stops glibc from raising both by itself


def set_thresholds(mmap: int, trim: int) -> None:
    """Set two thresholds of glibc, in bytes; without glibc, do nothing. A block of memory above `mmap` is mapped
    separately; free memory above `trim` at the end of the heap is returned to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap)
        mallopt(M_TRIM_THRESHOLD, trim)


def limit_kernel_cache() -> None:
    """Make oneDNN cache at most `KERNELS` compiled kernels, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY is set.

    oneDNN compiles a kernel for every shape and by default caches 1024 kernels. Rows of packed samples have new lengths
    in nearly every step, so that a process in bf16 on a CPU with AMX grew from 0.5 to 1.2 GB in 60 steps. To be called
    before the first torch operation, because oneDNN reads the variable only once
    (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))
