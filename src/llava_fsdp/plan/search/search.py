"""Enumerate all sensible ways to train (sharding, activation checkpointing, offload), find the largest micro-batch that
fits into memory for each, and sort them by speed."""

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
from llava_fsdp.parallel.ranks.rank_layout import mesh_shape, shape_of_experts
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Mesh
from llava_fsdp.plan.memory.micro_batches import MicroBatches, MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import Machine
from llava_fsdp.plan.workload import configured_split, possible_splits
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.progress import Watch, watch

BUDGET = 0.5
"""Share of a block's activations that is kept, if `activation_checkpointing.budget` is not set."""


def choices(
    cfg: Config,
    machine: Machine,
    strategies: Sequence[Strategy],
    configured: ActivationCheckpointingConfig | None = None,
) -> list[Choice]:
    """Return all combinations of strategy, activation checkpointing and offload that the configuration's checks accept.
    The mode `budget` has the budget of `configured` or, if it is None, of `cfg`."""
    # on a CPU machine host memory is the device's, so that only files save memory
    modes = list(OffloadMode) if machine.device != "cpu" else [OffloadMode.none, OffloadMode.nvme]
    return [
        Choice(strategy, activation_checkpointing, mode)
        for strategy in strategies
        for activation_checkpointing in checkpointing_modes(cfg, machine, configured)
        for mode in modes
        if is_allowed(cfg, strategy, mode)
    ]


def distinct_strategies(ranks: RankCounts, parts: int = 1, shares_experts: bool = False) -> list[Strategy]:
    """Return the sharding strategies that differ from each other on these ranks.

    Args:
        parts: number of ranks that divide one copy of the model among them, with stages or parts of layers.
        shares_experts: whether ranks share experts. These are sharded over ranks with different parts of layers, too.
    """
    ranks_of_part = ranks.world_size // parts
    if ranks_of_part == 1 and not shares_experts:
        return [Strategy.FULL_SHARD]  # a single rank shards nothing, so all strategies are the same
    shards = min(ranks.shard_size, ranks_of_part)
    # without parts, a `shard_size` that does not divide the ranks is an error, which `mesh_shape` raises
    hybrid = 1 < shards < ranks_of_part and (parts == 1 or ranks_of_part % shards == 0)
    return [s for s, plan in SHARD_PLANS.items() if hybrid or plan.mesh is not Mesh.HYBRID]


def checkpointing_modes(
    cfg: Config, machine: Machine, configured: ActivationCheckpointingConfig | None = None
) -> list[ActivationCheckpointingConfig]:
    """Return the modes of activation checkpointing that the plan compares, without those that the configuration or the
    machine excludes. `configured` is what the user has set, which sets the budget of `budget`; None: that of `cfg`."""
    modes = [ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full]
    configured = configured or cfg.activation_checkpointing
    may_compile = cfg.compile is not False or configured.mode is ActivationCheckpointing.budget
    # the mode `budget` cannot be combined with these kinds of parallelism, nor `offload` with a pipeline
    divides = max(cfg.parallel.tensor, cfg.parallel.expert, cfg.parallel.pipeline) > 1
    # on a CPU machine host memory is the device's, and compiling takes longer than it saves
    if machine.device != "cpu":
        modes += [ActivationCheckpointing.budget] * (machine.has_compiler and may_compile and not divides)
        modes += [ActivationCheckpointing.offload] * (cfg.parallel.pipeline == 1)
    budget = configured.budget if configured.mode is ActivationCheckpointing.budget else BUDGET
    return [
        ActivationCheckpointingConfig(mode=mode, budget=budget if mode is ActivationCheckpointing.budget else None)
        for mode in modes
    ]


def is_allowed(cfg: Config, strategy: Strategy, mode: OffloadMode) -> bool:
    """Return whether the configuration's checks accept this strategy with this mode of offload. `sharding.shard_size`
    and `offload.folder` are left out, which are set for the configured strategy and mode and may not fit others."""
    sharding, offload = ShardingConfig(strategy=strategy, shard_size=None), OffloadConfig(mode=mode, folder=None)
    try:
        replace(cfg, sharding=sharding, offload=offload)
    except ConfigError:
        return False
    return True


def ways_to_share_experts(cfg: Config, ways: Sequence[Choice], ranks: RankCounts) -> list[Choice]:
    """Return those choices (`ways`) under whose sharding strategy ranks can share experts as configured
    (`parallel.expert`). Raise ConfigError if no strategy allows it. `ranks`: numbers of ranks that hold the same part
    of the model."""
    if cfg.parallel.expert == 1:
        return list(ways)
    possible: list[Choice] = []
    error: ConfigError | None = None
    for choice in ways:
        try:
            shape = mesh_shape(SHARD_PLANS[choice.strategy], ranks.world_size, ranks.shard_size)
            shape_of_experts(shape, cfg.parallel.expert, cfg.parallel.tensor)
            possible.append(choice)
        except ConfigError as refused:
            error = refused
    if error is not None and not possible:
        raise error
    return possible


