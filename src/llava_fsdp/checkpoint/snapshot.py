"""The copy of a rank's part that an asynchronous save writes from, while the training goes on: made once and kept.

It is filled during the next step's forward and backward passes, which only read what is copied; the optimizer's update
waits for it.
"""

import mmap
import socket
import threading

import torch
import torch.distributed as dist

from llava_fsdp.checkpoint.layout import Part
from llava_fsdp.distributed.consensus import gathered
from llava_fsdp.distributed.host_memory import PAGE, Arena
from llava_fsdp.runtime.errors import OffloadError, OutOfMemory
from llava_fsdp.runtime.host import read_host
from llava_fsdp.runtime.log import log

SHARE = 0.8
"""Of the memory that the host has left; the rest is for what a run still grows by."""


def no_room(nbytes: int) -> OutOfMemory:
    return OutOfMemory(
        f"out of host memory: the copy that checkpoints are written from takes {nbytes / 2**30:.3g} GiB; "
        "checkpoint.asynchronous=false goes without it, offload=nvme keeps states in files"
    )


class Staging:
    """A buffer for every part that this rank writes; pinned where parts lie on a GPU."""

    def __init__(self, parts: dict[str, Part]):
        self.on_gpu = any(part.values.device.type == "cuda" for part in parts.values())
        room = sum(Arena.room(part.values.shape, part.dtype) for part in parts.values())
        try:
            self.arena = Arena(room, pin=self.on_gpu)
        except OffloadError as error:
            if not self.on_gpu:
                raise no_room(room) from error
            log().warning("the copy that checkpoints are written from is not pinned, and takes longer: %s", error)
            try:
                self.arena = Arena(room)
            except OffloadError:
                raise no_room(room) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a 512th of the page faults
            self.arena.memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffers = {name: self.arena.take(part.values.shape, part.dtype) for name, part in parts.items()}
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.updated = torch.cuda.Event() if self.on_gpu else None
        self.copied = torch.cuda.Event() if self.on_gpu else None
        self.filled = threading.Event()
        self.filled.set()

    def touch(self) -> None:
        """Have the system find the pages before the first copy waits for them."""
        memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        memory[::PAGE].zero_()

    def begin(self) -> None:
        """From here on the parts must stay as they are until `wait`; called where they were changed last."""
        self.filled.clear()
        if self.updated is not None:
            self.updated.record()

    def fill(self, parts: dict[str, Part]) -> None:
        """Copy; in the thread that writes. On a GPU a stream of its own does it, behind the update before."""
        assert parts.keys() == self.buffers.keys()
        try:
            if self.stream is None or self.updated is None or self.copied is None:
                for name, part in parts.items():
                    self.buffers[name].copy_(part.values)
                return
            self.stream.wait_event(self.updated)
            with torch.cuda.stream(self.stream):
                for name, part in parts.items():
                    self.buffers[name].copy_(part.values, non_blocking=True)
                self.copied.record(self.stream)
        finally:
            self.filled.set()

    def wait(self) -> None:
        """Before the parts are changed. On a GPU the host waits until the copies are under way, the stream for them."""
        self.filled.wait()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def ready(self) -> dict[str, torch.Tensor]:
        """The buffers, once the copies have arrived."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.buffers


def fits(nbytes: int, group: dist.ProcessGroup | None) -> bool:
    """Whether the copies of all ranks fit into the memory of their hosts. A collective: the answer is one for all."""
    host = socket.gethostname()
    needed = sum(count for name, count in gathered((host, nbytes), group) if name == host)
    available = read_host().free
    answers = gathered((needed <= SHARE * available, needed, available), group)
    short = [(needed, available) for enough, needed, available in answers if not enough]
    if short:
        needed, available = short[0]
        log().info(
            "checkpoints are written synchronously: a copy to write from takes %.1f GB of a host's memory, and %.1f GB "
            "are available",
            needed / 1e9,
            available / 1e9,
        )
    return not short
