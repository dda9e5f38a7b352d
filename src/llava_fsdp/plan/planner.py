"""Predict the cost of one way to train: the bytes on a rank at the memory peak of a step, and the seconds of a step.

Example: `peak(cfg, world_size=8, device="cuda").bytes["total"]`
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Config,
    ContextHow,
    DType,
    LinearKind,
    OffloadMode,
    Strategy,
)
from llava_fsdp.model.architecture import check_abilities
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.experts import Router, check_shared_experts, find_experts, find_routers
from llava_fsdp.model.flops import Flops, count_flops
from llava_fsdp.model.packed_attention.attention import grows_with_square
from llava_fsdp.model.parts import Parts
from llava_fsdp.parallel.compile import compiling_of_settings
from llava_fsdp.parallel.context.context_attention import plan_context
from llava_fsdp.parallel.context.share_rows import check_rows
from llava_fsdp.parallel.fsdp.parts import parts_of
from llava_fsdp.parallel.fsdp.units import units_of_blocks
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.memory.memory import Bytes, Weight, bytes_per_rank, divided_weights
from llava_fsdp.parallel.pipeline.pipeline import passes_of
from llava_fsdp.parallel.pipeline.stages import plan_stages
from llava_fsdp.parallel.precision.fast_dtype import settle_precision
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.precision.summed_linear import check_one_rank
from llava_fsdp.parallel.ranks.rank_layout import RankLayout, mesh_shape, place_of_group
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, ShardPlan, Sync
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_plan import tensor_plan
from llava_fsdp.plan.memory.activations import ActivationMeter, PassSegment, stack_name
from llava_fsdp.plan.memory.blank_images import BlankImages, image_rule
from llava_fsdp.plan.memory.fsdp_units import Unit, units_of
from llava_fsdp.plan.memory.micro_batches import MicroBatches, MicroBatchSizes
from llava_fsdp.plan.memory.reached import freeze_unreached
from llava_fsdp.plan.memory.simulate import (
    Ledger,
    Pass,
    States,
    inputs_of_blocks,
    inputs_on_host,
    interpolate,
    simulate_step,
    simulate_unsharded_step,
)
from llava_fsdp.plan.memory.stage_memory import segments_of_stage, simulate_pipeline, weights_of_groups
from llava_fsdp.plan.model_shapes import kernel_for, shapes_of
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import MIB, Machine, machine_for
from llava_fsdp.plan.time.heaviest_rank import heaviest_over_mean
from llava_fsdp.plan.time.layer_volume import layer_volume
from llava_fsdp.plan.time.muon_cost import MuonCost, muon_cost
from llava_fsdp.plan.time.step_time import (
    ExpertLayers,
    StepTime,
    StepWork,
    Volume,
    added_bytes,
    context_volume,
    copied_bytes,
    expert_volume,
    received_by_attention,
    recomputed_share,
    sample_flops,
    step_time,
    volume,
)
from llava_fsdp.plan.workload import Samples, configured_split, micro_batch, packed_row, samples_of
from llava_fsdp.runtime.errors import ConfigError

T = TypeVar("T")
STREAMED = 2 * 128 * MIB
"""Bytes of the two device buffers that the offloaded moments pass through (`parallel/memory/streamed_optimizer.py`)."""


@dataclass(frozen=True)
class Choice:
    """One way to train: sharding strategy, activation checkpointing and offload."""

    strategy: Strategy
    activation_checkpointing: ActivationCheckpointingConfig
    offload: OffloadMode

    @property
    def zero(self) -> str:
        """Name of the strategy on the command line, such as zero3."""
        return SHARD_PLANS[self.strategy].zero


@dataclass(frozen=True)
class PlanRow:
    """A way to train, with its predicted memory and time."""

    choice: Choice
    world_size: int
    shard_size: int
    micro_batches: tuple[MicroBatchSizes, ...]
    """What a rank runs in a step."""
    bytes: dict[str, int]
    """Bytes on the device at the memory peak of a step, by category, and their `total`."""
    peak_moment: str
    """When in a step the most device memory is used."""
    at_rest: dict[str, int]
    """Bytes of parameters, gradients and optimizer state after a step, on the device or offloaded."""
    host: int
    """Bytes of offloaded tensors in host memory; 0 on a CPU machine."""
    disk: int
    """Bytes of offloaded tensors in files."""
    usable: int
    """Bytes of the device's memory that tensors can use."""
    step: StepTime
    sent: Volume
    samples_per_second: float
    """On all ranks together."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization: FLOPs without recomputation as a share of the devices' peak."""

    @property
    def fits(self) -> bool:
        return self.bytes["total"] <= self.usable

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        return max(micro.tokens for micro in self.micro_batches)


@dataclass(frozen=True, eq=False)
class Group:
    """What the ranks of one group of a pipeline have of the model; without a pipeline, all of it."""

    number: int
    weights: list[Weight]
    stages: dict[int, range]
    """Number of each of its stages -> numbers of the language model's blocks in it."""
    num_stages: int
    """Number of the stages of all groups."""
    share: float = 1.0
    """Share of the model's computation."""

    @property
    def blocks(self) -> set[int]:
        return {number for stage in self.stages.values() for number in stage}

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    @cached_property
    def kind(self) -> Hashable:
        """A value that is equal for groups that are predicted to take equally long for a step."""
        counts = [(w.numel, w.trainable) for w in self.weights]
        return round(self.share, 9), len(self.blocks), len(self.stages), self.has_first, self.has_last, *sorted(counts)


