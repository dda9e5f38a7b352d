"""Compute by arithmetic the bytes of parameters, gradients and optimizer state on a rank under each sharding strategy.

FSDP2 shards dimension 0 like `torch.chunk`: if n rows are sharded over s ranks, a rank holds at most ceil(n / s) rows,
and the last ranks may hold fewer or none. Experts that are fewer than the ranks are sharded along dimension 1 if their
sizes allow it (`sharded_dimension`). Tests compare these formulas with the tensors that ranks really hold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llava_fsdp.config import DType, MasterDType, MomentDType, OffloadMode, PrecisionConfig, Strategy
from llava_fsdp.parallel.precision.lowbit_adamw import BLOCK, is_quantised
from llava_fsdp.parallel.ranks.rank_layout import mesh_shape
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Sync
from llava_fsdp.parallel.tensor.tensor_cut import Cut

ITEM_SIZE = {DType.bf16: 2, DType.fp16: 2, DType.fp32: 4}
NUM_MOMENTS = 2
ROOT, OUTPUT, NORMS = "", "output layer", "norms"
"""Names of the FSDP units that are no blocks: the root unit, the output layer, and all norms that compute in fp32."""


@dataclass(frozen=True)
class Weight:
    """The properties of one parameter from which the bytes that a rank holds are computed."""

    shape: tuple[int, ...]
    trainable: bool
    whole: bool
    """Whether the parameter, if it is frozen, stays unsharded even if the strategy shards frozen weights."""
    fp32: bool
    """Whether the parameter is stored and used in fp32, whatever the model's compute dtype is."""
    fp8: bool = False
    """Whether FSDP gathers the parameter in fp8."""
    unit: str = ""
    """FSDP unit, named after its first block; empty for the root unit. Shared experts have one (`unit_of_experts`)."""
    per_element: int = 1
    """Number of weights that are packed into one element; 1 unless they are quantised and packed."""
    statistics: int = 0
    """Bytes of the scales and offsets of a quantised weight, which every rank holds whole."""
    sharers: int = 1
    """Number of ranks that share the rows (experts) evenly (`parallel.expert`). FSDP shards the part of one of them
    over the ranks that have the same part."""
    tensor: int = 1
    """Number of ranks that compute each layer together (`parallel.tensor`), if all of them take part in sharding the
    parameter, as they do for experts that ranks share; 1 for other parameters."""
    whole_shape: tuple[int, ...] | None = None
    """Shape of the parameter of which this is a part under tensor parallelism; None: it is whole."""
    muon: bool = False
    """Whether Muon updates the parameter, which has one moment, in fp32."""
    average: bool = False
    """Whether a moving average of the parameter is kept, in fp32."""
    moments: MomentDType | None = None
    """The dtype of Adam's moments; None for a frozen parameter."""

    @property
    def fsdp_unit(self) -> str:
        """The FSDP unit that gathers the parameter. All norms that compute in fp32 are one unit."""
        return NORMS if self.fp32 else self.unit

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Number of elements times the number of quantised weights packed into each."""
        return self.numel * self.per_element

    def item_size(self, precision: PrecisionConfig) -> int:
        """Return the bytes of one element in the compute dtype."""
        return ITEM_SIZE[DType.fp32 if self.fp32 else precision.param_dtype]

    def gathered_size(self, precision: PrecisionConfig) -> int:
        """Return the bytes of one element in the dtype in which FSDP gathers it."""
        return 1 if self.fp8 else self.item_size(precision)

    def master_size(self, precision: PrecisionConfig) -> int:
        """Return the bytes of one element of the master weight, or of its gradient in the optimizer's step."""
        return 2 if precision.master_dtype is MasterDType.bf16 and not self.fp32 else 4

    def reduce_size(self, precision: PrecisionConfig) -> int:
        """Return the bytes of one element of the gradient while it is reduced over ranks."""
        return ITEM_SIZE[DType.fp32 if self.fp32 else precision.reduce_dtype]

    def moment_bytes(self, local: int) -> int:
        """Return the bytes of the optimizer's moments of a shard of `local` elements, and of the average of the weights
        if one is kept. Int8 moments have a scale of 4 bytes for each block of BLOCK elements of a row (an index of
        dimension 0), also for the last, shorter block of a row. A shard has whole rows or, if the parameter is sharded
        along dimension 1, whole blocks."""
        average = 4 * local * self.average
        if self.muon:
            return average + 4 * local
        assert self.moments is not None
        if is_quantised(self.shape, self.moments):
            row = math.prod(self.shape[1:])
            rows, rest = divmod(local, max(1, row))
            blocks = rows * math.ceil(row / BLOCK) + rest // BLOCK
            return average + NUM_MOMENTS * (local + 4 * blocks)
        return average + NUM_MOMENTS * (2 if self.moments is MomentDType.bf16 else 4) * local

    @property
    def gathered(self) -> int:
        """Number of elements that a rank has when FSDP has gathered the parameter."""
        return self.numel // self.sharers

    def own_shards(self, shards: int) -> int:
        """Return over how many ranks FSDP shards this parameter if it shards others over `shards` ranks."""
        return max(1, shards * self.tensor // self.sharers)

    def dimension(self, shards: int) -> int:
        """Return the dimension along which FSDP shards this parameter if it shards others over `shards` ranks."""
        own = (self.shape[0] // self.sharers, *self.shape[1:]) if self.shape else ()
        return sharded_dimension(own, self.own_shards(shards), self.moments)

    def local(self, shards: int, rank: int) -> int:
        """Return how many elements of this parameter a rank has. FSDP splits dimension 0 like torch.chunk, 1 evenly.

        Args:
            shards: number of ranks over which FSDP shards weights.
            rank: number of the rank among them. For experts under tensor parallelism, each of these numbers stands for
                `tensor` ranks, and the result is that of the first of them.
        """
        # over how many ranks this parameter is sharded, and the number of the rank among them
        fsdp_shards, place = self.own_shards(shards), rank * self.tensor // self.sharers
        if fsdp_shards == 1 or self.dimension(shards) == 1:
            return self.gathered // fsdp_shards
        rows = self.shape[0] // self.sharers
        chunk = math.ceil(rows / fsdp_shards)
        held = max(0, min(chunk, rows - place * chunk))
        return self.gathered // rows * held if rows else 0

    def padded(self, shards: int) -> int:
        """Return the number of elements in the largest of `shards` shards. FSDP pads all shards to this size."""
        return self.local(shards, 0)


def sharded_dimension(shape: Sequence[int], shards: int, moments: MomentDType | None) -> int:
    """Return the dimension along which FSDP shards a parameter over `shards` ranks: 1 for a stack of matrices, such as
    a layer's experts, if there are fewer matrices than ranks; otherwise 0, which is FSDP2's default.

    Along dimension 0, each rank beyond the number of matrices would hold a whole matrix of padding. FSDP2 shards
    dimension 1 only evenly. If moments are int8, each rank's part of a matrix must also consist of whole blocks, so
    that the blocks do not depend on the number of ranks. `shape`: the parameter's shape; that of experts is [experts,
    outputs, inputs] or [experts, inputs, outputs]."""
    if len(shape) != 3 or not 0 < shape[0] < shards or shape[1] % shards:
        return 0
    part = shape[1] // shards * shape[2]
    return 0 if moments is MomentDType.int8 and part % BLOCK else 1


def divided_weights(weights: Mapping[str, Weight], plan: Mapping[str, Cut], size: int, index: int) -> dict[str, Weight]:
    """Return the part of every parameter that rank `index` of `size` has under tensor parallelism, by name.

    Args:
        plan: name of a module or of a parameter -> how it is divided: `ROWWISE` and `ROWWISE_SPLIT` divide the columns
            of a weight, and leave a bias whole; `SUMMED` leaves parameters whole; all others divide rows. What it does
            not name is whole on every rank.
    """
    found = {}
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        cut = plan.get(name, plan.get(owner))
        dimension = None if cut in (None, Cut.SUMMED) else 0
        if cut in (Cut.ROWWISE, Cut.ROWWISE_SPLIT):
            dimension = 1 if leaf == "weight" else None
        shape = list(weight.shape)
        if dimension is not None:
            each = math.ceil(shape[dimension] / size)
            shape[dimension] = max(0, min(each, shape[dimension] - index * each))
        whole = None if dimension is None else weight.shape
        found[name] = replace(weight, shape=tuple(shape), whole_shape=whole)
    return found


def unit_of_experts(block: str) -> str:
    """Return the name of the FSDP unit of a block's experts, if ranks share them."""
    return f"experts of {block}"


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank after an optimizer step or, in fields that end in `between`, between two micro-batches."""

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
    padded: bool = False,
    divided: bool = False,
) -> Bytes:
    """Compute the bytes of parameters, gradients and optimizer state that rank `rank` holds, in memory or offloaded,
    and of parameters and gradients between two micro-batches.

    After an optimizer step, before its gradients are freed, a rank holds for each trainable weight a shard in
    `precision.master_dtype`, a gradient of the same dtype and two moments in `precision.moment_dtype`. Frozen weights
    are held in the compute dtype, whole or sharded.

    Between the micro-batches of a step, a rank also holds the whole weights in the compute dtype if the strategy keeps
    weights gathered. Gradients that are not yet reduced are held whole, in the reduction dtype; with hybrid strategies
    they are shards that are not yet reduced over the replicas. A single rank without FSDP also holds copies of the
    weights in the compute dtype, if that is not the master dtype, or in the same memory two layouts in fp8.

    Args:
        shard_size: number of ranks over which hybrid strategies shard.
        offload: matters only for one rank, which uses FSDP only to offload weights.
        padded: whether to count padding too. FSDP pads the parameters and gradients of a short shard to the size of a
            full shard (`FSDPParam.reset_sharded_param`, `foreach_reduce`). Moments have no padding.
        divided: whether `weights` are a part of the model, which ranks have under tensor or pipeline parallelism;
            `world_size` is then the number of ranks that have the same part. A single one uses FSDP, too.
    """
    plan = SHARD_PLANS[strategy]
    _, shards = mesh_shape(plan, world_size, shard_size)

    def local(weight: Weight) -> int:
        return weight.padded(shards) if padded else weight.local(shards, rank % shards)

    trainable = [w for w in weights if w.trainable]
    frozen = 0
    for weight in weights:
        if not weight.trainable:
            numel = local(weight) if plan.shards_frozen and not weight.whole else weight.gathered
            frozen += weight.item_size(precision) * numel + weight.statistics
    masters = sum(w.master_size(precision) * local(w) for w in trainable)
    moments = sum(w.moment_bytes(w.local(shards, rank % shards)) for w in trainable)
    parameters = frozen + masters
    if world_size == 1 and not divided and not offload.moves_weights:
        parameters += sum(
            w.item_size(precision) * w.numel for w in trainable if w.item_size(precision) != w.master_size(precision)
        )
        return Bytes(parameters, masters, moments, parameters, masters)
    gathered = 0 if plan.reshard_every_micro_batch else sum(w.gathered_size(precision) * w.gathered for w in trainable)
    gradients_between = {  # by when gradients are reduced: in every micro-batch, or in the last one of a step
        Sync.EVERY_MICRO_BATCH: masters,
        Sync.LAST_MICRO_BATCH: sum(w.reduce_size(precision) * w.gathered for w in trainable),
        # sharded in every micro-batch, and reduced over the replicas in the last one
        Sync.SCATTER_EVERY_REDUCE_LAST: sum(w.reduce_size(precision) * w.padded(shards) for w in trainable),
    }[plan.gradient_sync]
    return Bytes(parameters, masters, moments, parameters + gathered, gradients_between)


def checkpoint_bytes(weights: list[Weight], precision: PrecisionConfig) -> int:
    """Return the bytes of a checkpoint's tensors: master weights, moments and step counts of all trainable weights."""
    trainable = [w for w in weights if w.trainable]
    return sum(w.master_size(precision) * w.numel + w.moment_bytes(w.numel) + 4 * (not w.muon) for w in trainable)
