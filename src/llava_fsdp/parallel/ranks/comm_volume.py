"""Count the bytes that ranks send to each other: in collectives (all-gather, reduce-scatter, ...) and messages."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {
    "all_gather": (
        "c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_into_tensor_coalesced_",
        "_c10d_functional::all_gather_into_tensor",
    ),
    "reduce_scatter": (
        "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_", "c10d::reduce_scatter_tensor_coalesced_",
        "_c10d_functional::reduce_scatter_tensor",
    ),
    "all_reduce": ("c10d::allreduce_", "c10d::allreduce_coalesced_", "_c10d_functional::all_reduce"),
    "all_to_all": ("c10d::alltoall_base_", "_c10d_functional::all_to_all_single"),
    "send": ("c10d::send",),
    "receive": ("c10d::recv_",),
}  # fmt: skip
KINDS = tuple(OPERATIONS)
COLLECTIVES = {name: kind for kind, names in OPERATIONS.items() for name in names}


class Traffic:
    """Counts of this rank's collectives: `calls`, `bytes` and `sent` for each kind, such as `all_gather`.

    `bytes` are those of whole tensors: the output of an all-gather, the input of the others. `sent` are the bytes that
    one of n ranks sends in a ring algorithm: (n - 1) / n of the whole tensor, and twice that for an all-reduce; all of
    a tensor that is sent to one other rank. Collectives of a single rank send nothing and are not counted.
    """

    def __init__(self) -> None:
        self.moved = {kind: {"calls": 0, "bytes": 0, "sent": 0} for kind in KINDS}

    def add(self, kind: str, payload: int, ranks: int) -> None:
        """Count one collective of a kind, such as `all_gather`. `payload`: bytes of the whole tensor. A rank sends
        (ranks - 1) / ranks of them (ring), twice that for an all-reduce, all for `send`, none for `receive`."""
        if ranks < 2:
            return
        passes = {"all_reduce": 2, "receive": 0}.get(kind, 1)
        sent = payload if kind == "send" else passes * payload * (ranks - 1) // ranks
        for key, value in (("calls", 1), ("bytes", payload), ("sent", sent)):
            self.moved[kind][key] += value


class CollectiveBytes(TorchDispatchMode):
    """Dispatch mode that adds up, in `traffic`, the bytes of each kind of collective issued while it is active.

    Raises:
        AssertionError: a collective is issued that is not in the table `COLLECTIVES`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    @property
    def moved(self) -> dict[str, dict[str, int]]:
        return self.traffic.moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation; if it is a collective, add its bytes. Fails on collectives that COLLECTIVES lacks."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's operations come here again with plain tensors
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in COLLECTIVES:
            sizes = [nbytes(args[0]), nbytes(args[1]) if len(args) > 1 else 0, nbytes(result)]
            # the larger one of input and output is the whole tensor
            self.traffic.add(COLLECTIVES[name], max(sizes), ranks_of(func, args))
        elif name.startswith(("c10d::", "_c10d_functional::")) and "barrier" not in name:
            assert not has_group(func), f"{name} is a collective that is not in the table"
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: otherwise torch would run compiled functions uncompiled while this mode is active."""
        return True


def ranks_of(func: Any, args: tuple) -> int:
    """Return the number of ranks in the process group of a collective, given as an operation of torch's dispatcher."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).size()
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value).size()
    raise AssertionError(f"{func} has no process group")


def has_group(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation has an argument for a process group, as collectives do."""
    return any(a.name in ("process_group", "group_name") for a in func._schema.arguments)


def nbytes(value: Any) -> int:
    """Return the size in bytes of a tensor, or of all tensors in nested lists; 0 for other values."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(nbytes(v) for v in value)
    return 0
