"""Keys of the optimizer, loss, checkpoints, export and trackers; `Config`, all keys of a training; and its checks."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from llava_fsdp.config.checks import AUTO, at_least
from llava_fsdp.config.data import HELDOUT, DataConfig, SamplerConfig, SourceConfig, StageConfig, ValConfig
from llava_fsdp.config.describe import WORDS
from llava_fsdp.config.distributed import (
    ActivationCheckpointingConfig,
    CommConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
)
from llava_fsdp.config.enums import (
    ActivationCheckpointing,
    AspectRatio,
    Attention,
    CompatName,
    DType,
    Format,
    LinearKind,
    LossKernel,
    MasterDType,
    MomentDType,
    Normalize,
    OffloadMode,
    OnSaveError,
    Parity,
    Part,
    PatchMerge,
    Pixels,
    Quantizer,
    SamplerName,
    Schedule,
    Source,
    SpecialTokens,
    Strategy,
    TooLong,
    WandbMode,
)
from llava_fsdp.config.model import ModelConfig
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float
    projector_lr: float | None
    vision_lr: float | None
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float | None
    schedule: Schedule
    warmup_ratio: float
    warmup_steps: int | None
    """Wins over warmup_ratio; null: by the ratio."""

    def __post_init__(self) -> None:
        for name in ("lr", "projector_lr", "vision_lr", "weight_decay", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"optim.{name}={value} must be a finite number of at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"optim.clip={self.clip} must be above 0; null turns clipping off")
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(f"optim.warmup_ratio={self.warmup_ratio} must be a fraction of all steps, 0 to 1")
        if self.warmup_steps is not None:
            at_least("optim.warmup_steps", self.warmup_steps, 0)


@dataclass(kw_only=True, slots=True)
class CompatConfig:
    name: CompatName
    """llava_v1_5 has set labels, order, loss.normalize, data.pixels and precision's dtypes to the original's."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    normalize: Normalize
    """step: sum over label tokens divided by the label tokens of the step on all ranks, so that no cut of the step
    changes it; micro_batch: the original's mean of the micro-batches' means."""
    chunk_tokens: int
    """Labels whose logits are there at once."""
    kernel: LossKernel

    def __post_init__(self) -> None:
        at_least("loss.chunk_tokens", self.chunk_tokens, 1)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: int | None
    keep: int
    """So many of the newest that verify stay."""
    keep_every: int | None
    """Checkpoints of multiples of this step stay for good."""
    resume: str
    """auto: the newest one of output_dir that verifies; never: start over; else a `step-NNNNNN` folder."""
    strict: bool
    """With resume=auto, a newest checkpoint that does not verify is an error, not a warning and the one before it."""
    asynchronous: bool
    """Steps wait for a copy in host memory; the disk is written to while they go on. Where the copy does not fit, or
    offload=nvme keeps states in files, they wait for the disk."""
    on_save_error: OnSaveError

    def __post_init__(self) -> None:
        if self.every is not None:
            at_least("checkpoint.every", self.every, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)
        at_least("checkpoint.keep", self.keep, 2, "the newest may be the one that a crash interrupted")


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    enabled: bool
    dtype: DType
    verify: bool
    """Load the written model with transformers and compare its logits before the run is called done."""
    merge: bool = True
    """Of a run with adapters: write export/, the base with the adapters merged into it. The adapters alone are in
    adapter/ in any case."""


@dataclass(kw_only=True, slots=True)
class NumericConfig:
    max_consecutive_skips: int
    """Steps in a row whose gradients are not finite and that leave the weights as they were, until the run stops."""
    spike_sigma: float | None
    """Warn of a loss this many deviations above the mean of the steps before; null: never."""

    def __post_init__(self) -> None:
        at_least("numeric.max_consecutive_skips", self.max_consecutive_skips, 0)
        if self.spike_sigma is not None and not 0 < self.spike_sigma < float("inf"):
            raise ConfigError(f"numeric.spike_sigma={self.spike_sigma} must be a finite number above 0, or null")


@dataclass(kw_only=True, slots=True)
class TrackConfig:
    """Who else is told what `metrics.jsonl` and `validation.jsonl` say; rank 0 tells them."""

    tensorboard: bool = False
    """Event files in output_dir/tensorboard."""
    wandb: WandbMode = WandbMode.off
    project: str = "llava_fsdp"
    """Of Weights & Biases."""
    name: str | None = None
    """Of the run there; null: as output_dir is called."""


