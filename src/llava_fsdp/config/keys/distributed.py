"""Configuration keys of sharding, precision, activation checkpointing, offload and communication."""

from dataclasses import dataclass, field, replace
from typing import Self

from llava_fsdp.config.bounds import TAKES, above_zero, at_least, refuse_texts_except_auto
from llava_fsdp.config.keys.enums import (
    ActivationCheckpointing,
    ContextHow,
    DType,
    LinearKind,
    MasterDType,
    MomentDType,
    OffloadMode,
    PipelineSchedule,
    Strategy,
)
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    strategy: Strategy
    """Sharding strategy, from the table in parallel/sharding_strategies.py."""
    shard_size: int | None
    """Hybrid strategies: number of ranks that share one copy of the model; null: those of one node."""
    prefetch: int | None = None
    """Number of FSDP units gathered ahead of the running one; null: one, FSDP2's default."""
    blocks_per_unit: int = 1
    """Number of transformer blocks that are gathered and reduced together."""
    reductions: int = 1
    """Number of FSDP units whose gradients are reduced at once."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        at_least("sharding.blocks_per_unit", self.blocks_per_unit, 1)
        at_least("sharding.prefetch", self.prefetch, 1, "null leaves it to FSDP2")
        at_least("sharding.reductions", self.reductions, 1)
        at_least("sharding.shard_size", self.shard_size, 1)
        is_hybrid = self.strategy in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2, Strategy.auto)
        if self.shard_size is not None and not is_hybrid:
            raise ConfigError(
                f"sharding.shard_size={self.shard_size} has no meaning for {self.strategy.value}; "
                "set it to null, or choose sharding=hybrid or sharding=hybrid2"
            )


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Keys of the kinds of parallelism beside the sharding of states."""

    context: int | str = field(default=1, metadata={TAKES: "a number of ranks, or auto"})
    """Number of ranks that process each packed row together; auto: the smallest with which the training fits. Each rank
    has some of the row's positions. A row has up to that many times tokens_per_micro_batch."""
    context_how: ContextHow = ContextHow.auto
    """How ranks that share a row compute its attention. ulysses: each rank computes some heads; gather: some positions;
    auto: ulysses if the heads can be divided."""
    tensor: int = 1
    """Number of ranks that compute each layer of the language model together. Each has a part of its weights, and all
    process the same rows."""
    expert: int = 1
    """Number of ranks that share the experts of a mixture of experts. Each holds an equal part of them, and a token is
    sent to the ranks of its experts."""
    pipeline: int = 1
    """Number of groups of ranks that divide the layers among them. A micro-batch passes through one group
    after the other, and all groups work at the same time on different micro-batches."""
    schedule: PipelineSchedule = PipelineSchedule["1f1b"]
    """Order in which the groups of `parallel.pipeline` process micro-batches. 1f1b: each group has one stage of the
    model; interleaved: each has two, and waits less."""
    search: bool = False
    """Whether the planner chooses the fastest kinds of parallelism that fit. It sets context, tensor, expert and
    pipeline, where they are 1 or auto, and the schedule."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        at_least("parallel.tensor", self.tensor, 1)
        at_least("parallel.expert", self.expert, 1)
        at_least("parallel.pipeline", self.pipeline, 1)
        if self.pipeline == 1 and self.schedule is PipelineSchedule.interleaved:
            raise ConfigError("parallel.schedule=interleaved has no meaning with parallel.pipeline=1; set it to 1f1b")
        # for a text other than `auto`, in a key that takes a number or `auto`
        refuse_texts_except_auto(self, "parallel.")
        at_least("parallel.context", self.num_context, 1)

    @property
    def num_context(self) -> int:
        """Number of ranks that process a row together; 1 until the planner has replaced `auto`."""
        return self.context if isinstance(self.context, int) else 1

    @property
    def ranks_per_row(self) -> int:
        """Number of consecutive ranks that process the same rows: `parallel.context` times `parallel.tensor`."""
        return self.num_context * self.tensor

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of the model that each rank has; 1 without `parallel.pipeline`."""
        return 2 if self.schedule is PipelineSchedule.interleaved else 1

    @property
    def num_stages(self) -> int:
        """Number of stages into which the model is divided."""
        return self.pipeline * self.stages_per_rank

    def num_micro_batches(self, needed: int) -> int:
        """Return how many micro-batches each rank processes in a step, at least `needed`. The schedule 1f1b needs as
        many as there are stages, and interleaved a multiple of `parallel.pipeline`."""
        if self.schedule is PipelineSchedule.interleaved:
            return -(-needed // self.pipeline) * self.pipeline
        return max(needed, self.pipeline)

    def check_divides(self, world_size: int) -> None:
        """Raise ConfigError if `parallel.pipeline`, `parallel.tensor`, `parallel.context`, the product of these, or
        `parallel.expert` does not divide the number of ranks of the run."""
        of_stage = world_size // self.pipeline
        for key, size, ranks, by in (
            ("pipeline", self.pipeline, world_size, ()),
            ("tensor", self.tensor, of_stage, ("pipeline",)),
            ("context", self.num_context, of_stage // self.tensor, ("pipeline", "tensor")),
            ("expert", self.expert, of_stage, ("pipeline",)),
        ):
            if ranks % size or not ranks:
                divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
                others = [f"parallel.{other}={getattr(self, other)}" for other in by if getattr(self, other) > 1]
                per = f" divided by {' and '.join(others)}" if others else ""
                also = " that also divides the number of experts" if key == "expert" else ""
                raise ConfigError(
                    f"parallel.{key}={size} does not divide {ranks}, the number of ranks of this run{per}; "
                    f"set it to one of {divisors}{also}, or start another number of ranks (--nproc-per-node)"
                )


@dataclass(kw_only=True, slots=True)
class ScalerConfig:
    """Configuration keys of loss scaling, which keeps fp16 gradients from becoming 0. They correspond to DeepSpeed's
    five settings."""

    scale: float | None = None
    """A fixed loss scale; null: a dynamic one. That is halved when gradients overflow and doubled after `window` steps
    without overflow."""
    initial_power: int = 16
    """Exponent of the first dynamic loss scale. The scale is 2 ** initial_power."""
    window: int = 1000
    """Number of steps without overflow after which the loss scale is doubled."""
    hysteresis: int = 2
    """Number of overflows after which the loss scale is halved. Each further overflow halves it again, until a doubling
    resets the count."""
    minimum: float = 1.0
    """Minimum of the loss scale. A step that overflows at this scale ends the run."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        above_zero("precision.scaler.scale", self.scale, "; null chooses a dynamic one")
        at_least("precision.scaler.window", self.window, 1)
        at_least("precision.scaler.hysteresis", self.hysteresis, 1)
        above_zero("precision.scaler.minimum", self.minimum)
        if not 0 <= self.initial_power <= 127 or 2.0**self.initial_power < self.minimum:
            raise ConfigError(
                f"precision.scaler.initial_power={self.initial_power} must be 0 to 127, and 2 to its power no less "
                f"than precision.scaler.minimum={self.minimum}"
            )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    param_dtype: DType
    """Dtype of the forward and backward pass, and of frozen weights. auto: bf16 if all devices have instructions for it
    or another key of `precision` needs it, else fp32."""
    reduce_dtype: DType
    """Dtype in which gradients are summed over micro-batches and ranks. auto: param_dtype."""
    norm_dtype: DType
    """Dtype in which norm layers compute. Unless it is param_dtype, their weights are stored in it too. auto:
    param_dtype."""
    master_dtype: MasterDType
    """Dtype in which trainable weights are stored and updated, and of their gradients then. bf16 is rounded
    stochastically, so that small updates count."""
    moment_dtype: MomentDType
    """Dtype of the optimizer's stored moments, which are updated in fp32."""
    linear: LinearKind
    """How the linear layers in the language model's blocks multiply."""
    scaler: ScalerConfig
    """Loss scaling, for param_dtype=fp16 only."""

    @property
    def needs_bf16(self) -> bool:
        """Whether another key than param_dtype allows no param_dtype but bf16."""
        has_bf16 = DType.bf16 in (self.norm_dtype, self.reduce_dtype) or self.master_dtype is MasterDType.bf16
        return has_bf16 or self.linear is not LinearKind.same

    def settled(self, chosen: DType) -> Self:
        """Return these keys with each `auto` replaced by `chosen`. If `param_dtype` is not `auto`, no key is."""
        if self.param_dtype is not DType.auto:
            return self
        same = {key: chosen for key in ("norm_dtype", "reduce_dtype") if getattr(self, key) is DType.auto}
        return replace(self, param_dtype=chosen, **same)

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        allowed = {self.param_dtype, DType.fp32} | ({DType.bf16} if self.param_dtype is DType.auto else set())
        for key in ("norm_dtype", "reduce_dtype"):
            value = getattr(self, key)
            if value not in allowed:
                names = [dtype.value for dtype in DType if dtype in allowed]
                raise ConfigError(
                    f"precision.{key}={value.value} needs precision.param_dtype={value.value}; with "
                    f"param_dtype={self.param_dtype.value} it is {' or '.join(names)}"
                )
        may_be_bf16 = self.param_dtype in (DType.bf16, DType.auto)
        if self.master_dtype is MasterDType.bf16 and not may_be_bf16:
            raise ConfigError(
                f"precision.master_dtype=bf16 keeps no more than bf16 of a weight, so computing in "
                f"param_dtype={self.param_dtype.value} gains nothing; choose precision=bf16_pure, or master_dtype=fp32"
            )
        linear = self.linear.value
        if self.linear is not LinearKind.same and not may_be_bf16:
            raise ConfigError(
                f"precision.linear={linear} is for param_dtype=bf16, not for {self.param_dtype.value}; choose "
                f"precision={linear if self.linear.in_8_bits else 'bf16'}"
            )
        if self.linear is LinearKind.fp32_sums:
            for key in ("master_dtype", "reduce_dtype"):
                if getattr(self, key).value == "bf16":
                    raise ConfigError(
                        f"precision.linear=fp32_sums adds gradients in fp32, and precision.{key}=bf16 asks for bf16; "
                        f"set precision.{key}=fp32, or precision.linear=same"
                    )
        if self.param_dtype is not DType.fp16 and self.scaler != ScalerConfig():
            raise ConfigError(
                f"precision.scaler is for precision=fp16, and not for {self.param_dtype.value}: bf16 and fp32, which "
                "have more exponents, need no factor on the loss"
            )


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    mode: ActivationCheckpointing
    """Which activations a transformer block keeps for the backward pass."""
    budget: float | None
    """budget: share of a block's activations that is kept; dynamic: share of the free memory for activations. 0 keeps
    only the block's input, 1 everything that saves recomputation. With other modes it is null."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless `budget` is set exactly in the modes that have a budget."""
        meanings = {
            ActivationCheckpointing.budget: "the share of a block's activations that is kept",
            ActivationCheckpointing.dynamic: "the share of the free memory that activations may take",
        }
        meaning = meanings.get(self.mode)
        if meaning is not None and (self.budget is None or not 0 <= self.budget <= 1):
            raise ConfigError(
                f"activation_checkpointing.budget={self.budget} must be {meaning}, 0 to 1; "
                f"activation_checkpointing={self.mode.value} sets one"
            )
        if meaning is None and self.budget is not None:
            raise ConfigError(
                f"activation_checkpointing.budget={self.budget} is for activation_checkpointing=budget or dynamic, not "
                f"for {self.mode.value}: set it to null"
            )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    mode: OffloadMode
    """Which tensors are kept outside of the device's memory."""
    folder: str | None
    """nvme: folder on a local disk; null: output_dir. The files there have no name and disappear when the process
    ends."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a folder for offloaded data is set, but the mode writes no files."""
        if self.folder is not None and self.mode is not OffloadMode.nvme:
            raise ConfigError(
                f"offload.folder={self.folder} is for offload=nvme; offload={self.mode.value} writes no files: set it "
                "to null"
            )


@dataclass(kw_only=True, slots=True)
class CommConfig:
    timeout: int
    """Seconds that a collective waits for the slowest rank before it fails."""
    init_timeout: int
    """Seconds that a collective waits before the first step is finished. Weights are loaded and kernels compiled until
    then."""
    warn_after: int
    """Seconds of waiting after which a rank logs for which other ranks it waits."""

    def __post_init__(self) -> None:
        for name in ("timeout", "init_timeout", "warn_after"):
            at_least(f"comm.{name}", getattr(self, name), 1)