class Planner:
    """Predicts memory and time of training one model on one machine. Activation memory is measured once for each mode
    of activation checkpointing and size of micro-batch."""

    def __init__(
        self,
        cfg: Config,
        machine: Machine,
        samples: Samples | None = None,
        parts: Parts | None = None,
        correction: float = 1.0,
    ):
        """Build the model on the meta device, and count its weights and FLOPs.

        Args:
            samples: mean sizes of samples; None: read from the dataset's report or, without one, those of LLaVA's data.
            parts: configurations of the model's parts; None: read from the folders of `cfg` or from this package.
            correction: factor of all predicted seconds.
        """
        cfg, _ = settle_precision(cfg, [machine.has_bf16], machine.device)
        self.cfg = cfg
        self.machine = machine
        self.correction = correction
        machine.check(cfg.precision)
        self.parts = parts or shapes_of(cfg.model)
        bf16 = machine.gpu is not None and machine.gpu.bf16 is not None
        self.kernel = kernel_for(cfg, self.parts.language, machine.device, bf16)
        self.model = build_architecture(self.parts, cfg.model, DTYPES[cfg.precision.param_dtype], self.kernel, cfg.loss)
        self.image_rule = image_rule(cfg, self.model)
        self.images = self.image_rule if isinstance(self.image_rule, BlankImages) else None
        """Makes the images of a whole model of transformers; None: the model has tiles."""
        if self.images is not None:
            freeze_unreached(self.images, cfg.precision)
        self.unit_names = units_of_blocks(self.model, self.model.blocks(), cfg.sharding.blocks_per_unit)
        self.known_values: dict[Hashable, Any] = {}
        """Values that `cached` has computed, by key; planners of other layouts of ranks share them."""
        self.divide()
        quantized = sum(weight.statistics for weight in self.weights)  # counted with the parameters
        self.buffer_bytes = sum(b.numel() * b.element_size() for b in self.model.buffers()) - quantized
        self.samples = samples or samples_of(cfg, self.image_rule)
        self.flops, self.recomputing_flops = (self.count_flops(recomputes) for recomputes in (False, True))
        self.meters: dict[Any, ActivationMeter] = {}
        self.measured: dict[Any, list[PassSegment]] = {}
        self.interpolated: dict[Any, list[PassSegment]] = {}

    def count_flops(self, recomputes: bool) -> Flops:
        """Count the FLOPs of the model. `recomputes`: activations are recomputed in the backward pass."""
        flops = count_flops(self.model, activation_checkpointing=recomputes)
        return flops if self.images is None else self.images.with_images(flops, recomputes)

    def divide(self) -> None:
        """Set the attributes that depend on the configuration's kinds of parallelism: how the weights are divided, and
        the properties of the parameters (`weights`, `whole_weights`).

        Raises:
            ConfigError: the model cannot be divided in this way.
        """
        check_abilities(self.model, self.cfg)
        check_rows(self.model, self.cfg.parallel)
        experts, tensor = self.cfg.parallel.expert, self.cfg.parallel.tensor
        self.tensor = tensor
        self.plan = self.cached(("plan", tensor), lambda: tensor_plan(self.model, tensor) if tensor > 1 else {})
        if refusal := self.cached(("refused", experts, tensor), lambda: self.refusal(experts, tensor)):
            raise ConfigError(refusal)
        weights = self.cached(("weights", experts, tensor), self.weights_with_shared_experts)
        self.whole_weights = list(weights.values())
        self.trainable = sum(w.numel for w in self.whole_weights if w.trainable)
        """Number of trainable parameters of the model that is planned for."""
        self.named_weights = self.cached(
            ("divided", experts, tensor), lambda: divided_weights(weights, self.plan, tensor, 0)
        )
        """Properties of the parameters, or of the parts of them that the first rank has with parallel.tensor."""
        self.weights = list(self.named_weights.values())

    def refusal(self, experts: int, tensor: int) -> str:
        """Return why `experts` ranks cannot share the experts of a mixture while `tensor` ranks compute each layer
        together; empty if they can."""
        try:
            check_shared_experts(self.model.language, experts, tensor)
        except ConfigError as error:
            return str(error)
        return ""

    def weights_with_shared_experts(self) -> dict[str, Weight]:
        """Return the properties of the parameters, by name, as ranks share the experts of a mixture."""
        cfg = self.cfg
        return weights_of(
            self.model,
            parts_of(self.model),
            cfg.precision,
            cfg.sharding.blocks_per_unit,
            cfg.parallel,
            optim=cfg.optim,
        )

    def with_layout(self, cfg: Config) -> Self:
        """Return a planner of the same model with other kinds of parallelism, which shares all measured values. Raise
        ConfigError if the model cannot be divided in this way."""
        other = copy.copy(self)
        cfg, _ = settle_precision(cfg, [self.machine.has_bf16], self.machine.device)
        other.cfg = cfg
        other.divide()
        parallel = cfg.parallel
        # both raise ConfigError: if the ranks cannot share the heads, or the blocks cannot be divided into stages
        plan_context(parallel.context_how, self.parts.language, parallel.num_context, 0, other.tensor)
        other.groups_of(recomputes=False)
        return other

    @property
    def parallel_sizes(self) -> tuple[int, int, int]:
        """Sizes of `parallel.context`, `parallel.tensor` and `parallel.expert`, which together with the micro-batch
        decide the memory of a layer's activations on a rank."""
        parallel = self.cfg.parallel
        return parallel.num_context, parallel.tensor, parallel.expert

    @cached_property
    def grows_with_square(self) -> bool:
        """Whether activation memory grows with the square of a sample's length. It is then measured at each length, as
        it cannot be interpolated between two."""
        if self.kernel is None:  # padded rows all have one length
            return False
        return grows_with_square(self.kernel.attention, self.model.language)

    @property
    def how(self) -> ContextHow:
        """How attention exchanges tensors between the ranks that process a row together."""
        parallel = self.cfg.parallel
        # `how` is the same for every rank of a row, such as number 0
        return plan_context(parallel.context_how, self.parts.language, parallel.num_context, 0, self.tensor).how

    def gathered_for_attention(self, micro: MicroBatchSizes) -> int:
        """Return the bytes that a rank holds after a forward pass if it keeps the results of all collectives of
        attention between the ranks of a row."""
        size, width = self.cfg.parallel.num_context, DTYPES[self.cfg.precision.param_dtype].itemsize
        if size == 1:
            return 0
        received = received_by_attention(self.how, size, self.parts.language, width, micro.tokens)
        return int(received * size / (size - 1))  # with the rank's own part

    def sizes_to_measure(self, splits: Sequence[Sequence[MicroBatchSizes]]) -> list[MicroBatchSizes]:
        """Return the micro-batches whose activation memory is measured, to interpolate that of others: the smallest one
        of all splits, and 16, 256, ... times as many tokens, up to the largest split. Layouts of ranks have most of
        these in common, so that a search measures few. Empty if each micro-batch must be measured: all have one size,
        or attention's memory grows with the square of the length. `splits`: ways to split a step into micro-batches,
        those with the largest micro-batches first."""
        small, large = splits[-1][0], splits[0][0]
        if self.grows_with_square or small.tokens == large.tokens:
            return []
        if self.images is not None:  # each run of a whole model takes seconds
            return [small, large]
        sizes, times = [small], 1
        while sizes[-1].tokens < large.tokens:
            times *= 16
            # `small.length` is one rank's part of a row, which `small.context` ranks process together
            rows, length = small.rows, small.length * small.context
            if self.cfg.packs:
                sizes.append(packed_row(self.samples, times * length, small.context))
            else:
                sizes.append(micro_batch(self.samples, times * rows, length, times * rows))
        return sizes

    def compiles(self, mode: ActivationCheckpointing) -> bool:
        """Return whether the training compiles the language model's blocks in this mode."""
        attention = self.kernel and self.kernel.attention
        return self.machine.has_compiler and compiling_of_settings(self.cfg, mode, attention, self.machine.device).on

    def segments(
        self, mode: ActivationCheckpointing, micro: MicroBatchSizes, compiled: bool | None = None
    ) -> list[PassSegment]:
        """Measure the activation memory of a micro-batch, or return what was measured before. `mode`: `none`, `full` or
        `selective`; `compiled`: whether blocks are compiled; None: as the training does in this mode."""
        compiled = self.compiles(mode) if compiled is None else compiled
        key = self.parallel_sizes, compiled, mode, micro
        if key not in self.measured:
            one_row = micro.rows == 1
            meter = *key[:-1], micro.part, one_row
            if meter not in self.meters:
                self.meters[meter] = ActivationMeter(
                    self.parts,
                    self.cfg,
                    ActivationCheckpointingConfig(mode=mode, budget=None),
                    self.kernel,
                    part=micro.part,
                    compiled=compiled,
                    one_row=one_row,
                    images=self.images,
                )
            self.measured[key] = self.meters[meter].segments(micro)
        return self.measured[key]

    def passes(
        self,
        mode: ActivationCheckpointing,
        micros: Sequence[MicroBatchSizes],
        between: Sequence[MicroBatchSizes],
        compiled: bool | None = None,
    ) -> list[Pass]:
        """Return the activation memory of a step's micro-batches, each size once.

        Args:
            mode: `none`, `full` or `selective`.
            between: micro-batches that are measured to interpolate the others; if empty, each is measured.
            compiled: whether blocks are compiled; None: as the training does in this mode.
        """
        compiled = self.compiles(mode) if compiled is None else compiled
        if not between:
            return [self.segments(mode, micro, compiled) for micro in without_repeats(micros)]
        return [self.between(mode, micro, between, compiled) for micro in without_repeats(micros)]

    def between(
        self, mode: ActivationCheckpointing, micro: MicroBatchSizes, sizes: Sequence[MicroBatchSizes], compiled: bool
    ) -> list[PassSegment]:
        """Return the activation memory of a micro-batch, interpolated linearly in its tokens between the next smaller
        and the next larger one of `sizes`, whose memory is measured. If there are no such two, or their passes have
        different numbers of segments, the memory of the micro-batch is measured. `sizes`: the smallest first."""
        key = self.parallel_sizes, compiled, mode, micro
        around = [(a, b) for a, b in itertools.pairwise(sizes) if a.tokens < micro.tokens < b.tokens]
        if not around or key in self.measured:
            return self.segments(mode, micro, compiled)
        [(small, large)] = around
        place = *key, small, large
        if place not in self.interpolated:
            first, second = (self.segments(mode, size, compiled) for size in (small, large))
            if len(first) != len(second):
                return self.segments(mode, micro, compiled)
            share = (micro.tokens - small.tokens) / (large.tokens - small.tokens)
            self.interpolated[place] = [interpolate(a, b, share) for a, b in zip(first, second, strict=True)]
        return self.interpolated[place]

    def groups(self, choice: Choice) -> list[Group]:
        """Return what each group of ranks of a pipeline has; without a pipeline, one group with the whole model."""
        return self.groups_of(choice.activation_checkpointing.mode is not ActivationCheckpointing.none)

    def groups_of(self, recomputes: bool) -> list[Group]:
        parallel = self.cfg.parallel
        key = "groups", parallel.tensor, parallel.expert, parallel.pipeline, parallel.num_stages, recomputes
        return self.cached(key, lambda: self.make_groups(recomputes))

    def make_groups(self, recomputes: bool) -> list[Group]:
        """Return, for each group of ranks of the pipeline, its part of the model; without a pipeline, one group that
        has all of it. `recomputes`: activations are recomputed in the backward pass."""
        parallel = self.cfg.parallel
        if parallel.pipeline == 1:
            blocks = range(self.parts.language.num_hidden_layers)
            return [Group(number=0, weights=self.weights, stages={0: blocks}, num_stages=1)]
        flops = self.recomputing_flops if recomputes else self.flops
        plan = plan_stages(self.model, flops, self.samples.counts, parallel.num_stages, self.tensor)
        weights = weights_of_groups(self.model, self.named_weights, plan, parallel)
        places = (place_of_group(parallel, group) for group in range(parallel.pipeline))
        return [
            Group(
                number=place.index,
                weights=weights[place.index],
                stages={stage: plan.blocks[stage] for stage in place.own},
                num_stages=parallel.num_stages,
                share=sum(plan.costs[stage] for stage in place.own) / sum(plan.costs),
            )
            for place in places
        ]

    def row(
        self,
        choice: Choice,
        ranks: RankCounts,
        micros: Sequence[MicroBatchSizes],
        between: Sequence[MicroBatchSizes] = (),
        rank: int | None = None,
    ) -> PlanRow:
        """Predict memory and time of a choice of strategy, activation checkpointing and offload. With a pipeline,
        memory and communication are those of the group of ranks that needs the most memory, or of the group of `rank`.

        Args:
            ranks: numbers of ranks of the training.
            micros: what a rank runs in a step.
            between: micro-batches whose activation memory is measured, to interpolate that of `micros`; if empty, each
                of `micros` is.
            rank: the rank whose memory is computed; None: the first one of the group that needs the most.
        """
        parallel, precision, strategy, offload = self.cfg.parallel, self.cfg.precision, choice.strategy, choice.offload
        world_size, layout = ranks.world_size, RankLayout(parallel, ranks.world_size)
        same_part, groups = self.ranks_of_same_part(ranks), self.groups(choice)
        index, micros = layout.copy_of_layers(rank or 0).number, MicroBatches(micros)  # index among these ranks
        shape = mesh_shape(SHARD_PLANS[strategy], same_part.world_size, same_part.shard_size)
        ledgers = {
            number: self.simulate(choice, same_part, micros, between, index, groups[number])
            for number in (range(len(groups)) if rank is None else [layout.place(rank).index])
        }
        number, ledger = max(ledgers.items(), key=lambda item: sum(item[1].worst.values()))
        group = groups[number]
        # offloaded shards take their padding along; at rest, only the weights' elements are reported
        at_rest, stored = (self.state_bytes(choice, same_part, index, group, padded) for padded in (False, True))
        host, disk = self.off_device(offload, SHARD_PLANS[strategy], stored)
        if self.offloads_activations(choice):
            passes = self.passes(ActivationCheckpointing.full, micros, between)
            host += max(sum(inputs_of_blocks(one).values()) for one in passes)
        _, sent = self.step(choice, ranks, micros, group)
        # all groups wait for the slowest one
        step = max((self.step(choice, ranks, micros, one)[0] for one in groups), key=lambda one: one.seconds)
        flops = sample_flops(self.flops, self.samples)
        rate = self.cfg.global_batch_size / step.seconds
        return PlanRow(
            choice=choice,
            world_size=world_size,
            shard_size=same_part.shard_size,
            micro_batches=micros,
            bytes={**ledger.worst, "total": sum(ledger.worst.values())},
            peak_moment=ledger.moment + (f" (pipeline group {number} of {len(groups)})" if len(groups) > 1 else ""),
            at_rest={"parameters": at_rest.parameters, "gradients": at_rest.gradients, "optimizer": at_rest.optimizer},
            host=host,
            disk=disk,
            usable=self.machine.usable(layout.num_groups(shape)),
            step=step,
            sent=sent,
            samples_per_second=rate,
            tokens_per_second=rate * self.samples.tokens,
            mfu=rate * flops / (world_size * self.machine.peak(precision.param_dtype)),
        )

    def state_bytes(self, choice: Choice, ranks: RankCounts, rank: int, group: Group, padded: bool = True) -> Bytes:
        """Return the bytes of parameters, gradients and optimizer state that a rank holds.

        Args:
            ranks: numbers of ranks that hold the same part of the model.
            rank: index of the rank among them.
            group: the rank's part of the model.
            padded: whether to count the padding of shards, too.
        """
        # if the model is divided, a rank uses FSDP even if no other rank holds the same part
        divided = self.tensor > 1 or self.cfg.parallel.pipeline > 1

        def compute() -> Bytes:
            return bytes_per_rank(
                group.weights,
                choice.strategy,
                self.cfg.precision,
                ranks.world_size,
                ranks.shard_size,
                rank=rank,
                offload=choice.offload,
                padded=padded,
                divided=divided,
            )

        return self.cached((group, "state bytes", choice.strategy, ranks, rank, choice.offload, padded), compute)

    def units(
        self, group: Group, choice: Choice, shards: int, offloads_gradients: bool = False, passes_through: bool = False
    ) -> dict[str, Unit]:
        """Return the FSDP units of a group of ranks, whose weights are sharded over `shards` ranks.
        `offloads_gradients`: the shards' gradients are offloaded. `passes_through`: offloaded shards are copied to the
        device first."""
        plan, precision = SHARD_PLANS[choice.strategy], self.cfg.precision
        return self.cached(
            (group, "units", choice.strategy, shards, offloads_gradients, passes_through),
            lambda: units_of(group.weights, plan, precision, shards, offloads_gradients, passes_through),
        )

    def ranks_of_same_part(self, ranks: RankCounts) -> RankCounts:
        """Return how many ranks hold the same part of the model as one rank does (the same stages, and the same parts
        of their layers): in all, in a group that shards together, and on a node."""
        layout = RankLayout(self.cfg.parallel, ranks.world_size)
        # of the ranks of a node, `shard_size` counts those with the same part, since no `sharding.shard_size` is given
        copies, node = layout.num_copies, layout.shard_size(None, ranks.node_size)
        return RankCounts(copies, min(ranks.shard_size, copies), node)

    def seconds(self, choice: Choice, ranks: RankCounts, micros: MicroBatches, idle_spread: int | None = None) -> float:
        """Predict the seconds of a step, those of the pipeline ranks that need longest, without predicting the memory.

        Args:
            micros: the micro-batches that a rank runs in the step.
            idle_spread: number of micro-batches over which a pipeline's idle time is spread; None: that of `micros`.
        """
        # Groups (ranks with the same part of the model) of one kind take equally long. `groups` is cached, so that its
        # id can be a part of the key.
        groups = self.groups(choice)
        kinds = self.cached(("kinds", id(groups)), lambda: list({one.kind: one for one in groups}.values()))
        return max(self.step(choice, ranks, micros, group, idle_spread)[0].seconds for group in kinds)

    def step(
        self, choice: Choice, ranks: RankCounts, micros: MicroBatches, group: Group, idle_spread: int | None = None
    ) -> tuple[StepTime, Volume]:
        """Predict the time of a step and what a rank receives in it, for the ranks of one group of a pipeline.

        Args:
            choice: sharding strategy, activation checkpointing and offload.
            ranks: numbers of ranks: in all, per copy of the model, and per node.
            micros: what a rank runs in a step.
            group: what the ranks have of the model; without a pipeline, all of it.
            idle_spread: number of micro-batches over which the idle time of a pipeline is spread; None: that of
                `micros`. A larger one gives a lower bound for all numbers of micro-batches up to it.
        """
        parallel, precision, strategy = self.cfg.parallel, self.cfg.precision, choice.strategy
        same_part = self.ranks_of_same_part(ranks)
        _, shards = mesh_shape(SHARD_PLANS[strategy], same_part.world_size, same_part.shard_size)
        trained, local = self.cached((group, "trained", shards), lambda: trained_numbers(group.weights, shards))
        one, two = self.cached(  # the volume of 1 and of 2 micro-batches
            (group, strategy, same_part),
            lambda: [volume(group.weights, strategy, precision, same_part, micro_batches=n) for n in (1, 2)],
        )
        sent = one.extrapolated(two, len(micros) - 1)
        sent = self.with_experts(self.with_context(sent, choice, micros, group), choice, micros, group)
        sent = self.with_messages(self.with_layers(sent, choice, micros, group), ranks, micros, group)
        muon = self.muon_cost(group, choice, same_part)
        sent = replace(sent, muon=muon.received, muon_exchanges=muon.calls)
        flops = sample_flops(self.flops, self.samples)
        # the vision part is not divided: each of the ranks that compute layers together computes it for itself
        tower = self.flops.vision * self.samples.tiles
        shared = (
            self.cfg.parallel.num_context if self.model.attends_by_mask else 1
        )  # each rank of a row runs all images
        of_rank = (flops - tower) / self.tensor + tower * shared
        recomputed = self.recomputed_flops(choice) / self.tensor
        # idle time of a pipeline, as a share of the time in which it computes: arXiv 2104.04473, section 2.2
        idle = (parallel.pipeline - 1) / (parallel.stages_per_rank * (idle_spread or len(micros)))
        # samples of the heaviest rank, of each of which it computes the share of its group
        work = group.share * self.cfg.global_batch_size / same_part.world_size * self.heaviest_over_mean(ranks)
        copied = self.cached(
            (group, "copied", strategy, same_part, len(micros), ranks.world_size > 1),
            lambda: (
                copied_bytes(group.weights, strategy, precision, same_part, len(micros))
                if ranks.world_size > 1
                else added_bytes(precision, len(micros)) * trained
            ),
        )
        step = step_time(
            self.machine,
            precision,
            StepWork(
                flops=work * of_rank,
                recomputed=work * recomputed,
                copied=copied,
                local=local,
                micro_batches=len(micros),
                muon=muon,
            ),
            sent,
            choice.offload,
        )
        # behind `step_time`, because idle time hides no communication
        step = replace(step, compute=step.compute * self.machine.with_idle(1 + idle))
        return step.times(self.correction), sent

    def muon_cost(self, group: Group, choice: Choice, ranks: RankCounts) -> MuonCost:
        """Return what an update by Muon costs each rank of a group; nothing with another optimizer. `ranks`: numbers of
        ranks that hold the same part of the model."""
        if not self.cfg.optim.is_muon:
            return MuonCost()
        _, shards = mesh_shape(SHARD_PLANS[choice.strategy], ranks.world_size, ranks.shard_size)
        width = 2 if self.cfg.precision.param_dtype is DType.bf16 else 4
        return self.cached(
            (group, "muon", shards, ranks.world_size),
            lambda: muon_cost(group.weights, shards, ranks.world_size * self.tensor, width),
        )

    def heaviest_over_mean(self, ranks: RankCounts) -> float:
        """Return the work of the rank with the most in a step, divided by the mean rank's."""
        cfg, groups = self.cfg, RankLayout(self.cfg.parallel, ranks.world_size).num_row_groups
        key = "heaviest", groups, cfg.global_batch_size, cfg.micro_batch_size, cfg.packs
        return self.cached(key, lambda: heaviest_over_mean(cfg, self.samples, self.flops, groups))

    def recomputed_flops(self, choice: Choice) -> float:
        """Return the FLOPs of a sample that run again in the backward pass."""
        share, flops = recomputed_share(choice.activation_checkpointing), sample_flops(self.flops, self.samples)
        return share * (sample_flops(self.recomputing_flops, self.samples) - flops)

    def hidden_bytes(self, micro: MicroBatchSizes | MicroBatches) -> int:
        """Return the bytes of the hidden states that one stage sends to the next."""
        return micro.tokens * self.parts.language.hidden_size * DTYPES[self.cfg.precision.param_dtype].itemsize

    def local_hidden_bytes(self, micro: MicroBatchSizes) -> int:
        """Return the bytes of the hidden states at the first rank's positions, between layers."""
        width = self.parts.language.hidden_size * DTYPES[self.cfg.precision.param_dtype].itemsize
        return MicroBatches([micro]).own_tokens(self.tensor) * width

    def simulate_group(
        self,
        choice: Choice,
        ranks: RankCounts,
        micros: Sequence[MicroBatchSizes],
        between: Sequence[MicroBatchSizes],
        rank: int,
        group: Group,
    ) -> Ledger:
        """Simulate the device memory of a rank in a step with a pipeline. If a step has many micro-batches, only the
        consecutive ones with the most tokens are simulated, among which is the peak.

        Args:
            ranks: numbers of the ranks that hold the same part of the model.
            micros: what the rank runs in the step.
            between: micro-batches whose activation memory is measured, to interpolate that of `micros`; if empty, that
                of each of `micros` is measured.
            rank: index of the rank among `ranks`.
            group: the part of the model that the rank has.
        """
        parallel, plan = self.cfg.parallel, SHARD_PLANS[choice.strategy]
        # enough micro-batches to fill the pipeline twice; `windows`: all series of so many consecutive ones
        most = parallel.num_micro_batches(2 * parallel.num_stages)
        windows = (micros[begin : begin + most] for begin in range(max(1, len(micros) - most + 1)))
        run = max(windows, key=lambda window: sum(micro.tokens for micro in window))
        stack, mode = stack_name(self.model), choice.activation_checkpointing.mode
        # whether a stage's first block keeps its positions of the received states; else they are computed again
        keeps_local_input = self.tensor > 1 and mode is ActivationCheckpointing.none
        segments = {
            (number, micro): segments_of_stage(
                self.passes(mode, [micro], between)[0], stack, blocks, number == 0, number == parallel.num_stages - 1,
                self.hidden_bytes(micro), self.local_hidden_bytes(micro), keeps_local_input,
            )
            for number, blocks in group.stages.items()
            for micro in set(run)
        }  # fmt: skip
        stored = self.state_bytes(choice, ranks, rank, group)
        step_input_bytes, _ = self.input_bytes(micros)
        shown = micros if group.has_first else [replace(m, tiles=0) for m in micros]  # only the first stage gets images
        _, micro_input_bytes = self.input_bytes(shown)
        buffers = self.buffer_bytes + step_input_bytes
        updating = self.muon_cost(group, choice, ranks).buffers
        states = States(
            stored.parameters, stored.gradients, stored.optimizer, buffers, updating, (max(micro_input_bytes),)
        )
        _, shards = mesh_shape(plan, ranks.world_size, ranks.shard_size)
        units = self.units(group, choice, shards)
        order = self.cached(
            ("passes", parallel.pipeline, parallel.schedule, group.number, len(run)),
            lambda: passes_of(parallel, group.number, len(run)),
        )
        steps = [(one, segments[one.stage, run[one.micro_batch]]) for one in order]
        return simulate_pipeline(steps, units, plan, states, self.unit_names, self.cfg.sharding)

    def with_messages(self, sent: Volume, ranks: RankCounts, micros: MicroBatches, group: Group) -> Volume:
        """Return `sent`, what a rank receives in a step, with what other stages send: hidden states from the stages
        before, and their gradients from those behind.

        Args:
            ranks: numbers of ranks of the training.
            micros: what the rank runs in the step.
            group: its part of the model.
        """
        before = len(group.stages) - group.has_first  # number of its stages that have one before them
        behind = len(group.stages) - group.has_last
        received = (before + behind) * self.hidden_bytes(micros)
        count, on_one_node = (before + behind) * len(micros), ranks.world_size <= ranks.node_size
        return replace(sent, pipeline=received, messages=count, stages_on_one_node=on_one_node)

    def with_context(self, sent: Volume, choice: Choice, micros: MicroBatches, group: Group) -> Volume:
        """Return `sent`, what a rank receives in a step, with what attention moves between ranks that process a row
        together. `micros`: what the rank runs in the step; `group`: its part of the model."""
        size = self.cfg.parallel.num_context
        if size == 1:
            return sent
        width = DTYPES[self.cfg.precision.param_dtype].itemsize
        mode, share = choice.activation_checkpointing.mode, recomputed_share(choice.activation_checkpointing)
        if mode is ActivationCheckpointing.selective:  # it keeps products, and collectives run again
            share = 1.0
        elif mode is ActivationCheckpointing.budget:  # the compiler keeps the results of all collectives
            share = 0.0
        tokens = micros.tokens
        moved, count = context_volume(self.how, size, self.parts.language, width, tokens, share)
        part = len(group.blocks) / self.parts.language.num_hidden_layers
        exchanges = round(count * part) * len(micros)
        # ranks that compute layers together have some of the heads each
        return replace(sent, context=moved * part / self.tensor, exchanges=exchanges, context_size=size)

    def with_layers(self, sent: Volume, choice: Choice, micros: MicroBatches, group: Group) -> Volume:
        """Return `sent`, what a rank receives in a step, with what ranks that compute layers together exchange.
        `micros`: what the rank runs in the step; `group`: its part of the model."""
        if self.tensor == 1:
            return sent
        share = recomputed_share(choice.activation_checkpointing)
        if choice.activation_checkpointing.mode is ActivationCheckpointing.selective:  # collectives run again
            share = 1.0
        chains = sum(number - 1 not in group.blocks for number in group.blocks)  # lists of consecutive blocks
        expert_blocks = self.count_expert_blocks(group)
        # number of experts whose tokens are counted, in all blocks together; a training counts them only where each
        # sample is on one rank, without `parallel.context`
        counted = self.router.experts * expert_blocks if expert_blocks and self.cfg.parallel.num_context == 1 else 0
        volume = self.cached(
            (group, "layers", share, counted),
            lambda: layer_volume(
                self.model,
                self.cuts_of_group(group),
                blocks=len(group.blocks) - expert_blocks,
                chains=chains,
                size=self.tensor,
                recomputed=share,
                counted=counted,
            ),
        )
        # gradients are reduced after the last micro-batch alone, or after each one
        is_last = SHARD_PLANS[choice.strategy].gradient_sync is Sync.LAST_MICRO_BATCH
        moved = volume.of(micros, self.cfg.loss.chunk_tokens, 1 if is_last else len(micros))
        return replace(sent, tensor=moved.bytes, sums=moved.calls, tensor_size=self.tensor)

    def count_expert_blocks(self, group: Group) -> int:
        """Return how many blocks of a group (the part of the model that one rank of a pipeline has) have experts."""
        stack = find_blocks(self.model.language)
        key = group, "blocks with experts"
        return self.cached(key, lambda: sum(len(find_experts(stack[number])) for number in group.blocks))

    @property
    def router(self) -> Router:
        """A router of the language model; the other routers have as many experts."""
        return self.cached("router", lambda: find_routers(self.model.language)[0])

    def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of `key`, and compute it the first time: a search asks for it often. All layouts of ranks
        share these values, so the key must have all that differs between layouts and changes the value."""
        if key not in self.known_values:
            self.known_values[key] = compute()
        return self.known_values[key]

    def cuts_of_group(self, group: Group) -> dict[str, Cut]:
        """Return how a group's weights are divided among the ranks that compute layers together, by full name of a
        module or parameter. Only the first stage has the embedding, and only the last one the output layer."""
        stack, ends = stack_name(self.model) + ".", {Cut.EMBEDDING: group.has_first, Cut.OUTPUT: group.has_last}
        return {
            name: cut
            for name, cut in self.plan.items()
            if ends.get(cut, True)
            and (not name.startswith(stack) or int(name.removeprefix(stack).partition(".")[0]) in group.blocks)
        }

    def with_experts(self, sent: Volume, choice: Choice, micros: MicroBatches, group: Group) -> Volume:
        """Return `sent`, what a rank receives in a step, with the exchange of tokens between ranks that share experts.
        `micros`: what the rank runs in the step; `group`: its part of the model."""
        size = self.cfg.parallel.expert
        if size == 1:
            return sent
        token_bytes = self.parts.language.hidden_size * DTYPES[self.cfg.precision.param_dtype].itemsize
        moved, calls = expert_volume(
            ExpertLayers(self.count_expert_blocks(group), self.router.experts, self.router.choices, token_bytes),
            size,
            tokens=micros.own_tokens(self.tensor),
            micro_batches=len(micros),
            recomputed=int(choice.activation_checkpointing.mode is not ActivationCheckpointing.none),
        )
        return replace(sent, experts=moved, expert_exchanges=calls, expert_size=size)

    def offloads_activations(self, choice: Choice) -> bool:
        """Return whether the inputs of blocks are offloaded; not on a CPU machine, whose only memory is the host's."""
        return choice.activation_checkpointing.mode is ActivationCheckpointing.offload and self.machine.device != "cpu"

    def simulate(
        self,
        choice: Choice,
        ranks: RankCounts,
        micros: Sequence[MicroBatchSizes],
        between: Sequence[MicroBatchSizes],
        rank: int,
        group: Group,
    ) -> Ledger:
        """Simulate the device memory of a rank during a step.

        Args:
            ranks: numbers of the ranks that hold the same part of the model.
            micros: what the rank runs in the step.
            between: micro-batches whose activation memory is measured, to interpolate that of `micros`; if empty, that
                of each of `micros` is measured.
            rank: index of the rank among `ranks`.
            group: the part of the model that the rank has, if there is a pipeline; else not used.
        """
        if self.cfg.parallel.pipeline > 1:
            return self.simulate_group(choice, ranks, micros, between, rank, group)
        mode = choice.activation_checkpointing.mode
        if mode is ActivationCheckpointing.budget:
            # the compiler's partitioner chooses what is kept: something between everything and the blocks' inputs
            compiled = self.machine.has_compiler  # whatever the configuration says of the other modes
            most, least = (
                self.simulate_passes(choice, ranks, micros, self.passes(end, micros, between, compiled), rank)
                for end in (ActivationCheckpointing.none, ActivationCheckpointing.full)
            )
            # what attention receives from other ranks stays: the partitioner never repeats a collective
            least.worst["activations"] += max(map(self.gathered_for_attention, micros))
            least.worst["activations"] = min(least.worst["activations"], most.worst["activations"])
            share = choice.activation_checkpointing.budget or 0.0
            worst = {n: int(share * most.worst[n] + (1 - share) * least.worst[n]) for n in most.worst}
            return Ledger(held=least.held, worst=worst, moment=least.moment)
        # `dynamic` begins as `full`, and takes only memory that is left then
        are_full = ActivationCheckpointing.offload, ActivationCheckpointing.dynamic
        measured = ActivationCheckpointing.full if mode in are_full else mode
        passes = self.passes(measured, micros, between)
        if self.offloads_activations(choice):
            passes = [inputs_on_host(one) for one in passes]
        return self.simulate_passes(choice, ranks, micros, passes, rank)

    def simulate_passes(
        self, choice: Choice, ranks: RankCounts, micros: Sequence[MicroBatchSizes], passes: Sequence[Pass], rank: int
    ) -> Ledger:
        """Simulate the device memory of a rank during a step without a pipeline.

        Args:
            ranks: numbers of the ranks that hold the same part of the model.
            micros: what the rank runs in the step.
            passes: activation memory of the first of `micros`, and of one micro-batch of each size that follows it.
            rank: index of the rank among `ranks`.
        """
        plan = SHARD_PLANS[choice.strategy]
        world_size, shard_size = ranks.world_size, ranks.shard_size
        group = self.groups(choice)[0]
        stored = self.state_bytes(choice, ranks, rank, group)
        step_input_bytes, micro_input_bytes = self.input_bytes(micros)
        buffers = self.buffer_bytes + step_input_bytes
        states = replace(self.on_device(choice.offload, plan, stored, buffers), inputs=micro_input_bytes)
        if self.cfg.optim.is_muon:
            states = replace(states, updating=self.muon_cost(group, choice, ranks).buffers)
        # a single rank uses FSDP only if it has parts of layers, or offloads weights
        if world_size == 1 and self.tensor == 1 and not choice.offload.moves_weights:
            return simulate_unsharded_step(passes, states)
        if self.cfg.precision.linear is LinearKind.fp32_sums:
            check_one_rank(sharded=True)
        _, shards = mesh_shape(plan, world_size, shard_size)
        offloads_gradients = not states.gradients  # the shards' gradients are offloaded
        passes_through = (
            offloads_gradients and self.machine.device != "cpu"
        )  # offloaded shards are copied to the device first
        units = self.units(group, choice, shards, offloads_gradients, passes_through)
        return simulate_step(passes, units, plan, states, self.unit_names, self.cfg.sharding)

    def on_device(self, offload: OffloadMode, plan: ShardPlan, stored: Bytes, buffers: int) -> States:
        """Return the bytes that stay on the device under this mode of offload. On a CPU machine host memory counts as
        the device, so only files are off the device.

        Args:
            stored: bytes that a rank holds in all, on the device or offloaded.
            buffers: bytes of the model's buffers, and of the inputs that are held for the whole step.
        """
        if offload is OffloadMode.none or (self.machine.device == "cpu" and offload is not OffloadMode.nvme):
            return States(stored.parameters, stored.gradients, stored.optimizer, buffers)
        # during the step, the moments pass through two buffers on the device, neither larger than all moments
        if offload is OffloadMode.optimizer:
            return States(stored.parameters, stored.gradients, 0, buffers, min(STREAMED, 2 * stored.optimizer))
        # `params` and `nvme` offload all weights but frozen ones that FSDP does not shard
        return States(self.frozen_whole(plan), 0, 0, buffers)

    def frozen_whole(self, plan: ShardPlan) -> int:
        """Return the bytes of frozen weights that the sharding strategy leaves whole on every rank."""
        # `gathered`: elements of a weight that a rank has once FSDP has gathered it
        # `whole`: stays unsharded, if it is frozen, under every strategy
        return sum(
            w.gathered * w.item_size(self.cfg.precision)
            for w in self.weights
            if not w.trainable and (w.whole or not plan.shards_frozen)
        )

    def off_device(self, offload: OffloadMode, plan: ShardPlan, stored: Bytes) -> tuple[int, int]:
        """Return the bytes of offloaded parameters, gradients and optimizer state in host memory, and on disk. `stored`
        are the bytes that a rank holds in all, on the device or offloaded."""
        # frozen weights that are not sharded stay on the device
        states = stored.parameters - self.frozen_whole(plan) + stored.gradients + stored.optimizer
        if offload is OffloadMode.nvme:
            return 0, states
        if self.machine.device == "cpu":
            return 0, 0
        return {OffloadMode.none: 0, OffloadMode.optimizer: stored.optimizer, OffloadMode.params: states}[offload], 0

    def input_bytes(self, micros: Sequence[MicroBatchSizes]) -> tuple[int, tuple[int, ...]]:
        """Return (the bytes of inputs held for the whole step, for each micro-batch of `without_repeats` the bytes of
        those held while it runs). Inputs are pixels, and int64 numbers: the id and position of each token, the place
        and row of each image token, the position and id of each label. An image token that is a weighted sum has the
        rows and fp32 weights of four features.

        A GPU holds only the micro-batch that runs, with pixels in fp32. A CPU machine holds all micro-batches with
        pixels in uint8, and in addition the fp32 pixels of the one that runs.
        """
        run = without_repeats(micros)  # those that can decide the peak: the first, and one of each size that follows
        if (images := self.images) is not None:  # its processor gives pixels in fp32, to a CPU machine too
            if self.machine.device != "cpu":
                return 0, tuple(images.input_bytes(micro) for micro in run)
            return sum(images.input_bytes(micro) for micro in micros), (0,) * len(run)

        def pixels(micro: MicroBatchSizes) -> int:
            return micro.tiles * 3 * self.parts.image_size**2

        each = 7 if self.image_rule.blends else 2

        def numbers(micro: MicroBatchSizes) -> int:
            return 2 * micro.tokens + each * micro.image_tokens + 2 * micro.labels

        if self.machine.device != "cpu":
            return 0, tuple(4 * pixels(m) + 8 * numbers(m) for m in run)
        return sum(pixels(m) + 8 * numbers(m) for m in micros), tuple(4 * pixels(m) for m in run)


