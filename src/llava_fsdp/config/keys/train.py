"""Configuration keys of the optimizer, loss, checkpoints, export and trackers; and `TrainingKeys`, all keys of a
training."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from llava_fsdp.config.bounds import AUTO, TAKES, above_zero, at_least, refuse_texts_except_auto
from llava_fsdp.config.keys.data import HELDOUT, DataConfig, SamplerConfig, SourceConfig, StageConfig, ValConfig
from llava_fsdp.config.keys.distributed import (
    ActivationCheckpointingConfig,
    CommConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    ShardingConfig,
)
from llava_fsdp.config.keys.enums import (
    ActivationCheckpointing,
    Attention,
    BestBy,
    CompatName,
    DType,
    ExportDType,
    Format,
    LoraBias,
    LossKernel,
    Normalize,
    OnSaveError,
    OptimName,
    PairForm,
    PairReference,
    Parity,
    SamplerName,
    Schedule,
    Source,
    SpecialTokens,
    Strategy,
    WandbMode,
    Which,
)
from llava_fsdp.config.keys.model import ModelConfig
from llava_fsdp.runtime.errors import ConfigError

PROFILE_STEPS = "the first and the last step to profile, as [10, 12], or null"


MOMENTUM = 0.95
"""Muon's usual decay rate of the mean of gradients."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float
    """Peak learning rate of all parts without one of their own."""
    projector_lr: float | None
    """Peak learning rate of the projector; null: optim.lr. The vector at the end of a line of tiles' features
    (`image_newline`) always has optim.lr, as in the original."""
    vision_lr: float | None
    """Peak learning rate of the vision tower; null: optim.lr."""
    weight_decay: float
    """Weight decay, not of biases and norms."""
    beta1: float
    """Decay rate of AdamW's mean of gradients."""
    beta2: float
    """Decay rate of AdamW's mean of squared gradients."""
    eps: float
    """Number added to the root of that mean."""
    clip: float | None
    """Maximum norm of all gradients together; null: no clipping. Larger gradients are scaled down to it."""
    schedule: Schedule
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: float
    """Share of all steps in which the learning rate rises from 0."""
    warmup_steps: int | None
    """Number of warm-up steps; null: by warmup_ratio."""
    decay_ratio: float | None = None
    """Share of the steps, at their end, in which the rate falls (WSD); null: all after the warm-up."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    name: OptimName = OptimName.adamw
    """muon: Muon for matrices, AdamW for the rest."""
    momentum: float = MOMENTUM
    """Muon's decay rate of the mean of gradients."""
    ema: float | None = None
    """Decay rate of a moving average of the weights; null: none."""

    @property
    def is_muon(self) -> bool:
        return self.name is OptimName.muon

    @property
    def described_schedule(self) -> str:
        """The schedule after the warm-up, such as `linear in the last 0.1 of the steps, to 0.2 of the peak`."""
        falls = "" if self.decay_ratio is None else f" in the last {self.decay_ratio:.3g} of the steps"
        return self.schedule.value + falls + (f", to {self.min_lr_ratio:.3g} of the peak" if self.min_lr_ratio else "")

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is not allowed."""
        for name in ("lr", "projector_lr", "vision_lr", "weight_decay", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"optim.{name}={value} must be a finite number of at least 0")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.momentum != MOMENTUM and not self.is_muon:
            raise ConfigError(
                f"optim.momentum={self.momentum} is for optim=muon, and the optimizer is {self.name.value}"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"optim.ema={self.ema} must be above 0 and below 1; null keeps no average")
        above_zero("optim.clip", self.clip, "; null turns clipping off")
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(f"optim.warmup_ratio={self.warmup_ratio} must be a fraction of all steps, 0 to 1")
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        for name in ("decay_ratio", "min_lr_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"optim.{name}={value} must be a fraction, 0 to 1")
            if value and not self.schedule.decays:
                raise ConfigError(
                    f"optim.{name}={value} is for optim.schedule=cosine, linear and sqrt, and it is "
                    f"{self.schedule.value}"
                )


@dataclass(kw_only=True, slots=True)
class CompatConfig:
    name: CompatName
    """llava_v1_5 sets labels, sampler, loss.normalize, data.pixels and the dtypes of precision to those of the original
    LLaVA."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    normalize: Normalize
    """step: the loss is divided by the step's label tokens on all ranks; micro_batch: the mean of the micro-batches'
    means, as in the original LLaVA."""
    chunk_tokens: int
    """Number of label tokens whose logits are in memory at once."""
    kernel: LossKernel
    """Implementation of the loss."""

    def __post_init__(self) -> None:
        at_least("loss.chunk_tokens", self.chunk_tokens, 1)


