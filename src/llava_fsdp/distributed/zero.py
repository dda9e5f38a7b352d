"""THE table: what each ZeRO stage means in FSDP2's own knobs.

Sources: ZeRO (arXiv 1910.02054), `torch.distributed.fsdp.fully_shard` and its `FSDPModule` setters, PyTorch's
`ShardingStrategy` for the names. DeepSpeed's numbers for the same stages are in docs/sharding.md.
"""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Strategy


class Sync(Enum):
    """When gradients travel between ranks."""

    EVERY_MICRO_BATCH = "every micro-batch"
    LAST_MICRO_BATCH = "last micro-batch"
    SCATTER_EVERY_REDUCE_LAST = "reduce-scatter every micro-batch, all-reduce the last"


class Mesh(Enum):
    """How N ranks are laid out as (replicate, shard)."""

    REPLICATE = "(N, 1)"
    SHARD = "(1, N)"
    HYBRID = "(N / shard_size, shard_size)"


@dataclass(frozen=True)
class ShardPlan:
    """One row: a ZeRO stage as FSDP2 runs it."""

    zero: str
    """The name that `sharding=` takes."""
    mesh: Mesh
    reshard_after_forward: bool
    """Whether a block's weights are freed between its forward and its backward, and gathered again."""
    gradient_sync: Sync
    reshard_every_micro_batch: bool
    """Whether weights are freed after every micro-batch's backward, or only after the step's last one."""
    shards_frozen: bool
    """Whether frozen weights inside a stack of blocks are sharded too; replicated ones cost no communication."""


SHARD_PLANS: dict[Strategy, ShardPlan] = {
    Strategy.NO_SHARD: ShardPlan("zero0", Mesh.REPLICATE, False, Sync.LAST_MICRO_BATCH, False, False),
    Strategy.SHARD_OPTIMIZER: ShardPlan("zero1", Mesh.SHARD, False, Sync.LAST_MICRO_BATCH, False, False),
    Strategy.SHARD_GRAD_OP: ShardPlan("zero2", Mesh.SHARD, False, Sync.EVERY_MICRO_BATCH, True, False),
    Strategy.FULL_SHARD: ShardPlan("zero3", Mesh.SHARD, True, Sync.EVERY_MICRO_BATCH, True, True),
    Strategy.HYBRID_SHARD: ShardPlan("hybrid", Mesh.HYBRID, True, Sync.SCATTER_EVERY_REDUCE_LAST, True, True),
    Strategy._HYBRID_SHARD_ZERO2: ShardPlan("hybrid2", Mesh.HYBRID, False, Sync.SCATTER_EVERY_REDUCE_LAST, True, False),
}


def begin_micro_batch(model: nn.Module, plan: ShardPlan, is_last: bool) -> None:
    """Tell FSDP what this micro-batch's backward does with gradients and weights. Nothing at world size 1."""
    if not isinstance(model, FSDPModule):
        return
    if plan.gradient_sync is Sync.LAST_MICRO_BATCH:
        model.set_requires_gradient_sync(is_last)
    if plan.gradient_sync is Sync.SCATTER_EVERY_REDUCE_LAST:
        model.set_requires_all_reduce(is_last)
    if not plan.reshard_every_micro_batch:
        model.set_reshard_after_backward(is_last)
