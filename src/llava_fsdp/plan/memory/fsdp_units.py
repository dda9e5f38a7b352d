"""Compute the memory that FSDP2 allocates for each FSDP unit on top of its weights' shards: gathered weights, buffers
and gradients.

The formulas are read from torch/distributed/fsdp/_fully_shard (2.13): `foreach_all_gather`,
`foreach_all_gather_copy_out` and `foreach_reduce` in _fsdp_collectives.py, `FSDPParam` in _fsdp_param.py. In a
collective every rank's part is as large as the largest one, so uneven shards are padded in memory, too.
"""

from dataclasses import dataclass

from llava_fsdp.config import PrecisionConfig
from llava_fsdp.parallel.memory.memory import Weight
from llava_fsdp.parallel.sharding_strategies import ShardPlan


@dataclass(frozen=True)
class Unit:
    """Bytes of an FSDP unit: a group of weights that FSDP gathers and reduces together."""

    name: str
    gathered: int
    """Whole weights in the compute dtype, while they are gathered."""
    buffer: int
    """The all-gather's flat output until it is copied into the weights; 0 if weights are not sharded."""
    cast: int
    """The copy of this rank's shards in the compute dtype, made at the start of an all-gather."""
    reduce_input: int
    """The reduce-scatter's input, held until `sharding.reductions` further units have begun to reduce."""
    reduce_output: int
    """The reduce-scatter's output and, if weights are not sharded, the copy that FSDP2 makes of it."""
    waiting_output: int
    """The reduce-scatter's output that a hybrid strategy keeps until the last micro-batch, whose output is reduced over
    replicas together with it."""
    shard_gradients: int
    """Gradients of this rank's shards; 0 if they are offloaded."""
    kept_gradients: tuple[int, ...]
    """Each weight's unsharded gradient in the reduction dtype, as it is kept for a later micro-batch."""
    backward_gradients: tuple[int, ...]
    """Each weight's unsharded gradient in the dtype in which the backward pass produces it."""
    second_copy: int
    """Weights that are sharded along dimension 1 (by columns). An all-gather makes one more copy of them, with the
    ranks' shards one after the other, and frees it when the weights are complete."""
    is_copied: tuple[bool, ...]
    """Whether each trainable weight is sharded along dimension 1. FSDP copies its gradient before a reduce-scatter."""


def units_of(
    weights: list[Weight],
    plan: ShardPlan,
    precision: PrecisionConfig,
    shards: int,
    offloads_gradients: bool = False,
    passes_through: bool = False,
) -> dict[str, Unit]:
    """Return the FSDP units of these weights, by name, with the bytes that each needs. Frozen weights are in a unit
    only if the sharding strategy shards them.

    Args:
        shards: number of ranks that the weights are sharded over.
        offloads_gradients: whether the gradients of this rank's shards are offloaded.
        passes_through: whether offloaded shards are copied to the device, in their stored dtype, before an all-gather.
    """
    members: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.trainable or (plan.shards_frozen and not weight.whole):
            members.setdefault(weight.fsdp_unit, []).append(weight)
    return {
        name: unit_of(name, group, precision, shards, offloads_gradients, passes_through)
        for name, group in members.items()
    }


def unit_of(
    name: str,
    weights: list[Weight],
    precision: PrecisionConfig,
    shards: int,
    offloads_gradients: bool,
    passes_through: bool,
) -> Unit:
    """Return the bytes of an FSDP unit with these weights, all of which have the same sharding.

    Args:
        shards: number of ranks that the weights are sharded over.
        offloads_gradients: whether the gradients of this rank's shards are offloaded.
        passes_through: whether offloaded shards are copied to the device before an all-gather.
    """
    trainable = [w for w in weights if w.trainable]
    # bytes of this rank's shards: of weights in the dtype of the all-gather, and of gradients in the dtypes of the
    # reduction and of the master weights
    part = sum(w.padded(shards) * w.gathered_size(precision) for w in weights)
    reduced = sum(w.reduce_size(precision) * w.padded(shards) for w in trainable)
    kept = sum(w.master_size(precision) * w.padded(shards) for w in trainable)
    fsdp_ranks = weights[0].own_shards(shards)  # ranks over which FSDP shards the unit: the same for all its weights
    return Unit(
        name,
        gathered=part * fsdp_ranks,
        # the flat output of the all-gather, until it is copied into the weights
        buffer=0 if fsdp_ranks == 1 else part * fsdp_ranks,
        cast=cast_bytes(weights, precision, shards, passes_through),
        reduce_input=reduced * fsdp_ranks,
        # with the copy that FSDP2 makes of it if weights are not sharded, and with a copy in the dtype of the master
        # weights, if that is another one
        reduce_output=reduced * (2 if fsdp_ranks == 1 else 1) + (0 if kept == reduced else kept),
        waiting_output=reduced,
        shard_gradients=0 if offloads_gradients else kept,
        # for each trainable weight, its unsharded gradient in the dtype of the reduction, and as backward makes it
        kept_gradients=tuple(w.reduce_size(precision) * w.gathered for w in trainable),
        backward_gradients=tuple(w.item_size(precision) * w.gathered for w in trainable),
        # FSDP makes one more copy of a weight that is sharded by columns (dimension 1), and of its gradient
        second_copy=sum(w.gathered * w.gathered_size(precision) for w in weights if w.dimension(shards) == 1),
        is_copied=tuple(w.dimension(shards) == 1 for w in trainable),
    )


def cast_bytes(weights: list[Weight], precision: PrecisionConfig, shards: int, passes_through: bool) -> int:
    """Return the bytes of the copies of this rank's shards that an all-gather makes first: to cast them to the dtype of
    the all-gather and, if `passes_through`, to bring them from host memory to the device. `shards`: number of ranks
    that the weights are sharded over."""
    sizes = []
    for weight in weights:
        stored = weight.master_size(precision) if weight.trainable else weight.item_size(precision)
        casts = stored != weight.gathered_size(precision)
        per_element = (stored if passes_through else 0) + (weight.gathered_size(precision) if casts else 0)
        sizes.append(weight.padded(shards) * per_element)
    # FSDP copies the shards of all weights for one all-gather, but copies weights that are not sharded one by one
    return max(sizes, default=0) if weights[0].own_shards(shards) == 1 else sum(sizes)
