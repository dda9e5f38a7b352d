"""Blocks that run again from inputs which wait in the host's memory.

What a block gave besides is not moved but computed anew: moving costs more. A block of a 7B Llama computes about 0.8
microseconds a position on an H100, in which PCIe 5 carries some 40 KB; its input has 8 KB, everything that autograd
keeps of it 100 to 200 (docs/memory.md).

On CUDA copies go over a stream of their own out of and into pinned memory: a block's input leaves while the block runs,
and comes back while the block behind it runs backward. Without CUDA the same code copies within the host's memory,
which saves nothing.
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
    """Sends inputs of blocks away and brings them back, each a block ahead."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[Away] | None = None
        """What was sent last, whose device memory is still held: its copy may be under way."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """Made when first needed: shapes and tests have no device."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def pack(self, tensor: torch.Tensor) -> Away | torch.Tensor:
        """Send a block's input away; anything else stays where it is."""
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
    """One tensor: its copy on the host, and on the device until the copy is done and again when it is needed."""

    def __init__(self, owner: HostInputs, tensor: torch.Tensor, before: Away | None):
        self.owner = owner
        self.before = weakref.ref(before) if before is not None else None
        self.here: torch.Tensor | None = tensor
        self.done: torch.Event | None = None
        """The last copy, out or in."""
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=owner.on_cuda)
        self.copy(self.host, tensor)
        if not owner.on_cuda:
            self.here = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On the side stream, behind whatever the computation has been given so far."""
        if not self.owner.on_cuda:
            to.copy_(source)
            return
        stream = self.owner.stream
        stream.wait_stream(torch.cuda.current_stream(self.owner.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self.done = stream.record_event()

    def wait(self) -> None:
        """Nothing that the computation is given from now on begins before the copy is done."""
        if self.done is not None:
            torch.cuda.current_stream(self.owner.device).wait_event(self.done)
            self.done = None

    def release(self) -> None:
        """Let go of the device's memory. It may be written to again only by what the computation is given later."""
        self.wait()
        self.here = None

    def fetch(self) -> None:
        """Begin to bring it back. Its memory is the computation's, which the side stream waits for: no other order of
        the two streams is needed when it is freed again."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.owner.device, pin_memory=False)
            self.copy(self.here, self.host)

    def back(self) -> torch.Tensor:
        """The tensor again, and the one before it on its way."""
        self.fetch()
        self.wait()
        found, self.here = self.here, None
        assert found is not None
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return found


class BlockFromHost(ActivationWrapper):
    """A block that keeps its input on the host and runs again from it."""

    def __init__(self, block: nn.Module, host: HostInputs):
        super().__init__(block)
        self.host = host

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # checkpoint's own hooks lie inside of ours, which see what it keeps to begin with: its positional arguments
        with saved_tensors_hooks(self.host.pack, self.host.unpack):
            return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)
