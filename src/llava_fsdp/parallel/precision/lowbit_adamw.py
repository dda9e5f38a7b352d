"""AdamW that computes in fp32, but stores weights and moments with fewer bits.

A few rows at a time are converted to fp32, updated by torch's own fused AdamW, and stored again:

- bf16 weights and moments are rounded stochastically (e.g. arXiv 2010.06192): a value is rounded up with a probability
  in proportion to the part that would be dropped, so that on average no small update is lost. With rounding to nearest,
  the second moment would hardly change: beta2=0.999 changes it by 1/1000 per step, and neighbouring bf16 numbers differ
  by about 1/256.
- int8 moments are indices into a table of 256 values, dense around zero, with one scale for each block of 256 elements
  (dynamic block-wise quantisation, arXiv 2110.02861). A block never crosses a row, and FSDP shards only whole rows or
  whole blocks (`memory.sharded_dimension`). So sharding does not change the blocks.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from llava_fsdp.config import MomentDType
from llava_fsdp.parallel.local_shards import local, local_columns, local_rows
from llava_fsdp.parallel.precision.fused_adamw import MOMENTS, fused_adamw
from llava_fsdp.runtime.seeds import derive

BLOCK = 256
"""Number of consecutive elements of a row of an int8 moment that share one scale."""
CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are updated at a time. Weight, gradient and moments in fp32 then take 16 MiB each."""
Conversions = tuple[Callable[..., torch.Tensor], Callable[..., None]]
"""Functions that convert codes of an int8 moment to fp32 (`dequantise`), and fp32 values into codes (`requantise`)."""
SCALE = "_scale"
"""Ending of the name, in the optimizer's state, of the scales of an int8 moment."""


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) for fp32 or bf16 weights and gradients, with moments of fp32, bf16 or int8.

    Args:
        groups: as `torch.optim.AdamW` takes them, with lr and weight_decay in each.
        moments: with int8, the moments of one-dimensional parameters are fp32.
        seed: seed of the stochastic rounding. Random numbers depend on the seed, the step, the parameter, and the first
            row and the columns of this rank's shard, so that replicas stay equal and a resumed run draws the same
            numbers.
        compiled: whether torch.compile makes the kernels that convert int8 moments to fp32 and back. A GPU then reads
            and writes them fewer times. There the compiled kernels may round divisions differently.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: MomentDType,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        compiled: bool = False,
    ):
        """Take the settings of AdamW, the dtype in which moments are stored, and the seed of the stochastic rounding to
        bf16. `compiled`: whether torch.compile makes the kernels that convert int8 moments to fp32 and back."""
        super().__init__(groups, {"betas": betas, "eps": eps})
        self.moments = moments
        self.seed = seed
        self.conversions: Conversions = dequantise, requantise
        if compiled:
            self.conversions = torch.compile(dequantise, dynamic=True), torch.compile(requantise, dynamic=True)

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return zero moments, sharded like the parameter, and a step count of 0 on the CPU."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for name in MOMENTS:
            if is_quantised(parameter.shape, self.moments):
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[name + SCALE] = zero_scales(parameter)
            else:
                dtype = torch.bfloat16 if self.moments is MomentDType.bf16 else torch.float32
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient. `closure`, an argument of all torch optimizers, must be None."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self.update(parameter, group, number)

    def update(self, parameter: nn.Parameter, group: dict[str, Any], number: int) -> None:
        """Update one parameter and its moments.

        Args:
            group: hyperparameters (lr, betas, ...), as in `param_groups`.
            number: number of the parameter, counted over all groups, for the seed of the stochastic rounding.
        """
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        state["step"] += 1
        step = int(state["step"])
        assert parameter.grad is not None
        weights, gradients = as_rows(parameter), as_rows(parameter.grad)
        stored = [StoredMoment(state, name, self.conversions) for name in MOMENTS]
        # where this rank's shard begins: ranks with different shards draw different numbers, and replicas the same
        place = [local_rows(parameter)[0], *(local_columns(parameter) or ())]
        generator = torch.Generator(weights.device).manual_seed(derive("rounding", self.seed, step, number, *place))
        steps = torch.full((), float(step), device=weights.device)
        for rows in row_chunks(weights):
            weight, moments = weights[rows].float(), [moment.read(rows) for moment in stored]
            fused_adamw([[weight, gradients[rows].float(), *moments]], [steps], group)
            store(weight, weights[rows], generator)
            for moment, value in zip(stored, moments, strict=True):
                moment.write(rows, value, generator)


def is_quantised(shape: tuple[int, ...], moments: MomentDType) -> bool:
    """Return whether a parameter's moments are int8. Those of one-dimensional parameters (norms and biases) are not:
    they are so small that int8 would save nothing."""
    return moments is MomentDType.int8 and len(shape) > 1


