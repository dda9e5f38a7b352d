"""Two ways to update offloaded moments: copy them from host memory to buffers on the device and back, or update them in
memory-mapped files, which are read ahead. Buckets and pieces are those of streamed_optimizer.py."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from llava_fsdp.parallel.memory.host_memory import Arena
from llava_fsdp.parallel.memory.streamed_optimizer import Piece, State, StreamedOptimizer, padded


class DeviceStaging:
    """Copies moments from host memory to the device and back. There are two device buffers, so that one bucket is
    copied while another is updated.

    On a GPU, there is one stream for copies to the device and another for copies from the device, and the host waits
    only once, at the end of the optimizer's step. On a CPU there are no streams. The buffers exist only during a step.
    """

    def __init__(self, optimizer: StreamedOptimizer, device: torch.device):
        """Prepare to copy the moments of `optimizer`, which are in host memory, to `device`, that of its parameters,
        and back. They are copied a bucket at a time: the moments of some pieces of parameters."""
        self.optimizer = optimizer
        self.device = device
        self.bytes = max((sum(map(self.bytes_of, bucket)) for bucket in optimizer.buckets), default=0)
        """Size of a device buffer: that of the largest bucket."""
        self.streams: CopyStreams | None = CopyStreams(device) if device.type == "cuda" else None
        self.buffers: list[torch.Tensor] = []
        self.staged: dict[int, list[State]] = {}
        """Bucket number -> the moments of the bucket's pieces, in a device buffer."""

    def bytes_of(self, piece: Piece) -> int:
        """Return the bytes that the moments of a piece take in a device buffer."""
        return sum(padded(m.numel()) * m.itemsize for m in self.optimizer.moments(piece).values())

    def begin(self) -> None:
        """Begin an optimizer step: allocate the device buffers, and begin to copy the first bucket of moments."""
        two = self.optimizer.buckets[:2]
        self.buffers = [torch.empty(self.bytes, dtype=torch.uint8, device=self.device) for _ in two]
        if self.streams is not None:
            self.streams.begin()
        self.load(0)

    def fetch(self, number: int) -> list[State]:
        """Return the moments of each piece of bucket `number`, in a device buffer, and begin to copy the next bucket.
        On a GPU, kernels that are launched after this call wait until bucket `number` is copied."""
        self.load(number + 1)
        if self.streams is not None:
            self.streams.wait_loaded(number)
        return self.staged[number]

    def load(self, number: int) -> None:
        """Begin to copy a bucket, if there is one, into the device buffer that bucket `number - 2` has used."""
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
        """Begin to copy the updated moments of bucket `number` from its device buffer to host memory: on a GPU in a
        stream of its own, after the kernels that were launched before. A bucket has pieces of parameters."""
        with self.streams.storing(number) if self.streams is not None else nullcontext():
            for piece, state in zip(self.optimizer.buckets[number], self.staged.pop(number), strict=True):
                for name, home in self.optimizer.moments(piece).items():
                    home.copy_(state[name], non_blocking=True)

    def end(self) -> None:
        if self.streams is not None:
            self.streams.end()
        self.buffers = []


class CopyStreams:
    """Streams for copies to device buffers and back, and the events that order them with the current stream."""

    def __init__(self, device: torch.device):
        """Create for each direction a stream and, for each of the two device buffers, an event of its copies."""
        self.device = device
        self.inward = torch.cuda.Stream(device)
        self.outward = torch.cuda.Stream(device)
        self.loaded = [torch.cuda.Event(), torch.cuda.Event()]
        self.stored = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self) -> None:
        """Make copies to the device wait for earlier work, which may still use the new buffers' memory."""
        self.inward.wait_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def loading(self, number: int) -> Iterator[None]:
        """Context manager for the copies of bucket `number` (from 0; buckets use two buffers in turn) to the device.
        They wait until the bucket before it in the same buffer is on the host again."""
        with torch.cuda.stream(self.inward):
            if number > 1:
                self.inward.wait_event(self.stored[number % 2])
            yield
            self.loaded[number % 2].record(self.inward)

    def wait_loaded(self, number: int) -> None:
        """Make the current stream wait until a bucket has been copied to the device."""
        torch.cuda.current_stream(self.device).wait_event(self.loaded[number % 2])

    @contextmanager
    def storing(self, number: int) -> Iterator[None]:
        """Context manager that runs copies of bucket `number` to the host after its update. Buckets use two device
        buffers in turn (`number % 2`)."""
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            yield
            self.stored[number % 2].record(self.outward)

    def end(self) -> None:
        """Wait for all copies to the host. Then device buffers may be freed, and a checkpoint may read the moments."""
        self.outward.synchronize()


class FileStaging:
    """Updates moments in memory-mapped files: while one bucket is updated, a thread reads the next one from disk."""

    def __init__(self, optimizer: StreamedOptimizer, others: list[Arena]):
        """Prepare to update an optimizer's moments, which are in a mapped file, a bucket at a time. `others` are the
        mapped files of parameters and gradients, which are read ahead and released, too."""
        self.optimizer = optimizer
        self.arenas = [optimizer.arena, *others]
        self.thread = ThreadPoolExecutor(1, "offload")
        self.ahead: Future[None] | None = None  # the reading of the next bucket; None outside of a step

    def begin(self) -> None:
        self.ahead = self.thread.submit(self.each, 0, Arena.fetch)

    def fetch(self, number: int) -> list[State]:
        """Return the moments of each piece of a bucket, once read, and begin to read the next bucket from disk."""
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
        """Call `act(file, tensor)` for every tensor in a mapped file that the update of a bucket reads or writes."""
        for piece in self.optimizer.buckets[number] if number < len(self.optimizer.buckets) else ():
            values = [piece.of(t) for t in (piece.parameter, piece.parameter.grad) if t is not None]
            for tensor in (*self.optimizer.moments(piece).values(), *values):
                owner = next((arena for arena in self.arenas if arena.owns(tensor)), None)
                if owner is not None:
                    act(owner, tensor)
