"""Settings of FSDP units: in words, and those that have no effect in a training."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import ShardingConfig
from llava_fsdp.parallel.fsdp.units import grouped
from llava_fsdp.runtime.text.log import log


def log_useless_settings(
    sharding: ShardingConfig, stacks: Sequence[nn.ModuleList], shards: int | None, is_first: bool
) -> None:
    """Log a message for each setting of FSDP units that has no effect: on rank 0 as a warning, on others for debugging.

    Args:
        stacks: the model's lists of blocks, after `fully_shard` was applied.
        shards: number of ranks that the weights are sharded over; None without FSDP.
        is_first: whether this is rank 0.
    """
    level = logging.WARNING if is_first else logging.DEBUG
    for message in useless_settings(sharding, stacks, shards):
        log().log(level, message)


def describe_units(sharding: ShardingConfig) -> str:
    """Describe the settings of FSDP units (blocks per unit, prefetch) that differ from FSDP2's defaults, if any do."""
    parts = [f"{sharding.blocks_per_unit} blocks gathered together"] if sharding.blocks_per_unit > 1 else []
    parts += [f"{sharding.prefetch} gathers begun ahead"] if sharding.prefetch is not None else []
    return ", ".join(parts)


def useless_settings(sharding: ShardingConfig, stacks: Sequence[nn.ModuleList], shards: int | None) -> list[str]:
    """Return a message for each setting of FSDP units (blocks per unit, prefetch) that has no effect in this training.

    Args:
        stacks: the model's stacks of blocks, after `fully_shard` was applied.
        shards: number of ranks that the weights are sharded over; None without FSDP.
    """
    size, ahead = sharding.blocks_per_unit, sharding.prefetch
    largest = max(map(len, stacks))
    units = sum(
        any(isinstance(block, FSDPModule) for block in unit) for stack in stacks for unit in grouped(list(stack), size)
    )
    messages = []
    if shards is None and size > 1:
        messages.append(f"sharding.blocks_per_unit={size} does nothing on one rank, which gathers nothing")
    elif size > largest:
        messages.append(f"sharding.blocks_per_unit={size} is as {largest}: no stack of the model has more blocks")
    if ahead is None:
        return messages
    if shards is None:
        messages.append(f"sharding.prefetch={ahead} does nothing on one rank, which gathers nothing")
    elif shards == 1:
        messages.append(f"sharding.prefetch={ahead} does nothing: every rank has whole weights")
    elif units < 2:
        messages.append(f"sharding.prefetch={ahead} does nothing: fewer than two units have sharded blocks")
    elif ahead >= units:
        messages.append(f"sharding.prefetch={ahead} is as {units - 1}: blocks that are sharded make {units} units")
    return messages
