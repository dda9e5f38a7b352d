"""`Config`: the configuration of a training, after a check that its keys do not contradict each other."""

from dataclasses import dataclass

from llava_fsdp.config.bounds import AUTO
from llava_fsdp.config.keys.enums import (
    ActivationCheckpointing,
    Answers,
    AspectRatio,
    Attention,
    BestBy,
    DType,
    LabelWeights,
    LinearKind,
    LossKernel,
    MasterDType,
    MomentDType,
    Normalize,
    OffloadMode,
    PairReference,
    Parity,
    Part,
    PatchMerge,
    Pixels,
    Quantizer,
    SamplerName,
    Source,
    SpecialTokens,
    Strategy,
    Thoughts,
    TooLong,
    Which,
)
from llava_fsdp.config.keys.train import PrefConfig, TrainingKeys
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Config(TrainingKeys):
    """All configuration keys of a training."""

    def __post_init__(self) -> None:
        super(Config, self).__post_init__()
        check_training(self)


def check_training(cfg: TrainingKeys) -> None:
    """Raise ConfigError if keys in the configuration of a training contradict each other."""
    check_packing(cfg)
    check_divided(cfg)
    check_base(cfg)
    check_compile(cfg)
    check_offload(cfg)
    check_optimizer(cfg)
    check_validation(cfg)
    if cfg.max_steps is not None:
        check_profile(cfg, cfg.max_steps)
    check_dry_run(cfg)
    check_original(cfg)
    check_anyres(cfg)
    check_export(cfg)
    check_pairs(cfg)
    check_best(cfg)


def check_packing(cfg: TrainingKeys) -> None:
    """Raise ConfigError if keys contradict each other about packed or padded rows and their number of tokens."""
    tokens, is_original = cfg.tokens_per_micro_batch, cfg.sampler.name is SamplerName.llava_v1_5
    check_context(cfg)
    if not cfg.packs:
        if isinstance(tokens, int):
            raise ConfigError(
                f"tokens_per_micro_batch={tokens} is for packed rows; padded micro-batches hold micro_batch_size "
                "rows: set it to null"
            )
        if cfg.attention not in (Attention.auto, Attention.sdpa):
            raise ConfigError(f"attention={cfg.attention.value} is for packed rows; with pack=false set attention=auto")
        return
    context = cfg.parallel.num_context
    if isinstance(tokens, int) and tokens * context < cfg.data.sample_tokens and cfg.parallel.context != AUTO:
        room = f"tokens_per_micro_batch={tokens}" + (f" x parallel.context={context}" if context > 1 else "")
        sample = "two answers" if cfg.data.pairs else "a sample"
        raise ConfigError(
            f"{room} has no room for {sample} of data.max_length={cfg.data.max_length}; raise it or parallel.context, "
            "which lets several ranks process a sample together, or lower data.max_length"
        )
    if is_original and isinstance(tokens, int):
        raise ConfigError(
            "sampler=llava_v1_5 makes micro-batches of micro_batch_size samples; "
            f"tokens_per_micro_batch={tokens} has no effect on them: set it to null"
        )
    if not is_original and cfg.loss.normalize is Normalize.micro_batch:
        raise ConfigError(
            "loss.normalize=micro_batch is a mean of means, and a packed micro-batch is whatever fits into "
            "a row: a sample would weigh more or less with its neighbours; set loss.normalize=step"
            + (", or pack=false" if context == 1 else "")
        )


