"""Table of sharding strategies: the FSDP2 settings of each ZeRO stage (arXiv 1910.02054).

The settings are arguments of `torch.distributed.fsdp.fully_shard` and setters of `FSDPModule`. The names of the
strategies are those of PyTorch's `ShardingStrategy`. docs/sharding.md lists DeepSpeed's names of the stages.
"""

from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Strategy


class Sync(Enum):
    """When gradients are reduced over the ranks: in which micro-batches of an optimizer step."""

    EVERY_MICRO_BATCH = "every micro-batch"
    LAST_MICRO_BATCH = "last micro-batch"
    SCATTER_EVERY_REDUCE_LAST = "reduce-scatter every micro-batch, all-reduce the last"


class Mesh(Enum):
    """The (replicate, shard) shape of the device mesh of N ranks that a sharding strategy needs."""

    REPLICATE = "(N, 1)"
    SHARD = "(1, N)"
    HYBRID = "(N / shard_size, shard_size)"


@dataclass(frozen=True)
class ShardPlan:
    """The FSDP2 settings of one sharding strategy (ZeRO stage)."""

    zero: str
    """The strategy's name on the command line: the value of `sharding=`."""
    mesh: Mesh
    reshard_after_forward: bool
    """Whether a block's weights are freed after its forward pass, and gathered again for its backward pass."""
    gradient_sync: Sync
    reshard_every_micro_batch: bool
    """Whether weights are freed after the backward pass of every micro-batch. If not, they are freed only after the
    last micro-batch of a step."""
    shards_frozen: bool
    """Whether frozen weights of blocks are sharded too. If not, frozen weights take more memory but need no
    communication."""


SHARD_PLANS: dict[Strategy, ShardPlan] = {
    Strategy.NO_SHARD: ShardPlan(
        zero="zero0", mesh=Mesh.REPLICATE, gradient_sync=Sync.LAST_MICRO_BATCH,
        reshard_after_forward=False, reshard_every_micro_batch=False, shards_frozen=False,
    ),
    Strategy.SHARD_OPTIMIZER: ShardPlan(
        zero="zero1", mesh=Mesh.SHARD, gradient_sync=Sync.LAST_MICRO_BATCH,
        reshard_after_forward=False, reshard_every_micro_batch=False, shards_frozen=False,
    ),
    Strategy.SHARD_GRAD_OP: ShardPlan(
        zero="zero2", mesh=Mesh.SHARD, gradient_sync=Sync.EVERY_MICRO_BATCH,
        reshard_after_forward=False, reshard_every_micro_batch=True, shards_frozen=False,
    ),
    Strategy.FULL_SHARD: ShardPlan(
        zero="zero3", mesh=Mesh.SHARD, gradient_sync=Sync.EVERY_MICRO_BATCH,
        reshard_after_forward=True, reshard_every_micro_batch=True, shards_frozen=True,
    ),
    Strategy.HYBRID_SHARD: ShardPlan(
        zero="hybrid", mesh=Mesh.HYBRID, gradient_sync=Sync.SCATTER_EVERY_REDUCE_LAST,
        reshard_after_forward=True, reshard_every_micro_batch=True, shards_frozen=True,
    ),
    Strategy._HYBRID_SHARD_ZERO2: ShardPlan(
        zero="hybrid2", mesh=Mesh.HYBRID, gradient_sync=Sync.SCATTER_EVERY_REDUCE_LAST,
        reshard_after_forward=False, reshard_every_micro_batch=True, shards_frozen=False,
    ),
}  # fmt: skip


def begin_micro_batch(model: nn.Module, plan: ShardPlan, is_last: bool) -> None:
    """Set whether FSDP reduces gradients and frees weights in the backward pass of the micro-batch that begins, as
    `plan` says (settings of the sharding strategy). `is_last`: whether it is the last micro-batch of the optimizer
    step. Does nothing for a model without FSDP."""
    if not isinstance(model, FSDPModule):
        return
    # the other value of `gradient_sync` is FSDP's default: gradients are reduced in every micro-batch
    if plan.gradient_sync is Sync.LAST_MICRO_BATCH:
        model.set_requires_gradient_sync(is_last)
    # reduce-scatter within a group of ranks in every micro-batch, all-reduce between groups in the last one
    if plan.gradient_sync is Sync.SCATTER_EVERY_REDUCE_LAST:
        model.set_requires_all_reduce(is_last)
    if not plan.reshard_every_micro_batch:
        model.set_reshard_after_backward(is_last)
