"""Predict the seconds of a step: computation, communication, and the part of it that computation does not hide.

The estimate uses the rates in the table of GPUs. It is good enough to compare ways to train, but not exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from transformers import PretrainedConfig

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    ContextHow,
    LinearKind,
    MasterDType,
    OffloadMode,
    PrecisionConfig,
    Strategy,
)
from llava_fsdp.model.flops import Flops
from llava_fsdp.parallel.memory.memory import ITEM_SIZE, NORMS, OUTPUT, ROOT, Weight
from llava_fsdp.parallel.ranks.rank_layout import mesh_shape
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, Sync
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import Machine
from llava_fsdp.plan.time.muon_cost import MuonCost
from llava_fsdp.plan.workload import Samples

LINK_EFFICIENCY = 0.78
"""Share of a link's bandwidth that collectives reach: NCCL's large rings reach 230 of 300 GB/s on A100 and 370 of 450
on H100 (nccl-tests, bus bandwidth)."""
OVERLAP = 0.9
"""Share of the computation with which collectives can overlap; the first all-gather and the last reduction cannot. On
CPU cores none can, because gloo runs on the cores that compute."""
LATENCY = 20e-6
"""Seconds to start a collective."""
HOP, HOP_BETWEEN = 3e-6, 8e-6
"""Seconds of latency from one rank of a ring to the next, within a node and between nodes."""
SLOW_ADD = 1.4
"""How many times as long as its bytes take torch's addition of a 16-bit gradient to an fp32 sum takes (measured on an
H200: 24.5 ms instead of 17.6 ms for 6.76e9 parameters, benchmarks/results/planner-7b-cuda-2026-11-26.json)."""
NCCL_SHARE = 20 / 132
"""Share of a GPU's processors that NCCL's kernels take from a computation that runs at the same time. An estimate, not
measured here: DeepSeek-V3's own kernels for communication take 20 of the 132 of an H800 (arXiv 2412.19437, 3.2.2)."""
HOST_SECONDS = 0.005
"""Seconds of a step on a GPU in which the host works while the GPU waits: it reads losses and norm, and launches the
first kernels of the next step. An estimate; not measured here."""
UPDATED_BYTES = 28
"""Bytes of memory traffic of AdamW's update per parameter of a rank's shards: it reads 16 and writes 12."""
CPU_LINK = 0.55e9
"""Bytes per second between two ranks on a CPU machine by gloo (measured: 0.53 to 0.57e9 in an all-gather, 0.30 to
0.40e9 in a reduce-scatter)."""
CPU_LATENCY = 1e-3
"""Seconds to start a collective by gloo (measured for 8 bytes on two cores that others used too: medians of 0.2 to 0.9
ms on two ranks, 0.8 to 5 ms on four)."""
CPU_BANDWIDTH = 10e9
"""Bytes per second of a CPU machine's memory."""
RECOMPUTED = {
    ActivationCheckpointing.none: 0.0,
    ActivationCheckpointing.full: 1.0,
    ActivationCheckpointing.selective: 0.15,
    ActivationCheckpointing.offload: 1.0,
    ActivationCheckpointing.dynamic: 1.0,
}
"""Share of a block's forward time that runs again in the backward pass. With `selective` these are norms, rotary
embeddings and activation functions, which are memory traffic and few FLOPs. `dynamic` counts as it begins, with every
block recomputed."""
HOST_UPDATE_BANDWIDTH = 12e9
"""Bytes per second and rank that the CPU's fused AdamW reads and writes."""
DISK_BANDWIDTH = 2e9
"""Bytes per second and rank of a local NVMe disk."""


