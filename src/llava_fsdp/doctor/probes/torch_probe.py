"""Print what torch reports about itself and the GPUs as one line of JSON, after using each GPU once. Runs in a separate
process, as a broken driver may hang or crash it."""

import json
from typing import Any

import torch

from llava_fsdp.runtime.process.host import gpu_has_bf16


def main() -> None:
    """Print what torch reports about itself and the GPUs as one JSON object, with the keys of `gpus.TorchFacts`."""
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    print(
        json.dumps({
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": nccl_version() if available else None,
            "available": available,
            "devices": [facts_of(index) for index in range(count)],
            "no_peers": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        })
    )  # fmt: skip


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch was built with, such as `2.27.3`; None without NCCL."""
    try:
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()))
    except Exception:  # a build without NCCL raises various errors
        return None


def facts_of(index: int) -> dict[str, Any]:
    """Return a GPU's properties. `error` says why it computes nothing or wrong products; empty if it works."""
    device = torch.cuda.get_device_properties(index)
    error = ""
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if (ones @ ones).sum().item() != 64**3:
            error = "it computes wrong products"
    except RuntimeError as problem:
        error = str(problem).splitlines()[0]
    return {
        "name": device.name,
        "capability": [device.major, device.minor],
        "memory": device.total_memory,
        "bf16": gpu_has_bf16(device.major, torch.version.hip is not None),
        "error": error,
    }


if __name__ == "__main__":
    main()
