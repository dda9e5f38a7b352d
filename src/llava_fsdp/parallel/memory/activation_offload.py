"""Activation checkpointing that keeps the inputs of blocks in host memory.

All other activations of a block are computed again in the backward pass, because moving them would take longer: on an
H100, a block of a 7B Llama takes about 0.8 microseconds per token, and in that time PCIe 5 transfers about 40 KB. The
block's input has 8 KB per token, and all activations that autograd would keep of a block have 100 to 200 KB per token
(docs/memory.md).

On CUDA, a side stream copies to and from pinned memory: a block's input is copied to the host while the block runs
forward, and back to the device while the next block runs backward. Without CUDA the copies stay in host memory, which
saves nothing.
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
    """Hooks for autograd's saved tensors, `pack` and `unpack`, which move the inputs of a model's blocks to host
    memory. A block's input is copied back to the device while the next block runs backward."""

    def __init__(self, device: torch.device):
        """Offload the inputs of blocks from `device` to host memory. The stream for copies is created later."""
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[OffloadedTensor] | None = None
        """The input that was offloaded last. Its device memory is freed when the next input is offloaded, because until
        then its copy to the host may still be running."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """The CUDA stream for copies, created at its first use: before, the device may not be initialised."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def pack(self, tensor: torch.Tensor) -> OffloadedTensor | torch.Tensor:
        """Begin to copy a saved tensor to host memory, and return an object that holds the copy. A parameter, or a
        tensor that is empty, not contiguous or not floating-point, is returned unchanged. torch's checkpoint saves an
        empty tensor with each block's input."""
        is_data = tensor.is_floating_point() and tensor.is_contiguous() and tensor.numel() > 0
        if not is_data or isinstance(tensor, nn.Parameter):
            return tensor
        before = self._last() if self._last is not None else None
        offloaded = OffloadedTensor(self, tensor.detach(), before)
        if before is not None:  # a block has run since, in which time its copy to the host has usually finished
            before.release()
        self._last = weakref.ref(offloaded)
        return offloaded

    def unpack(self, kept: OffloadedTensor | torch.Tensor) -> torch.Tensor:
        """Return a saved tensor on the device, in the backward pass."""
        return kept.restore() if isinstance(kept, OffloadedTensor) else kept


class OffloadedTensor:
    """An activation that is offloaded to host memory until the backward pass. Its device copy is freed once the copy to
    the host has finished, and made again for the backward pass."""

    def __init__(self, owner: HostInputs, tensor: torch.Tensor, before: OffloadedTensor | None):
        """Begin to copy a tensor to host memory. `owner` has the device and the stream for copies. `before`: the tensor
        that was offloaded before this one, and which the backward pass needs after it; None for the first."""
        self.owner = owner
        self.before = weakref.ref(before) if before is not None else None
        self.on_device: torch.Tensor | None = tensor
        """The copy on the device; None while the tensor is only in host memory."""
        self.done: torch.Event | None = None
        """Event recorded after the most recent copy to or from the host; None if no later work has to wait for it."""
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=owner.on_cuda)
        self.copy(self.host, tensor)
        if not owner.on_cuda:
            self.on_device = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `to` on the side stream, after all work that is already queued on the main CUDA stream;
        without CUDA at once."""
        if not self.owner.on_cuda:
            to.copy_(source)
            return
        stream = self.owner.stream
        stream.wait_stream(torch.cuda.current_stream(self.owner.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self.done = stream.record_event()

    def wait(self) -> None:
        """Make later work on the main CUDA stream wait for the most recent copy to or from the host."""
        if self.done is not None:
            torch.cuda.current_stream(self.owner.device).wait_event(self.done)
            self.done = None

    def release(self) -> None:
        """Free the device memory. Later work on the main CUDA stream, which may reuse it, waits for the copy."""
        self.wait()
        self.on_device = None

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device. The memory is allocated on the main CUDA stream, so that it can
        be freed there without waiting for the side stream, which copies."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.owner.device, pin_memory=False)
            self.copy(self.on_device, self.host)

    def restore(self) -> torch.Tensor:
        """Return this tensor on the device for the backward pass, and begin to copy back the one offloaded before it,
        the input of the preceding block. This object no longer holds the tensor on the device."""
        self.fetch()
        self.wait()
        tensor, self.on_device = self.on_device, None
        assert tensor is not None
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return tensor


class BlockFromHost(ActivationWrapper):
    """Wrapper that keeps the input of a block in host memory, from which the backward pass runs the block again."""

    def __init__(self, block: nn.Module, host: HostInputs):
        super().__init__(block)
        self.host = host

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, whose activations are computed again in the backward pass from its input in host memory."""
        tensors = (*args, *kwargs.values(), *self.parameters())
        if not any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            return self._checkpoint_wrapped_module(*args, **kwargs)  # no gradient will pass: there is nothing to keep
        # `checkpoint` registers hooks of its own inside these hooks, so that these get only the positional arguments
        # that `checkpoint` keeps
        with saved_tensors_hooks(self.host.pack, self.host.unpack):
            return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)