def trained_numbers(weights: Sequence[Weight], shards: int) -> tuple[int, float]:
    """Return (the number of trainable parameters that a rank has when FSDP has gathered them, the number that it
    updates). `shards`: number of ranks over which FSDP shards weights other than shared experts."""
    trained = [weight for weight in weights if weight.trainable]
    return sum(w.gathered for w in trained), sum(w.gathered / w.own_shards(shards) for w in trained)


def without_repeats(micros: Sequence[MicroBatchSizes]) -> list[MicroBatchSizes]:
    """Return the micro-batches that can decide the memory peak: the first one, and one of each size that follows."""
    return [micros[0], *dict.fromkeys(micros[1:])]


def peak(
    cfg: Config,
    world_size: int,
    device: str | torch.device,
    micros: Sequence[MicroBatchSizes] | None = None,
    rank: int | None = None,
) -> PlanRow:
    """Predict memory and time of training with exactly this configuration.

    Args:
        world_size: number of ranks, all on one node.
        device: cuda or cpu.
        micros: the micro-batches of a step; None: made of samples of mean size.
        rank: the rank whose memory is predicted; None: rank 0, or the one of a pipeline that needs the most.
    """
    planner = Planner(cfg, machine_for(device.type if isinstance(device, torch.device) else device, world_size))
    micros = micros or configured_split(cfg, planner.samples, world_size)
    choice = Choice(cfg.sharding.strategy, cfg.activation_checkpointing, cfg.offload.mode)
    ranks = RankCounts(world_size, cfg.sharding.shard_size or world_size // cfg.parallel.tensor, node_size=world_size)
    return planner.row(choice, ranks, micros, rank=rank)
