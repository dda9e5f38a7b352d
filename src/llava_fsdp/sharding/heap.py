"""What glibc does with memory that is freed; other systems' allocators are left as they are.

By itself it raises its threshold between its heap and pages of their own to the largest block that was ever freed, up
to 32 MiB, keeps what is freed below that, and gives back what is free at the heap's end. What is set here holds for the
life of a process.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SMALLEST, LARGEST = 128 * 2**10, 32 * 2**20
"""glibc's own first threshold, and the most that it takes."""
NEVER = -1
KERNELS = 256
"""More than a micro-batch of any model here needs: a block's products, forward and backward, are some 30 shapes."""


def return_freed_memory() -> None:
    """Give large blocks back to the system as soon as they are freed.

    Units of all sizes, gathered and freed in turn, leave holes in the heap: under zero3 half of what a process held,
    where this was measured. Every large tensor then costs the system fresh pages, and some time.
    """
    set_thresholds(SMALLEST, SMALLEST)


def keep_freed_memory() -> None:
    """Keep what is free at the heap's end.

    Whether a step's memory lies there depends on what was allocated first. Where it does, glibc gives it back and gets
    it anew in every step: up to 40,000 page faults and 5 % of the CPU seconds, where this was measured.
    """
    set_thresholds(LARGEST, NEVER)  # to set either also ends the other's growing


def set_thresholds(mmap: int, trim: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap)
        mallopt(M_TRIM_THRESHOLD, trim)


def limit_kernel_cache() -> None:
    """Let oneDNN keep at most `KERNELS` compiled kernels, unless the environment says how many.

    It compiles one for every shape and keeps 1024 of them. Packed rows have new lengths in nearly every step: a process
    in bf16 on a CPU with AMX grew from 0.5 to 1.2 GB in 60 steps. Call it before the first operation: oneDNN reads the
    variable once (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))
