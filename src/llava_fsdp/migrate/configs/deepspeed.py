"""Table of rules: what each key of a DeepSpeed configuration becomes. The keys are those in DeepSpeed's
docs/_pages/config-json.md and runtime/config.py. Names of nested keys are joined with dots, and `block.*` stands for
all keys of that block that have no rule of their own."""

from collections.abc import Mapping
from dataclasses import dataclass

from llava_fsdp.migrate.source.source_run import AUTO, plain
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    OnlyIf,
    Rule,
    RuleContext,
    Translation,
    Verdict,
    becomes,
    implied,
    mapped,
    no_effect,
    only_off,
    only_on,
    refused,
    rules,
    unsupported,
)
from llava_fsdp.migrate.to_keys.overrides import DS_ADAM, DS_SCHEDULES, STAGES

BLOCKS = "FSDP2 gathers and reduces one block of layers at a time, ahead of the computation"
COMMUNICATION = implied(f"{BLOCKS}; sharding.blocks_per_unit=N and sharding.prefetch=N are in blocks, not in elements")
READ_BY_ROWS = implied("every rank reads its own rows of every weight from the files, or from a checkpoint")
GATHERED = implied("export/ always holds the whole model, written without ever gathering it")
METRICS = implied("metrics.jsonl has loss, tokens, seconds and memory of every step")
ADAMW = implied("PyTorch's own AdamW, fused; moments in precision.moment_dtype")
NO_SETTING = unsupported("AdamW and the schedules have no such setting")
FP32_SUMS = "gradients are added and reduced in fp32 (precision.reduce_dtype)"
NOT_A_DIVISOR = "no number that divides the GPUs: DeepSpeed needs one"
LAYERS = "transformers' plan of each model says how its layers are divided"
NONE = "it has no equivalent here"
# Keys of the block `fp16` except `enabled`, with DeepSpeed's default values, which are also those of precision.scaler.
LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def compare_with_flag(value: object, flag_value: object, text: str, flag_name: str) -> Translation:
    """Return what a key of DeepSpeed's configuration becomes if the training script also sets it (`flag_value`, named
    `flag_name`). `text` names the override that it becomes. The value `auto` stands for the script's value. Any other
    value must equal the script's, or transformers refuses the original training (integrations/deepspeed.py)."""
    if value == AUTO:
        return mapped(text, flag_value)
    given = [plain(v) for v in value] if isinstance(value, list) else plain(value)
    return mapped(text) if given == flag_value else refused(f"{flag_name} is {flag_value}")


@dataclass(frozen=True)
class FromFlag:
    """Rule for a key that becomes an override if its value agrees with a flag of the training script.

    Attributes:
        key: key of the override.
        note: remark that is printed behind the override.
    """

    flag: str
    key: str
    note: str = ""

    def __call__(self, context: RuleContext, value: object) -> Translation:
        return compare_with_flag(
            value,
            context.run.trainer_value(self.flag),
            context.text_of_override(self.key) + self.note,
            f"--{self.flag}",
        )


@dataclass(frozen=True)
class Switched:
    """Rule for all keys of an object in the JSON file (such as `autotuning`) that switches on a feature which
    llava_fsdp does not have: they are not supported, unless the feature is off.

    Attributes:
        why: why the feature is not supported, or what to use instead.
        flag: key of this object, or of an object inside it, that switches the feature on: by true, or by a size other
            than 0 and 1.
    """

    why: str
    flag: str = "enabled"

    def __call__(self, context: RuleContext, value: object) -> Translation:
        """Return what a key becomes in llava_fsdp, if its object in the file (such as `autotuning`) is for a feature
        that llava_fsdp does not have. The key is not supported if a key `self.flag` switches the feature on: by true,
        or by a size other than 0 and 1, in this object or one inside it. Else the feature is off, as it also is if the
        object's own `self.flag` is false. `value` does not matter."""
        block = context.key.partition(".")[0]
        assert context.run.deepspeed is not None
        values = context.run.deepspeed.values
        inner = [plain(v) for k, v in values.items() if k.startswith(block + ".") and k.endswith("." + self.flag)]
        is_on = any(v is True or v not in (None, 0, 1) for v in inner)
        if plain(values.get(f"{block}.{self.flag}")) is False or not is_on:
            return implied(f"{block} is off, as here")
        return unsupported(self.why)


