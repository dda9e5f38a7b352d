"""Two ways to update the optimizer's offloaded moments: copy them from host memory to buffers on the device and back,
or update them in memory-mapped files, which are read ahead."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from llava_fsdp.parallel.memory.host_memory import Arena
from llava_fsdp.parallel.memory.streamed_optimizer import Piece, State, StreamedOptimizer, padded


class DeviceStaging:
    """Copies the optimizer's moments from host memory to the device and back, one bucket (a group of pieces of
    parameters) at a time. There are two device buffers, so that one bucket is copied while another is updated.

    On a GPU, there is one stream for copies to the device and another for copies from the device, and the host waits
    only once, at the end of the optimizer's step. On a CPU there are no streams. The buffers exist only during a step.
    """

    def __init__(self, optimizer: StreamedOptimizer, device: torch.device):
        self.optimizer = optimizer
        self.device = device
        self.bytes = max((sum(map(self.bytes_of, bucket)) for bucket in optimizer.buckets), default=0)
        """Size of a device buffer in bytes: that of the largest bucket."""
        self.streams: CopyStreams | None = CopyStreams(device) if device.type == "cuda" else None
        self.buffers: list[torch.Tensor] = []
        self.staged: dict[int, list[State]] = {}
        """Bucket number -> the moments of the bucket's pieces, in a device buffer."""

    def bytes_of(self, piece: Piece) -> int:
        """Return the bytes that the moments of a piece of a parameter take in a device buffer."""
        return sum(padded(m.numel()) * m.itemsize for m in self.optimizer.moments(piece).values())

    def begin(self) -> None:
        two = self.optimizer.buckets[:2]
        self.buffers = [torch.empty(self.bytes, dtype=torch.uint8, device=self.device) for _ in two]
        if self.streams is not None:
            self.streams.begin()
        self.load(0)

    def fetch(self, number: int) -> list[State]:
        self.load(number + 1)
        if self.streams is not None:
            self.streams.wait_loaded(number)
        return self.staged[number]

    def load(self, number: int) -> None:
        """Begin to copy the moments of bucket `number` (a group of pieces of parameters) into the device buffer that
        bucket `number - 2` has used. Does nothing if there is no such bucket."""
        if number >= len(self.optimizer.buckets):
            return
        buffer, offset, states = self.buffers[number % 2], 0, []
        with self.streams.loading(number) if self.streams is not None else nullcontext():
            for piece in self.optimizer.buckets[number]:
                state: State = {}
                for name, source in self.optimizer.moments(piece).items():
                    state[name] = buffer[offset : offset + source.nbytes].view(source.dtype)
                    state[name].copy_(source, non_blocking=True)
                    offset += padded(source.numel()) * source.itemsize
                states.append(state)
        self.staged[number] = states

    def put_back(self, number: int) -> None:
        with self.streams.storing(number) if self.streams is not None else nullcontext():
            for piece, state in zip(self.optimizer.buckets[number], self.staged.pop(number), strict=True):
                for name, home in self.optimizer.moments(piece).items():
                    home.copy_(state[name], non_blocking=True)

    def end(self) -> None:
        if self.streams is not None:
            self.streams.end()
        self.buffers = []


class CopyStreams:
    """Two CUDA streams, for copies of optimizer moments from the host to device buffers and back, and the events that
    order them with the current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.inward = torch.cuda.Stream(device)
        self.outward = torch.cuda.Stream(device)
        self.loaded = [torch.cuda.Event(), torch.cuda.Event()]
        self.stored = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self) -> None:
        """Make the copies of optimizer moments to the device wait for earlier work on the current CUDA stream, which
        may still use the memory of the newly allocated buffers."""
        self.inward.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def loading(self, number: int) -> Iterator[None]:
        """Context manager for copies of the moments of bucket `number` (a group of pieces of parameters) from the host
        into one of two device buffers. They run on the stream for copies to the device, once the bucket that used this
        buffer before has been copied to the host."""
        with torch.cuda.stream(self.inward):
            if number > 1:
                self.inward.wait_event(self.stored[number % 2])
            yield
            self.loaded[number % 2].record(self.inward)

    def wait_loaded(self, number: int) -> None:
        """Make the current CUDA stream wait until the moments of bucket `number` (a group of pieces of parameters) have
        been copied to the device."""
        torch.cuda.current_stream(self.device).wait_event(self.loaded[number % 2])

    @contextmanager
    def storing(self, number: int) -> Iterator[None]:
        """Context manager for copies of the moments of bucket `number` (a group of pieces of parameters) from a device
        buffer to the host. They run on the stream for copies to the host, after the bucket's update."""
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            yield
            self.stored[number % 2].record(self.outward)

    def end(self) -> None:
        """End an optimizer step: block the host until all copies of the moments from the device to the host are done.
        Then the caller may free the buffers on the device, and a checkpoint may read the moments on the host."""
        self.outward.synchronize()


class FileStaging:
    """Reads the optimizer's moments ahead, which are updated in place in memory-mapped files: while one bucket (a group
    of pieces of parameters) is updated, a thread reads the next one from disk."""

    def __init__(self, optimizer: StreamedOptimizer, others: list[Arena]):
        """Create the thread that reads the optimizer's moments ahead from a memory-mapped file.

        Args:
            optimizer: the optimizer whose moments are in the file.
            others: the mapped files of parameters and gradients, which are read ahead, and removed from memory after
                the update, like the moments.
        """
        self.optimizer = optimizer
        self.arenas = [optimizer.arena, *others]
        self.thread = ThreadPoolExecutor(1, "offload")
        self.ahead: Future[None] | None = None

    def begin(self) -> None:
        self.ahead = self.thread.submit(self.each, 0, Arena.fetch)

    def fetch(self, number: int) -> list[State]:
        assert self.ahead is not None
        self.ahead.result()
        self.ahead = self.thread.submit(self.each, number + 1, Arena.fetch)
        return [self.optimizer.moments(piece) for piece in self.optimizer.buckets[number]]

    def put_back(self, number: int) -> None:
        self.each(number, Arena.release)

    def end(self) -> None:
        assert self.ahead is not None
        self.ahead.result()
        self.ahead = None

    def each(self, number: int, act: Callable[[Arena, torch.Tensor], None]) -> None:
        """Call `act(arena, tensor)` for every tensor that the update of bucket `number` (a group of pieces of
        parameters) reads or writes in a memory-mapped file; `arena` is that file. Does nothing if there is no such
        bucket."""
        for piece in self.optimizer.buckets[number] if number < len(self.optimizer.buckets) else ():
            values = [piece.of(t) for t in (piece.parameter, piece.parameter.grad) if t is not None]
            for tensor in (*self.optimizer.moments(piece).values(), *values):
                owner = next((arena for arena in self.arenas if arena.owns(tensor)), None)
                if owner is not None:
                    act(owner, tensor)
