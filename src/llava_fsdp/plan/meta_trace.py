"""Trace of live bytes in a forward and a backward pass, on the meta device: shapes, dtypes and lifetimes, no data.

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
    """A storage that was made or dropped, or a mark."""

    storage: int
    """Number of the storage; -1 for a mark."""
    change: int
    """Bytes, negative if dropped."""
    width: int = 0
    """Last dimension of the tensor that was made."""
    mark: str = ""


@dataclass
class Trace:
    """Events in order."""

    events: list[Event] = field(default_factory=list)
    gradients: dict[int, str] = field(default_factory=dict)
    """Names of the parameters whose gradients these storages became."""

    def mark(self, text: str) -> None:
        self.events.append(Event(-1, 0, mark=text))


class LiveBytes(TorchDispatchMode):
    """Records every storage that is made or dropped while this mode is active in a trace."""

    def __init__(self, trace: Trace, known: Iterator[torch.Tensor]):
        """
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
        """Return the number of a tensor's storage; None if it does not count."""
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
    """Replaces `scaled_dot_product_attention` by a fused kernel: the meta device would choose plain matrices.

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
    """Record each storage that becomes a gradient, and mark when it is complete."""

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