def train_batch_size(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's `train_batch_size` becomes in llava_fsdp."""
    text = context.text_of_override("global_batch_size")
    return compare_with_flag(
        value, context.run.batch, text, "micro-batch x accumulation x GPUs with samples of their own"
    )


def optimizer_type(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's `optimizer.type` becomes in llava_fsdp, which has AdamW and Muon. The projector gets the
    learning rate of all parameters (`optim.projector_lr=null`), because DeepSpeed has one group of parameters."""
    if str(value).lower() == "muon":
        return unsupported("optim=muon is Muon here: set it, and look at its learning rate (docs/sharding.md)")
    if str(value).lower() not in DS_ADAM:
        return unsupported(f"AdamW is the optimizer, and replaces it: {value} has no equivalent here")
    text = context.text_of_override("optim.projector_lr")
    return mapped(f"optim=adamw, one group for all parameters, as DeepSpeed has it: {text}")


def betas(context: RuleContext, value: object) -> Translation:
    """Return what the betas in DeepSpeed's `optimizer` entry become in llava_fsdp."""
    theirs = [context.run.trainer_value("adam_beta1"), context.run.trainer_value("adam_beta2")]
    text = f"{context.text_of_override('optim.beta1')}, {context.text_of_override('optim.beta2')}"
    return compare_with_flag(value, theirs, text, "--adam_beta1, --adam_beta2")


def adam_w_mode(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's switch between Adam (decay as L2) and AdamW becomes in llava_fsdp."""
    if plain(value) or str(context.run.ds("optimizer.type")).lower() == "adamw":
        return implied("decay apart from the gradient: AdamW")
    if context.decided.get("optim.weight_decay") == 0:
        return implied("without weight decay Adam is AdamW")
    return unsupported("AdamW is the optimizer: decay apart from the gradient, not L2")


def scheduler_type(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's `scheduler.type` becomes in llava_fsdp."""
    if not any(value == kind for kind, _ in DS_SCHEDULES):
        return unsupported(f"{value} has no equivalent here; {context.text_of_override('optim.schedule')}")
    return mapped(
        f"{context.text_of_override('optim.schedule')}: DeepSpeed's {value} replaces --lr_scheduler_type. Its engine "
        "steps once before the schedule begins; here step n has the schedule's n-th value"
    )


def half_enabled(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's `bf16.enabled` or `fp16.enabled` (`context.key`) becomes in llava_fsdp. It must agree
    with the script's flag --bf16 or --fp16; `auto` takes the flag's value."""
    name = "fp16" if context.key.startswith("fp16") else "bf16"
    theirs = context.run.is_half(name)
    is_on = theirs if value == AUTO else plain(value) is True
    found = compare_with_flag(value, theirs, context.text_of_override("precision") if is_on else OFF.text, f"--{name}")
    # a switch that is off needs no override
    return found if is_on or found.verdict is Verdict.unsupported else implied(found.text, found.resolved)


def bf16_master_weights(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's keys for master weights, or moments, in bf16 become in llava_fsdp. `context.decided` has
    the overrides of the whole command, in which these keys are taken into account already."""
    if not plain(value):
        return implied("master weights and moments are fp32, as here")
    if context.decided.get("precision") != "bf16_pure":
        return no_effect("DeepSpeed reads it only with bf16, and for moments with bf16_master_weights_and_grads")
    moments = (
        ", " + context.text_of_override("precision.moment_dtype") if "precision.moment_dtype" in context.decided else ""
    )
    return mapped(
        f"{context.text_of_override('precision')}{moments}: rounded at random here, so that small updates are not lost"
    )


def fp16_detail(context: RuleContext, value: object) -> Translation:
    """Return what a key of DeepSpeed's block `fp16` other than `enabled` (such as `loss_scale`) becomes in llava_fsdp,
    which has the same default values (LOSS_SCALE). Other values are not supported."""
    if context.decided.get("precision") != "fp16":
        return no_effect("fp16 is off")
    if plain(value) == LOSS_SCALE.get(context.key.partition(".")[2], False):
        return implied("DeepSpeed's default, as here")
    return unsupported(f"{NONE}; precision.scaler.* sets the loss scale")


def stage(context: RuleContext, value: object) -> Translation:
    """Return what DeepSpeed's `zero_optimization.stage` becomes in llava_fsdp."""
    if plain(value) not in list(STAGES):
        return unsupported("ZeRO has stages 0 to 3")
    note = ": as little memory as ZeRO-2 or less; weights are sharded between steps too" if plain(value) == 2 else ""
    return mapped(context.text_of_override("sharding") + note)


DEEPSPEED: Mapping[str, Rule] = {
    # batch
    "train_batch_size": train_batch_size,
    "train_micro_batch_size_per_gpu": FromFlag("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": FromFlag("gradient_accumulation_steps", "global_batch_size"),
    "managed_gradient_accumulation": only_on("a step is global_batch_size samples"),
    # optimizer
    "optimizer.type": optimizer_type,
    "optimizer.params.lr": FromFlag("learning_rate", "optim.lr"),
    "optimizer.params.betas": betas,
    "optimizer.params.eps": FromFlag("adam_epsilon", "optim.eps"),
    "optimizer.params.weight_decay": FromFlag(
        "weight_decay", "optim.weight_decay", ", without norms and biases, which DeepSpeed decays too"),
    **rules(ADAMW, "torch_adam fused set_grad_none", "optimizer.params."),
    **rules(adam_w_mode, "adam_w_mode adamw_mode", "optimizer.params."),
    **rules(only_on("AdamW corrects its moments, which are in precision.moment_dtype, by default fp32"),
           "bias_correction fp32_optimizer_states", "optimizer.params."),
    "optimizer.params.momentum": unsupported("set optim.momentum, with optim=muon"),
    "optimizer.params.max_grad_norm": only_off("optim.clip clips", 0, 0.0),
    **rules(ADAMW, "optimizer.legacy_fusion zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    # schedule
    "scheduler.type": scheduler_type,
    "scheduler.params.warmup_min_lr": only_off("warm-up begins at 0", 0, AUTO),
    "scheduler.params.warmup_max_lr": FromFlag("learning_rate", "optim.lr"),
    "scheduler.params.warmup_num_steps": IfDecided("optim.warmup_steps", becomes("optim.warmup_ratio")),
    "scheduler.params.warmup_type": becomes("optim.schedule"),
    "scheduler.params.total_num_steps": implied("schedules end with the run: set max_steps where it is another number"),
    "scheduler.params.last_batch_iteration": only_off("a run that continues knows where it is", -1),
    **rules(NO_SETTING, "optimizer.params.* scheduler.params.* zero_optimization.save_muon_momentum_buffer_in_memory"),
    # precision
    "gradient_clipping": FromFlag("max_grad_norm", "optim.clip"),
    **rules(only_off(f"{FP32_SUMS}; compat=llava_v1_5 reduces them in bf16", "fp32"),
           "communication_data_type data_types.grad_accum_dtype"),
    **rules(implied(FP32_SUMS), "fp32_allreduce bf16.immediate_grad_update"),
    **rules(only_off("the loss is divided by the label tokens of the step before backward, and gradients are summed",
               1, 1.0, "mean"),
           "prescale_gradients gradient_predivide_factor gradient_allreduce_op"),
    "sparse_gradients": only_off("gradients of embeddings are dense"),
    **rules(half_enabled, "bf16.enabled bfloat16.enabled fp16.enabled"),
    "bf16.check_grad_overflow": implied("a step whose gradients are not finite is skipped"),
    **rules(bf16_master_weights, "bf16_master_weights_and_grads bf16_optimizer_states", "bf16."),
    "fp16.auto_cast": implied("images are cast to the dtype that the model computes in"),
    "fp16.*": fp16_detail,
    "data_types.*": unsupported("precision= chooses the dtypes"),
    **rules(Switched("precision= chooses the dtypes"), "amp.* torch_autocast.*"),
    # ZeRO
    "zero_optimization.stage": stage,
    "allgather_size": COMMUNICATION,
    **rules(COMMUNICATION, """
        contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
        allgather_bucket_size allgather_sequential stage3_allgather_sequential overlap_comm round_robin_gradients
        grad_hooks sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold
        param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold
        stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance
        stage3_module_granularity_threshold module_granularity_threshold leaf_module.* log_trace_cache_warnings
        stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params mics_hierarchical_params_gather
        legacy_stage1 memory_efficient_linear enable_sanity_checks""", "zero_optimization."),
    "disable_allgather": only_off("weights are gathered"),
    **rules(READ_BY_ROWS, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint override_module_apply",
           "zero_optimization."),
    "zero_optimization.offload_optimizer.ratio": OnlyIf((1, 1.0), "all of the state", "all of the state is offloaded"),
    **rules(IfDecided("offload", OFF), "offload_param offload_optimizer offload_param.* offload_optimizer.* "
                                  "cpu_offload cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory",
           "zero_optimization."),
    "aio.*": IfDecided("offload.folder", no_effect("only with offload to nvme"), "files are read ahead"),
    **rules(GATHERED, "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
                     "stage3_gather_fp16_weights_on_model_save", "zero_optimization."),
    "zero_optimization.ignore_unused_parameters": implied("parameters that can never get a gradient are frozen"),
    **rules(only_off("not set: sharding=hybrid sharding.shard_size=N shards in groups of N ranks, which are copies",
               -1, 0, 1), "zero_hpz_partition_size mics_shard_size", "zero_optimization."),
    **rules(only_off(NONE, -1, 0, 1), "zero_quantized_weights zero_quantized_nontrainable_weights "
           "zero_quantized_gradients", "zero_optimization."),
    # memory
    "activation_checkpointing.*": no_effect(
        "only for models that call DeepSpeed's own checkpointing; LLaVA's is --gradient_checkpointing. "
        "activation_checkpointing=offload keeps blocks' inputs in host memory"),
    "compile.*": Switched("FSDP2 gathers around compiled blocks, not in them; compile=true compiles", "deepcompile"),
    # logging
    **rules(METRICS, "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level"),
    **rules(Switched("metrics.jsonl has tokens and seconds of every step"), "flops_profiler.* comms_logger.*"),
    **rules(Switched("track.tensorboard=true and track.wandb=online are the trackers (docs/report.md)"),
           "tensorboard.* wandb.* comet.* monitor_config.*"),
    "csv_monitor.*": Switched("no CSV is written; metrics.jsonl has one JSON object a step"),
    # checkpoints
    **rules(implied("every rank writes its own shard, and any number of ranks reads them"),
           "checkpoint.tag_validation checkpoint.load_universal checkpoint.parallel_write.*"),
    "checkpoint.use_node_local_storage": only_off("output_dir is one folder that all machines see"),
    "checkpoint.*": unsupported("checkpoints have a format of their own: docs/checkpoints.md"),
    # other ways to train
    "dataloader_drop_last": only_off("no sample is dropped"),
    "vocabulary_size": implied("taken from the model's configuration"),
    "elasticity.*": Switched("global_batch_size stays the same; NNODES=MIN:MAX launch/multinode.sh"),
    "autotuning.*": Switched("llava-fsdp sweep runs the configurations that you name"),
    **rules(IfDecided("parallel.tensor", only_off(NOT_A_DIVISOR, 0, 1), LAYERS),
            "tensor_parallel.autotp_size autotp_size"),
    "tensor_parallel.*": implied(LAYERS),
    "sequence_parallel_size": IfDecided("parallel.context", only_off(NOT_A_DIVISOR, 0, 1)),
    "graph_harvesting": only_off(NONE, 0),
    "pipeline.*": no_effect(
        "DeepSpeed reads these keys for models that are written as a PipelineModule, which those of these programs are "
        "not; here parallel.pipeline=N divides the layers of a model among groups of GPUs"),
    **rules(Switched(NONE), """
        data_efficiency.* curriculum_learning.* curriculum_params_legacy.* expert_parallel.* hybrid_engine.*
        compression_training.* quantize_training.* progressive_layer_drop.* eigenvalue.* nebula.*"""),
    **rules(unsupported(NONE), """
        sparse_attention.* inference.* data_parallel_group weight_quantization.* zero_optimization.zenflow.*
        zero_optimization.zeropp_loco_param.* seq_parallel_communication_data_type
        use_data_before_expert_parallelism"""),
}  # fmt: skip


def rule_of(key: str) -> Rule | None:
    """Return the entry of the table DEEPSPEED for a dotted key, or else its entry `block.*` for the nearest block
    around the key; None if the key is unknown."""
    parts = key.split(".")
    names = [key, *(".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))]
    return next((DEEPSPEED[name] for name in names if name in DEEPSPEED), None)
