"""Trace the bytes alive in a forward and a backward pass on the meta device, which has shapes, dtypes and lifetimes but
no data.

Every operation that autograd and the modules run is seen as it is dispatched. A tensor's bytes count from the operation
that makes it until its storage is dropped, which is when a real pass would free it. Memory that a kernel allocates
inside itself is not seen. As `torch.distributed._tools.mem_tracker`, but needs no process group.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Event:
    """A storage that was allocated or freed, or a named mark between such events."""

    storage: int
    """Number of the storage; -1 for a mark."""
    change: int
    """Change of the bytes alive: the storage's size, negative if it was freed."""
    width: int = 0
    """Size of the last dimension of the tensor that was made."""
    mark: str = ""


@dataclass
class Trace:
    """The storages that a pass allocated and freed, and marks between them, in the order of time."""

    events: list[Event] = field(default_factory=list)
    gradients: dict[int, str] = field(default_factory=dict)
    """Storage number of each gradient, and the name of its parameter."""

    def mark(self, text: str) -> None:
        self.events.append(Event(-1, 0, mark=text))


class LiveBytes(TorchDispatchMode):
    """Adds to a trace every storage that is allocated or freed while this dispatch mode is active."""

    def __init__(self, trace: Trace, known: Iterator[torch.Tensor]):
        """Create a mode that writes events into `trace` while it is active.

        Args:
            known: tensors that exist before, which do not count.
        """
        super().__init__()
        self.trace = trace
        self.numbers: dict[int, int] = {}  # by id of the storage object, which lives as long as its storage
        self.alive: dict[int, Any] = {}
        self.known = {id(t.untyped_storage()): t for t in known}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return made

    def see(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, new for a new storage; None for tensors that existed before."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.known:
            return None
        if key not in self.numbers:
            number = self.numbers[key] = self.count
            self.count += 1
            size = storage.nbytes()
            self.trace.events.append(Event(number, size, tensor.shape[-1] if tensor.ndim else 0))
            self.alive[key] = weakref.ref(storage, lambda _: self.drop(key, number, size))
        return self.numbers[key]

    def drop(self, key: int, number: int, size: int) -> None:
        self.trace.events.append(Event(number, -size))
        del self.numbers[key], self.alive[key]


class FuseAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` on the meta device by a fused kernel, because torch would otherwise trace
    the unfused one, which needs more memory.

    All fused kernels keep the same: queries, keys, values, the output, and a float32 for each head and token
    (FlashAttention, arXiv 2205.14135, section 3.1).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(*args[:3], 0.0, bool((kwargs or {}).get("is_causal")))[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def collect_gradients(model: nn.Module, live: LiveBytes, trace: Trace) -> Iterator[None]:
    """Record the storage of each parameter's gradient, and mark in the trace when the gradient is complete."""

    def recorder(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            number = live.see(parameter.grad)
            assert number is not None
            trace.gradients[number] = name
            trace.mark(f"gradient {name}")

        return hook

    handles = [
        p.register_post_accumulate_grad_hook(recorder(n)) for n, p in model.named_parameters() if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
