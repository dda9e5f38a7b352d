"""What torch says of itself and of this machine's GPUs, as one line of JSON; each GPU is used once.

A process of its own (`python -m llava_fsdp.doctor.torch_probe`): a driver that hangs or crashes takes this one down.
"""

import json
from typing import Any

import torch


def main() -> None:
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    print(
        json.dumps({
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": nccl() if available else None,
            "available": available,
            "devices": [facts_of(index) for index in range(count)],
            "no_peers": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        })
    )  # fmt: skip


def nccl() -> str | None:
    try:
        from torch.cuda import nccl as own

        return ".".join(str(part) for part in own.version())
    except Exception:  # a build without it says so in many ways
        return None


def facts_of(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    error = ""
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if (ones @ ones).sum().item() != 64**3:
            error = "it computes wrong sums"
    except RuntimeError as problem:
        error = str(problem).splitlines()[0]
    return {
        "name": found.name,
        "capability": [found.major, found.minor],
        "memory": found.total_memory,
        "bf16": found.major >= 8,
        "error": error,
    }


if __name__ == "__main__":
    main()
