"""What a way to train costs: bytes of a rank at the worst moment of a step, and the seconds that a step takes.

peak(cfg, world_size=8, device="cuda").bytes["total"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config, OffloadMode, Strategy
from llava_fsdp.distributed.memory import Bytes, bytes_per_rank
from llava_fsdp.distributed.mesh import mesh_shape
from llava_fsdp.distributed.parallelize import units_of_blocks, weights_of
from llava_fsdp.distributed.precision import DTYPES
from llava_fsdp.distributed.zero import SHARD_PLANS, ShardPlan
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava import build_llava
from llava_fsdp.model.pretrained import Parts
from llava_fsdp.plan.activations import Measuring, MicroBatch, Segment
from llava_fsdp.plan.fsdp_units import units_of
from llava_fsdp.plan.hardware import Machine, machine_for
from llava_fsdp.plan.model_shapes import kernel_for, shapes_of
from llava_fsdp.plan.simulate import Ledger, Pass, Rest, blend, inputs_away, inputs_of_blocks, walk, walk_one_rank
from llava_fsdp.plan.step_time import AGAIN, Step, Volume, sample_flops, step_time, volume
from llava_fsdp.plan.workload import Samples, asked_for, samples_of

STREAMED = 2 * 128 * (1 << 20)
"""Buffers through which offloaded moments pass (`distributed/streamed_optimizer.py`)."""


@dataclass(frozen=True)
class Choice:
    """One way to train."""

    strategy: Strategy
    activation_checkpointing: ActivationCheckpointingConfig
    offload: OffloadMode


@dataclass(frozen=True)
class PlanRow:
    """One way to train, and what it costs."""

    choice: Choice
    world_size: int
    shard_size: int
    micro_batches: tuple[MicroBatch, ...]
    """What a rank runs in a step."""
    bytes: dict[str, int]
    """On the device at the worst moment, by category; `total` is their sum."""
    moment: str
    """Which the worst moment is."""
    at_rest: dict[str, int]
    """Parameters, gradients and optimizer after an optimizer step, wherever they lie."""
    host: int
    """Bytes of tensors in host memory, beside a GPU."""
    disk: int
    usable: int
    """Bytes of the device that tensors can have."""
    step: Step
    sent: Volume
    samples_per_second: float
    """Of all ranks."""
    tokens_per_second: float
    mfu: float
    """Arithmetic of the model alone, without what runs again, over the peak of the devices."""

    @property
    def fits(self) -> bool:
        return self.bytes["total"] <= self.usable

    @property
    def tokens(self) -> int:
        """Most positions that a rank runs at once."""
        return max(micro.tokens for micro in self.micro_batches)


class Planner:
    """A configuration's model on a machine; passes are measured once for each kind of activation checkpointing."""

    def __init__(self, cfg: Config, machine: Machine, samples: Samples | None = None, parts: Parts | None = None):
        """
        Args:
            samples: None: of the dataset's report, or LLaVA's.
            parts: None: of folders, or as this package ships them.
        """
        self.cfg = cfg
        self.machine = machine
        machine.check(cfg.precision)
        self.parts = parts or shapes_of(cfg.model)
        bf16 = machine.gpu is not None and machine.gpu.bf16 is not None
        self.kernel = kernel_for(cfg, self.parts.language, machine.device, bf16)
        self.model = build_llava(self.parts, cfg.model, DTYPES[cfg.precision.param_dtype], self.kernel, cfg.loss)
        whole, blocks = self.model.whole_while_frozen(), self.model.blocks()
        per_unit = cfg.sharding.blocks_per_unit
        self.weights = list(weights_of(self.model, blocks, whole, cfg.precision, per_unit).values())
        self.unit_names = units_of_blocks(self.model, blocks, per_unit)
        packed = sum(weight.statistics for weight in self.weights)  # counted with the parameters
        self.buffer_bytes = sum(b.numel() * b.element_size() for b in self.model.buffers()) - packed
        self.flops = count_flops(self.model, activation_checkpointing=False)
        self.flops_again = count_flops(self.model, activation_checkpointing=True)
        self.samples = samples or samples_of(cfg, self.model.image_tokens)
        self.models: dict[ActivationCheckpointing, Measuring] = {}
        self.measured: dict[tuple[ActivationCheckpointing, MicroBatch], list[Segment]] = {}
        self.between: dict[tuple[ActivationCheckpointing, MicroBatch], list[Segment]] = {}

    @property
    def trainable(self) -> int:
        """Parameters that train."""
        return sum(w.numel for w in self.weights if w.trainable)

    def segments(self, mode: ActivationCheckpointing, micro: MicroBatch) -> list[Segment]:
        """A pass of `none`, `full` or `selective`."""
        key = mode, micro
        if key not in self.measured:
            if mode not in self.models:
                activation_checkpointing = ActivationCheckpointingConfig(mode=mode, budget=None)
                self.models[mode] = Measuring(self.parts, self.cfg, activation_checkpointing, self.kernel)
            self.measured[key] = self.models[mode].segments(micro)
        return self.measured[key]

    def passes(
        self, mode: ActivationCheckpointing, micros: Sequence[MicroBatch], between: Sequence[MicroBatch]
    ) -> list[Pass]:
        """Passes of a step's micro-batches: measured, or drawn between two that are."""
        apart = told_apart(micros)
        return [self.drawn(mode, micro, between) if between else self.segments(mode, micro) for micro in apart]

    def drawn(self, mode: ActivationCheckpointing, micro: MicroBatch, between: Sequence[MicroBatch]) -> list[Segment]:
        """A pass between two measured ones; measured itself where those differ in more than sizes."""
        key = mode, micro
        small, large = between
        one, other = (self.segments(mode, end) for end in between)
        if key in self.measured or len(one) != len(other):
            return self.segments(mode, micro)
        if key not in self.between:
            part = (micro.tokens - small.tokens) / (large.tokens - small.tokens)
            self.between[key] = [blend(a, b, part) for a, b in zip(one, other, strict=True)]
        return self.between[key]

    def row(
        self,
        choice: Choice,
        world_size: int,
        shard_size: int,
        micros: Sequence[MicroBatch],
        node_size: int | None = None,
        between: Sequence[MicroBatch] = (),
        rank: int = 0,
    ) -> PlanRow:
        """What a way to train costs.

        Args:
            micros: the micro-batches that a rank runs in a step.
            node_size: ranks of a node; None: all.
            between: two micro-batches that were measured, between which others are drawn.
        """
        precision, strategy, offload = self.cfg.precision, choice.strategy, choice.offload
        of = self.weights, strategy, precision, world_size, shard_size, rank, offload
        rest = bytes_per_rank(*of)
        ledger = self.walk(choice, world_size, shard_size, micros, between, rank)
        bytes_ = {**ledger.worst, "total": sum(ledger.worst.values())}
        host, disk = self.elsewhere(offload, SHARD_PLANS[strategy], bytes_per_rank(*of, padded=True))
        if choice.activation_checkpointing.mode is ActivationCheckpointing.offload and self.machine.device != "cpu":
            passes = self.passes(ActivationCheckpointing.full, micros, between)
            host += max(sum(inputs_of_blocks(own).values()) for own in passes)
        sent = volume(self.weights, strategy, precision, world_size, shard_size, node_size or world_size, len(micros))
        own = self.samples
        a_sample = own.positions, own.spread, own.labels, own.tiles
        flops = sample_flops(self.flops, *a_sample)
        again = again_share(choice.activation_checkpointing) * (sample_flops(self.flops_again, *a_sample) - flops)
        each = self.cfg.global_batch_size / world_size
        _, shards = mesh_shape(SHARD_PLANS[strategy], world_size, shard_size)
        step = step_time(
            self.machine,
            precision,
            each * flops,
            each * again,
            sent,
            trainable=self.trainable,
            local=self.trainable / shards,
            micro_batches=len(micros),
            world_size=world_size,
            offload=offload,
        )
        rate = self.cfg.global_batch_size / step.seconds
        peak_rate = world_size * self.machine.peak(precision.param_dtype)
        return PlanRow(
            choice,
            world_size,
            shard_size,
            tuple(micros),
            bytes_,
            ledger.moment,
            {"parameters": rest.parameters, "gradients": rest.gradients, "optimizer": rest.optimizer},
            host,
            disk,
            self.machine.usable(world_size),
            step,
            sent,
            rate,
            rate * own.positions,
            rate * flops / peak_rate,
        )

    def walk(
        self,
        choice: Choice,
        world_size: int,
        shard_size: int,
        micros: Sequence[MicroBatch],
        between: Sequence[MicroBatch],
        rank: int,
    ) -> Ledger:
        """A step of these micro-batches, under a kind of activation checkpointing."""
        mode = choice.activation_checkpointing.mode
        if mode is ActivationCheckpointing.budget:
            # what the compiler's partitioner keeps is its own choice: drawn between everything and nothing
            kept, none = (
                self.walk_passes(choice, world_size, shard_size, micros, self.passes(own, micros, between), rank)
                for own in (ActivationCheckpointing.none, ActivationCheckpointing.full)
            )
            part = choice.activation_checkpointing.budget or 0.0
            worst = {n: int(part * kept.worst[n] + (1 - part) * none.worst[n]) for n in kept.worst}
            return Ledger(held=none.held, worst=worst, moment=none.moment)
        measured = ActivationCheckpointing.full if mode is ActivationCheckpointing.offload else mode
        passes = self.passes(measured, micros, between)
        if mode is ActivationCheckpointing.offload and self.machine.device != "cpu":
            passes = [inputs_away(own) for own in passes]
        return self.walk_passes(choice, world_size, shard_size, micros, passes, rank)

    def walk_passes(
        self,
        choice: Choice,
        world_size: int,
        shard_size: int,
        micros: Sequence[MicroBatch],
        passes: Sequence[Pass],
        rank: int,
    ) -> Ledger:
        precision, plan = self.cfg.precision, SHARD_PLANS[choice.strategy]
        of = self.weights, choice.strategy, precision, world_size, shard_size, rank, choice.offload
        stored = bytes_per_rank(*of, padded=True)
        buffers = self.buffer_bytes + self.input_bytes(micros)
        rest = self.on_device(choice.offload, plan, stored, buffers)
        if world_size == 1 and not choice.offload.moves_weights:
            return walk_one_rank(passes, rest)
        _, shards = mesh_shape(plan, world_size, shard_size)
        is_away = not rest.gradients
        passes_through = is_away and self.machine.device != "cpu"
        units = units_of(self.weights, plan, precision, shards, is_away, passes_through)
        return walk(passes, units, plan, rest, self.unit_names, self.cfg.sharding.prefetch)

    def on_device(self, offload: OffloadMode, plan: ShardPlan, stored: Bytes, buffers: int) -> Rest:
        """What stays of the states on the device; on a CPU machine only files are elsewhere."""
        everything = Rest(stored.parameters, stored.gradients, stored.optimizer, buffers)
        if offload is OffloadMode.none or (self.machine.device == "cpu" and offload is not OffloadMode.nvme):
            return everything
        if offload is OffloadMode.optimizer:
            return Rest(stored.parameters, stored.gradients, 0, buffers, min(STREAMED, 2 * stored.optimizer))
        return Rest(self.frozen_whole(plan), 0, 0, buffers)

    def frozen_whole(self, plan: ShardPlan) -> int:
        """Bytes of frozen weights that are whole on every rank."""
        return sum(
            w.numel * w.item_size(self.cfg.precision)
            for w in self.weights
            if not w.trainable and (w.whole or not plan.shards_frozen)
        )

    def elsewhere(self, offload: OffloadMode, plan: ShardPlan, stored: Bytes) -> tuple[int, int]:
        """Bytes in host memory and on disk."""
        states = stored.parameters - self.frozen_whole(plan) + stored.gradients + stored.optimizer
        if offload is OffloadMode.nvme:
            return 0, states
        if self.machine.device == "cpu":
            return 0, 0
        return {OffloadMode.none: 0, OffloadMode.optimizer: stored.optimizer, OffloadMode.params: states}[offload], 0

    def input_bytes(self, micros: Sequence[MicroBatch]) -> int:
        """A step's tensors: ids, positions and places of pictures in int64, pixels in bytes.

        The micro-batch that runs has its pixels in fp32; a GPU holds no other.
        """
        pixels = [micro.tiles * 3 * self.parts.vision.image_size**2 for micro in micros]
        numbers = [2 * m.tokens + 2 * m.tiles * self.model.image_tokens + 2 * m.labels for m in micros]
        if self.machine.device != "cpu":
            return max(4 * p + 8 * n for p, n in zip(pixels, numbers, strict=True))
        return sum(pixels) + 8 * sum(numbers) + 4 * max(pixels)


def told_apart(micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Enough of a step's micro-batches to see its worst moment: of those after the first that are alike, one."""
    return [micros[0], *dict.fromkeys(micros[1:])]


def again_share(activation_checkpointing: ActivationCheckpointingConfig) -> float:
    """Of a forward pass through the blocks, in time."""
    if activation_checkpointing.mode is ActivationCheckpointing.budget:
        return 1 - (activation_checkpointing.budget or 0.0)
    return AGAIN[activation_checkpointing.mode]


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
    planner = Planner(cfg, machine_for(device.type if isinstance(device, torch.device) else device, world_size))
    found = micros or asked_for(cfg, planner.samples, world_size, planner.model.image_tokens)
    choice = Choice(cfg.sharding.strategy, cfg.activation_checkpointing, cfg.offload.mode)
    return planner.row(choice, world_size, cfg.sharding.shard_size or world_size, found, rank=rank)
