"""Keys of sharding, precision, activation checkpointing, offload and communication."""

from dataclasses import dataclass

from llava_fsdp.config.checks import at_least
from llava_fsdp.config.enums import (
    ActivationCheckpointing,
    DType,
    LinearKind,
    MasterDType,
    MomentDType,
    OffloadMode,
    Strategy,
)
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    strategy: Strategy
    shard_size: int | None
    """Hybrid rows only: ranks that share one copy of the model; null: the ranks of one node."""
    prefetch: int | None = None
    """Units whose all-gathers are begun before the unit in front of them runs, forward and backward; null: FSDP2's own,
    the next one, as soon as the computation has been handed over."""
    blocks_per_unit: int = 1
    """Blocks of layers that are gathered and reduced together."""

    def __post_init__(self) -> None:
        at_least("sharding.blocks_per_unit", self.blocks_per_unit, 1)
        if self.prefetch is not None:
            at_least("sharding.prefetch", self.prefetch, 1, "null leaves it to FSDP2")
        if self.shard_size is not None:
            at_least("sharding.shard_size", self.shard_size, 1)
            if self.strategy not in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2, Strategy.auto):
                raise ConfigError(
                    f"sharding.shard_size={self.shard_size} has no meaning for {self.strategy.value}; "
                    "set it to null, or choose sharding=hybrid or sharding=hybrid2"
                )


@dataclass(kw_only=True, slots=True)
class ScalerConfig:
    """The factor on the loss that keeps fp16 gradients from vanishing; DeepSpeed's five settings."""

    scale: float | None = None
    """A fixed factor; null: one that is halved where gradients overflow and doubled after a while without."""
    initial_power: int = 16
    """The factor begins at 2 ** initial_power."""
    window: int = 1000
    """Steps without an overflow after which it is doubled."""
    hysteresis: int = 2
    """It is halved from this overflow on; a doubling starts the count anew."""
    minimum: float = 1.0
    """It is never lower; a step that overflows there ends the run."""

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ConfigError(
                f"precision.scaler.scale={self.scale} must be a finite number above 0; null lets it find its own"
            )
        at_least("precision.scaler.window", self.window, 1)
        at_least("precision.scaler.hysteresis", self.hysteresis, 1)
        if not 0 < self.minimum < float("inf"):
            raise ConfigError(f"precision.scaler.minimum={self.minimum} must be a finite number above 0")
        if not 0 <= self.initial_power <= 127 or 2.0**self.initial_power < self.minimum:
            raise ConfigError(
                f"precision.scaler.initial_power={self.initial_power} must be 0 to 127, and 2 to its power no less "
                f"than precision.scaler.minimum={self.minimum}"
            )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    param_dtype: DType
    """What forward and backward compute in, and what frozen weights are stored in."""
    reduce_dtype: DType
    """What gradients are added in, over micro-batches and ranks."""
    norm_dtype: DType
    """What norms compute in, and what their weights are stored in where that is not param_dtype."""
    master_dtype: MasterDType
    """What trainable weights are kept and updated in, and their gradients at the update; bf16 weights are rounded at
    random, so that small updates are not lost on average."""
    moment_dtype: MomentDType
    """What the optimizer's two moments are kept in; they are computed in fp32."""
    linear: LinearKind
    scaler: ScalerConfig
    """param_dtype=fp16 only."""

    def __post_init__(self) -> None:
        for key in ("norm_dtype", "reduce_dtype"):
            value = getattr(self, key)
            if value not in (self.param_dtype, DType.fp32):
                raise ConfigError(
                    f"precision.{key}={value.value} needs precision.param_dtype={value.value}; with "
                    f"param_dtype={self.param_dtype.value} it is {self.param_dtype.value} or fp32"
                )
        if self.master_dtype is MasterDType.bf16 and self.param_dtype is not DType.bf16:
            raise ConfigError(
                f"precision.master_dtype=bf16 keeps no more than bf16 of a weight, so computing in "
                f"param_dtype={self.param_dtype.value} gains nothing; choose precision=bf16_pure, or master_dtype=fp32"
            )
        if self.linear is LinearKind.fp8 and self.param_dtype is not DType.bf16:
            raise ConfigError(
                f"precision.linear=fp8 is for param_dtype=bf16, which everything but the products is computed in, and "
                f"not for {self.param_dtype.value}; choose precision=fp8"
            )
        if self.param_dtype is not DType.fp16 and self.scaler != ScalerConfig():
            raise ConfigError(
                f"precision.scaler is for precision=fp16; {self.param_dtype.value} has the exponents of fp32 and needs "
                "no factor on the loss"
            )


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    mode: ActivationCheckpointing
    budget: float | None
    """budget only: the share of what a compiled block would keep, 0 (its input alone) to 1 (all that is worth it)."""

    def __post_init__(self) -> None:
        if self.mode is ActivationCheckpointing.budget:
            if self.budget is None or not 0 <= self.budget <= 1:
                raise ConfigError(
                    f"activation_checkpointing.budget={self.budget} must be the share of a block's activations that "
                    f"is kept, 0 to 1"
                )
        elif self.budget is not None:
            raise ConfigError(
                f"activation_checkpointing.budget={self.budget} is for activation_checkpointing=budget, and this is "
                f"activation_checkpointing={self.mode.value}: "
                "set it to null"
            )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    mode: OffloadMode
    folder: str | None
    """nvme only: a folder on a local disk; null: output_dir. What lies there has no name and ends with the process."""

    def __post_init__(self) -> None:
        if self.folder is not None and self.mode is not OffloadMode.nvme:
            raise ConfigError(
                f"offload.folder={self.folder} is for offload=nvme; offload={self.mode.value} writes no files: set it "
                "to null"
            )


@dataclass(kw_only=True, slots=True)
class CommConfig:
    timeout: int
    """Seconds that a collective may wait for the slowest rank."""
    init_timeout: int
    """The same until the first step is over: weights are loaded and kernels compiled before."""
    warn_after: int
    """Seconds after which ranks that wait say for whom."""

    def __post_init__(self) -> None:
        for name in ("timeout", "init_timeout", "warn_after"):
            at_least(f"comm.{name}", getattr(self, name), 1)
