"""Enumerate all sensible ways to train, find for each the largest micro-batch that fits into memory, and sort them by
speed."""

from collections.abc import Sequence
from dataclasses import replace

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Config,
    OffloadConfig,
    OffloadMode,
    SamplerName,
    ShardingConfig,
    Strategy,
)
from llava_fsdp.distributed.zero import SHARD_PLANS, Mesh
from llava_fsdp.plan.activations import MicroBatch
from llava_fsdp.plan.planner import Choice, Planner, PlanRow, Ranks
from llava_fsdp.plan.workload import configured_split, possible_splits
from llava_fsdp.runtime.errors import ConfigError

BUDGET = 0.5
"""Share of a block's activations that activation_checkpointing=budget keeps (`budget`), if the configuration sets no
share."""


def choices(cfg: Config, device: str, strategies: Sequence[Strategy]) -> list[Choice]:
    """Combine sharding strategies with the modes of activation checkpointing and of offload, without combinations that
    the configuration's checks refuse."""
    # on a CPU machine host memory is the device's, so that only files save memory
    modes = list(OffloadMode) if device != "cpu" else [OffloadMode.none, OffloadMode.nvme]
    return [
        Choice(strategy, activation_checkpointing, mode)
        for strategy in strategies
        for activation_checkpointing in checkpointing_modes(cfg, device)
        for mode in modes
        if is_allowed(cfg, strategy, mode)
    ]


def distinct_strategies(ranks: Ranks) -> list[Strategy]:
    """Sharding strategies that differ from each other on this number of ranks."""
    if ranks.world_size == 1:
        return [Strategy.FULL_SHARD]  # a single rank shards nothing, so all strategies are the same
    hybrid = 1 < ranks.shard_size < ranks.world_size
    return [s for s, plan in SHARD_PLANS.items() if hybrid or plan.mesh is not Mesh.HYBRID]


def checkpointing_modes(cfg: Config, device: str) -> list[ActivationCheckpointingConfig]:
    modes = [ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full]
    if device != "cpu":  # on a CPU machine host memory is the device's, and compiling takes longer than it saves
        modes += [ActivationCheckpointing.budget, ActivationCheckpointing.offload]
    configured = cfg.activation_checkpointing
    budget = configured.budget if configured.mode is ActivationCheckpointing.budget else BUDGET
    return [
        ActivationCheckpointingConfig(mode=mode, budget=budget if mode is ActivationCheckpointing.budget else None)
        for mode in modes
    ]


def is_allowed(cfg: Config, strategy: Strategy, mode: OffloadMode) -> bool:
    """Whether the configuration's checks accept this sharding strategy together with this mode of offload."""
    sharding, offload = ShardingConfig(strategy=strategy, shard_size=None), OffloadConfig(mode=mode, folder=None)
    try:
        replace(cfg, sharding=sharding, offload=offload)
    except ConfigError:
        return False
    return True


def plan_rows(
    planner: Planner, found: Sequence[Choice], ranks: Ranks, splits: Sequence[Sequence[MicroBatch]]
) -> list[PlanRow]:
    """Predict the cost of each way to train and sort: the ways that fit into memory first, then by samples per second.

    Args:
        splits: ways to split a rank's part of a step into micro-batches; each row has the first one that fits.
    """
    ends = [splits[-1][0], splits[0][0]] if len(splits) > 1 else []
    rows = [largest_that_fits(planner, choice, ranks, splits, ends) for choice in found]
    # of two that are equally fast, the one with less recomputation and fewer bytes comes first
    modes = list(ActivationCheckpointing)
    rows.sort(
        key=lambda r: (
            not r.fits, -r.samples_per_second, modes.index(r.choice.activation_checkpointing.mode), r.bytes["total"]
        )
    )  # fmt: skip
    best = rows[0]  # measured, as interpolated bytes may be a little too high
    rows[0] = planner.row(best.choice, ranks, best.micro_batches)
    return rows


def splits_to_try(planner: Planner, cfg: Config, world_size: int, is_free: bool) -> list[list[MicroBatch]]:
    """Ways to split a rank's samples of a step into micro-batches, the largest micro-batches first; only the configured
    split if `is_free` is false."""
    args = cfg, planner.samples, world_size, planner.model.image_tokens
    is_fixed = (
        cfg.pack and cfg.sampler.name is SamplerName.llava_v1_5
    )  # each of this sampler's rows has micro_batch_size samples
    return possible_splits(*args) if is_free and not is_fixed else [configured_split(*args)]


def largest_that_fits(
    planner: Planner,
    choice: Choice,
    ranks: Ranks,
    splits: Sequence[Sequence[MicroBatch]],
    ends: Sequence[MicroBatch],
) -> PlanRow:
    """The plan row with the fewest (largest) micro-batches that fit into memory, found by bisection; with the smallest
    micro-batches if none fit."""

    def row(split: Sequence[MicroBatch]) -> PlanRow:
        return planner.row(choice, ranks, split, ends)

    first, last = 0, len(splits) - 1
    while first < last:
        middle = (first + last) // 2
        if row(splits[middle]).fits:
            last = middle
        else:
            first = middle + 1
    return row(splits[first])
