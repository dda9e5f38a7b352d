"""How many bytes of parameters, gradients and optimizer state a rank holds under each row of the table.

FSDP2 cuts a parameter along dimension 0 as `torch.chunk` does: of n rows over s ranks, a rank holds up to
ceil(n / s), the last ones fewer or none. These are its formulas, summed over the parameters; tests compare them
with what the ranks really hold.
"""

import math
from dataclasses import dataclass

from llava_fsdp.config import DType, MasterDType, MomentDType, OffloadMode, PrecisionConfig, Strategy
from llava_fsdp.distributed.lowbit_adamw import BLOCK, is_quantised
from llava_fsdp.distributed.mesh import mesh_shape
from llava_fsdp.distributed.zero import SHARD_PLANS, Sync

ITEM_SIZE = {DType.bf16: 2, DType.fp16: 2, DType.fp32: 4}
MOMENTS = 2


@dataclass(frozen=True)
class Weight:
    """A parameter as the arithmetic sees it."""

    shape: tuple[int, ...]
    trainable: bool
    whole: bool
    """Stays whole on every rank while frozen."""
    fp32: bool
    """Computed in fp32, whatever the rest of the model is computed in."""
    fp8: bool = False
    """Gathered in fp8."""
    unit: str = ""
    """The block that it is gathered with; "" is the root unit."""
    per_element: int = 1
    """Weights in one element: of a packed one, more."""
    statistics: int = 0
    """Bytes that a packed one is unpacked with, whole on every rank."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Weights, as the model's size is told in."""
        return self.numel * self.per_element

    def item_size(self, precision: PrecisionConfig) -> int:
        """Bytes of an element in the computation."""
        return ITEM_SIZE[DType.fp32 if self.fp32 else precision.param_dtype]

    def gathered_size(self, precision: PrecisionConfig) -> int:
        """Bytes of an element while it is gathered."""
        return 1 if self.fp8 else self.item_size(precision)

    def master_size(self, precision: PrecisionConfig) -> int:
        """Bytes of an element as it is kept, and of its gradient at the update."""
        return 2 if precision.master_dtype is MasterDType.bf16 and not self.fp32 else 4

    def reduce_size(self, precision: PrecisionConfig) -> int:
        """Bytes of an element of a gradient on its way between ranks."""
        return ITEM_SIZE[DType.fp32 if self.fp32 else precision.reduce_dtype]

    def moment_bytes(self, precision: PrecisionConfig, local: int) -> int:
        """Bytes of both moments of `local` elements, which are whole rows."""
        if is_quantised(self.shape, precision.moment_dtype):
            columns = math.prod(self.shape[1:])
            return MOMENTS * (local + 4 * math.ceil(columns / BLOCK) * (local // columns if columns else 0))
        return MOMENTS * (2 if precision.moment_dtype is MomentDType.bf16 else 4) * local

    def local(self, shards: int, rank: int) -> int:
        """Elements on shard `rank` of `shards`."""
        if shards == 1:
            return self.numel
        rows = self.shape[0]
        chunk = math.ceil(rows / shards)
        mine = max(0, min(chunk, rows - rank * chunk))
        return self.numel // rows * mine if rows else 0

    def padded(self, shards: int) -> int:
        """Elements of the largest shard, as which FSDP lays out every rank's part of a collective."""
        return self.local(shards, 0)


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank, when nothing runs and between two micro-batches of a step."""

    parameters: int
    gradients: int
    optimizer: int
    parameters_between: int
    gradients_between: int


def bytes_per_rank(
    weights: list[Weight],
    strategy: Strategy,
    precision: PrecisionConfig,
    world_size: int,
    shard_size: int,
    rank: int = 0,
    offload: OffloadMode = OffloadMode.none,
) -> Bytes:
    """What rank `rank` holds, wherever `offload` lets it lie.

    At rest (after an optimizer step, gradients not yet freed) trainables are shards in `master_dtype` with gradients of
    that dtype and two moments in `moment_dtype`; frozen weights are in the compute dtype, whole or sharded, and what
    packed ones are unpacked with is whole. Between micro-batches a row that keeps weights gathered adds them in the
    compute dtype, and a row that has not synchronised holds whole gradients (in the reduction dtype) or, for hybrid
    rows, shards not yet reduced over the replicas. One rank that FSDP does not wrap has working copies of masters that
    are not in the compute dtype.
    """
    plan = SHARD_PLANS[strategy]
    _, shards = mesh_shape(plan, world_size, shard_size)
    trainable = [w for w in weights if w.trainable]
    frozen = 0
    for weight in weights:
        if not weight.trainable:
            sharded = plan.shards_frozen and not weight.whole
            local = weight.local(shards if sharded else 1, rank % shards if sharded else 0)
            frozen += weight.item_size(precision) * local + weight.statistics
    locals_ = [(w, w.local(shards, rank % shards)) for w in trainable]
    masters = sum(w.master_size(precision) * local for w, local in locals_)
    moments = sum(w.moment_bytes(precision, local) for w, local in locals_)
    if world_size == 1 and not offload.moves_weights:
        copies = sum(
            w.item_size(precision) * w.numel for w in trainable if w.item_size(precision) != w.master_size(precision)
        )
        held = frozen + masters + copies
        return Bytes(held, masters, moments, held, masters)
    parameters = frozen + masters
    gathered = 0 if plan.reshard_every_micro_batch else sum(w.gathered_size(precision) * w.numel for w in trainable)
    gradients_between = {
        Sync.EVERY_MICRO_BATCH: masters,
        Sync.LAST_MICRO_BATCH: sum(w.reduce_size(precision) * w.numel for w in trainable),
        Sync.SCATTER_EVERY_REDUCE_LAST: sum(w.reduce_size(precision) * w.padded(shards) for w in trainable),
    }[plan.gradient_sync]
    return Bytes(parameters, masters, moments, parameters + gathered, gradients_between)


def storage_per_rank(
    weights: list[Weight],
    strategy: Strategy,
    precision: PrecisionConfig,
    world_size: int,
    shard_size: int,
    rank: int = 0,
    offload: OffloadMode = OffloadMode.none,
) -> Bytes:
    """What the tensors of `bytes_per_rank` occupy: FSDP pads parameters and gradients of a short shard to a full one.

    A shard's parameter is a view into its padded rows, its gradient one into what the reduce-scatter returned
    (`FSDPParam.reset_sharded_param`, `foreach_reduce`); moments are made like the views, without padding.
    """
    held = bytes_per_rank(weights, strategy, precision, world_size, shard_size, rank, offload)
    if world_size == 1:
        return held
    plan = SHARD_PLANS[strategy]
    _, shards = mesh_shape(plan, world_size, shard_size)
    masters = gradients = frozen = 0
    for weight in weights:
        short = weight.padded(shards) - weight.local(shards, rank % shards)
        if weight.trainable:
            masters += weight.master_size(precision) * short
            gradients += weight.master_size(precision) * short
        elif plan.shards_frozen and not weight.whole:
            frozen += weight.item_size(precision) * short
    return Bytes(
        held.parameters + masters + frozen,
        held.gradients + gradients,
        held.optimizer,
        held.parameters_between + masters + frozen,
        held.gradients_between + (gradients if plan.gradient_sync is Sync.EVERY_MICRO_BATCH else 0),
    )


def checkpoint_bytes(weights: list[Weight], precision: PrecisionConfig) -> int:
    """What a checkpoint holds of all ranks together: trainable weights as they are kept, moments, a step count each."""
    trainable = [w for w in weights if w.trainable]
    return sum(w.master_size(precision) * w.numel + w.moment_bytes(precision, w.numel) + 4 for w in trainable)
