"""Trace how many bytes of tensors exist at each moment of a forward and a backward pass. The passes run on the meta
device, where tensors have shapes, dtypes and lifetimes but no data.

A tensor's bytes count from the operation that makes it until its storage is dropped, which is when a real pass would
free it. Memory inside a kernel is not seen. `torch.distributed._tools.mem_tracker` does the same, but needs a process
group.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from llava_fsdp.model.packed_attention.dispatch_mode import CompilingMode


@dataclass
class Event:
    """A tensor storage was allocated or freed, or a named mark was set."""

    storage: int
    """Id within the trace; -1 for a mark."""
    change: int
    """Size in bytes, negative if it was freed; 0 for a mark."""
    width: int = 0
    """Last dimension of the tensor for which the storage was allocated; else 0."""
    mark: str = ""


@dataclass
class Trace:
    """Events of a forward and backward pass in the order of time."""

    events: list[Event] = field(default_factory=list)
    gradients: dict[int, str] = field(default_factory=dict)
    """Id of a storage -> name of the parameter whose gradient it holds."""

    def mark(self, text: str) -> None:
        self.events.append(Event(-1, 0, mark=text))


class LiveBytes(CompilingMode):
    """Dispatch mode that records each storage allocated or freed while it is active, but none of `known` tensors."""

    def __init__(self, trace: Trace, known: Iterator[torch.Tensor]):
        """Begin with an empty record. `known`: tensors that exist before the pass, whose storages are not recorded."""
        super().__init__()
        self.trace = trace
        # all keys are ids of storage objects, which live as long as their storages
        self.numbers: dict[int, int] = {}
        """{key: id within the trace}, of the storages that are alive."""
        self.alive: dict[int, Any] = {}
        """Weak references to these storages, kept because their callbacks record that a storage is freed."""
        self.known = {
            id(t.untyped_storage()): t for t in known
        }  # keeps the tensors, so that no new storage has their id
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the new storages among its results as allocated."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.record_storage(tensor)
        return made

    def record_storage(self, tensor: torch.Tensor) -> int | None:
        """Return the storage's id in the trace; None if it existed before. A new storage is recorded as allocated."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.known:
            return None
        if key not in self.numbers:
            number = self.numbers[key] = self.count
            self.count += 1
            size = storage.nbytes()
            # (id, bytes, last dimension: by it the logits, which are as wide as the vocabulary, are found)
            self.trace.events.append(Event(number, size, tensor.shape[-1] if tensor.ndim else 0))
            self.alive[key] = weakref.ref(storage, lambda _: self.drop(key, number, size))
        return self.numbers[key]

    def drop(self, key: int, number: int, size: int) -> None:
        self.trace.events.append(Event(number, -size))
        del self.numbers[key], self.alive[key]


class GroupedProduct(torch.autograd.Function):
    """The product of groups of rows, [rows, in], with the matrix of each group, [groups, in, out]: `torch._grouped_mm`
    on the meta device, where torch's own takes only bf16 and some sizes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(len(rows), matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return gradients without values, which only allocate memory; None for an input that needs none."""
        return tuple(
            tensor.new_empty(tensor.shape) if needed else None
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )


def fused_attention(*args: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` on the meta device as a fused kernel does; torch would trace the unfused
    one, which needs more memory. All fused kernels keep the same tensors for the backward pass: queries, keys, values,
    the output, and a float32 for each head and token (FlashAttention, arXiv 2205.14135, section 3.1)."""
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype is torch.bool:  # it is converted, and kept for the backward pass
        mask = args[0].new_zeros(mask.shape)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(*args[:3], 0.0, bool(options.get("is_causal")), attn_mask=mask)[0]


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    return GroupedProduct.apply(rows, matrices)


STAND_INS: dict[Any, Callable[..., torch.Tensor]] = {
    nn.functional.scaled_dot_product_attention: fused_attention,
    torch._grouped_mm: grouped_product,
}
"""Functions that are replaced on the meta device."""


class FusedKernels(TorchFunctionMode):
    """Function mode that replaces the functions in STAND_INS."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (STAND_INS.get(func) or func)(*args, **(kwargs or {}))


def split_like_inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Split a graph of torch.compile into a forward and a backward graph, which keep the same tensors as with Inductor,
    and return a function that runs them operation by operation, on any device."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    # Replace attention and products of experts by functions that allocate what fused kernels do. The function mode that
    # does this elsewhere does not reach the parts of a graph that torch's checkpoint runs again.
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.target = STAND_INS.get(node.target, node.target)
            part.recompile()

    def run_uncompiled(part: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(part.forward)

    divide = aot_autograd(
        fw_compiler=run_uncompiled,
        bw_compiler=run_uncompiled,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return divide(graph, inputs)


@contextmanager
def collect_gradients(model: nn.Module, live: LiveBytes, trace: Trace) -> Iterator[None]:
    """Context manager: records the storage of each parameter's gradient, and marks when the gradient is complete."""

    def recorder(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # the layer has added it to a sum, within a product
                return
            number = live.record_storage(parameter.grad)  # of its storage
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
