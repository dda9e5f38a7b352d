"""Settings of FSDP units: in words, and those that have no effect in a training."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import ShardingConfig
from llava_fsdp.parallel.fsdp.units import grouped
from llava_fsdp.parallel.memory.offload import fsdp_parameters
from llava_fsdp.runtime.text.log import log


def log_useless_settings(
    sharding: ShardingConfig, stacks: Sequence[nn.ModuleList], shards: int | None, reduced: int, is_first: bool
) -> None:
    """Log a message for each setting of FSDP units that has no effect: on rank 0 as a warning, on others for debugging.

    Args:
        stacks: the model's lists of blocks, after `fully_shard` was applied.
        shards: number of ranks that the weights are sharded over; None without FSDP.
        reduced: number of FSDP units with trainable weights (`count_reduced`).
        is_first: whether this is rank 0.
    """
    level = logging.WARNING if is_first else logging.DEBUG
    for message in useless_settings(sharding, stacks, shards, reduced):
        log().log(level, message)


def count_reduced(model: nn.Module) -> int:
    """Return the number of a model's FSDP units that have trainable weights, whose gradients are reduced."""
    units = [fsdp_parameters(module) for module in model.modules() if isinstance(module, FSDPModule)]
    # the modules of a unit of several blocks have the same list of parameters
    return len({id(unit) for unit in units if any(p.sharded_param.requires_grad for p in unit)})


def describe_units(sharding: ShardingConfig) -> str:
    """Describe the settings of FSDP units (blocks per unit, prefetch, reductions) that differ from FSDP2's defaults, if
    any do."""
    parts = [f"{sharding.blocks_per_unit} blocks gathered together"] if sharding.blocks_per_unit > 1 else []
    parts += [f"{sharding.prefetch} gathers begun ahead"] if sharding.prefetch is not None else []
    parts += [f"gradients of {sharding.reductions} units reduced at once"] if sharding.reductions > 1 else []
    return ", ".join(parts)


def useless_settings(
    sharding: ShardingConfig, stacks: Sequence[nn.ModuleList], shards: int | None, reduced: int
) -> list[str]:
    """Return a message for each setting of FSDP units (blocks per unit, prefetch, reductions) that has no effect in
    this training.

    Args:
        stacks: the model's stacks of blocks, after `fully_shard` was applied.
        shards: number of ranks that the weights are sharded over; None without FSDP.
        reduced: number of FSDP units with trainable weights (`count_reduced`).
    """
    size, ahead, at_once = sharding.blocks_per_unit, sharding.prefetch, sharding.reductions
    largest = max(map(len, stacks))
    units = sum(
        any(isinstance(block, FSDPModule) for block in unit) for stack in stacks for unit in grouped(list(stack), size)
    )
    messages = []
    if shards is None and size > 1:
        messages.append(f"sharding.blocks_per_unit={size} does nothing on one rank, which gathers nothing")
    elif size > largest:
        messages.append(f"sharding.blocks_per_unit={size} is as {largest}: no stack of the model has more blocks")
    if at_once > 1 and shards is None:
        messages.append(f"sharding.reductions={at_once} does nothing on one rank, which reduces nothing")
    elif at_once > 1 and shards == 1:
        messages.append(
            f"sharding.reductions={at_once} takes memory and does nothing else: every rank has whole weights, and the "
            "backward pass waits for no reduction"
        )
    elif at_once > max(1, reduced):
        messages.append(f"sharding.reductions={at_once} is as {max(1, reduced)}: {reduced} units have gradients")
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
