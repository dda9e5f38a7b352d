"""Where a step would make the host wait for a GPU, seen on the CPU."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten.equal, aten.is_nonzero,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.bincount,
}  # fmt: skip
"""Operations whose result, or its size, the host has to know."""
READING = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
    torch.tensor,
    torch.as_tensor,
}
"""Copies from the device or onto it that wait; on the CPU they are none, and no operation is dispatched."""


class HostWaits:
    """Counts, by the line of our code, what waits while it is active.

    A copy that does not wait (`non_blocking=True`) is none, in either direction.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> HostWaits:
        self._stack.enter_context(Functions(self))
        self._stack.enter_context(Operations(self))
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def add(self, what: object) -> None:
        own = [
            f for f in traceback.extract_stack() if "/src/llava_fsdp/" in f.filename
        ]  # a clone may have this name, too
        where = f"{own[-1].filename.rpartition('/')[2]} {own[-1].name}" if own else "?"
        self.seen[f"{where}: {what}"] += 1


class Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and any(
            isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1])
        )
        if packet in WAITING or by_mask:
            self.waits.add(packet)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = (
            func is torch.Tensor.to and not kwargs.get("non_blocking") and "cpu" in (*args[1:], kwargs.get("device"))
        )
        if func in READING or to_host:
            self.waits.add(getattr(func, "__name__", func))
        return func(*args, **kwargs)
