"""How moments that lie elsewhere come to where they are updated, and go back: through buffers, or mapped from files."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from llava_fsdp.distributed.host_memory import Arena
from llava_fsdp.distributed.streamed_optimizer import Piece, State, StreamedOptimizer, padded


class Copied:
    """Moments in host memory, copied through two buffers on the device while another bucket is being updated.

    On a GPU copies in and copies out have a stream each, and the host waits once, at the end of the step. On a CPU the
    same is done without streams. The buffers live only during a step.
    """

    def __init__(self, optimizer: StreamedOptimizer, device: torch.device):
        self.optimizer = optimizer
        self.device = device
        self.bytes = max((sum(map(self.bytes_of, bucket)) for bucket in optimizer.buckets), default=0)
        self.lanes: Lanes | None = Lanes(device) if device.type == "cuda" else None
        self.buffers: list[torch.Tensor] = []
        self.staged: dict[int, list[State]] = {}

    def bytes_of(self, piece: Piece) -> int:
        return sum(padded(m.numel()) * m.itemsize for m in self.optimizer.moments(piece).values())

    def begin(self) -> None:
        two = self.optimizer.buckets[:2]
        self.buffers = [torch.empty(self.bytes, dtype=torch.uint8, device=self.device) for _ in two]
        if self.lanes is not None:
            self.lanes.begin()
        self.load(0)

    def fetch(self, number: int) -> list[State]:
        self.load(number + 1)
        if self.lanes is not None:
            self.lanes.wait_loaded(number)
        return self.staged[number]

    def load(self, number: int) -> None:
        """Copy a bucket's moments into the buffer that the bucket before the last has left."""
        if number >= len(self.optimizer.buckets):
            return
        buffer, offset, found = self.buffers[number % 2], 0, []
        with self.lanes.loading(number) if self.lanes is not None else nullcontext():
            for piece in self.optimizer.buckets[number]:
                state: State = {}
                for name, source in self.optimizer.moments(piece).items():
                    state[name] = buffer[offset : offset + source.nbytes].view(source.dtype)
                    state[name].copy_(source, non_blocking=True)
                    offset += padded(source.numel()) * source.itemsize
                found.append(state)
        self.staged[number] = found

    def put_back(self, number: int) -> None:
        with self.lanes.storing(number) if self.lanes is not None else nullcontext():
            for piece, state in zip(self.optimizer.buckets[number], self.staged.pop(number), strict=True):
                for name, home in self.optimizer.moments(piece).items():
                    home.copy_(state[name], non_blocking=True)

    def end(self) -> None:
        if self.lanes is not None:
            self.lanes.end()
        self.buffers = []


class Lanes:
    """Two CUDA streams beside the current one, and the events that order them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.inward = torch.cuda.Stream(device)
        self.outward = torch.cuda.Stream(device)
        self.loaded = [torch.cuda.Event(), torch.cuda.Event()]
        self.stored = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self) -> None:
        """The buffers' memory may still be in use by what the current stream has been told before."""
        self.inward.wait_stream(torch.cuda.current_stream(self.device))

    def loading(self, number: int) -> Any:
        if number > 1:
            self.inward.wait_event(self.stored[number % 2])
        return Recorded(self.inward, self.loaded[number % 2])

    def wait_loaded(self, number: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.loaded[number % 2])

    def storing(self, number: int) -> Any:
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        return Recorded(self.outward, self.stored[number % 2])

    def end(self) -> None:
        """The host may read the moments next, for a checkpoint, and the buffers' memory is given back."""
        self.outward.synchronize()


class Recorded:
    """What is told to a stream, and an event behind it."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event):
        self.stream = torch.cuda.stream(stream)
        self.on = stream
        self.event = event

    def __enter__(self) -> None:
        self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.event.record(self.on)
        self.stream.__exit__(*error)


class Mapped:
    """Moments in files, updated where they are: the next bucket is read ahead by a thread, the last one is let go."""

    def __init__(self, optimizer: StreamedOptimizer, others: list[Arena]):
        """
        Args:
            others: the files of parameters and gradients, which are read ahead and let go with the moments.
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
        """Every stretch of a file that the update of a bucket touches."""
        for piece in self.optimizer.buckets[number] if number < len(self.optimizer.buckets) else ():
            held = [piece.of(t) for t in (piece.parameter, piece.parameter.grad) if t is not None]
            for tensor in (*self.optimizer.moments(piece).values(), *held):
                owner = next((arena for arena in self.arenas if arena.owns(tensor)), None)
                if owner is not None:
                    act(owner, tensor)
