"""An optimizer whose moments lie elsewhere, updated piece by piece by the very kernel that would update them at once.

The inner optimizer is any of torch's whose update is elementwise and whose state is, for every parameter, tensors of
its shape and single numbers (Adam, AdamW, SGD with momentum, ...). It is handed stretches of the flattened
parameters, a bucket of them at a time, with the stretches of their moments: element by element the same arithmetic.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llava_fsdp.errors import ConfigError
from llava_fsdp.sharding.arena import Arena
from llava_fsdp.sharding.shards import like, local

BUCKET_BYTES = 128 << 20
"""Most bytes of moments that are moved at once; two such are under way."""
ALIGNMENT = 256
"""Elements: pieces begin at multiples, so that a kernel's vectors and scalar rest lie where they do in the whole."""

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of this rank's part of a parameter."""

    group: int
    parameter: torch.Tensor
    begin: int
    end: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor).reshape(-1)[self.begin : self.end]

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == local(self.parameter).numel()


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for a parameter of a dtype."""

    moments: dict[str, torch.dtype]
    """of the parameter's shape"""
    scalars: dict[str, torch.Tensor]
    """single numbers, as they are before the first step"""

    @property
    def item_size(self) -> int:
        return sum(dtype.itemsize for dtype in self.moments.values())


class Staging(Protocol):
    """How the moments of a bucket come to where they are updated, and go back."""

    def begin(self) -> None: ...

    def fetch(self, number: int) -> list[State]:
        """For every piece of a bucket its moments, ready for the update; the next bucket's are under way."""
        ...

    def put_back(self, number: int) -> None: ...

    def end(self) -> None: ...


class StreamedOptimizer(torch.optim.Optimizer):
    """Steps `inner` over buckets of pieces; `state` holds each parameter's whole moments, where they lie.

    All state exists from the beginning, as zeros, so that a checkpoint is read into it as it is.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        make_arena: Callable[[int], Arena],
        make_staging: Callable[["StreamedOptimizer"], Staging],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        specs = {p.dtype: probe(inner, local(p)) for group in self.param_groups for p in group["params"]}
        parameters = [p for group in self.param_groups for p in group["params"]]
        rooms = (Arena.room(local(p).shape, d) for p in parameters for d in specs[p.dtype].moments.values())
        self.arena = make_arena(sum(rooms))
        for parameter in parameters:
            spec = specs[parameter.dtype]
            moments = {n: like(parameter, self.arena.take(local(parameter).shape, d)) for n, d in spec.moments.items()}
            self.state[parameter] = {**{n: v.clone() for n, v in spec.scalars.items()}, **moments}
        self.moment_names = {dtype: list(spec.moments) for dtype, spec in specs.items()}
        self.buckets = list(cut(self.param_groups, {d: s.item_size for d, s in specs.items()}, bucket_bytes))
        self.staging = make_staging(self)

    def moments(self, piece: Piece) -> State:
        """Where a piece's moments lie."""
        state = self.state[piece.parameter]
        return {n: piece.of(state[n]) for n in self.moment_names[piece.parameter.dtype]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.staging.begin()
        for number, bucket in enumerate(self.buckets):
            self.update(bucket, self.staging.fetch(number))
            self.staging.put_back(number)
        self.staging.end()

    def update(self, bucket: list[Piece], moments: list[State]) -> None:
        """One step of the inner optimizer over the pieces of a bucket."""
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.param_groups]
        given: list[tuple[Piece, torch.Tensor, State]] = []
        for piece, found in zip(bucket, moments, strict=True):
            gradient = piece.parameter.grad
            if gradient is None:
                continue
            values = piece.of(piece.parameter)
            values.grad = piece.of(gradient)
            kept = {n: v for n, v in self.state[piece.parameter].items() if n not in found}
            # pieces of one parameter count the step each for themselves
            state = found | (kept if piece.is_whole else {n: v.clone() for n, v in kept.items()})
            groups[piece.group]["params"].append(values)
            self.inner.state[values] = dict(state)
            given.append((piece, values, state))
        self.inner.param_groups = groups
        self.inner.step()
        for piece, values, state in given:
            after = self.inner.state[values]
            assert all(after[n] is v for n, v in state.items()), (
                "an optimizer that replaces its state cannot be streamed"
            )
            if not piece.is_whole and piece.end == local(piece.parameter).numel():
                for name, value in self.state[piece.parameter].items():
                    if name not in self.moment_names[piece.parameter.dtype]:
                        value.copy_(state[name])
        self.inner.state.clear()
        self.inner.param_groups = self.param_groups


def probe(inner: torch.optim.Optimizer, example: torch.Tensor) -> StateSpec:
    """What the optimizer keeps for such a parameter: asked by stepping one of two zeros.

    Raises:
        ConfigError: something else than numbers and tensors of the parameter's shape.
    """
    stand_in = torch.zeros(2, dtype=example.dtype, device=example.device)
    stand_in.grad = torch.zeros_like(stand_in)
    groups = inner.param_groups
    inner.param_groups = [{**groups[0], "params": [stand_in]}]
    inner.step()
    inner.param_groups = groups
    found = inner.state.pop(stand_in)
    moments, scalars = {}, {}
    for name, value in found.items():
        if type(value) is torch.Tensor and value.shape == stand_in.shape:
            moments[name] = value.dtype
        elif type(value) is torch.Tensor and value.ndim == 0:
            scalars[name] = torch.zeros_like(value)
        else:
            raise ConfigError(
                f"offload streams moments of the parameter's shape, and {type(inner).__name__} keeps {name} as "
                f"{type(value).__name__}; set offload=none or offload=params, or precision.moment_dtype=fp32"
            )
    return StateSpec(moments, scalars)


def cut(groups: list[dict[str, Any]], item_sizes: dict[torch.dtype, int], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Pieces in the order of parameters, in buckets of at most so many bytes of moments."""
    bucket: list[Piece] = []
    filled = 0
    for group, parameter in ((i, p) for i, g in enumerate(groups) for p in g["params"]):
        item, count = max(1, item_sizes[parameter.dtype]), local(parameter).numel()
        largest = max(ALIGNMENT, bucket_bytes // item // ALIGNMENT * ALIGNMENT)
        for begin in range(0, count, largest):
            end = min(count, begin + largest)
            if bucket and filled + padded(end - begin) * item > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(Piece(group, parameter, begin, end))
            filled += padded(end - begin) * item
    if bucket:
        yield bucket


def padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class Copied:
    """Moments in host memory, copied through two buffers on the device while another bucket is being updated.

    On a GPU copies in and copies out have a stream each, and the host waits once, at the end of the step. On a CPU the
    same is done without streams. The buffers live only during a step.
    """

    def __init__(self, optimizer: StreamedOptimizer, device: torch.device):
        self.optimizer = optimizer
        self.device = device
        self.bytes = max(sum(map(self.bytes_of, bucket)) for bucket in optimizer.buckets)
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