@dataclass(kw_only=True, slots=True)
class PrefConfig:
    """Configuration keys of the loss of pairs of a chosen and a rejected answer (`data.pairs`). A step's loss is the
    mean over its pairs of `weight` times the form's loss, minus `sft_weight` times the mean log-probability of the
    tokens of the chosen answer."""

    form: PairForm = PairForm.sigmoid
    """Loss of a pair (sigmoid: DPO)."""
    beta: float = 0.1
    """Factor of scores. A larger one keeps the model nearer to the reference."""
    gamma: float = 0.0
    """Margin of SimPO. The reward of the chosen answer must be higher by so much."""
    label_smoothing: float = 0.0
    """Share of pairs taken as reversed. With sigmoid it makes conservative DPO."""
    per_token: bool = False
    """Whether scores are divided by tokens (IPO, SimPO)."""
    weight: float = 1.0
    """Factor of `form`'s loss."""
    sft_weight: float = 0.0
    """Factor of the chosen answer's cross entropy. Its mean over tokens is added to the loss (RPO, MPO)."""
    reference: PairReference = PairReference.auto
    """Model to compare with. Its log-probabilities of the answers are subtracted. adapters: the
    model without its adapters, in a second forward pass; stored: the model as training begins, whose log-probabilities
    are computed once and written to output_dir; none: no model (SimPO); auto: adapters if they alone train and begin at
    zero, else stored."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is not allowed."""
        above_zero("pref.beta", self.beta)
        for name in ("gamma", "weight", "sft_weight"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"pref.{name}={value} must be a finite number of at least 0")
        if not self.weight and not self.sft_weight:
            raise ConfigError("pref.weight=0 with pref.sft_weight=0 trains nothing; raise one of them")
        share, form = self.label_smoothing, self.form
        if not 0 <= share < 0.5:
            raise ConfigError(f"pref.label_smoothing={share} must be a share of pairs, at least 0 and below 0.5")
        if share and form not in (PairForm.sigmoid, PairForm.robust):
            raise ConfigError(
                f"pref.label_smoothing={share} is for pref.form=sigmoid and robust, and it is {form.value}; set it to 0"
            )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: int | None
    """Number of steps between two checkpoints; null: only one, at the end."""
    keep: int
    """Number of newest valid checkpoints that are kept."""
    keep_every: int | None
    """Checkpoints at multiples of this step are never deleted; null: all old ones may be."""
    resume: str
    """Checkpoint to start from: auto (the newest valid one), never (start over), or its path."""
    strict: bool
    """Whether a damaged newest checkpoint ends the run. Otherwise resume=auto warns and uses the one before it."""
    asynchronous: bool
    """Whether to write checkpoints while training continues. They are written from a copy in host memory; if it does
    not fit, or with offload=nvme, training waits for the disk."""
    on_save_error: OnSaveError
    """Whether a checkpoint that cannot be written ends the run (raise) or not (warn)."""
    best: BestBy | None = None
    """Number of validations by which the best checkpoint is kept."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep_every", self.keep_every, 1)
        at_least("checkpoint.keep", self.keep, 2, "the newest may be the one that a crash interrupted")


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    enabled: bool
    """Whether to write the trained model in transformers' format to output_dir/export at the end."""
    dtype: ExportDType
    """Dtype of the exported weights."""
    verify: bool
    """Whether to load the exported model with transformers and compare its logits."""
    merge: bool = True
    """Whether to export the base model with the adapters merged into it. The adapters alone are always
    written to output_dir/adapter."""
    which: Which = Which.last
    """Weights that are exported."""

    @property
    def stored(self) -> DType:
        """`dtype`, as the dtypes of `precision` are named."""
        return DType(self.dtype.value)


@dataclass(kw_only=True, slots=True)
class NumericConfig:
    max_consecutive_skips: int
    """Maximum number of consecutive steps that are skipped because gradients are not finite. One more ends the run."""
    spike_sigma: float | None
    """Standard deviations above the mean of preceding losses that give a warning; null: none."""

    def __post_init__(self) -> None:
        at_least("numeric.max_consecutive_skips", self.max_consecutive_skips, 0)
        above_zero("numeric.spike_sigma", self.spike_sigma, ", or null")


