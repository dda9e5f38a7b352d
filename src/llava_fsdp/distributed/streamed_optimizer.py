"""An optimizer whose moments lie elsewhere, updated piece by piece by the very kernel that would update them at once.

The inner optimizer is any of torch's whose update is elementwise and whose state is, for every parameter, tensors of
its shape and single numbers (Adam, AdamW, SGD with momentum, ...). It is handed stretches of the flattened
parameters, a bucket of them at a time, with the stretches of their moments: element by element the same arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llava_fsdp.distributed.host_memory import Arena
from llava_fsdp.distributed.local_shards import like, local
from llava_fsdp.runtime.errors import ConfigError

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
        own = local(tensor)
        assert own.is_contiguous(), f"{tuple(own.shape)} with strides {own.stride()}: an update of a copy would be lost"
        return own.view(-1)[self.begin : self.end]

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
