"""Which of a machine's GPUs a process sees. Imports nothing of ours."""

from collections.abc import Sequence


def visible_gpus(gpus: Sequence[str], visible: str) -> list[tuple[str, str]]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES.

    Args:
        gpus: UUIDs of all GPUs, in nvidia-smi's order.
        visible: indices, UUIDs or beginnings of them, with commas between; UUIDs of parts (MIG) too.

    Returns:
        Of each, what it is called there and its UUID; the name itself where it is none of `gpus`.
    """
    found = []
    for name in (own.strip() for own in visible.split(",")):
        if not name or name == "-1":  # CUDA stops there
            break
        by_number = gpus[int(name)] if name.isdecimal() and int(name) < len(gpus) else None
        by_prefix = next((key for key in gpus if key.startswith(name)), None)
        found.append((name, by_number or by_prefix or name))
    return found