@dataclass(kw_only=True, slots=True)
class TrackConfig:
    """Configuration keys of the trackers, to which rank 0 sends the metrics of training and validation."""

    tensorboard: bool = False
    """Whether to write event files to output_dir/tensorboard."""
    wandb: WandbMode = WandbMode.off
    """Whether and how Weights & Biases records the run."""
    mlflow: str | None = None
    """Address of an MLflow server."""
    trackio: bool = False
    """Whether Trackio records."""
    project: str = "llava_fsdp"
    """Project in the trackers."""
    name: str | None = None
    """Run in the trackers; null: the name of output_dir."""


@dataclass(kw_only=True, slots=True)
class TrainingKeys:
    """All configuration keys of a training. `config.rules.Config` also checks their combinations."""

    stage: StageConfig
    model: ModelConfig
    data: DataConfig
    sharding: ShardingConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    activation_checkpointing: ActivationCheckpointingConfig
    offload: OffloadConfig
    optim: OptimConfig
    sampler: SamplerConfig
    compat: CompatConfig
    loss: LossConfig
    pref: PrefConfig = field(default_factory=PrefConfig)
    checkpoint: CheckpointConfig
    export: ExportConfig
    comm: CommConfig
    numeric: NumericConfig
    val: ValConfig
    output_dir: str
    """Folder of the run, for checkpoints, logs, metrics and the export."""
    private: bool
    """Whether only the owner can read the run's files. A new output_dir is then closed to others, too."""
    labels: Parity
    """Which tokens are labels. exact: those of every answer; llava_v1_5: as in the original LLaVA, which gives some
    samples no labels (LLaVA train.py:332-655)."""
    seed: int
    """Seed of random weights, the order of samples, and dropout."""
    epochs: int
    """Number of times that every record is trained on."""
    max_steps: int | None
    """Number of steps after which training ends, within an epoch or after several; null: `epochs` epochs."""
    global_batch_size: int
    """Number of samples of a step, on all ranks together. A pair of answers is one sample."""
    micro_batch_size: int
    """Maximum number of rows that a rank processes at once. With packed rows it gives a maximum number of tokens
    instead: micro_batch_size * data.max_length."""
    pack: bool | str = field(metadata={TAKES: "true, false or auto"})
    """Whether to pack samples end to end into one row instead of padding. Each sample attends only to itself. auto:
    packed, if the language model can keep the samples of a row apart; the run records which."""
    tokens_per_micro_batch: int | str | None = field(metadata={TAKES: "a number of tokens, auto or null"})
    """Maximum number of tokens of a packed row on a rank; null: micro_batch_size * data.max_length. auto: the planner
    chooses when a training begins, and the run records its choice."""
    attention: Attention
    """Implementation of attention in packed rows."""
    compile: bool | str = field(metadata={TAKES: "true, false or auto"})
    """Whether to compile the language model's blocks; auto: on CUDA with Triton."""
    log_every: int
    """Number of steps between two lines of progress. A terminal has a progress bar instead."""
    gc_every: int | None
    """Number of steps between two runs of Python's garbage collector; null: Python decides. They are at the same steps
    on all ranks."""
    deterministic: bool
    """Whether results on CUDA are bitwise repeatable. Results on a CPU always are."""
    profile: bool
    """Whether to write a trace, a memory snapshot and a page about time to output_dir/profile."""
    profile_steps: list[int] | None = field(metadata={TAKES: PROFILE_STEPS})
    """First and last step to profile, counted from 1 at this start; null: 10 to 12. If this start has fewer steps, null
    means the last three."""
    track: TrackConfig = field(default_factory=TrackConfig)
    dry_run: int | None
    """Number of ranks to simulate, to measure the memory of one of them. Two of its steps are run; nothing is trained
    or written."""
    format: Format
    """Format in which dry_run prints its result."""

    @property
    def row_tokens(self) -> int:
        """Maximum number of tokens of a packed row (several samples end to end), on all ranks that process it together.
        It is `tokens_per_micro_batch` for each of these ranks or, if that is null, room for `micro_batch_size` of the
        longest samples. If it is `auto`, the planner (`llava-fsdp plan`) must have replaced it by a number before."""
        assert not self.plans_tokens, "the planner must replace auto first"
        tokens = self.tokens_per_micro_batch
        if isinstance(tokens, int):
            return tokens * self.parallel.num_context
        return self.micro_batch_size * self.data.sample_tokens

    @property
    def rank_tokens(self) -> int:
        """Maximum number of tokens that one rank processes at once: of a packed row, its part."""
        return self.row_tokens // self.parallel.num_context

    @property
    def can_share_rows(self) -> bool:
        """Whether several ranks may process each row together (`parallel.context` above 1)."""
        return self.packs and self.sampler.name is not SamplerName.llava_v1_5

    @property
    def packs(self) -> bool:
        """Whether samples are packed end to end into rows instead of padded. Also true for `pack=auto`, until
        `plan.auto.settle_packing` replaces it by true or false."""
        return self.pack is not False

    @property
    def plans_tokens(self) -> bool:
        """Whether the planner (`llava-fsdp plan`) chooses the maximum number of tokens of a packed row (several samples
        end to end). Not with pack=false or sampler=llava_v1_5, which use micro_batch_size and treat `auto` as null."""
        is_free = self.packs and self.sampler.name is not SamplerName.llava_v1_5
        return is_free and self.tokens_per_micro_batch == AUTO

    @property
    def held_out(self) -> Self:
        """Copy of the training's configuration for reading the validation records once: its `data` keys name the
        records that the `val` keys name. `max_steps` and `profile`, which concern the training's steps, are off."""
        val, files = self.val, self.val.sources
        # the embedded dataset (data=shapes) has a file of validation records, which is used if `val` names none
        embedded = str(Path(self.data.root or ".") / HELDOUT) if self.data.source is Source.shapes else None
        data = replace(
            self.data,
            path=None if files else val.path or embedded,
            images=val.images or self.data.images,
            sources={name: SourceConfig(path=file.path, images=file.images) for name, file in files.items()},
            index=val.index,
        )
        return replace(self, data=data, epochs=1, max_steps=None, profile=False)

    @property
    def trained_template(self) -> str:
        """Name of the conversation template that training really uses. It is `data.template`, but labels=llava_v1_5
        turns v0 into v1, because the original LLaVA's --version v0 trains with v1 (LLaVA train.py:894-908)."""
        is_v0 = self.data.template == "v0" and self.labels is Parity.llava_v1_5
        return "v1" if is_v0 else self.data.template

    @property
    def trained_special_tokens(self) -> SpecialTokens:
        """How training really tokenizes special tokens such as `</s>` in a record's text: `data.special_tokens`, or if
        that is null, the default for `labels`."""
        is_original = self.labels is Parity.llava_v1_5
        return self.data.special_tokens or (SpecialTokens.parse if is_original else SpecialTokens.text)

    @property
    def begins_without_adapters(self) -> bool:
        """Whether the model without its adapters is, at every step, the one that training begins with: nothing but
        adapters is trained, not even biases, and the adapters begin at zero and not at values of a checkpoint."""
        model = self.model
        begins_at_zero = model.lora.checkpoint is None and model.lora.bias is LoraBias.none
        return model.lora.enabled and begins_at_zero and set(model.trained) == set(model.adapted)

    @property
    def pair_reference(self) -> PairReference:
        """The reference model of training on pairs of answers: `pref.reference`, where `auto` means `adapters` (the
        model without its adapters, run at every step) if that is the model that training begins with, else `stored`
        (its log-probabilities are computed once, before training)."""
        if self.pref.reference is not PairReference.auto:
            return self.pref.reference
        return PairReference.adapters if self.begins_without_adapters else PairReference.stored

    @property
    def exports_model(self) -> bool:
        """Whether training ends with the export of a whole model for transformers, and not only of LoRA adapters."""
        return self.export.enabled and (self.export.merge or not self.model.lora.enabled)

    @property
    def has_auto(self) -> bool:
        """Whether a configuration key is set to `auto`, so that the planner (`llava-fsdp plan`) chooses its value."""
        return (
            self.sharding.strategy is Strategy.auto
            or self.activation_checkpointing.mode is ActivationCheckpointing.auto
            or self.plans_tokens
            or self.parallel.context == AUTO
            or self.parallel.search
        )

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is not allowed."""
        refuse_texts_except_auto(self)
        for name in ("epochs", "global_batch_size", "micro_batch_size", "log_every"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        at_least("max_steps", self.max_steps, 1, "null trains every epoch to its end")
        at_least("gc_every", self.gc_every, 1, "null leaves it to Python")
        at_least("dry_run", self.dry_run, 1, "it is the number of ranks to simulate")
        steps = self.profile_steps
        if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"profile_steps={steps} must be {PROFILE_STEPS}")
