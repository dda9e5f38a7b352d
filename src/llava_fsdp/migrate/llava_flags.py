"""The table of every flag of LLaVA's training script: its own (LLaVA train.py:53-112) and transformers 4.37's
TrainingArguments. Defaults are those of the original's parser. Long because it is complete."""

from collections.abc import Mapping

from llava_fsdp.migrate import llava_flag_rules as rules
from llava_fsdp.migrate.context import off, to
from llava_fsdp.migrate.key_outcome import implied, no_effect, unsupported
from llava_fsdp.migrate.source_run import Flag

NO_EVALUATION = no_effect("the original has no evaluation data; val.every measures held-out records")
NO_HUB = off("exports are folders; upload one with the hub's own tools", "every_save", "checkpoint")
HUB_DETAIL = no_effect("only with push_to_hub")
OTHER_DEVICE = off("CUDA or CPU, as the machine has it; CPU by CUDA_VISIBLE_DEVICES= before the command", "O1", "auto")
DDP_DETAIL = implied("FSDP2 has its own communication; nothing of DDP is left to set")
LOG_DETAIL = implied("rank 0 speaks, and the others only when something is wrong")

FLAGS: Mapping[str, Flag] = {
    # LLaVA's ModelArguments
    "model_name_or_path": Flag("facebook/opt-125m", rules.model_name),
    "version": Flag("v0", rules.version),
    "freeze_backbone": Flag(False, rules.freeze_backbone),
    "tune_mm_mlp_adapter": Flag(False, to("stage", "model.train")),
    "vision_tower": Flag(None, rules.vision_tower, str),
    "mm_vision_select_layer": Flag(-1, to("model.select_layer")),
    "pretrain_mm_mlp_adapter": Flag(None, rules.projector, str),
    "mm_projector_type": Flag("linear", rules.projector_type),
    "mm_use_im_start_end": Flag(False, rules.im_start_end),
    "mm_use_im_patch_token": Flag(True, rules.im_patch_token),
    "mm_patch_merge_type": Flag("flat", rules.patch_merge_type),
    "mm_vision_select_feature": Flag("patch", to("model.select_feature")),
    # LLaVA's DataArguments
    "data_path": Flag(None, to("data", "data.path"), str),
    "lazy_preprocess": Flag(False, no_effect("accepted and never read (LLaVA train.py:77); pictures are always read lazily")),
    "is_multimodal": Flag(False, no_effect("set by the code whenever there is a tower (LLaVA train.py:913)")),
    "image_folder": Flag(None, to("data.images"), str),
    "image_aspect_ratio": Flag("square", rules.aspect_ratio),
    # LLaVA's TrainingArguments
    "cache_dir": Flag(None, off("set the environment variable HF_HOME"), str),
    "freeze_mm_mlp_adapter": Flag(False, to("model.train")),
    "mpt_attn_impl": Flag("triton", no_effect("only for MPT models, which do not train in the original at all")),
    "model_max_length": Flag(512, to("data.max_length", note="positions of pictures included")),
    "double_quant": Flag(True, rules.quantized("double")),
    "quant_type": Flag("nf4", rules.quantized("mode")),
    "bits": Flag(16, rules.bits),
    "lora_enable": Flag(False, rules.lora_enable),
    "lora_r": Flag(64, rules.lora("r")),
    "lora_alpha": Flag(16, rules.lora("alpha")),
    "lora_dropout": Flag(0.05, rules.lora("dropout")),
    "lora_weight_path": Flag("", no_effect("never read in the original")),
    "lora_bias": Flag("none", rules.lora("bias")),
    "mm_projector_lr": Flag(None, rules.projector_lr, float),
    "group_by_modality_length": Flag(False, rules.group_by_modality_length),
    # how long, and in what steps
    "per_device_train_batch_size": Flag(8, to("micro_batch_size", "global_batch_size")),
    "gradient_accumulation_steps": Flag(1, rules.accumulation),
    "num_train_epochs": Flag(3.0, rules.epochs),
    "max_steps": Flag(-1, rules.max_steps),
    "per_gpu_train_batch_size": Flag(None, off("deprecated; say --per_device_train_batch_size"), int),
    "auto_find_batch_size": Flag(False, off("choose micro_batch_size; accumulation follows from global_batch_size")),
    "split_batches": Flag(False, off("global_batch_size counts the samples of all ranks")),
    "dispatch_batches": Flag(None, off("every rank prepares its own part of a step"), bool),
    # optimizer and schedule
    "learning_rate": Flag(5e-5, rules.of_optimizer("optim.lr")),
    "weight_decay": Flag(0.0, rules.of_optimizer("optim.weight_decay", rules.DECAYS)),
    "adam_beta1": Flag(0.9, rules.of_optimizer("optim.beta1")),
    "adam_beta2": Flag(0.999, rules.of_optimizer("optim.beta2")),
    "adam_epsilon": Flag(1e-8, rules.of_optimizer("optim.eps")),
    "max_grad_norm": Flag(1.0, rules.max_grad_norm),
    "lr_scheduler_type": Flag("linear", rules.scheduler_type),
    "lr_scheduler_kwargs": Flag({}, off("the schedules have no further settings", {}, "{}"), str),
    "warmup_ratio": Flag(0.0, rules.warmup_ratio),
    "warmup_steps": Flag(0, rules.warmup_steps),
    "optim": Flag("adamw_torch", rules.optimizer_name),
    "optim_args": Flag(None, off("AdamW's settings are optim.beta1, optim.beta2, optim.eps"), str),
    "adafactor": Flag(False, off("AdamW is the optimizer")),
    "label_smoothing_factor": Flag(0.0, off("the loss is plain cross entropy", 0.0)),
    "neftune_noise_alpha": Flag(None, off("no noise is added to embeddings"), float),
    # numbers and memory
    "bf16": Flag(False, rules.bf16),
    "fp16": Flag(False, rules.fp16),
    "tf32": Flag(None, rules.tf32, bool),
    "fp16_opt_level": Flag("O1", no_effect("only for apex")),
    "half_precision_backend": Flag("auto", no_effect("only without DeepSpeed, and bf16 needs no loss scale")),
    "fp16_backend": Flag("auto", no_effect("deprecated name of half_precision_backend")),
    "bf16_full_eval": Flag(False, NO_EVALUATION),
    "fp16_full_eval": Flag(False, NO_EVALUATION),
    "gradient_checkpointing": Flag(False, to("activation_checkpointing")),
    "gradient_checkpointing_kwargs": Flag(None, implied("activation_checkpointing= never uses the reentrant kind"), str),
    "torch_compile": Flag(False, rules.torch_compile),
    "torch_compile_backend": Flag(None, rules.torch_compile, str),
    "torch_compile_mode": Flag(None, rules.torch_compile, str),
    "torchdynamo": Flag(None, rules.torch_compile, str),
    "jit_mode_eval": Flag(False, NO_EVALUATION),
    "use_ipex": Flag(False, OTHER_DEVICE),
    # how it is spread over GPUs
    "deepspeed": Flag(None, rules.deepspeed_file, str),
    "fsdp": Flag("", rules.fsdp),
    "fsdp_config": Flag(None, rules.fsdp_detail, str),
    "fsdp_min_num_params": Flag(0, rules.fsdp_detail),
    "fsdp_transformer_layer_cls_to_wrap": Flag(None, rules.fsdp_detail, str),
    "ddp_timeout": Flag(1800, to("comm.timeout")),
    "ddp_backend": Flag(None, implied("NCCL with CUDA, gloo without"), str),
    "ddp_find_unused_parameters": Flag(None, DDP_DETAIL, bool),
    "ddp_bucket_cap_mb": Flag(None, DDP_DETAIL, int),
    "ddp_broadcast_buffers": Flag(None, DDP_DETAIL, bool),
    "local_rank": Flag(-1, implied("torchrun tells every process its rank")),
    "mp_parameters": Flag("", no_effect("only for SageMaker")),
    "tpu_num_cores": Flag(None, OTHER_DEVICE, int),
    "tpu_metrics_debug": Flag(False, OTHER_DEVICE),
    "no_cuda": Flag(False, OTHER_DEVICE),
    "use_cpu": Flag(False, OTHER_DEVICE),
    "use_mps_device": Flag(False, OTHER_DEVICE),
    # data
    "dataloader_num_workers": Flag(0, to("data.workers")),
    "dataloader_drop_last": Flag(False, rules.drop_last),
    "dataloader_pin_memory": Flag(True, implied("steps are pinned where there is a GPU")),
    "dataloader_persistent_workers": Flag(False, implied("workers live through all epochs")),
    "remove_unused_columns": Flag(False, implied("records are read as they are")),
    "group_by_length": Flag(False, off("data.too_long and sampler= are what there is; lengths are not grouped")),
    "length_column_name": Flag("length", no_effect("only with group_by_length")),
    "label_names": Flag(None, no_effect("for evaluation only"), str),
    "seed": Flag(42, rules.seed),
    "data_seed": Flag(None, off("the order of samples comes from seed, like everything that is drawn"), int),
    "full_determinism": Flag(False, rules.determinism),
    "ignore_data_skip": Flag(False, off("a run continues at exactly its next sample")),
    # what is written
    "output_dir": Flag(None, to("output_dir"), str),
    "overwrite_output_dir": Flag(False, no_effect("LLaVA never looks at it; a run continues what it finds, checkpoint.resume=never starts over")),
    "save_strategy": Flag("steps", rules.save_strategy),
    "save_steps": Flag(500.0, rules.save_steps),
    "save_total_limit": Flag(None, rules.save_total_limit, int),
    "save_safetensors": Flag(True, implied("exports are safetensors")),
    "save_on_each_node": Flag(False, off("output_dir is one folder that all machines see")),
    "save_only_model": Flag(False, off("a checkpoint always holds what a run needs to continue")),
    "resume_from_checkpoint": Flag(None, no_effect("LLaVA train.py:966 looks for checkpoint-* instead; checkpoint.resume=auto does the same"), str),
    "push_to_hub": Flag(False, NO_HUB),
    "hub_model_id": Flag(None, HUB_DETAIL, str),
    "hub_strategy": Flag("every_save", HUB_DETAIL),
    "hub_token": Flag(None, HUB_DETAIL, str),
    "hub_private_repo": Flag(False, HUB_DETAIL),
    "hub_always_push": Flag(False, HUB_DETAIL),
    "push_to_hub_model_id": Flag(None, HUB_DETAIL, str),
    "push_to_hub_organization": Flag(None, HUB_DETAIL, str),
    "push_to_hub_token": Flag(None, HUB_DETAIL, str),
    # what is told
    "logging_steps": Flag(500.0, rules.logging_steps),
    "logging_strategy": Flag("steps", rules.logging_strategy),
    "logging_first_step": Flag(False, implied("metrics.jsonl has every step")),
    "logging_dir": Flag(None, implied("metrics.jsonl lies in output_dir"), str),
    "logging_nan_inf_filter": Flag(True, implied("metrics.jsonl has null for a loss that is not finite; its step is skipped")),
    "log_level": Flag("passive", LOG_DETAIL),
    "log_level_replica": Flag("warning", LOG_DETAIL),
    "log_on_each_node": Flag(True, LOG_DETAIL),
    "disable_tqdm": Flag(None, implied("a progress bar where there is a terminal"), bool),
    "report_to": Flag(None, rules.report_to, str),
    "run_name": Flag(None, rules.run_name, str),
    "include_tokens_per_second": Flag(False, implied("metrics.jsonl has tokens and seconds of every step")),
    "include_num_input_tokens_seen": Flag(False, implied("metrics.jsonl has tokens and seconds of every step")),
    "skip_memory_metrics": Flag(True, implied("metrics.jsonl has the memory of every step")),
    "debug": Flag("", off("no such checks")),
    # evaluation, which the original never does
    "do_train": Flag(False, no_effect("LLaVA always trains")),
    "do_eval": Flag(False, NO_EVALUATION),
    "do_predict": Flag(False, NO_EVALUATION),
    "evaluation_strategy": Flag("no", rules.evaluation),
    "eval_steps": Flag(None, NO_EVALUATION, float),
    "eval_delay": Flag(0.0, NO_EVALUATION),
    "eval_accumulation_steps": Flag(None, NO_EVALUATION, int),
    "per_device_eval_batch_size": Flag(8, NO_EVALUATION),
    "per_gpu_eval_batch_size": Flag(None, NO_EVALUATION, int),
    "prediction_loss_only": Flag(False, NO_EVALUATION),
    "include_inputs_for_metrics": Flag(False, NO_EVALUATION),
    "load_best_model_at_end": Flag(False, off("the last weights are the result; val.every measures them on the way")),
    "metric_for_best_model": Flag(None, NO_EVALUATION, str),
    "greater_is_better": Flag(None, NO_EVALUATION, bool),
    "past_index": Flag(-1, no_effect("for models that LLaVA is none of")),
    "use_legacy_prediction_loop": Flag(False, NO_EVALUATION),
    "ray_scope": Flag("last", no_effect("only for hyperparameter searches")),
}  # fmt: skip
# Wide on purpose: one flag, one line.
# ruff: noqa: E501


def canonical(name: str) -> str | None:
    """The flag that a word of the command line means: exact, with `-` for `_`, or abbreviated as argparse allows."""
    name = name.replace("-", "_")
    if name in FLAGS:
        return name
    if name.startswith("no_") and FLAGS.get(name[3:], Flag(None, unsupported(""))).default is True:
        return name[3:]
    near = [flag for flag in FLAGS if flag.startswith(name)]
    return near[0] if len(near) == 1 else None