def recomputed_share(activation_checkpointing: ActivationCheckpointingConfig) -> float:
    """Return the share of the blocks' forward time that runs again in the backward pass."""
    if activation_checkpointing.mode is ActivationCheckpointing.budget:
        return 1 - (activation_checkpointing.budget or 0.0)
    return RECOMPUTED[activation_checkpointing.mode]


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank receives in the collectives of a step, and the numbers of these collectives."""

    sharded: float = 0.0
    """Bytes of all-gathers of weights and reduce-scatters of gradients, between `shards` consecutive ranks."""
    replicated: float = 0.0
    """Bytes of all-reduces of gradients, between `replicas` ranks whose numbers are `shards` apart."""
    gathers: int = 0
    """Number of all-gathers and reduce-scatters."""
    reductions: int = 0
    """Number of all-reduces."""
    context: float = 0.0
    """Bytes received in attention from the `context_size` ranks that process a row together."""
    exchanges: int = 0
    """Number of collectives of attention."""
    context_size: int = 1
    tensor: float = 0.0
    """Bytes received from the `tensor_size` ranks that compute layers together."""
    sums: float = 0
    """Number of collectives between ranks that compute layers together."""
    tensor_size: int = 1
    experts: float = 0.0
    """Bytes of tokens received from the `expert_size` ranks that share the experts of a mixture."""
    expert_exchanges: int = 0
    """Number of collectives between ranks that share experts."""
    expert_size: int = 1
    muon: float = 0.0
    """Bytes of matrices received in an update by Muon, from all ranks with the same stages."""
    muon_exchanges: int = 0
    """Number of collectives of such an update."""
    pipeline: float = 0.0
    """Bytes received from the ranks with the stages before and behind."""
    messages: int = 0
    """Number of messages between stages."""
    stages_on_one_node: bool = False
    shards: int = 1
    replicas: int = 1
    node_size: int = 1
    """Number of ranks on one node; a group that computes layers together counts as one."""

    def extrapolated(self, other: Volume, times: int) -> Volume:
        """Add `times` more micro-batches to the collectives of weights and gradients. `other` has one more."""
        more = {key: getattr(self, key) + times * (getattr(other, key) - getattr(self, key)) for key in GROWING_FIELDS}
        return replace(self, **more)

    @property
    def total(self) -> float:
        of_layers = self.context + self.tensor + self.experts + self.pipeline
        return self.sharded + self.replicated + of_layers + self.muon

    @property
    def calls(self) -> float:
        """Number of all collectives and messages."""
        of_layers = self.exchanges + self.sums + self.expert_exchanges + self.muon_exchanges
        return self.gathers + self.reductions + of_layers + self.messages

    @property
    def nodes(self) -> int:
        return max(1, self.shards * self.replicas // self.node_size)

    def seconds(self, link: float, network: float) -> float:
        """Return the seconds of FSDP's collectives and of messages between stages if nothing overlaps. `link` is bytes
        per second within a node, `network` bytes per second from each GPU to other nodes.

        A ring enters and leaves each node once. If its ranks are neighbors, it uses all network ports of the node
        (NCCL runs as many rings as there are ports). The rings between replicas, one for each shard, share the ports.
        """
        spans = self.shards > self.node_size
        ring = min(link, network * self.node_size) if spans else link
        sharing = min(self.shards, self.node_size)
        replicas = min(link, network * self.node_size / sharing) if self.nodes > 1 else link
        crossing = HOP_BETWEEN * self.nodes
        latency = self.gathers * (LATENCY + HOP * (self.shards - 1) + (crossing if spans else 0))
        latency += self.reductions * (LATENCY + HOP * (self.replicas - 1) + (crossing if self.nodes > 1 else 0))
        latency += self.messages * LATENCY
        # stages are the outermost dimension of ranks: with several nodes, neighboring stages are on different nodes
        stages = link if self.stages_on_one_node else network
        return latency + (self.sharded / ring + self.replicated / replicas + self.pipeline / stages) / LINK_EFFICIENCY

    def attention_seconds(self, link: float, network: float) -> float:
        """Return the seconds of collectives between the ranks of a row and between those that compute layers together.
        They overlap with nothing, because the layers wait for each.

        The ranks of each group have consecutive numbers. If the size of a group does not divide the ranks of a node,
        some groups span two nodes, and all ranks wait for these.
        """
        seconds = 0.0
        for received, calls, size, span in (
            (self.tensor, self.sums, self.tensor_size, self.tensor_size),
            (self.context, self.exchanges, self.context_size, self.tensor_size * self.context_size),
        ):
            seconds += self.waiting_seconds(received, calls, size, span, link, network)
        return seconds

    def expert_seconds(self, link: float, network: float) -> float:
        """Return the seconds of the token exchanges between the ranks, consecutive ones, that share experts. They
        overlap with nothing: experts wait for tokens. `link`, `network`: bytes per second within and between nodes."""
        size = self.expert_size
        return self.waiting_seconds(self.experts, self.expert_exchanges, size, size, link, network)

    def muon_seconds(self, link: float, network: float) -> float:
        """Return the seconds in which an update by Muon exchanges matrices. It overlaps with nothing."""
        size = self.shards * self.replicas * self.tensor_size
        return self.waiting_seconds(self.muon, self.muon_exchanges, size, size, link, network)

    def waiting_seconds(
        self, received: float, calls: float, size: int, span: int, link: float, network: float
    ) -> float:
        """Return the seconds of `calls` collectives, for each of which a rank waits, and in which it receives
        `received` bytes in all. They run between `size` ranks, all of them among `span` consecutive ones."""
        # in `node_size`, ranks that compute layers together count as one; if `span` divides a node's ranks, no group
        # of ranks reaches into another node
        bandwidth = network if self.nodes > 1 and self.node_size * self.tensor_size % span else link
        return calls * (LATENCY + HOP * (size - 1)) + received / bandwidth / LINK_EFFICIENCY


GROWING_FIELDS = ("sharded", "replicated", "gathers", "reductions")
"""Fields of Volume that count collectives of weights and gradients. They grow by equal amounts with each micro-batch,
or not at all."""


def volume(
    weights: Sequence[Weight],
    strategy: Strategy,
    precision: PrecisionConfig,
    ranks: RankCounts,
    micro_batches: int,
) -> Volume:
    """Count the bytes that a rank receives in FSDP's collectives of a step: all-gathers of weights, and reductions of
    gradients. With n ranks, a rank receives (n - 1) / n of the bytes of a tensor that is all-gathered or
    reduce-scattered, and twice as many if it is all-reduced.

    Args:
        weights: the part of the model that the rank has.
        ranks: numbers of the ranks that hold the same part of the model.
    """
    # `tensor` is above 1 for experts whose shards are also divided among ranks that compute layers together
    if ranks.world_size == 1 and all(weight.tensor == 1 for weight in weights):
        return Volume()
    plan = SHARD_PLANS[strategy]
    replicas, shards = mesh_shape(plan, ranks.world_size, ranks.shard_size)
    # weights that FSDP handles; `whole` ones stay unsharded if they are frozen
    taking_part = [w for w in weights if w.trainable or (plan.shards_frozen and not w.whole)]
    trainable = [w for w in taking_part if w.trainable]

    # elements of the other ranks' shards, which are padded to the largest one
    def others(weight: Weight) -> int:
        return (weight.own_shards(shards) - 1) * weight.padded(shards)

    def gathered(weights: Sequence[Weight]) -> int:
        return sum(others(w) * w.gathered_size(precision) for w in weights)

    # number of ranks that hold the same shard of a weight; `sharers`: number of ranks that share experts
    def copies_of(weight: Weight) -> float:
        return ranks.world_size * weight.tensor / (weight.sharers * weight.own_shards(shards))

    def replicated(weight: Weight) -> float:
        copies = copies_of(weight)
        return 2 * (copies - 1) / copies * weight.padded(shards) * weight.reduce_size(precision)

    scattered = sum(others(w) * w.reduce_size(precision) for w in trainable)
    gathers = micro_batches if plan.reshard_every_micro_batch else 1  # of each unit, in forward passes
    reductions = 1 if plan.gradient_sync is Sync.LAST_MICRO_BATCH else micro_batches
    # only units of blocks are freed after the forward pass
    freed = [w for w in taking_part if w.fsdp_unit not in (ROOT, OUTPUT, NORMS)]
    again = freed if plan.reshard_after_forward else []  # gathered again in the backward pass

    def units(weights: Sequence[Weight]) -> int:
        return len({w.fsdp_unit for w in weights if w.own_shards(shards) > 1})

    return Volume(
        sharded=gathers * (gathered(taking_part) + gathered(again)) + reductions * scattered,
        replicated=sum(map(replicated, trainable)),
        gathers=gathers * (units(taking_part) + units(again)) + reductions * units(trainable),
        reductions=len({w.fsdp_unit for w in trainable if copies_of(w) > 1}),
        shards=shards,
        replicas=replicas,
        node_size=ranks.node_size,
    )


def received_by_attention(how: ContextHow, size: int, language: PretrainedConfig, width: int, tokens: int) -> float:
    """Return the bytes that a rank receives from the ranks of its row in one forward pass of all layers.

    With `ulysses`, queries, keys, values and the result are exchanged: a rank receives (size - 1) / size of what it
    holds. With `gather`, it receives the keys and values of all other ranks.

    Args:
        size: number of ranks that share a row.
        width: bytes of a value.
        tokens: positions that the rank processes.
    """
    heads = language.num_attention_heads
    key_heads = getattr(language, "num_key_value_heads", heads)
    head_width = getattr(language, "head_dim", None) or language.hidden_size // heads
    if how is ContextHow.ulysses:
        # key heads are repeated until the ranks can divide them evenly
        key_heads *= size // math.gcd(key_heads, size)
        each = (2 * heads + 2 * key_heads) * (size - 1) / size
    else:
        each = 2 * key_heads * (size - 1)
    return language.num_hidden_layers * each * head_width * width * tokens


def context_volume(
    how: ContextHow, size: int, language: PretrainedConfig, width: int, tokens: int, recomputed: float
) -> tuple[float, int]:
    """Return the bytes that attention moves in a step between the ranks of a row, and the collectives of each
    micro-batch. The backward pass moves as many bytes of gradients as the forward pass moves of values.

    Args:
        width: bytes of a value.
        tokens: positions that the rank processes in a step, in all its micro-batches.
        recomputed: share of the forward pass that runs again in the backward pass.
    """
    passes = 2 + recomputed
    # `ulysses` exchanges queries, keys, values and the result; `gather` gathers keys and values
    calls = (4 if how is ContextHow.ulysses else 2) * language.num_hidden_layers
    return passes * received_by_attention(how, size, language, width, tokens), math.ceil(calls * passes)


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of a language model that have experts."""

    layers: int
    experts: int
    """Number of experts of a layer."""
    choices: int
    """Number of experts that a token is sent to."""
    token_bytes: int
    """Bytes of a token's hidden state."""


