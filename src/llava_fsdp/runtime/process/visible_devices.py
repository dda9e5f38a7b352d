"""Find out which GPUs of a machine a process can see."""

from collections.abc import Sequence


def visible_gpus(gpus: Sequence[str], visible: str) -> list[tuple[str, str]]:
    """Parse the value of CUDA_VISIBLE_DEVICES in the same way as CUDA.

    Args:
        gpus: UUIDs of all GPUs of the machine, in nvidia-smi's order.
        visible: GPU indices, UUIDs, beginnings of UUIDs or UUIDs of MIG instances, separated by commas.

    Returns:
        (name in `visible`, UUID) of each visible GPU. If no UUID matches, the name is repeated.
    """
    pairs = []
    for name in (word.strip() for word in visible.split(",")):
        if not name or name == "-1":  # CUDA ignores everything after this
            break
        by_number = gpus[int(name)] if name.isdecimal() and int(name) < len(gpus) else None
        by_prefix = next((key for key in gpus if key.startswith(name)), None)
        pairs.append((name, by_number or by_prefix or name))
    return pairs