def check_context(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings that cannot be used if several ranks process each row together."""
    if cfg.parallel.context == 1:
        return
    context = f"parallel.context={cfg.parallel.context}"
    if not cfg.packs:
        raise ConfigError(f"{context} divides packed rows among ranks, and pack=false; set parallel.context=1")
    if cfg.sampler.name is SamplerName.llava_v1_5:
        raise ConfigError(
            f"{context} with sampler=llava_v1_5: the original LLaVA gives every rank rows of its own; set "
            "sampler=shuffle, or parallel.context=1"
        )
    if cfg.parallel.num_context > 1 and cfg.activation_checkpointing.mode is ActivationCheckpointing.dynamic:
        raise ConfigError(
            f"{context} with activation_checkpointing=dynamic is not supported; set activation_checkpointing=auto, or "
            "parallel.context=1"
        )
    if cfg.model.balance_loss:
        raise ConfigError(
            f"{context} with model.balance_loss={cfg.model.balance_loss}: this loss needs all tokens of a sample on "
            "one rank; set model.balance_loss=0, or parallel.context=1"
        )


def check_divided(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings that cannot be used if ranks divide the model: compute each layer together
    (`parallel.tensor`), share the experts of a mixture (`parallel.expert`), or have different layers
    (`parallel.pipeline`)."""
    parallel, precision = cfg.parallel, cfg.precision
    quantizer, mode = cfg.model.quantize.mode, cfg.activation_checkpointing.mode
    is_dynamic = mode is ActivationCheckpointing.dynamic
    is_budget = mode is ActivationCheckpointing.budget
    all_kinds = {  # {setting that is not supported: (whether it is set, what to set instead)}
        "compile=true": (cfg.compile is True, "compile=auto"),
        "activation_checkpointing=budget": (is_budget, "activation_checkpointing=selective"),
        "activation_checkpointing=dynamic": (is_dynamic, "activation_checkpointing=auto"),
        f"offload={cfg.offload.mode.value}": (cfg.offload.mode is not OffloadMode.none, "offload=none"),
        f"precision.linear={precision.linear.value}": (
            precision.linear is not LinearKind.same,
            "precision.linear=same",
        ),
        f"model.quantize.mode={quantizer.value}": (quantizer is not Quantizer.none, "model.quantize.mode=none"),
    }
    with_tensor = {
        "precision.param_dtype=fp16": (precision.param_dtype is DType.fp16, "precision=bf16"),
        "precision.moment_dtype=int8": (precision.moment_dtype is MomentDType.int8, "precision.moment_dtype=bf16"),
        "model.lora.use_dora=true": (cfg.model.lora.use_dora, "model.lora.use_dora=false"),
        "loss.kernel=torch": (cfg.loss.kernel is LossKernel.torch, "loss.kernel=auto"),
    }
    is_offload = mode is ActivationCheckpointing.offload
    trained = cfg.model.trained
    blocks = trained.get(Part.language)
    ends_early = trained.keys() == {Part.language} and blocks is not None and blocks.start not in (None, 0)
    with_pipeline = {
        # only later blocks train: a pipeline stage of frozen blocks would have no gradient to send back
        f"model.train={cfg.model.train}": (ends_early, "model.train=[projector,...]"),
        "activation_checkpointing=offload": (is_offload, "activation_checkpointing=full"),
    }
    kinds = (
        ("tensor", parallel.tensor, all_kinds | with_tensor),
        ("expert", parallel.expert, all_kinds),
        ("pipeline", parallel.pipeline, all_kinds | with_pipeline),
    )
    for key, size, settings in kinds:
        for setting, (is_set, cure) in settings.items():
            if size > 1 and is_set:
                alone = " and ".join(f"parallel.{k}=1" for k, s, refused in kinds if s > 1 and setting in refused)
                raise ConfigError(f"parallel.{key}={size} with {setting} is not supported; set {cure}, or {alone}")


def check_base(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings that contradict a frozen or quantized language model: `precision.linear` if it has
    adapters, `int8_mixed` and `fp32_sums` if it is frozen without them, and an offload that would move quantized
    weights to the host."""
    mode, linear = cfg.model.quantize.mode, cfg.precision.linear
    if cfg.model.lora.enabled and linear is not LinearKind.same:
        raise ConfigError(
            f"precision.linear={linear.value} is for weights that train, and model.lora.enabled=true freezes them; "
            "set precision.linear=same"
        )
    if mode is not Quantizer.none and cfg.offload.mode.moves_weights:
        raise ConfigError(
            f"offload={cfg.offload.mode.value} with model.quantize.mode={mode.value} would send quantized weights "
            "through the host at every step; choose offload=optimizer or none"
        )
    if linear in (LinearKind.int8_mixed, LinearKind.fp32_sums) and Part.language not in cfg.model.trained:
        raise ConfigError(
            f"precision.linear={linear.value} is for a language model that trains, and model.train="
            f"{cfg.model.train} freezes it; set precision.linear=same"
        )


def check_compile(cfg: TrainingKeys) -> None:
    """Raise ConfigError if `compile` contradicts activation checkpointing or the balance loss."""
    if cfg.compile is False and cfg.activation_checkpointing.mode is ActivationCheckpointing.budget:
        raise ConfigError(
            "compile=false with activation_checkpointing=budget: the compiler chooses what is kept; set compile=auto, "
            "or choose activation_checkpointing=selective"
        )
    is_budget = cfg.activation_checkpointing.mode is ActivationCheckpointing.budget
    if cfg.model.balance_loss and (cfg.compile is True or is_budget):
        compiling = "activation_checkpointing=budget" if is_budget else "compile=true"
        raise ConfigError(
            f"{compiling} with model.balance_loss={cfg.model.balance_loss}: this loss needs what routers return inside "
            "of a block, with gradients, which compiled blocks do not give; set model.balance_loss=0, or "
            + ("choose activation_checkpointing=selective" if is_budget else "compile=auto")
        )


def check_offload(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings with which `offload.mode`, which keeps optimizer states or also weights in host
    memory or in files, cannot work or would save nothing: some sharding strategies and some dtypes."""
    mode, strategy, precision = cfg.offload.mode, cfg.sharding.strategy, cfg.precision
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
    masters, moments = precision.master_dtype, precision.moment_dtype
    is_fp32 = masters is MasterDType.fp32 and moments is MomentDType.fp32
    if mode in (OffloadMode.optimizer, OffloadMode.nvme) and not is_fp32:
        raise ConfigError(
            f"offload={mode.value} updates fp32 masters and moments, not precision.master_dtype={masters.value} with "
            f"moment_dtype={moments.value}; choose offload=params, or precision.master_dtype=fp32 and "
            "precision.moment_dtype=fp32"
        )
    if mode is not OffloadMode.none and precision.linear is LinearKind.fp32_sums:
        raise ConfigError(
            f"offload={mode.value} takes gradients away from the device as they are made, and "
            "precision.linear=fp32_sums adds them there; choose offload=none, or precision.linear=same"
        )
    if mode.moves_weights and precision.linear is LinearKind.fp8:
        raise ConfigError(
            f"offload={mode.value} gathers shards from the host, where nothing turns them into "
            "precision.linear=fp8; choose offload=optimizer, or precision=bf16"
        )


def check_optimizer(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings with which Muon, or an average of the weights, does not work."""
    mode, precision = cfg.offload.mode, cfg.precision
    if cfg.export.which is Which.average and cfg.optim.ema is None:
        raise ConfigError("export.which=average needs an average of the weights: optim.ema=0.999, or another")
    if cfg.optim.ema is not None and mode is not OffloadMode.none:
        raise ConfigError(
            f"optim.ema keeps its average on the device, which offload={mode.value} is to spare; set one of them to "
            "null or none"
        )
    if not cfg.optim.is_muon:
        return
    if mode is not OffloadMode.none:
        raise ConfigError(
            f"offload={mode.value} updates weights on the CPU or a piece at a time, and optim=muon needs whole "
            "matrices on the device; set offload=none, or optim=adamw"
        )
    if (precision.master_dtype, precision.moment_dtype) != (MasterDType.fp32, MomentDType.fp32):
        raise ConfigError(
            f"optim=muon has fp32 masters and moments, not precision.master_dtype={precision.master_dtype.value} with "
            f"moment_dtype={precision.moment_dtype.value}; set both to fp32, or optim=adamw"
        )


def check_validation(cfg: TrainingKeys) -> None:
    """Raise ConfigError if the training is to be validated, but no file of validation records is named."""
    if cfg.val.every is not None and not cfg.val.is_named and cfg.data.source is not Source.shapes:
        raise ConfigError(
            f"val.every={cfg.val.every} needs validation records: name a file of them, val.path=FILE, or set "
            "val.every=null"
        )


def check_profile(cfg: TrainingKeys, total_steps: int) -> None:
    """Raise ConfigError if a training of `total_steps` steps ends before the last step to profile (`profile_steps`)."""
    if cfg.profile and cfg.profile_steps is not None and cfg.profile_steps[1] > total_steps:
        raise ConfigError(
            f"profile_steps={cfg.profile_steps}: this run has {total_steps} steps; name earlier ones, or null for its "
            "last three"
        )


def check_dry_run(cfg: TrainingKeys) -> None:
    """Raise ConfigError for a dry run of hybrid sharding in which the number of ranks that share a node is unknown."""
    is_hybrid = cfg.sharding.strategy in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2)
    if cfg.dry_run is not None and is_hybrid and cfg.sharding.shard_size is None:
        raise ConfigError(
            f"dry_run={cfg.dry_run} cannot tell how many of these ranks share a node; set sharding.shard_size"
        )


def check_original(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings that contradict `labels=llava_v1_5`, which tokenizes samples and masks labels as
    the original LLaVA's code does, or `sampler=llava_v1_5`, which orders and batches them as it does."""
    if cfg.labels is Parity.llava_v1_5 and cfg.data.too_long is not TooLong.truncate:
        raise ConfigError(
            f"labels=llava_v1_5 truncates what is too long, as the original does; data.too_long="
            f"{cfg.data.too_long.value} needs labels=exact"
        )
    if cfg.labels is Parity.llava_v1_5 and (cfg.data.answers is not Answers.all or cfg.data.thoughts is Thoughts.drop):
        raise ConfigError(
            f"data.answers={cfg.data.answers.value}, data.thoughts={cfg.data.thoughts.value}: labels=llava_v1_5 learns "
            "every answer as it is written; set labels=exact, or data.answers=all and data.thoughts=refuse"
        )
    if cfg.labels is Parity.llava_v1_5 and cfg.data.special_tokens is SpecialTokens.text:
        raise ConfigError(
            "data.special_tokens=text: labels=llava_v1_5 reads special tokens in a text as the original does; set "
            "data.special_tokens=parse or null, or labels=exact"
        )
    if cfg.sampler.name is not SamplerName.llava_v1_5:
        return
    if cfg.global_batch_size % cfg.micro_batch_size:
        raise ConfigError(
            f"sampler=llava_v1_5 has whole micro-batches, and global_batch_size={cfg.global_batch_size} is not a "
            f"multiple of micro_batch_size={cfg.micro_batch_size}"
        )
    if any(source.weight is not None or source.epochs not in (None, 1) for source in cfg.data.sources.values()):
        raise ConfigError(
            "sampler=llava_v1_5 has every record once an epoch, as the original does; take epochs and weight out of "
            "data.sources, or set sampler=shuffle"
        )


def check_anyres(cfg: TrainingKeys) -> None:
    """Raise ConfigError if images of several tiles (anyres) are set together with keys that do not support them."""
    merge, aspect = cfg.model.patch_merge, cfg.data.image_aspect_ratio
    needed = {
        f"model.patch_merge=spatial_unpad (it is {merge.value})": merge is PatchMerge.spatial_unpad,
        "data.pixels=exact or fast (it is llava_v1_5)": cfg.data.pixels is not Pixels.llava_v1_5,
        "labels=exact (it is llava_v1_5)": cfg.labels is not Parity.llava_v1_5,
    }
    wrong = [key for key, is_right in needed.items() if not is_right]
    if aspect is AspectRatio.anyres_max and wrong:
        raise ConfigError(f"data.image_aspect_ratio=anyres_max is LLaVA-OneVision's, and needs {' and '.join(wrong)}")
    if merge is PatchMerge.flat:  # suits every image_aspect_ratio
        return
    if aspect not in (AspectRatio.anyres, AspectRatio.anyres_max):
        raise ConfigError(
            f"model.patch_merge={merge.value} is for data.image_aspect_ratio=anyres and anyres_max; with "
            f"{aspect.value} an image is one tile: set model.patch_merge=flat"
        )
    if cfg.data.pixels is Pixels.llava_v1_5:
        raise ConfigError(
            f"data.pixels=llava_v1_5 trains anyres as square, as the original does; model.patch_merge={merge.value} "
            "needs data.pixels=exact or fast"
        )


def check_export(cfg: TrainingKeys) -> None:
    """Raise ConfigError if the training would end with an export for which transformers has no model class."""
    if not cfg.exports_model:
        return
    if cfg.model.shuffle_factor > 1:
        return  # it depends on the vision tower whether this can be exported: checked once the model is read
    cure = "export.merge=false" if cfg.model.lora.enabled else "export.enabled=false"
    merge = cfg.model.patch_merge
    if cfg.data.trained_aspect is AspectRatio.anyres and merge is not PatchMerge.spatial_unpad:
        raise ConfigError(
            f"data.image_aspect_ratio=anyres with model.patch_merge={merge.value} has no equal in transformers, whose "
            "LLaVA-NeXT joins tiles as spatial_unpad, so the run could not be exported at its end; set "
            f"model.patch_merge=spatial_unpad, or {cure} (llava-fsdp export format=llava can "
            "write the original's format later, if the language model is a Llama)"
        )
    if cfg.model.projector_type != "mlp2x_gelu":
        raise ConfigError(
            f"model.projector_type={cfg.model.projector_type} has no equal in transformers' LLaVA, so the run "
            f"could not be exported; choose mlp2x_gelu, or set {cure}. llava-fsdp export can later write the whole "
            "model with format=llava if its language model is a Llama, or the projector alone with format=projector"
        )


def check_best(cfg: TrainingKeys) -> None:
    """Raise ConfigError if the best checkpoint is asked for, and no validation tells which it is."""
    best = cfg.checkpoint.best
    if best is None:
        if cfg.val.patience is not None:
            raise ConfigError(
                f"val.patience={cfg.val.patience} needs a number to compare: checkpoint.best=loss, or another"
            )
        if cfg.export.which is Which.best:
            raise ConfigError("export.which=best needs a number to compare: checkpoint.best=loss, or another")
        return
    if cfg.val.every is None:
        raise ConfigError(f"checkpoint.best={best.value} compares validations; set val.every=STEPS")
    if best is BestBy.score and not cfg.val.answers:
        raise ConfigError("checkpoint.best=score compares answers, and val.answers=0; raise it, or set best=loss")
    if best in (BestBy.accuracy, BestBy.margin) and not cfg.data.pairs:
        raise ConfigError(f"checkpoint.best={best.value} is for pairs, and data.pairs=false; set loss or score")


def check_pairs(cfg: TrainingKeys) -> None:
    """Raise ConfigError for settings that contradict training on answer pairs (`data.pairs`), or `pref` without it."""
    if not cfg.data.pairs:
        if cfg.pref != PrefConfig() or cfg.data.prompt_once:
            keys = "data.prompt_once" if cfg.data.prompt_once else "pref.*"
            raise ConfigError(f"{keys} is for records with two answers, and data.pairs=false; choose stage=prefer")
        return
    parallel, mode = cfg.parallel, cfg.activation_checkpointing.mode
    refused = {  # {setting that is not supported: (whether it is set, what to set instead)}
        "data.weights=ignore": (cfg.data.weights is not LabelWeights.use, "data.weights=use"),
        "labels=llava_v1_5": (cfg.labels is not Parity.exact, "labels=exact"),
        "sampler=llava_v1_5": (cfg.sampler.name is SamplerName.llava_v1_5, "sampler=shuffle"),
        "loss.normalize=micro_batch": (cfg.loss.normalize is not Normalize.step, "loss.normalize=step"),
        "loss.kernel=torch": (cfg.loss.kernel is LossKernel.torch, "loss.kernel=auto"),
        "data.too_long=truncate": (cfg.data.too_long is TooLong.truncate, "data.too_long=fail or skip"),
        f"data.question={cfg.data.question}": (cfg.data.question is not None, "data.question=null data.answer=null"),
        "parallel=auto": (parallel.search, "parallel=none"),
        f"parallel.context={parallel.context}": (parallel.context != 1, "parallel.context=1"),
        f"parallel.tensor={parallel.tensor}": (parallel.tensor > 1, "parallel.tensor=1"),
        f"parallel.pipeline={parallel.pipeline}": (parallel.pipeline > 1, "parallel.pipeline=1"),
        "activation_checkpointing=dynamic": (
            mode is ActivationCheckpointing.dynamic,
            "activation_checkpointing=selective",
        ),
    }
    for setting, (is_set, cure) in refused.items():
        if is_set:
            raise ConfigError(f"data.pairs=true with {setting} is not supported; set {cure}")
    if cfg.data.prompt_once and not cfg.packs:
        raise ConfigError("data.prompt_once=true needs packed rows, and pack=false; set data.prompt_once=false")
    if cfg.data.prompt_once and cfg.model.balance_loss:
        raise ConfigError(
            "data.prompt_once=true with model.balance_loss, whose loads are those of whole samples, is not supported; "
            "set one of them to false or 0"
        )
    if cfg.pref.reference is PairReference.adapters and not cfg.begins_without_adapters:
        raise ConfigError(
            "pref.reference=adapters: without its adapters the model must be the one that training begins with, so "
            "nothing else may train, and adapters must begin at zero; set pref.reference=stored, or "
            "model.train=[language], model.lora.enabled=true, model.lora.bias=none and model.lora.checkpoint=null"
        )
