"""Table of rules: what each flag of LLaVA's training program becomes. The flags and their default values are LLaVA's
own (train.py:53-112) and those of the TrainingArguments of transformers 4.37."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    OnlyIf,
    Rule,
    becomes,
    implied,
    no_effect,
    only_off,
    unsupported,
)

NO_EVALUATION = no_effect("the original has no evaluation data; val.every measures held-out records")
DEVICE = only_off(
    "a run uses CUDA where there is a GPU, else the CPU; CUDA_VISIBLE_DEVICES= before the command hides GPUs"
)
DDP_DETAIL = implied("FSDP2 has its own communication, without DDP's settings")
BITS = no_effect("only with 4-bit weights under adapters or a projector")
ADAPTERS = no_effect("only with adapters")
METRICS = implied("metrics.jsonl has loss, tokens, seconds and memory of every step; rank 0 prints")
ADAMW = "AdamW is the optimizer; its settings are optim.beta1, optim.beta2, optim.eps"


def flags_with(rule: Rule, **defaults: object) -> dict[str, Flag]:
    """Return flags with the same rule, by name. `defaults` has the default value of each flag; a type instead of a
    value is that of a flag whose default is None."""
    return {
        name: Flag(None, rule, default) if isinstance(default, type) else Flag(default, rule)
        for name, default in defaults.items()
    }


FLAGS: Mapping[str, Flag] = {
    # LLaVA's ModelArguments
    "model_name_or_path": Flag("facebook/opt-125m", rules.model_name),
    "version": Flag("v0", rules.version),
    "freeze_backbone": Flag(False, only_off(
        "the original then trains the projector and lm_head alone (train.py:844); model.train cannot name lm_head")),
    "tune_mm_mlp_adapter": Flag(False, becomes("stage", "model.train")),
    "vision_tower": Flag(None, IfDecided("model.vision", unsupported(
        "without it the original trains a language model on text; models here have a vision tower")), str),
    "mm_vision_select_layer": Flag(-1, becomes("model.select_layer")),
    "pretrain_mm_mlp_adapter": Flag(None, rules.projector, str),
    "mm_projector_type": Flag("linear", rules.projector_type),
    "mm_use_im_start_end": Flag(False, IfDecided(
        "model.image_start_end", only_off("it adds two tokens; a run here does not change a vocabulary"),
        "the checkpoint's tokenizer has both tokens")),
    "mm_use_im_patch_token": Flag(True, only_off(
        "it adds <im_patch> to the vocabulary, which no sample uses; a run here does not change a vocabulary, and the "
        "numbers are the same without it")),
    "mm_patch_merge_type": Flag("flat", only_off(
        "only for images of several tiles, which the original does not train on", "flat")),
    "mm_vision_select_feature": Flag("patch", becomes("model.select_feature")),
    # LLaVA's DataArguments
    "data_path": Flag(None, rules.data_path, str),
    "lazy_preprocess": Flag(False, no_effect("never read (LLaVA train.py:77); images are always read lazily")),
    "is_multimodal": Flag(False, no_effect("set by the code whenever there is a vision tower (LLaVA train.py:913)")),
    "image_folder": Flag(None, becomes("data.images"), str),
    "image_aspect_ratio": Flag("square", becomes("data.image_aspect_ratio", note=
        "the original trains with square images for everything but pad (train.py:702-718)")),
    # LLaVA's TrainingArguments
    "cache_dir": Flag(None, only_off("set the environment variable HF_HOME"), str),
    "freeze_mm_mlp_adapter": Flag(False, becomes("model.train")),
    "mpt_attn_impl": Flag("triton", no_effect("only for MPT models, which do not train in the original at all")),
    "model_max_length": Flag(512, becomes("data.max_length", note="image tokens included")),
    "double_quant": Flag(True, IfDecided("model.quantize.double", BITS)),
    "quant_type": Flag("nf4", IfDecided("model.quantize.mode", BITS)),
    "bits": Flag(16, rules.bits),
    "lora_enable": Flag(False, rules.lora_enable),
    "lora_r": Flag(64, IfDecided("model.lora.r", ADAPTERS)),
    "lora_alpha": Flag(16, IfDecided("model.lora.alpha", ADAPTERS)),
    "lora_dropout": Flag(0.05, IfDecided("model.lora.dropout", ADAPTERS)),
    "lora_weight_path": Flag("", no_effect("never read in the original")),
    "lora_bias": Flag("none", IfDecided("model.lora.bias", ADAPTERS)),
    "mm_projector_lr": Flag(None, rules.of_optimizer("optim.projector_lr"), float),
    "group_by_modality_length": Flag(False, becomes("sampler.group_by_modality_length", note=
        "read with sampler=llava_v1_5 or compat=llava_v1_5; without them samples are shuffled by (seed, epoch)")),
    # length and steps
    "per_device_train_batch_size": Flag(8, becomes("micro_batch_size", "global_batch_size")),
    "gradient_accumulation_steps": Flag(1, becomes("global_batch_size", note="a factor of it")),
    "num_train_epochs": Flag(3.0, IfDecided("epochs", unsupported("epochs are whole; give max_steps=N"))),
    "max_steps": Flag(-1, IfDecided("max_steps", implied("whole epochs"))),
    **flags_with(only_off("choose micro_batch_size and global_batch_size, of all ranks; accumulation follows"),
           per_gpu_train_batch_size=int, auto_find_batch_size=False, split_batches=False, dispatch_batches=bool),
    # optimizer and schedule
    "learning_rate": Flag(5e-5, rules.of_optimizer("optim.lr")),
    "weight_decay": Flag(0.0, rules.of_optimizer("optim.weight_decay", rules.DECAYS)),
    "adam_beta1": Flag(0.9, rules.of_optimizer("optim.beta1")),
    "adam_beta2": Flag(0.999, rules.of_optimizer("optim.beta2")),
    "adam_epsilon": Flag(1e-8, rules.of_optimizer("optim.eps")),
    "max_grad_norm": Flag(1.0, rules.of_optimizer("optim.clip")),
    "lr_scheduler_type": Flag("linear", rules.scheduler_type),
    "lr_scheduler_kwargs": Flag({}, only_off("see optim.decay_ratio and optim.min_lr_ratio", {}, "{}"), str),
    "warmup_ratio": Flag(0.0, rules.warmup_ratio),
    "warmup_steps": Flag(0, IfDecided("optim.warmup_steps", implied("by --warmup_ratio, or none"))),
    "optim": Flag("adamw_torch", OnlyIf(
        ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "AdamW, fused", ADAMW)),
    **flags_with(only_off(ADAMW), optim_args=str, adafactor=False),
    "label_smoothing_factor": Flag(0.0, only_off("the loss is plain cross entropy", 0.0)),
    "neftune_noise_alpha": Flag(None, only_off("embeddings get no noise"), float),
    # precision and memory
    "bf16": Flag(False, rules.half_precision),
    "fp16": Flag(False, rules.half_precision),
    "tf32": Flag(None, implied(
        "16-bit products do not use it; with precision=fp32 set NVIDIA_TF32_OVERRIDE=1"), bool),
    **flags_with(no_effect("only for apex, SageMaker or hyperparameter searches, or deprecated"), fp16_opt_level="O1",
           half_precision_backend="auto", fp16_backend="auto", mp_parameters="", past_index=-1, ray_scope="last"),
    "gradient_checkpointing": Flag(False, becomes("activation_checkpointing")),
    "gradient_checkpointing_kwargs": Flag(None, implied("never the reentrant kind"), str),
    **flags_with(rules.torch_compile, torch_compile=False, torch_compile_backend=str, torch_compile_mode=str,
           torchdynamo=str),
    # distribution over GPUs
    "deepspeed": Flag(None, rules.deepspeed_file, str),
    "fsdp": Flag("", rules.fsdp),
    **flags_with(implied("FSDP2 shards every block of layers as one unit"), fsdp_config=str, fsdp_min_num_params=0,
           fsdp_transformer_layer_cls_to_wrap=str),
    "ddp_timeout": Flag(1800, becomes("comm.timeout")),
    **flags_with(DDP_DETAIL, ddp_backend=str, ddp_find_unused_parameters=bool, ddp_bucket_cap_mb=int,
           ddp_broadcast_buffers=bool),
    "local_rank": Flag(-1, implied("torchrun gives every process its rank")),
    **flags_with(DEVICE, tpu_num_cores=int, tpu_metrics_debug=False, no_cuda=False, use_cpu=False, use_mps_device=False,
           use_ipex=False),
    # data
    "dataloader_num_workers": Flag(0, becomes("data.workers")),
    "dataloader_drop_last": Flag(False, OnlyIf(
        (False,), "no sample is dropped, where the original fills the last step up with repeated samples",
        "no sample is dropped; the last step of an epoch is smaller")),
    **flags_with(implied("steps are pinned, workers live through all epochs, and records are read as they are"),
           dataloader_pin_memory=True, dataloader_persistent_workers=False, remove_unused_columns=False),
    "group_by_length": Flag(False, only_off("samples are packed instead of grouped by length")),
    **flags_with(no_effect("only with group_by_length, or for evaluation"),
                 length_column_name="length", label_names=str),
    "seed": Flag(42, becomes("seed", note="also of the projector, which the original draws before it seeds")),
    "data_seed": Flag(None, only_off("the order of samples comes from seed, like everything that is drawn"), int),
    "full_determinism": Flag(False, IfDecided("deterministic", OFF)),
    "ignore_data_skip": Flag(False, only_off("a run continues at exactly its next sample")),
    # output
    "output_dir": Flag(None, becomes("output_dir"), str),
    "overwrite_output_dir": Flag(False, no_effect(
        "never read in the original; a run continues what it finds, checkpoint.resume=never starts over")),
    "save_strategy": Flag("steps", rules.save_strategy),
    "save_steps": Flag(500.0, IfDecided(
        "checkpoint.every", unsupported("a fraction of all steps; give checkpoint.every=N in steps"))),
    "save_total_limit": Flag(None, IfDecided(
        "checkpoint.keep", unsupported("transformers keeps every checkpoint; checkpoint.keep=N keeps the newest N"),
        "at least 2, because the newest may be the one that a crash interrupted"), int),
    "save_safetensors": Flag(True, implied("exports are safetensors")),
    "save_on_each_node": Flag(False, only_off("output_dir is one folder that all machines see")),
    "save_only_model": Flag(False, only_off("a checkpoint always holds what a run needs to continue")),
    "resume_from_checkpoint": Flag(None, no_effect(
        "LLaVA train.py:966 looks for checkpoint-* instead; checkpoint.resume=auto does the same"), str),
    "push_to_hub": Flag(False, only_off("exports are folders; upload one with the hub's own tools")),
    **flags_with(no_effect("only with push_to_hub"), hub_model_id=str, hub_strategy="every_save", hub_token=str,
           hub_private_repo=False, hub_always_push=False, push_to_hub_model_id=str, push_to_hub_organization=str,
           push_to_hub_token=str),
    # logging
    **flags_with(IfDecided("log_every", METRICS), logging_steps=500.0, logging_strategy="steps"),
    "logging_nan_inf_filter": Flag(True, implied("a step with a loss that is not finite is skipped")),
    **flags_with(METRICS, logging_dir=str, logging_first_step=False, include_tokens_per_second=False,
           include_num_input_tokens_seen=False, skip_memory_metrics=True, log_level="passive",
           log_level_replica="warning", log_on_each_node=True),
    "disable_tqdm": Flag(None, implied("a progress bar where there is a terminal"), bool),
    "report_to": Flag(None, rules.report_to, str),
    "run_name": Flag(None, IfDecided("track.name", implied("a run is named by output_dir")), str),
    "debug": Flag("", only_off("there are no such checks")),
    # evaluation, which the original never does
    "do_train": Flag(False, no_effect("the original always trains")),
    "evaluation_strategy": Flag("no", only_off(
        "there is no such evaluation; name held-out records with val.every and val.path")),
    "load_best_model_at_end": Flag(False, only_off(
        "the last weights are the result, unless checkpoint.best and export.which=best are set")),
    **flags_with(NO_EVALUATION, do_eval=False, do_predict=False, eval_steps=float, eval_delay=0.0,
           eval_accumulation_steps=int, per_device_eval_batch_size=8, per_gpu_eval_batch_size=int,
           prediction_loss_only=False, include_inputs_for_metrics=False, metric_for_best_model=str,
           greater_is_better=bool, use_legacy_prediction_loop=False, bf16_full_eval=False, fp16_full_eval=False,
           jit_mode_eval=False),
}  # fmt: skip


def canonical(name: str, table: Mapping[str, Flag]) -> str | None:
    """Return the full name of a flag of `table` that a command line writes as `name`; None if there is no such flag. As
    in argparse, `name` may have `-` for `_`, be abbreviated, or be `no_X` for a flag X that is true by default."""
    name = name.replace("-", "_")
    if name in table:
        return name
    if name.startswith("no_") and table.get(name[3:], Flag(None, OFF)).default is True:
        return name[3:]
    near = [flag for flag in table if flag.startswith(name)]
    return near[0] if len(near) == 1 else None