def expert_volume(
    mixtures: ExpertLayers, size: int, tokens: int, micro_batches: int, recomputed: int
) -> tuple[float, int]:
    """Return the bytes that a rank receives in a step from those it shares experts with, and the number of collectives,
    if all experts have the same load. In the forward pass of a layer, a token is sent to each of its experts and back,
    and the numbers of tokens are exchanged (int64). The backward pass exchanges as many bytes of gradients.

    Args:
        size: number of ranks that share the experts.
        tokens: positions that the rank processes in a step, in all its micro-batches.
        recomputed: how often the forward pass runs again in the backward pass, 0 or 1.
    """
    # a forward pass has three collectives (token counts, tokens, results), a backward pass two (gradients)
    counts = (1 + recomputed) * micro_batches * mixtures.experts * 8
    moved = (2 + recomputed) * 2 * tokens * mixtures.choices * mixtures.token_bytes
    calls = mixtures.layers * micro_batches * (3 * (1 + recomputed) + 2)
    return mixtures.layers * (counts + moved) * (size - 1) / size, calls


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step."""

    compute: float
    copies: float
    communication: float
    """All communication, whether or not computation hides it."""
    exposed: float
    """Communication that computation does not hide."""
    update: float
    contention: float = 0.0
    """Computation that takes longer because NCCL's kernels run at the same time."""
    host: float = 0.0
    """The GPU waits for the host."""

    @property
    def seconds(self) -> float:
        return self.compute + self.copies + self.exposed + self.update + self.contention + self.host

    def times(self, factor: float) -> StepTime:
        """Return these seconds, each multiplied by `factor`."""
        return StepTime(**{name: factor * seconds for name, seconds in asdict(self).items()})


