"""Names of settings in other training programs, and the configuration keys with the same meaning here; used for error
messages. The programs are transformers' Trainer, DeepSpeed, LLaVA and LLaVA-NeXT, peft, ms-swift, LLaMA-Factory and
axolotl. `migrate` translates whole commands of some of them."""

import re
from collections.abc import Container, Mapping
from types import MappingProxyType

NOTHING = "nothing: "
"""Beginning of the texts about settings that do not exist here."""
BATCH = "global_batch_size (samples of a step on all ranks) and micro_batch_size (rows of a forward pass of a rank)"
ROWS = "micro_batch_size (rows of a forward pass of a rank), and global_batch_size (samples of a step on all ranks)"
ACCUMULATION = "global_batch_size: the samples of a step on all ranks; how often gradients are added up follows from it"
WHOLE = "model.checkpoint (a whole LLaVA) or model.language"
PRECISION = "precision=bf16, fp16, fp32 or auto"
STAGES = "stage=finetune_lora, or stage=finetune_qlora"
SHARDING = "sharding=zero0, zero1, zero2, zero3, hybrid"
OFFLOAD = "offload=params, optimizer or nvme"
RECOMPUTING = "activation_checkpointing=full, none or auto (the planner chooses)"
SAVING = "checkpoint.every=STEPS, or null: only at the end"
RESUMING = "checkpoint.resume=auto, never or the folder of a checkpoint"
CLIPPING = "optim.clip=NORM, or null: no clipping"
SCHEDULES = "optim.schedule=cosine, linear, constant, ..."
FEATURES = "model.select_feature=patch, full (with the CLS token) or auto"
GRIDS = "data.grid_pinpoints=[[WIDTH,HEIGHT],...] in pixels"
QUANTIZERS = "model.quantize.mode=nf4, fp4, int8 or none"
COMPILING = "compile=true, false or auto"
TEMPLATES = "data.template=v1, plain, auto, ..."
PARTS = "model.train=[projector,language,vision]; stage=pretrain trains the projector alone"
BLOCKS = "model.train with blocks: [projector,language:-4] trains the last 4 blocks of the language model"
HELD_OUT = "val.every=STEPS, with val.path=FILE"
BEST = "checkpoint.best=loss, score, ... keeps the best checkpoint, and export.which=best exports it"
EARLY_STOP = "val.patience=N validations that are not better end the training, with checkpoint.best=loss or score"
LEFT_OUT = f"{NOTHING}leave it out; llava-fsdp migrate SCRIPT says what becomes of each flag"
OPTIMIZERS = "optim=adamw or muon"
AVERAGE = "optim.ema=0.999 keeps a moving average of the weights, and export.which=average exports it"
ATTENTION = "attention=auto, varlen, sdpa, flash, ..."
TABLE: Mapping[str, str] = MappingProxyType({
    BATCH: "batch_size bs train_batch_size total_batch_size effective_batch_size",
    ROWS: """per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size mbs
        mini_batch_size train_micro_batch_size_per_gpu micro_batch micro_bs device_batch_size""",
    ACCUMULATION: """gradient_accumulation_steps grad_accum grad_acc gradient_accumulation accumulate_grad_batches
        grad_accumulation_steps accumulation_steps""",
    "optim.lr": "lr learning_rate base_lr max_lr peak_lr optimizer.lr optimizer.params.lr optim.learning_rate",
    "optim.projector_lr": "mm_projector_lr projector_lr aligner_lr merger_lr",
    "optim.vision_lr": "mm_vision_tower_lr vision_lr vision_tower_lr vit_lr",
    "optim.weight_decay": "weight_decay wd decay optimizer.params.weight_decay",
    "optim.beta1": "adam_beta1 beta1 betas", "optim.beta2": "adam_beta2 beta2",
    "optim.eps": "adam_epsilon eps epsilon adam_eps",
    CLIPPING: "max_grad_norm gradient_clipping grad_clip clip_grad_norm gradient_clip_val clip_grad max_norm",
    SCHEDULES: "lr_scheduler_type scheduler lr_schedule lr_scheduler schedule lr_decay_style",
    "optim.warmup_ratio": "warmup_ratio warmup lr_warmup_ratio warmup_fraction",
    "optim.warmup_steps": "warmup_steps warmup_num_steps num_warmup_steps lr_warmup_steps",
    "optim.decay_ratio=SHARE of the steps, such as 0.1": """decay_steps_ratio wsd_decay_ratio lr_decay_ratio
        lr_wsd_decay_steps num_decay_steps""",
    "optim.min_lr_ratio=SHARE of the peak, such as 0.1": "min_lr min_lr_rate min_lr_factor lr_min_ratio",
    AVERAGE: "ema ema_decay use_ema ema_rate ema_beta model_ema",
    "optim.momentum": "muon_momentum",
    "epochs=N, a whole number": "num_train_epochs num_epochs epoch n_epochs max_epochs train_epochs",
    "max_steps": "train_steps num_steps steps total_steps max_train_steps num_train_steps train_iters iterations",
    "data.max_length": """model_max_length max_length max_seq_length max_seq_len seq_length sequence_len seq_len
        cutoff_len block_size context_length""",
    "data.workers": """dataloader_num_workers num_workers workers preprocessing_num_workers dataset_num_proc
        dataset_num_workers""",
    "data.prefetch": "dataloader_prefetch_factor prefetch_factor",
    "data.path": """data_path dataset datasets train_file train_data train_data_path dataset_path train_path data_file
        train_dataset dataset_dir""",
    "data.images": "image_folder image_dir images media_dir image_root image_path data.image_folder video_folder",
    TEMPLATES: "version template chat_template conv_version conversation_template prompt_template template_type",
    "data.image_aspect_ratio": "image_aspect_ratio aspect_ratio",
    GRIDS: "image_grid_pinpoints grid_pinpoints",
    "data.max_tiles": "max_tiles max_num_tiles max_dynamic_patch max_num", "data.video_fps": "video_fps fps",
    "data.video_frames": "frames_upbound num_frames max_frames video_maxlen",
    "val.path": "val_dataset eval_dataset eval_path val_data eval_file validation_file test_file",
    WHOLE: """model_name_or_path model_name model_path model_id base_model
        pretrained_model_name_or_path llm""",
    "model.vision": "vision_tower vision_encoder vision_model image_encoder mm_vision_tower",
    "model.projector": "pretrain_mm_mlp_adapter mm_projector projector",
    "model.projector_type": "mm_projector_type projector_type",
    "model.select_layer": "mm_vision_select_layer select_layer vision_select_layer",
    FEATURES: "mm_vision_select_feature select_feature",
    "model.patch_merge": "mm_patch_merge_type patch_merge_type", "model.image_start_end": "mm_use_im_start_end",
    PARTS: """mm_tunable_parts tune_mm_mlp_adapter freeze_mm_mlp_adapter unfreeze_mm_vision_tower freeze_vit freeze_llm
        freeze_aligner freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_backbone train_type
        trainable_parts tunable_parts unfreeze_language_model""",
    BLOCKS: """unfreeze_vit_layers unfreeze_lm_layers freeze_trainable_layers unfrozen_parameters unfreeze_layers
        train_layers trainable_layers last_n_layers num_unfrozen_layers""",
    STAGES: "lora_enable use_lora use_peft lora finetuning_type tuner_type adapter qlora",
    "model.lora.r": "lora_r lora_rank", "model.lora.alpha": "lora_alpha", "model.lora.dropout": "lora_dropout",
    "model.lora.bias": "lora_bias", "model.lora.use_dora": "use_dora", "model.lora.use_rslora": "use_rslora",
    "model.lora.checkpoint": "adapter_name_or_path lora_model_dir adapters resume_from_adapter lora_weight_path",
    QUANTIZERS: """bits load_in_4bit load_in_8bit quantization_bit quant_bits quant_method quant_type
        bnb_4bit_quant_type""",
    "model.quantize.double": "double_quant bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant",
    PRECISION: """bf16 fp16 fp32 fp8 half mixed_precision torch_dtype dtype precision.bf16 bf16.enabled fp16.enabled
        pure_bf16 amp""",
    RECOMPUTING: """gradient_checkpointing grad_checkpointing activation_checkpoint gradient_checkpoint checkpointing
        use_gradient_checkpointing recompute_granularity vit_gradient_checkpointing""",
    SHARDING: """deepspeed fsdp zero zero_stage zero_optimization zero_optimization.stage deepspeed_config fsdp_config
        sharding_strategy fsdp_sharding_strategy""",
    OFFLOAD: """cpu_offload offload_optimizer offload_param fsdp_offload_params zero_optimization.offload_optimizer
        zero_optimization.offload_param optimizer_offload""",
    "parallel.tensor": "tensor_parallel_size tp tp_size tensor_model_parallel_size tensor_parallel",
    "parallel.pipeline": "pipeline_parallel_size pp pp_size pipeline_model_parallel_size pipeline_parallel",
    "parallel.context": """context_parallel_size cp cp_size sequence_parallel_size sp sp_size ulysses_size
        sequence_parallel_degree ring_attn_world_size""",
    "parallel.expert": "expert_parallel_size ep ep_size expert_model_parallel_size",
    COMPILING: "torch_compile torch_compile_backend torch_compile_mode torchdynamo dynamo_backend use_compile",
    ATTENTION: """attn_implementation attn_impl
        flash_attn use_flash_attention flash_attention flash_attention_2 use_flash_attn""",
    "pack": "packing sample_packing neat_packing",
    "sampler.group_by_modality_length": "group_by_modality_length group_by_length",
    "output_dir": "save_dir out_dir output logging_dir output_path save_path save",
    SAVING: "save_steps save_strategy save_every checkpoint_every save_interval save_freq ckpt_interval",
    "checkpoint.keep=N, at least 2": "save_total_limit keep max_checkpoints num_checkpoints",
    RESUMING: "resume_from_checkpoint resume resume_from overwrite_output_dir auto_resume load",
    "log_every": "logging_steps log_interval logging_strategy log_steps print_every log_freq",
    "track.wandb=online or track.tensorboard=true": "report_to wandb tensorboard logger use_wandb tracker",
    "track.name": "run_name wandb_run_name wandb_name experiment_name", "track.project": "wandb_project project",
    HELD_OUT: """do_eval evaluation_strategy eval_strategy eval_steps eval_every evaluate val_interval eval_interval
        eval_freq""",
    "val.batch_size": "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size val_batch_size",
    EARLY_STOP: "early_stopping early_stop patience early_stopping_patience early_stop_interval",
    BEST: "load_best_model_at_end metric_for_best_model save_best keep_best",
    "seed": "data_seed random_seed manual_seed", "deterministic": "full_determinism use_deterministic_algorithms",
    "comm.timeout": "ddp_timeout timeout nccl_timeout",
    "--nproc-per-node N": "num_gpus gpus n_gpu devices nproc_per_node num_processes world_size ngpus",
    "--nnodes N": "num_nodes nnodes num_machines",
    OPTIMIZERS: "optimizer optim_type optimizer_type adafactor",
    f"{NOTHING}the loss is plain cross entropy": "label_smoothing_factor label_smoothing",
    f"{NOTHING}embeddings get no noise": "neftune_noise_alpha neftune_alpha noise_alpha",
    f"{NOTHING}adapters are in all linear layers of the blocks of the parts that train": """lora_target_modules
        target_modules lora_target lora_modules""",
    f"{NOTHING}an export is a folder, which the hub's own tools upload": "push_to_hub hub_model_id hub_token",
    f"{NOTHING}a model's own code is never run": "trust_remote_code",
    f"{NOTHING}the environment variable HF_HOME names the folder of downloads": "cache_dir",
    LEFT_OUT: """lazy_preprocess is_multimodal mm_use_im_patch_token mpt_attn_impl tf32 fp16_opt_level
        half_precision_backend gradient_checkpointing_kwargs fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
        ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb local_rank dataloader_drop_last dataloader_pin_memory
        dataloader_persistent_workers remove_unused_columns ignore_data_skip save_safetensors save_only_model
        logging_first_step log_level disable_tqdm do_train do_predict skip_memory_metrics length_column_name
        label_names lora_task_type task_type optim_args lr_scheduler_kwargs auto_find_batch_size""",
})  # fmt: skip
"""What a setting is called here -> its names in other programs, in lower case, separated by blanks."""
FOREIGN: Mapping[str, str] = MappingProxyType({name: key for key, names in TABLE.items() for name in names.split()})


def called_here(name: str, known: Container[str]) -> str:
    """Return a text for error messages that tells what another program's setting is called here, or why there is no
    such setting; empty if the name is unknown, or if the command has no such key. `name` may have dashes, capital
    letters, groups before it, or `--` or `+` in front. `known`: all keys of the command."""
    plain = name.lstrip("-+").replace("-", "_").lower()
    here = FOREIGN.get(plain) or FOREIGN.get(plain.rpartition(".")[2], "")
    first = re.split("[ =:,]", here)[0]  # a text of TABLE begins with a key, a flag (`--nnodes N`) or NOTHING
    if first in known:
        return f"here it is {here}"
    # only commands with the keys of a training have optim.lr
    if first.startswith("-") and "optim.lr" in known:
        return f"here it is a flag of llava-fsdp train: {here}"
    return f"here {here.removeprefix(NOTHING)}" if here.startswith(NOTHING) and "optim.lr" in known else ""