def zero_scales(parameter: nn.Parameter) -> torch.Tensor:
    """Return the initial scales of an int8 moment, one for each block of 256 elements of a row: zeros, float32 [rows,
    blocks per row], sharded like the parameter."""

    def shape_of(values: torch.Tensor) -> tuple[int, int]:
        return values.shape[0], math.ceil(math.prod(values.shape[1:]) / BLOCK)

    scales = torch.zeros(shape_of(local(parameter)), dtype=torch.float32, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return scales
    rows, blocks = shape_of(parameter)
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size((rows, blocks)),
        stride=(blocks, 1),
    )  # fmt: skip


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor with at least one dimension: a scalar becomes one element."""
    return torch.atleast_1d(local(tensor))


def row_chunks(tensor: torch.Tensor) -> Iterator[slice]:
    """Yield slices of a tensor's rows (dimension 0) with about `CHUNK_ELEMENTS` elements each; none if it is empty."""
    if tensor.numel() == 0:
        return
    rows = max(1, CHUNK_ELEMENTS // (tensor.numel() // tensor.shape[0]))
    for begin in range(0, tensor.shape[0], rows):
        yield slice(begin, begin + rows)


class StoredMoment:
    """This rank's rows of one of AdamW's moments as it is stored: fp32, bf16, or int8 codes with scales."""

    def __init__(self, state: dict[str, torch.Tensor], name: str, conversions: Conversions):
        """Take moment `name` from a parameter's optimizer state. `conversions`: from int8 codes to fp32, and back."""
        self.from_codes, self.into_codes = conversions
        self.values = as_rows(state[name])
        self.scales = local(state[name + SCALE]) if name + SCALE in state else None
        signed = name == MOMENTS[0]  # the second moment is a mean of squares
        quantised = self.scales is not None
        self.map = torch.tensor(dynamic_map(signed), device=self.values.device) if quantised else None

    def read(self, rows: slice) -> torch.Tensor:
        """Return rows of the moment in fp32; if stored in fp32, as a view, whose update changes what is stored."""
        if self.scales is None or self.map is None:
            return self.values[rows].float()
        return self.from_codes(self.values[rows], self.scales[rows], self.map)

    def write(self, rows: slice, value: torch.Tensor, generator: torch.Generator) -> None:
        """Store fp32 values, which may be overwritten, as `rows`. `generator`: for stochastic rounding to bf16."""
        if self.scales is None or self.map is None:
            store(value, self.values[rows], generator)
        else:
            self.into_codes(value, self.values[rows], self.scales[rows], self.map)


def store(value: torch.Tensor, target: torch.Tensor, generator: torch.Generator) -> None:
    """Write fp32 values to `target`. For bf16 they are rounded stochastically, and `value` is overwritten."""
    if target.dtype == torch.float32:
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)
        return
    # A bf16 number is the upper 16 bits of an fp32 number. A random 16-bit number is added to the lower 16 bits, which
    # are then dropped. With probability (lower bits) / 2**16, the sum carries into the upper bits, which gives the bf16
    # number of the next larger magnitude.
    bits = value.view(torch.int32)
    bits.add_(torch.randint(1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator))
    bits.bitwise_and_(-(1 << 16))
    target.copy_(value)


@cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Return the 256 values that the codes 0 to 255 of an int8 moment stand for, in ascending order.

    The values lie in seven decades up to 1, each of which has twice as many values as the decade below it. Within a
    decade the values are the midpoints of equal intervals. 0 and 1 are added and, with `signed`, all negatives but -1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + ([-m for m in middles] if signed else [])
    return tuple(sorted(values))


def quantise(value: torch.Tensor, map_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize fp32 values [rows, ...]; return uint8 codes of the same shape, and scales, float32 [rows, blocks] of
    `BLOCK` elements. The scale of a block is its largest magnitude. The code of a value is the index in `map_`
    (`dynamic_map`, float32 [256]) of the entry that is nearest to value / scale."""
    blocks = into_blocks(value)
    scales = blocks.abs().amax(-1).clip_(min=1e-12)
    middles = (map_[:-1] + map_[1:]) / 2
    codes = torch.bucketize(blocks.div_(scales[..., None]), middles, right=True, out_int32=True).to(torch.uint8)
    return codes.flatten(1)[:, : value[0].numel()].view(value.shape), scales


def requantise(value: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, map_: torch.Tensor) -> None:
    """Quantize fp32 values in blocks, into `codes` and a scale per block. `map_`: each code's value (`dynamic_map`)."""
    new_codes, new_scales = quantise(value, map_)
    codes.copy_(new_codes)
    scales.copy_(new_scales)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, map_: torch.Tensor) -> torch.Tensor:
    """Convert uint8 codes [rows, ...] and the scales of their blocks [rows, blocks] back to float32 values of the
    codes' shape. `map_` has the value that each code stands for (`dynamic_map`). The result is contiguous, because the
    fused AdamW kernel updates it in place."""
    values = map_[codes.flatten(1).int()]
    return values.mul_(scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]).view(codes.shape)


def into_blocks(value: torch.Tensor) -> torch.Tensor:
    """Copy values [rows, ...] into blocks [rows, blocks, BLOCK]; each row is padded with zeros."""
    flat = value.flatten(1)
    return functional.pad(flat, (0, -flat.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
