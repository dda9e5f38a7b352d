"""What a rank holds at the worst moment of a training step, for any row of the table, by arithmetic alone.

peak(cfg, world_size=8, device="cuda").bytes["total"]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llava_fsdp.config import Config, RecomputeConfig, RecomputeMode, Strategy
from llava_fsdp.model.attention import Kernel
from llava_fsdp.model.llava import Llava, build_llava
from llava_fsdp.model.parts import Parts
from llava_fsdp.planning.activations import MicroBatch, Segment, measure
from llava_fsdp.planning.shapes import kernel_for, shapes_of
from llava_fsdp.planning.step import Ledger, Rest, walk, walk_one_rank
from llava_fsdp.planning.units import units_of
from llava_fsdp.sharding.memory import bytes_per_rank, storage_per_rank
from llava_fsdp.sharding.mesh import mesh_shape
from llava_fsdp.sharding.parallelize import weights_of
from llava_fsdp.sharding.precision import DTYPES
from llava_fsdp.sharding.zero import SHARD_PLANS


@dataclass(frozen=True)
class Samples:
    """What a sample of the dataset is like."""

    positions: float
    tiles: float
    labels: float
    spread: float
    """Standard deviation of positions."""
    source: str


LLAVA = Samples(
    positions=840,
    tiles=0.94,
    labels=180,
    spread=350,
    source="LLaVA's llava_v1_5_mix665k: 840 positions and 0.94 pictures a sample",
)
"""624,610 of 665,298 records have one picture (LLaVA issue 657); NeMo's packed run of the same file implies at most 847
positions a sample (docs/source/multimodal/mllm/sequence_packing.rst). Labels and spread are estimates."""


@dataclass(frozen=True)
class PlanRow:
    """One way to train, and what a rank holds of it."""

    strategy: Strategy
    recompute: RecomputeMode
    offload: str
    world_size: int
    micro_batches: tuple[MicroBatch, ...]
    """What a rank runs in a step."""
    bytes: dict[str, int]
    """At the worst moment, by category; `total` is their sum."""
    at_rest: dict[str, int]
    """After an optimizer step: parameters, gradients, optimizer."""
    moment: str
    """Which the worst moment is."""


class Planner:
    """A configuration's model, measured once for each way to recompute."""

    def __init__(self, cfg: Config, device: str, samples: Samples = LLAVA, bf16: bool = True):
        """
        Args:
            device: cuda or cpu: what attention is there, and what that keeps.
            bf16: the device's kernels know bf16, and with it FlashAttention.
        """
        self.cfg = cfg
        self.device = device
        self.samples = samples
        self.parts: Parts = shapes_of(cfg.model)
        compute = DTYPES[cfg.precision.param_dtype]
        self.kernel: Kernel | None = kernel_for(cfg, self.parts.language, device, bf16)
        self.model: Llava = build_llava(self.parts, cfg.model, compute, self.kernel)
        whole = self.model.whole_while_frozen()
        self.weights = list(weights_of(self.model, self.model.blocks(), whole, cfg.precision).values())
        self.buffer_bytes = sum(b.numel() * b.element_size() for b in self.model.buffers())
        self.measured: dict[tuple[str, MicroBatch], list[Segment]] = {}

    def segments(self, recompute: RecomputeConfig, micro: MicroBatch) -> list[Segment]:
        key = (recompute.mode.value, micro)
        if key not in self.measured:
            self.measured[key] = measure(self.parts, self.cfg, recompute, self.kernel, micro)
        return self.measured[key]

    def cut(self, world_size: int, row_tokens: int | None = None) -> list[MicroBatch]:
        """The micro-batches that a rank runs in a step."""
        cfg, own = self.cfg, self.samples
        longest = cfg.data.max_length
        each = cfg.global_batch_size / world_size
        if not cfg.pack:
            rows = min(cfg.micro_batch_size, math.ceil(each))
            count = max(1, math.ceil(cfg.global_batch_size / (world_size * cfg.micro_batch_size)))
            return [self.micro(rows, longest, rows)] * count
        # so many positions fall to a rank in all but few steps: three standard deviations above the mean
        share = each * own.positions + 3 * own.spread * math.sqrt(each)
        most = row_tokens or cfg.row_tokens
        count = max(1, math.ceil(each * own.positions / most))
        tokens = min(most, math.ceil(share / count))
        tokens = max(tokens, min(longest, most))
        return [self.micro(1, tokens, max(1, round(tokens / own.positions)))] * count

    def micro(self, rows: int, length: int, samples: int) -> MicroBatch:
        tokens = rows * length
        room = tokens // max(1, self.model.image_tokens)
        tiles = min(room, math.ceil(samples * self.samples.tiles))
        labels = min(tokens, max(1, math.ceil(samples * self.samples.labels)))
        return MicroBatch(rows, length, samples, tiles, labels)

    def row(
        self,
        strategy: Strategy,
        recompute: RecomputeConfig,
        world_size: int,
        shard_size: int,
        micros: Sequence[MicroBatch],
        rank: int = 0,
    ) -> PlanRow:
        """One row of the plan: a step of these micro-batches."""
        cfg, plan = self.cfg, SHARD_PLANS[strategy]
        passes = [self.segments(recompute, micro) for micro in told_apart(micros)]
        rest, stored = (
            of(self.weights, strategy, cfg.precision, world_size, shard_size, rank)
            for of in (bytes_per_rank, storage_per_rank)
        )
        inputs = [self.input_bytes(micro) for micro in micros]
        buffers = self.buffer_bytes + (sum(inputs) if self.device == "cpu" else max(inputs))
        held = Rest(stored.parameters, stored.gradients, stored.optimizer, buffers)
        if world_size == 1:
            ledger: Ledger = walk_one_rank(passes, held)
        else:
            _, shards = mesh_shape(plan, world_size, shard_size)
            units = units_of(self.weights, plan, cfg.precision, shards)
            ledger = walk(passes, units, plan, held)
        worst = {**ledger.worst, "total": sum(ledger.worst.values())}
        at_rest = {"parameters": rest.parameters, "gradients": rest.gradients, "optimizer": rest.optimizer}
        return PlanRow(strategy, recompute.mode, "none", world_size, tuple(micros), worst, at_rest, ledger.moment)

    def input_bytes(self, micro: MicroBatch) -> int:
        """A micro-batch's tensors: three int64 a position at most, two a label, pixels in fp32."""
        pixels = micro.tiles * 3 * self.parts.vision.image_size**2 * 4
        return pixels + 8 * (4 * micro.tokens + 2 * micro.labels)


def told_apart(micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Enough of a step's micro-batches to see its worst moment: of those after the first that are alike, one."""
    return [micros[0], *dict.fromkeys(micros[1:])]


def peak(
    cfg: Config,
    world_size: int,
    device: str | torch.device,
    micros: Sequence[MicroBatch] | None = None,
    rank: int = 0,
) -> PlanRow:
    """What a rank of this very configuration holds at the worst moment of a step.

    Args:
        device: cuda or cpu.
        micros: the micro-batches of the step, where they are known; else what LLaVA's mean samples make.
    """
    planner = Planner(cfg, device.type if isinstance(device, torch.device) else device)
    shard_size = cfg.sharding.shard_size or world_size
    found = planner.cut(world_size) if micros is None else micros
    return planner.row(cfg.sharding.strategy, cfg.recompute, world_size, shard_size, found, rank)
