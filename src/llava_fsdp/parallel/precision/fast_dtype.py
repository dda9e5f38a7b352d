"""Choose the compute dtype of `precision=auto`, and warn of a dtype for which a device has no instructions."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from llava_fsdp.config import Config, DType
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.runtime.process.host import cpu_has_bf16, gpu_has_bf16

C = TypeVar("C", bound=Config)
ROWS, WIDTHS, REPEATS = 32, (576, 1536), 2
"""The linear layer whose time is measured: rows of its input, widths of input and output; and how often."""


def has_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions for bf16. Emulated bf16 is many times slower than fp32."""
    if device.type == "cuda":
        return gpu_has_bf16(torch.cuda.get_device_capability(device)[0], torch.version.hip is not None)
    return cpu_has_bf16()


def settle_precision(cfg: C, able: Sequence[bool], kind: str, recorded: DType | None = None) -> tuple[C, str | None]:
    """Replace every `auto` in `precision` by a dtype, the same on all ranks: bf16 where the devices of all have
    instructions for it, else fp32. Also return a line with the choice and its reason; None if there was no `auto`.

    Args:
        able: for each rank, whether its device has instructions for bf16.
        kind: cuda or cpu.
        recorded: compute dtype of the run that is resumed; None: no run is resumed.
    """
    if cfg.precision.param_dtype is not DType.auto:
        return cfg, None
    lacking = [rank for rank, has in enumerate(able) if not has]
    device = "the GPU" if kind == "cuda" else "the CPU"
    chosen, reason = DType.bf16, f"{device} has instructions for it"
    if cfg.precision.needs_bf16:
        reason = "another key of precision needs it"
    elif recorded is not None:
        chosen, reason = recorded, "as in the run that is resumed"
    elif len(lacking) < len(able) and lacking:
        chosen = DType.fp32
        reason = f"the devices of ranks {lacking} have no instructions for bf16, and all ranks take the same dtype"
    elif lacking:
        chosen, reason = DType.fp32, f"{device} has no instructions for bf16"
        reason += "; precision=fp16, with a loss scale, is faster there" if kind == "cuda" else ""
    settled = replace(cfg, precision=cfg.precision.settled(chosen))
    return settled, f"auto: precision.param_dtype={chosen.value}: {reason}"


def slow_dtype(cfg: Config, device: torch.device, able: bool) -> str | None:
    """Return a warning if a device without instructions for the compute dtype is slower in it than in fp32, as a short
    measurement shows; else None. `able` says whether it has instructions for bf16."""
    dtype = cfg.precision.param_dtype
    if dtype is DType.fp32 or (dtype is DType.bf16 and able) or (dtype is DType.fp16 and device.type == "cuda"):
        return None
    factor = slowdown(DTYPES[dtype], device)
    if factor <= 1:
        return None
    name, better = ("GPU", "fp16 or fp32") if device.type == "cuda" else ("CPU", "fp32")
    return (
        f"precision.param_dtype={dtype.value} is emulated on this {name}: a linear layer takes {factor:.1f} times as "
        f"long as in fp32; choose precision={better}"
    )


def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Measure how many times as long a linear layer takes in a dtype as in fp32, forward and backward. Takes some
    milliseconds, or a tenth of a second where the dtype is emulated. Draws no random numbers."""
    return seconds_of(dtype, device) / seconds_of(torch.float32, device)


def seconds_of(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of the fastest of `REPEATS` forward and backward passes of a linear layer."""
    width, wide = WIDTHS
    x = torch.ones(ROWS, width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones(wide, width, dtype=dtype, device=device, requires_grad=True)
    found = []
    for _ in range(1 + REPEATS):  # the first makes the kernels
        started = time.perf_counter()
        torch.autograd.grad(nn.functional.linear(x, weight).sum(), [x, weight])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[1:])