def added_bytes(precision: PrecisionConfig, micro_batches: int) -> int:
    """Return the bytes of memory traffic per parameter in a step on one rank, where FSDP copies nothing. The gradient
    of the first micro-batch is cast to the dtype of the master weights, if it has another; later ones are added."""
    if precision.linear is LinearKind.fp32_sums:
        return 4  # the sum is filled with zeros; products that add to it are limited by arithmetic, not by memory
    made, master = ITEM_SIZE[precision.param_dtype], 2 if precision.master_dtype is MasterDType.bf16 else 4
    # a cast reads a gradient and writes a master's; an addition reads both and writes the sum
    return (master + made) * (made != master) + (2 * master + made) * (micro_batches - 1)


def copied_bytes(
    weights: Sequence[Weight], strategy: Strategy, precision: PrecisionConfig, ranks: RankCounts, micro_batches: int
) -> float:
    """Return the bytes of memory traffic of a step in which FSDP2 copies, casts and adds whole weights and gradients,
    while the computation waits. bf16 with fp32 reductions moves for each parameter and micro-batch 14 bytes with zero3,
    10 with zero2 and, with two to four micro-batches, 12 to 17 with zero1.

    From torch 2.13's `_fully_shard`: `foreach_all_gather_copy_out` copies gathered weights out of one buffer, and
    `foreach_reduce` copies gradients into one, in the dtype of the reduction. Without a reduction,
    `to_accumulated_grad_if_needed` casts the first gradient to that dtype, and `accumulate_unsharded_grad_if_needed`
    adds later ones. Not counted is what runs on streams of its own: copies and sums of shards and, where nothing is
    sharded, the copy of the gradients that are all-reduced.

    Args:
        weights: the part of the model that the rank has.
        ranks: numbers of the ranks that hold the same part of the model.
    """
    plan = SHARD_PLANS[strategy]
    _, shards = mesh_shape(plan, ranks.world_size, ranks.shard_size)
    gathers = micro_batches if plan.reshard_every_micro_batch else 1
    is_last = plan.gradient_sync is Sync.LAST_MICRO_BATCH
    total = 0.0
    for weight in weights:
        if not weight.trainable and (weight.whole or not plan.shards_frozen):
            continue  # FSDP does not handle it
        made, gathered, stored = (
            weight.item_size(precision), weight.gathered_size(precision), weight.master_size(precision)
        )  # fmt: skip
        # only units of blocks are freed after the forward pass, and gathered again
        freed = plan.reshard_after_forward and weight.fsdp_unit not in (ROOT, OUTPUT, NORMS)
        # a copy reads and writes; a weight that is not sharded is cast first, if it is stored in another dtype
        is_cast = weight.own_shards(shards) == 1 and weight.trainable and stored != made
        moved: float = gathers * (1 + freed) * (2 * gathered + (stored + made) * is_cast)
        if weight.trainable:
            reduced = weight.reduce_size(precision)
            if is_last and micro_batches > 1:
                # the first gradient is cast, or left as it is; later ones are added; the sum is copied
                added = 3 * made if made == reduced else (2 * reduced + made) * SLOW_ADD
                moved += (made + reduced) * (made != reduced) + (micro_batches - 1) * added + 2 * reduced
            else:
                moved += micro_batches * (made + reduced)
        total += moved * weight.gathered
    return total


