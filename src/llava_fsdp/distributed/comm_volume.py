"""Bytes that ranks exchange, counted as their collectives are issued."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
}


class Traffic:
    """Collectives by kind: how many, of how many bytes, and how many of these a rank sends.

    `bytes` is the whole tensor of the collective: what an all-gather gives, what a reduce-scatter or an all-reduce
    takes. `sent` is what a rank sends if it runs as a ring over its n ranks: (n - 1) / n of it, twice that for an
    all-reduce. A collective of one rank moves nothing.
    """

    def __init__(self) -> None:
        self.moved = {kind: {"calls": 0, "bytes": 0, "sent": 0} for kind in KINDS}

    def add(self, kind: str, payload: int, ranks: int) -> None:
        if ranks < 2:
            return
        passes = 2 if kind == "all_reduce" else 1
        for key, value in (("calls", 1), ("bytes", payload), ("sent", passes * payload * (ranks - 1) // ranks)):
            self.moved[kind][key] += value


class CollectiveBytes(TorchDispatchMode):
    """Counts the collectives that are issued while it is active.

    Raises:
        AssertionError: a collective that is not in the table.
    """

    def __init__(self, traffic: Traffic | None = None) -> None:
        super().__init__()
        self.traffic = traffic or Traffic()

    @property
    def moved(self) -> dict[str, dict[str, int]]:
        return self.traffic.moved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the collectives inside of it come back here
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in COLLECTIVES:
            sizes = [nbytes(args[0]), nbytes(args[1]) if len(args) > 1 else 0, nbytes(result)]
            # the gathered or the not yet scattered side; equal sides for an all-reduce
            self.traffic.add(COLLECTIVES[name], max(sizes), ranks_of(func, args))
        elif name.startswith(("c10d::", "_c10d_functional::")) and "barrier" not in name:
            assert not has_group(func), f"{name} is a collective that nobody has taught us to count"
        return result


def ranks_of(func: Any, args: tuple) -> int:
    """How many ranks take part in a collective."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value).size()
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value).size()
    raise AssertionError(f"{func} has no process group")


def has_group(func: torch._ops.OpOverload) -> bool:
    return any(a.name in ("process_group", "group_name") for a in func._schema.arguments)


def nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(nbytes(v) for v in value)
    return 0
