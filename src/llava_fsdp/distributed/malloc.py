"""Set what glibc's allocator does with freed memory, and how many kernels oneDNN caches, for the whole process.

By default glibc maps blocks above a threshold one by one, and returns them to the system when they are freed. The
threshold rises to the largest such block that was freed, up to 32 MiB. Smaller blocks are on the heap, of which glibc
returns only free memory at the end. Other allocators are not changed.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SMALLEST, LARGEST = 128 * 2**10, 32 * 2**20
"""Block sizes, in bytes, from which glibc maps blocks one by one: its default, and the largest that it accepts."""
NEVER = -1
KERNELS = 256
"""Number of compiled kernels that oneDNN caches. A micro-batch needs fewer: a block's matrix products need some 30."""


def return_freed_memory() -> None:
    """Make glibc return large blocks to the system as soon as they are freed.

    FSDP's units of different sizes, gathered and freed in turn, leave holes in the heap: under zero3 half of the memory
    of a process, as measured. The price is time: the system must provide new pages for every large tensor.
    """
    set_thresholds(SMALLEST, SMALLEST)


def keep_freed_memory() -> None:
    """Make glibc keep free memory at the end of the heap instead of returning it to the system.

    Whether a step's memory lies there depends on earlier allocations. If it does, glibc returns it and gets it again
    in every step: up to 40,000 page faults and 5 % of the CPU time, as measured.
    """
    set_thresholds(LARGEST, NEVER)  # setting either threshold stops glibc from raising both


def set_thresholds(mmap: int, trim: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap)
        mallopt(M_TRIM_THRESHOLD, trim)


def limit_kernel_cache() -> None:
    """Let oneDNN keep at most `KERNELS` compiled kernels, unless the environment sets another number.

    It compiles one for every shape and keeps 1024 of them. Packed rows have new lengths in nearly every step: a process
    in bf16 on a CPU with AMX grew from 0.5 to 1.2 GB in 60 steps. Call it before the first operation: oneDNN reads the
    variable once (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))
