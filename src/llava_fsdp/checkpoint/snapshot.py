"""Copy the training state that this rank holds to host memory, so that a checkpoint can be written from the copy while
training continues.

The copy is made during the forward and backward passes of the next step, which only read the state. The optimizer's
update waits until the copy is complete.
"""

import socket
import threading
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from llava_fsdp.parallel.memory.host_memory import PAGE, Arena
from llava_fsdp.parallel.ranks.consensus import gathered
from llava_fsdp.runtime.errors import OffloadError, OutOfMemory
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.log import log

NO_ROOM = (
    "out of host memory: the copy that checkpoints are written from takes {:.3g} GiB; checkpoint.asynchronous=false "
    "needs no copy, offload=nvme keeps states in files"
)
SHARE = 0.8
"""Maximum fraction of a host's free memory that the copies of its ranks' state may take. The rest is left for the
growth of processes during the run."""


class Snapshot:
    """A copy, in host memory, of all tensors that this rank writes to checkpoints. If they are on a GPU, it is
    pinned."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        """Allocate host memory for copies of these tensors: page-locked memory if they are on a GPU, or ordinary memory
        if that fails. Raises OutOfMemory if host memory is too small."""
        self.on_gpu = device_of(tensors.values()) is not None
        room = sum(Arena.room(tensor.shape, tensor.dtype) for tensor in tensors.values())
        try:
            self.arena = Arena(room, pin=self.on_gpu)
        except OffloadError as error:
            if not self.on_gpu:
                raise OutOfMemory(NO_ROOM.format(room / 2**30)) from error
            log().warning("the copy that checkpoints are written from is not pinned, and takes longer: %s", error)
            try:
                self.arena = Arena(room)
            except OffloadError:
                raise OutOfMemory(NO_ROOM.format(room / 2**30)) from error
        self.buffers = {name: self.arena.take(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.last_update = torch.cuda.Event() if self.on_gpu else None  # the last update before the copy is done
        self.copy_done = torch.cuda.Event() if self.on_gpu else None  # the copy is done
        self.copy_queued = threading.Event()  # set if no copy has still to be queued (on a CPU: to be made)
        self.copy_queued.set()

    def touch(self) -> None:
        """Write to every memory page of the buffers, so that the first copy need not wait for the system's pages."""
        memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        memory[::PAGE].zero_()

    def begin(self) -> None:
        """Mark the tensors' present values as those to copy (`fill`). They must not change until `wait` returns."""
        self.copy_queued.clear()
        if self.last_update is not None:
            self.last_update.record()

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors (by name) into the buffers. Called in the thread that writes checkpoints. On a GPU the copy
        runs on a side stream, after the optimizer's update that was queued before `begin` was called."""
        assert tensors.keys() == self.buffers.keys()
        try:
            if self.stream is None or self.last_update is None or self.copy_done is None:
                for name, tensor in tensors.items():
                    self.buffers[name].copy_(tensor)
                return
            self.stream.wait_event(self.last_update)
            with torch.cuda.stream(self.stream):
                for name, tensor in tensors.items():
                    self.buffers[name].copy_(tensor, non_blocking=True)
                self.copy_done.record(self.stream)
        finally:
            self.copy_queued.set()

    def wait(self) -> None:
        """Wait until the tensors may change again. On a GPU the host waits only until the copies are queued, and the
        current CUDA stream waits until the copies are done."""
        self.copy_queued.wait()
        if self.copy_done is not None:
            torch.cuda.current_stream().wait_event(self.copy_done)

    def wait_for_copies(self) -> dict[str, torch.Tensor]:
        """Wait until the tensors are copied, and return the copies by tensor name."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        return self.buffers


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the GPU that holds the tensors; None if all are in host memory."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)


def use_device(device: torch.device | None) -> None:
    """Make a GPU, if there is one, the current one of the calling thread. A new thread uses GPU 0, and its first call
    of CUDA would make a context there: half a gigabyte of GPU 0's memory for each rank of the machine."""
    if device is not None:
        torch.cuda.set_device(device)


def fits(nbytes: int, group: dist.ProcessGroup | None) -> bool:
    """Return whether host memory has room for the copies of all ranks, of which this one has `nbytes`; all ranks get
    the same result. Collective."""
    host = socket.gethostname()
    needed_on_host = sum(count for name, count in gathered((host, nbytes), group) if name == host)
    available = read_host().free
    is_enough = all(gathered(needed_on_host <= SHARE * available, group))
    if not is_enough:
        log().info(
            "checkpoints are written synchronously: a copy of the state does not fit into the memory of every host; "
            "this one's takes %.1f GB of %.1f GB", needed_on_host / 1e9, available / 1e9,
        )  # fmt: skip
    return is_enough
