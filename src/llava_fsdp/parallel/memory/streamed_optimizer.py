"""An optimizer with offloaded moments: one bucket of moments at a time is brought to the device and updated there.

Parameters are flattened and split into pieces, and pieces are grouped into buckets. An inner optimizer steps one bucket
at a time, with the same pieces of the moments. The results are bit for bit those without offload. The inner optimizer
can be any of torch's with an elementwise update, if it keeps only scalars and tensors of the parameter's shape for each
parameter (Adam, AdamW, SGD with momentum, ...).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llava_fsdp.parallel.local_shards import like, local
from llava_fsdp.parallel.memory.host_memory import Arena
from llava_fsdp.runtime.errors import ConfigError

BUCKET_BYTES = 128 << 20
"""Maximum bytes of the moments of a bucket. Two buckets are on the device at a time."""
ALIGNMENT = 256
"""Every piece begins at a multiple of this number of elements, so that the kernel's vector instructions process the
same elements together as if the parameter were not split."""

State = dict[str, torch.Tensor]
"""The optimizer state of a piece: tensors by name, such as `exp_avg`."""


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of this rank's flattened shard of a parameter."""

    group: int
    """Index of the parameter's group in the optimizer's `param_groups`."""
    parameter: torch.Tensor
    begin: int
    end: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece, elements [begin, end), of this rank's flattened shard of a tensor: the
        parameter, its gradient or a moment, which are sharded alike."""
        shard = local(tensor)
        assert shard.is_contiguous(), f"a copy would be updated: {tuple(shard.shape)} with strides {shard.stride()}"
        return shard.view(-1)[self.begin : self.end]

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == local(self.parameter).numel()


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for each parameter of one dtype."""

    moments: dict[str, torch.dtype]
    """Dtypes of the state tensors that have the parameter's shape, by name."""
    scalars: dict[str, torch.Tensor]
    """Scalar state tensors by name, with their values before the first step."""

    @property
    def item_size(self) -> int:
        return sum(dtype.itemsize for dtype in self.moments.values())


class Staging(Protocol):
    """Makes offloaded moments available for an update, one bucket at a time, and stores them again."""

    def begin(self) -> None:
        """Begin a step: start to fetch the moments of the first bucket."""
        ...

    def fetch(self, number: int) -> list[State]:
        """Return the moments of each piece of a bucket, ready for the update, and begin to fetch the next bucket."""
        ...

    def put_back(self, number: int) -> None:
        """Begin to store a bucket's updated moments."""
        ...

    def end(self) -> None:
        """Wait until all moments are stored."""
        ...


class StreamedOptimizer(torch.optim.Optimizer):
    """Optimizer with offloaded moments that steps another one over one bucket at a time. Its `state` contains the whole
    moments. All state exists from the beginning, as zeros, so that a checkpoint can be loaded into it.

    Args:
        inner: the other optimizer, without state; its parameter groups are used.
        make_arena: allocates so many bytes for all moments.
        make_staging: creates the object that makes the moments available for updates.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        make_arena: Callable[[int], Arena],
        make_staging: Callable[["StreamedOptimizer"], Staging],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        """Allocate all moments, as zeros, in buckets of at most `bucket_bytes` bytes, which are updated one at a time.

        Args:
            inner: the optimizer that updates a bucket; it has no state yet.
            make_arena: allocates so many bytes for all moments.
            make_staging: creates the object that makes the moments available for updates.
        """
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
        self.buckets = list(
            split_into_buckets(self.param_groups, {d: s.item_size for d, s in specs.items()}, bucket_bytes)
        )
        self.staging = make_staging(self)

    def moments(self, piece: Piece) -> State:
        """Return views of the offloaded moments of a piece, by name."""
        state = self.state[piece.parameter]
        return {n: piece.of(state[n]) for n in self.moment_names[piece.parameter.dtype]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, a bucket at a time: `staging` brings the bucket's moments, and stores them again.
        `closure`, an argument of all torch optimizers, must be None."""
        assert closure is None
        self.staging.begin()
        for number, bucket in enumerate(self.buckets):
            self.update(bucket, self.staging.fetch(number))
            self.staging.put_back(number)
        self.staging.end()

    def update(self, bucket: list[Piece], moments: list[State]) -> None:
        """Step the inner optimizer over a bucket. `moments` are those of each piece, on the device."""
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.param_groups]
        stepped: list[tuple[Piece, torch.Tensor, State]] = []
        for piece, fetched in zip(bucket, moments, strict=True):
            gradient = piece.parameter.grad
            if gradient is None:
                continue
            values = piece.of(piece.parameter)
            values.grad = piece.of(gradient)
            scalars = {n: v for n, v in self.state[piece.parameter].items() if n not in fetched}
            # the inner optimizer increments the step count of each piece, so pieces of one parameter need their own
            # copies of it
            state = fetched | (scalars if piece.is_whole else {n: v.clone() for n, v in scalars.items()})
            groups[piece.group]["params"].append(values)
            self.inner.state[values] = dict(state)
            stepped.append((piece, values, state))
        self.inner.param_groups = groups
        self.inner.step()
        for piece, values, state in stepped:
            after = self.inner.state[values]
            assert all(after[n] is v for n, v in state.items()), "the optimizer replaces its state"
            # the last piece's copies of the scalars, such as the step count, become the parameter's
            if not piece.is_whole and piece.end == local(piece.parameter).numel():
                for name, value in self.state[piece.parameter].items():
                    if name not in self.moment_names[piece.parameter.dtype]:
                        value.copy_(state[name])
        self.inner.state.clear()
        self.inner.param_groups = self.param_groups


def probe(inner: torch.optim.Optimizer, example: torch.Tensor) -> StateSpec:
    """Find out what an optimizer keeps for parameters of the dtype and device of `example`, by a step on two zeros.

    Raises:
        ConfigError: the optimizer has state other than scalars and tensors of the parameter's shape.
    """
    stand_in = torch.zeros(2, dtype=example.dtype, device=example.device)
    stand_in.grad = torch.zeros_like(stand_in)
    groups = inner.param_groups
    inner.param_groups = [{**groups[0], "params": [stand_in]}]
    inner.step()
    inner.param_groups = groups
    moments, scalars = {}, {}
    for name, value in inner.state.pop(stand_in).items():
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


def split_into_buckets(
    groups: list[dict[str, Any]], item_sizes: dict[torch.dtype, int], bucket_bytes: int
) -> Iterator[list[Piece]]:
    """Yield buckets: lists of consecutive pieces of parameters whose moments have at most `bucket_bytes` bytes
    together, `item_sizes[dtype]` for each element."""
    bucket: list[Piece] = []
    filled = 0
    for group, parameter in ((i, p) for i, g in enumerate(groups) for p in g["params"]):
        item, count = max(1, item_sizes[parameter.dtype]), local(parameter).numel()
        largest = max(ALIGNMENT, bucket_bytes // item // ALIGNMENT * ALIGNMENT)
        # an empty shard has an empty piece, so that its steps are counted
        for begin in range(0, max(1, count), largest):
            end = min(count, begin + largest)
            if bucket and filled + padded(end - begin) * item > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(Piece(group, parameter, begin, end))
            filled += padded(end - begin) * item
    if bucket:
        yield bucket


def padded(count: int) -> int:
    """Round a number of elements up to a multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT
