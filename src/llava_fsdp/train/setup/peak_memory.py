"""Measure peak memory: allocated on the GPU, or resident in this process."""

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

from llava_fsdp.runtime.process.host import process_memory


class PeakMeter:
    """Measures the peak memory since its construction, minus the memory that was in use then: on CUDA the allocated and
    the reserved memory, on a CPU the resident memory without mapped files (such as the code of libraries)."""

    def __init__(self, device: torch.device):
        """Begin to measure this process's peak memory on `device`. Unused memory is given back first, so that it does
        not count."""
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.bytes_before = torch.cuda.memory_allocated(device)
            self.reserved_before = torch.cuda.memory_reserved(device)
        else:
            trim_heap()
            reset_peak_memory()
            self.bytes_before = process_memory("VmRSS") - process_memory("RssFile")

    def read(self) -> dict[str, int]:
        """Return the peak memory since this meter was made, minus what was in use at its making, in bytes:
        `max_memory_allocated` and `max_memory_reserved` on a GPU, `peak_resident` on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return {
                "max_memory_allocated": torch.cuda.max_memory_allocated(self.device) - self.bytes_before,
                "max_memory_reserved": torch.cuda.max_memory_reserved(self.device) - self.reserved_before,
            }
        # The peak of resident memory (VmHWM) includes mapped files, such as the code of libraries. Linux has no peak of
        # these alone, so their present size (RssFile) is subtracted.
        return {"peak_resident": max(0, process_memory("VmHWM") - process_memory("RssFile") - self.bytes_before)}


def trim_heap() -> None:
    """Make glibc return free memory to the system; does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak_memory() -> None:
    """Reset the peak of resident memory (VmHWM) to its present value (`man 5 proc`: clear_refs), if permitted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
