"""Activation checkpointing that keeps the inputs of blocks in host memory.

All other activations are computed again, because moving them takes longer. A block of a 7B Llama takes about 0.8
microseconds a token on an H100, in which PCIe 5 carries some 40 KB; its input has 8 KB, and all that autograd keeps
of it 100 to 200 (docs/memory.md).

On CUDA, a side stream copies to and from pinned memory: a block's input leaves while the block runs, and comes back
while the next block runs backward. Without CUDA the copies stay in host memory, which saves nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint


class HostInputs:
    """Saved-tensor hooks that copy the inputs of blocks to host memory, and fetch each one a block ahead of its use."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[Away] | None = None
        """The most recently offloaded input. Its device memory is still held, since its copy may be under way."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """The CUDA stream for copies, created when first needed, because the device may not exist before."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def pack(self, tensor: torch.Tensor) -> Away | torch.Tensor:
        """Begin to copy a block's input to host memory; tensors that are not activations are returned unchanged."""
        if not tensor.is_floating_point() or not tensor.is_contiguous() or isinstance(tensor, nn.Parameter):
            return tensor
        before = self._last() if self._last is not None else None
        away = Away(self, tensor.detach(), before)
        if before is not None:
            before.release()
        self._last = weakref.ref(away)
        return away

    def unpack(self, kept: Away | torch.Tensor) -> torch.Tensor:
        return kept.back() if isinstance(kept, Away) else kept


class Away:
    """An activation that is offloaded to host memory.

    Its device copy is freed once the copy to the host has finished, and made again for the backward pass.
    """

    def __init__(self, owner: HostInputs, tensor: torch.Tensor, before: Away | None):
        self.owner = owner
        self.before = weakref.ref(before) if before is not None else None
        self.here: torch.Tensor | None = tensor
        self.done: torch.Event | None = None
        """Event recorded after the latest copy, in either direction; None if nothing waits for a copy."""
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=owner.on_cuda)
        self.copy(self.host, tensor)
        if not owner.on_cuda:
            self.here = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor on the side stream, after all work that is queued on the main stream now."""
        if not self.owner.on_cuda:
            to.copy_(source)
            return
        stream = self.owner.stream
        stream.wait_stream(torch.cuda.current_stream(self.owner.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self.done = stream.record_event()

    def wait(self) -> None:
        """Let the main stream wait for the latest copy before its next work."""
        if self.done is not None:
            torch.cuda.current_stream(self.owner.device).wait_event(self.done)
            self.done = None

    def release(self) -> None:
        """Free the tensor's device memory. Only later work of the main stream, which waits for the copy, can reuse
        it."""
        self.wait()
        self.here = None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device. Its memory belongs to the main stream, so freeing it needs no
        waiting."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.owner.device, pin_memory=False)
            self.copy(self.here, self.host)

    def back(self) -> torch.Tensor:
        """Return the tensor on the device, and begin to fetch the previous block's input."""
        self.fetch()
        self.wait()
        tensor, self.here = self.here, None
        assert tensor is not None
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return tensor


class BlockFromHost(ActivationWrapper):
    """Wraps a block so that its input is kept in host memory, from which the block runs again in the backward pass."""

    def __init__(self, block: nn.Module, host: HostInputs):
        super().__init__(block)
        self.host = host

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # the hooks of `checkpoint` are inside ours, so that ours see only what it keeps: its positional arguments
        with saved_tensors_hooks(self.host.pack, self.host.unpack):
            return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)
