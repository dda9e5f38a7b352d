"""Every way to train that could make sense, each with the largest micro-batch that fits, and the best of them."""

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
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.workload import asked_for, cuts
from llava_fsdp.runtime.errors import ConfigError

BUDGET = 0.5
"""The share that activation_checkpointing=budget is planned with, where the configuration names none."""


def choices(cfg: Config, device: str, strategies: Sequence[Strategy]) -> list[Choice]:
    """Strategies, kinds of activation checkpointing and of offload that go together, without equivalent duplicates."""
    # on a CPU machine the host's memory is the device's, and files alone help
    modes = list(OffloadMode) if device != "cpu" else [OffloadMode.none, OffloadMode.nvme]
    found = []
    for strategy in strategies:
        for activation_checkpointing in checkpointings(cfg, device):
            found += [
                Choice(strategy, activation_checkpointing, mode) for mode in modes if allowed(cfg, strategy, mode)
            ]
    return found


def rows_of(world_size: int, shard_size: int) -> list[Strategy]:
    """Rows of the ZeRO table that differ on so many ranks."""
    if world_size == 1:
        return [Strategy.FULL_SHARD]  # nothing is sharded, and every row is the same
    hybrid = 1 < shard_size < world_size
    return [s for s, plan in SHARD_PLANS.items() if hybrid or plan.mesh is not Mesh.HYBRID]


def checkpointings(cfg: Config, device: str) -> list[ActivationCheckpointingConfig]:
    modes = [ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full]
    if device != "cpu":  # there the host's memory is the device's, and compiling takes longer than it saves
        modes += [ActivationCheckpointing.budget, ActivationCheckpointing.offload]
    asked = (
        cfg.activation_checkpointing.budget
        if cfg.activation_checkpointing.mode is ActivationCheckpointing.budget
        else BUDGET
    )
    return [
        ActivationCheckpointingConfig(mode=m, budget=asked if m is ActivationCheckpointing.budget else None)
        for m in modes
    ]


def allowed(cfg: Config, strategy: Strategy, mode: OffloadMode) -> bool:
    """Whether a training would take it."""
    sharding, offload = ShardingConfig(strategy=strategy, shard_size=None), OffloadConfig(mode=mode, folder=None)
    try:
        replace(cfg, sharding=sharding, offload=offload)
    except ConfigError:
        return False
    return True


def plan_rows(
    planner: Planner,
    found: Sequence[Choice],
    world_size: int,
    shard_size: int,
    node_size: int,
    ways: Sequence[Sequence[MicroBatch]],
) -> list[PlanRow]:
    """A row for each choice, best first: what fits before what does not, then by samples a second.

    Args:
        ways: to cut a rank's part of a step into micro-batches, of which each row takes the first that fits.
    """
    ends = [ways[-1][0], ways[0][0]] if len(ways) > 1 else []
    rows = [largest_that_fits(planner, choice, world_size, shard_size, node_size, ways, ends) for choice in found]
    # where two are as fast, what moves less: nothing is copied to the host that has room
    modes = list(ActivationCheckpointing)
    rows.sort(
        key=lambda r: (
            not r.fits, -r.samples_per_second, modes.index(r.choice.activation_checkpointing.mode), r.bytes["total"]
        )
    )  # fmt: skip
    best = rows[0]  # measured as it is: what is drawn between two micro-batches may be a little too much
    rows[0] = planner.row(best.choice, world_size, shard_size, best.micro_batches, node_size)
    return rows


def ways_to_cut(planner: Planner, cfg: Config, world_size: int, is_free: bool) -> list[list[MicroBatch]]:
    """Any micro-batches, the largest first; or those that the configuration's own keys make."""
    told = cfg, planner.samples, world_size, planner.model.image_tokens
    is_bound = cfg.pack and cfg.sampler.name is SamplerName.llava_v1_5  # to rows of micro_batch_size samples
    return cuts(*told) if is_free and not is_bound else [asked_for(*told)]


def largest_that_fits(
    planner: Planner,
    choice: Choice,
    world_size: int,
    shard_size: int,
    node_size: int,
    ways: Sequence[Sequence[MicroBatch]],
    ends: Sequence[MicroBatch],
) -> PlanRow:
    """The fewest micro-batches that fit; the smallest ones where none do. More of them never need more at once."""

    def row(way: Sequence[MicroBatch]) -> PlanRow:
        return planner.row(choice, world_size, shard_size, way, node_size, ends)

    first, last = 0, len(ways) - 1
    while first < last:
        middle = (first + last) // 2
        if row(ways[middle]).fits:
            last = middle
        else:
            first = middle + 1
    return row(ways[first])