@dataclass(kw_only=True, slots=True)
class Config:
    """One training run."""

    stage: StageConfig
    model: ModelConfig
    data: DataConfig
    sharding: ShardingConfig
    precision: PrecisionConfig
    activation_checkpointing: ActivationCheckpointingConfig
    offload: OffloadConfig
    optim: OptimConfig
    sampler: SamplerConfig
    compat: CompatConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    export: ExportConfig
    comm: CommConfig
    numeric: NumericConfig
    val: ValConfig
    output_dir: str
    private: bool
    """What a run writes can be read by its user alone: a new output_dir is made for nobody else, and so are files."""
    labels: Parity
    """exact: every answer is supervised; llava_v1_5: as the original's preprocessing has it, which masks whole samples
    (LLaVA train.py:332-655)."""
    seed: int
    epochs: int
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: int
    pack: bool
    """Lay the samples of a micro-batch end to end in one row, each attending to itself alone; else pad rows."""
    tokens_per_micro_batch: int | str | None
    """pack only: most positions a rank runs at once; null: micro_batch_size * data.max_length; auto: the planner's
    choice when a training begins, which is what the run then records."""
    attention: Attention
    compile: bool | str
    """torch.compile for the language model's blocks, one at a time; auto: on CUDA with Triton."""
    log_every: int
    gc_every: int | None
    """Steps between two runs of Python's garbage collector, at the same ones on all ranks; null: when Python likes."""
    deterministic: bool
    profile: bool
    """A trace, CUDA's memory and a page of where the time goes, of a few steps, into output_dir/profile."""
    profile_steps: list[int] | None
    """Of these steps, from the first to the last of the two, counted from 1 where this start begins; null: 10 to 12,
    or the last ones of a shorter start, three at most."""
    track: TrackConfig = field(default_factory=TrackConfig)
    dry_run: int | None
    """Ranks to imagine: two steps of one rank in one process, to see what it holds; nothing is trained or written."""
    format: Format

    @property
    def row_tokens(self) -> int:
        """Most positions of a packed row."""
        assert not isinstance(self.tokens_per_micro_batch, str), "auto has been settled"
        return self.tokens_per_micro_batch or self.micro_batch_size * self.data.max_length

    @property
    def held_out(self) -> Self:
        """The same run reading the records of `val` once, as it reads its own."""
        own, files = self.val, self.val.sources
        embedded = str(Path(self.data.root or ".") / HELDOUT) if self.data.source is Source.shapes else None
        data = replace(
            self.data,
            path=None if files else own.path or embedded,
            images=own.images or self.data.images,
            sources={name: SourceConfig(path=file.path, images=file.images) for name, file in files.items()},
            index=own.index,
        )
        return replace(self, data=data, epochs=1, max_steps=None, profile=False)

    @property
    def trained_template(self) -> str:
        """What conversations are laid out in: the original's --version v0 leaves it at v1 (LLaVA train.py:894-908)."""
        is_v0 = self.data.template == "v0" and self.labels is Parity.llava_v1_5
        return "v1" if is_v0 else self.data.template

    @property
    def trained_special_tokens(self) -> SpecialTokens:
        """`data.special_tokens`, settled."""
        is_original = self.labels is Parity.llava_v1_5
        return self.data.special_tokens or (SpecialTokens.parse if is_original else SpecialTokens.text)

    @property
    def exports_model(self) -> bool:
        """The run ends with a whole model in transformers' format."""
        return self.export.enabled and (self.export.merge or not self.model.lora.enabled)

    @property
    def has_auto(self) -> bool:
        """Something is left to the planner."""
        return (
            self.sharding.strategy is Strategy.auto
            or self.activation_checkpointing.mode is ActivationCheckpointing.auto
            or self.tokens_per_micro_batch == AUTO
        )

    def __post_init__(self) -> None:
        self.check_packing()
        self.check_base()
        if self.precision.linear is LinearKind.fp8 and Part.language not in self.model.train:
            raise ConfigError(
                f"precision.linear=fp8 is for a language model that trains, and model.train="
                f"{[part.value for part in self.model.train]} freezes it; choose precision=bf16"
            )
        self.check_compile()
        self.check_offload()
        if self.val.every is not None and not self.val.is_named and self.data.source is not Source.shapes:
            raise ConfigError(
                f"val.every={self.val.every} needs held-out records: name a file of them, val.path=FILE, or set "
                "val.every=null"
            )
        for name in ("epochs", "global_batch_size", "micro_batch_size", "log_every"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        self.check_steps()
        if self.dry_run is not None:
            self.check_dry_run(self.dry_run)
        self.check_labels()
        if self.sampler.name is SamplerName.llava_v1_5 and self.global_batch_size % self.micro_batch_size:
            raise ConfigError(
                f"sampler=llava_v1_5 has whole micro-batches, and global_batch_size={self.global_batch_size} is no "
                f"multiple of micro_batch_size={self.micro_batch_size}"
            )
        plain = all(own.weight is None and own.epochs in (None, 1) for own in self.data.sources.values())
        if self.sampler.name is SamplerName.llava_v1_5 and not plain:
            raise ConfigError(
                "sampler=llava_v1_5 has every record once an epoch, as the original does; take epochs and weight out "
                "of "
                "data.sources, or set sampler=shuffle"
            )
        anyres = self.data.image_aspect_ratio is AspectRatio.anyres
        if self.model.patch_merge is not PatchMerge.flat and not anyres:
            raise ConfigError(
                f"model.patch_merge={self.model.patch_merge.value} is for data.image_aspect_ratio=anyres; with "
                f"{self.data.image_aspect_ratio.value} a picture is one tile: set model.patch_merge=flat"
            )
        if anyres and self.data.pixels is Pixels.llava_v1_5 and self.model.patch_merge is not PatchMerge.flat:
            raise ConfigError(
                f"data.pixels=llava_v1_5 trains anyres as square, as the original does; "
                f"model.patch_merge={self.model.patch_merge.value} needs data.pixels=exact or fast"
            )
        without = "export.merge=false" if self.model.lora.enabled else "export.enabled=false"
        if self.exports_model and self.data.trained_aspect is AspectRatio.anyres:
            raise ConfigError(
                "data.image_aspect_ratio=anyres has no equal in transformers' LLaVA, so the run could not be exported "
                f"at its end; set {without}, and use llava_fsdp.export format=llava"
            )
        if self.exports_model and self.model.projector_type != "mlp2x_gelu":
            raise ConfigError(
                f"model.projector_type={self.model.projector_type} has no equal in transformers' LLaVA, so the run "
                f"could not be exported; choose mlp2x_gelu, or set {without} and turn it into the "
                "original's format later: python -m llava_fsdp.export source=OUTPUT_DIR to=FOLDER format=llava"
            )

    def check_base(self) -> None:
        """Raises ConfigError where a frozen base cannot be computed with, or moved, as it is asked for."""
        mode = self.model.quantize.mode
        if self.model.lora.enabled and self.precision.linear is LinearKind.fp8:
            raise ConfigError(
                "precision.linear=fp8 is for weights that train, and model.lora.enabled=true freezes them; choose "
                "precision=bf16"
            )
        if mode is not Quantizer.none and self.offload.mode.moves_weights:
            raise ConfigError(
                f"offload={self.offload.mode.value} with model.quantize.mode={mode.value} would send packed weights "
                "through the host at every step; choose offload=optimizer or none"
            )

    def check_steps(self) -> None:
        """Raises ConfigError where a number of steps is none."""
        null = {"max_steps": "null trains every epoch to its end", "gc_every": "null leaves it to Python"}
        for name, why in null.items():
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1, why)
        steps = self.profile_steps
        if steps is None:
            return
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ConfigError(f"profile_steps={steps} must be {WORDS['profile_steps']}")
        if self.profile and self.max_steps is not None:
            self.check_profile(self.max_steps)

    def check_profile(self, total: int) -> None:
        """Raises ConfigError where a run of so many steps does not come to those that `profile` is to record."""
        if self.profile and self.profile_steps is not None and self.profile_steps[1] > total:
            raise ConfigError(
                f"profile_steps={self.profile_steps}: this run has {total} steps; name earlier ones, or null for three "
                "that it has"
            )

    def check_dry_run(self, ranks: int) -> None:
        """Raises ConfigError where that many ranks cannot be imagined."""
        at_least("dry_run", ranks, 1, "it is the number of ranks to imagine")
        hybrid = self.sharding.strategy in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2)
        if hybrid and self.sharding.shard_size is None:
            raise ConfigError(
                f"dry_run={ranks} cannot tell how many of these ranks share a node; set sharding.shard_size"
            )

    def check_compile(self) -> None:
        """Raises ConfigError where blocks are compiled and are not."""
        if isinstance(self.compile, str) and self.compile != AUTO:
            raise ConfigError(f"compile={self.compile} must be {WORDS['compile']}")
        if self.compile is False and self.activation_checkpointing.mode is ActivationCheckpointing.budget:
            raise ConfigError(
                "compile=false with activation_checkpointing=budget: what runs again is chosen while blocks are "
                "compiled; set "
                "compile=auto, or choose activation_checkpointing=selective"
            )

    def check_offload(self) -> None:
        """Raises ConfigError where a row of the ZeRO table keeps on the device what offload is to take off it."""
        mode, strategy = self.offload.mode, self.sharding.strategy
        if mode is not OffloadMode.none and strategy is Strategy.NO_SHARD:
            raise ConfigError(
                f"offload={mode.value} with sharding=zero0 would hold the same states in host memory once for every "
                "rank; sharding=zero2 or zero3 shares them out, and is the same on one GPU"
            )
        if mode.moves_weights and strategy is Strategy.SHARD_OPTIMIZER:
            raise ConfigError(
                f"offload={mode.value} with sharding=zero1 would still hold all weights and gradients on the device "
                "through the whole step; choose sharding=zero2 or zero3, or offload=optimizer"
            )
        masters, moments = self.precision.master_dtype, self.precision.moment_dtype
        if mode in (OffloadMode.optimizer, OffloadMode.nvme) and (masters, moments) != (
            MasterDType.fp32,
            MomentDType.fp32,
        ):
            raise ConfigError(
                f"offload={mode.value} updates stretches of fp32 masters and moments, and precision.master_dtype="
                f"{masters.value} with moment_dtype={moments.value} is rounded by the row; choose offload=params, or "
                "precision=bf16"
            )
        if mode.moves_weights and self.precision.linear is LinearKind.fp8:
            raise ConfigError(
                f"offload={mode.value} gathers shards from the host, where nothing turns them into "
                "precision.linear=fp8; choose offload=optimizer, or precision=bf16"
            )

    def check_labels(self) -> None:
        """Raises ConfigError where labels=llava_v1_5 cannot do what another key asks for."""
        if self.labels is Parity.llava_v1_5 and self.data.too_long is not TooLong.truncate:
            raise ConfigError(
                f"labels=llava_v1_5 truncates what is too long, as the original does; data.too_long="
                f"{self.data.too_long.value} needs labels=exact"
            )
        if self.labels is Parity.llava_v1_5 and self.data.special_tokens is SpecialTokens.text:
            raise ConfigError(
                "data.special_tokens=text: labels=llava_v1_5 reads special tokens in a text as the original does; set "
                "data.special_tokens=parse or null, or labels=exact"
            )

    def check_packing(self) -> None:
        """Raises ConfigError where keys of packing contradict each other."""
        tokens = self.tokens_per_micro_batch
        if isinstance(tokens, str) and tokens != AUTO:
            raise ConfigError(f"tokens_per_micro_batch={tokens} is not a number of positions; give one, auto or null")
        if not self.pack:
            if tokens is not None:
                raise ConfigError(
                    f"tokens_per_micro_batch={tokens} is for pack=true; padded micro-batches hold micro_batch_size "
                    "rows: set it to null"
                )
            if self.attention not in (Attention.auto, Attention.sdpa):
                raise ConfigError(
                    f"attention={self.attention.value} is for the rows of pack=true; with pack=false set attention=auto"
                )
            return
        if isinstance(tokens, int) and tokens < self.data.max_length:
            raise ConfigError(
                f"tokens_per_micro_batch={tokens} has no room for a sample of data.max_length={self.data.max_length}; "
                "a sample is never split: raise it, or lower data.max_length"
            )
        if self.sampler.name is SamplerName.llava_v1_5:
            if tokens is not None:
                raise ConfigError(
                    f"sampler=llava_v1_5 has micro-batches of its own, of micro_batch_size samples; "
                    f"tokens_per_micro_batch={tokens} would cut none: set it to null"
                )
        elif self.loss.normalize is Normalize.micro_batch:
            raise ConfigError(
                "loss.normalize=micro_batch is a mean of means, and with pack=true a micro-batch is whatever fits into "
                "a row: a sample would weigh more or less with its neighbours; set pack=false, or loss.normalize=step"
            )