@dataclass(frozen=True)
class StepWork:
    """What a rank computes in a step."""

    flops: float
    """FLOPs of the rank's samples, without recomputation."""
    recomputed: float
    """FLOPs that run again in the backward pass."""
    copied: float
    """Bytes of memory traffic in which weights and gradients are copied, cast and added."""
    local: float
    """Number of trainable parameters that this rank updates."""
    micro_batches: int
    muon: MuonCost = field(default_factory=MuonCost)


def step_time(
    machine: Machine, precision: PrecisionConfig, work: StepWork, sent: Volume, offload: OffloadMode
) -> StepTime:
    """Predict the seconds of a step on one rank. `work`: what the rank computes; `sent`: bytes that it receives from
    other ranks. On a GPU, FSDP's communication runs during the share OVERLAP of the computation, which it slows down;
    attention and experts wait for theirs."""
    gpu = machine.gpu
    rate = machine.peak(precision.param_dtype) * machine.efficiency
    bandwidth = 0.8 * gpu.bandwidth if gpu else CPU_BANDWIDTH
    compute = (work.flops + work.recomputed) / rate
    link, network = (gpu.link, gpu.network) if gpu else (CPU_LINK, CPU_LINK)
    seconds = sent.seconds(link, network)
    waiting = sent.attention_seconds(link, network) + sent.expert_seconds(link, network)
    if gpu is None:
        waiting += CPU_LATENCY * sent.calls
    unhidden = max(0.0, seconds - (OVERLAP * compute if gpu else 0.0))
    contention, exposed = NCCL_SHARE * (seconds - unhidden), unhidden + waiting
    copies = work.copied / bandwidth
    update = UPDATED_BYTES * work.local / bandwidth
    update += work.muon.flops / rate + sent.muon_seconds(link, network)
    pcie = gpu.pcie if gpu else CPU_BANDWIDTH
    if offload is OffloadMode.optimizer:
        update += 16 * work.local / pcie  # both fp32 moments, to the device and back: 4 times 4 bytes
    elif offload.moves_weights:
        # each micro-batch copies fp32 weights to the device for two gathers, and gradients back; the CPU updates
        exposed += work.micro_batches * 12 * work.local / pcie
        update = UPDATED_BYTES * work.local / HOST_UPDATE_BANDWIDTH
        if offload is OffloadMode.nvme:  # bytes for each weight that are read from files and written to them
            update += 40 * work.local / DISK_BANDWIDTH
    host = HOST_SECONDS if gpu else 0.0
    return StepTime(compute, copies, seconds + waiting, exposed, update, contention, host)


def sample_flops(flops: Flops, samples: Samples) -> float:
    """Return the mean FLOPs of a sample. Attention's FLOPs grow with the square of its length, so the spread counts."""
    return flops.of(samples.tokens, samples.tokens**2 + samples.spread**2, samples.labels, samples.tiles)