def plan_rows(
    planner: Planner,
    ways: Sequence[Choice],
    ranks: RankCounts,
    splits: Sequence[Sequence[MicroBatchSizes]],
    show: Watch = watch,
) -> list[PlanRow]:
    """Predict memory and time of each choice of strategy, activation checkpointing and offload (`ways`) with the first
    of `splits` that fits into memory, and sort: first what fits, the fastest before slower ones; then the others, from
    the fewest bytes on. `splits`: ways to split a step into micro-batches, the largest micro-batches first."""
    sizes = planner.sizes_to_measure(splits)
    # drops strategies whose groups of ranks cannot share the experts
    ways = ways_to_share_experts(planner.cfg, ways, planner.ranks_of_same_part(ranks))
    rows = []
    with show("ways to train", len(ways)) as advance:
        for choice in ways:
            rows.append(largest_that_fits(planner, choice, ranks, splits, sizes))
            advance(1)
    # if two are equally fast, the one with less recomputation comes first, then the one with fewer bytes
    modes = list(ActivationCheckpointing)

    def place(row: PlanRow) -> tuple[float, ...]:
        total, mode = row.bytes["total"], modes.index(row.choice.activation_checkpointing.mode)
        return 0 if row.fits else total, -row.samples_per_second, mode, total

    rows.sort(key=place)
    measured: list[PlanRow] = []
    while not any(rows[0] is one for one in measured):  # interpolated bytes are not exact
        measured.append(largest_measured(planner, rows[0], ranks, splits, sizes))
        rows[0] = measured[-1]
        rows.sort(key=place)
    return rows


def splits_to_try(planner: Planner, cfg: Config, world_size: int, is_free: bool) -> list[MicroBatches]:
    """Return the ways to split a step into micro-batches, largest first; unless `is_free`, only the configured one."""
    # this sampler packs micro_batch_size samples into each row: another size would change the training
    is_fixed = cfg.packs and cfg.sampler.name is SamplerName.llava_v1_5
    if is_free and not is_fixed:
        splits = possible_splits(cfg, planner.samples, world_size)
    else:
        splits = [configured_split(cfg, planner.samples, world_size)]
    return [MicroBatches(split) for split in splits]


def largest_that_fits(
    planner: Planner,
    choice: Choice,
    ranks: RankCounts,
    splits: Sequence[Sequence[MicroBatchSizes]],
    sizes: Sequence[MicroBatchSizes],
) -> PlanRow:
    """Predict memory and time of a choice of strategy, activation checkpointing and offload with the first of `splits`
    that fits, found by bisection; if none fits, with the last one. `splits`: those with the largest micro-batches
    first; `sizes`: micro-batches that are measured to interpolate the others; if empty, all are."""

    def row(split: Sequence[MicroBatchSizes]) -> PlanRow:
        return planner.row(choice, ranks, split, sizes)

    best, first, last = row(splits[-1]), 0, len(splits) - 1
    while best.fits and first < last:
        middle = (first + last) // 2
        tried = row(splits[middle])
        if tried.fits:
            best, last = tried, middle
        else:
            first = middle + 1
    return best


def largest_measured(
    planner: Planner,
    row: PlanRow,
    ranks: RankCounts,
    splits: Sequence[Sequence[MicroBatchSizes]],
    sizes: Sequence[MicroBatchSizes],
) -> PlanRow:
    """Return `row`, whose memory may be interpolated, with the memory that is measured for all of its micro-batches. If
    the measured one is too much although the interpolated one fits, try the splits with smaller micro-batches in turn.

    Args:
        row: the prediction that `largest_that_fits` has made with these `splits`.
        splits: ways to split a step into micro-batches, those with the largest micro-batches first.
        sizes: micro-batches that are measured to interpolate the others.
    """
    while True:
        measured = planner.row(row.choice, ranks, row.micro_batches)
        rest = splits[place_of(splits, row) + 1 :]
        if measured.fits or not row.fits or not rest:
            return measured
        row = largest_that_fits(planner, row.choice, ranks, rest, sizes)


def place_of(splits: Sequence[Sequence[MicroBatchSizes]], row: PlanRow) -> int:
    """Return the index of the split for which `row` was predicted."""
    return next(place for place, split in enumerate(splits) if tuple(split) == row.micro_batches)
