"""The table of DeepSpeed's configuration keys (docs/_pages/config-json.md, runtime/config.py), nested ones with dots.

`block.*` stands for every key of a block that is not listed by itself. `resolved` is what `auto` stands for: what
transformers' `HfTrainerDeepSpeedConfig` puts there.
"""

from collections.abc import Mapping

from llava_fsdp.migrate import deepspeed_rules as rules
from llava_fsdp.migrate.context import Rule, off, on, to
from llava_fsdp.migrate.key_outcome import Outcome, implied, unsupported

COMMUNICATION = implied("FSDP2 gathers and reduces one block of layers at a time, ahead of the computation")
LIVE = implied(
    "FSDP2 holds one block of layers gathered at a time, and prefetches the next; sharding.blocks_per_unit and "
    "sharding.prefetch change that"
)
MODEL_IS_STREAMED = implied("every rank reads its own rows of every weight from the files")
GATHERED = implied("export/ always holds the whole model, written without ever gathering it")
NO_LOGGER = rules.Switched("track.tensorboard=true and track.wandb=online are ours (docs/report.md)")
TIMES = implied("metrics.jsonl has the seconds of every step")
OFFLOAD = rules.offload
OPTIMIZER_OTHER = unsupported("AdamW has no such setting")
SCHEDULE_OTHER = unsupported("the schedules have no such setting")

DEEPSPEED: Mapping[str, Outcome | Rule] = {
    # batch
    "train_batch_size": rules.train_batch_size,
    "train_micro_batch_size_per_gpu": rules.micro_batch_size,
    "gradient_accumulation_steps": rules.accumulation,
    "managed_gradient_accumulation": on("a step is global_batch_size samples"),
    # optimizer
    "optimizer.type": rules.optimizer_type,
    "optimizer.params.lr": rules.lr,
    "optimizer.params.betas": rules.betas,
    "optimizer.params.eps": rules.eps,
    "optimizer.params.weight_decay": rules.weight_decay,
    "optimizer.params.torch_adam": implied("PyTorch's own AdamW, fused"),
    "optimizer.params.adam_w_mode": rules.adam_w_mode,
    "optimizer.params.adamw_mode": rules.adam_w_mode,
    "optimizer.params.bias_correction": on("AdamW always corrects its moments"),
    "optimizer.params.amsgrad": off("AdamW without amsgrad"),
    "optimizer.params.fused": implied("PyTorch's own AdamW, fused"),
    "optimizer.params.set_grad_none": implied("gradients are set to none after a step"),
    "optimizer.params.fp32_optimizer_states": on("moments are in precision.moment_dtype, fp32 unless told"),
    "optimizer.params.max_grad_norm": off("optim.clip clips", 0, 0.0),
    "optimizer.params.*": OPTIMIZER_OTHER,
    "optimizer.legacy_fusion": implied("FSDP2 has no such fusion"),
    "zero_allow_untested_optimizer": implied("AdamW is the optimizer"),
    "zero_force_ds_cpu_optimizer": implied("AdamW runs where the weights are"),
    # schedule
    "scheduler.type": rules.scheduler_type,
    "scheduler.params.warmup_min_lr": rules.warmup_min_lr,
    "scheduler.params.warmup_max_lr": rules.warmup_max_lr,
    "scheduler.params.warmup_num_steps": rules.warmup_num_steps,
    "scheduler.params.warmup_type": to("optim.schedule"),
    "scheduler.params.total_num_steps": rules.total_num_steps,
    "scheduler.params.last_batch_iteration": off("a run that continues knows where it is", -1),
    "scheduler.params.*": SCHEDULE_OTHER,
    # numbers
    "gradient_clipping": rules.gradient_clipping,
    "communication_data_type": rules.communication_dtype,
    "seq_parallel_communication_data_type": unsupported("no sequence parallelism"),
    "fp32_allreduce": to("precision", note="gradients are reduced in precision.reduce_dtype, fp32"),
    "prescale_gradients": off("gradients are summed and the loss is divided before backward: nothing to scale"),
    "gradient_predivide_factor": off("gradients are summed in fp32; there is nothing to divide before", 1, 1.0),
    "gradient_allreduce_op": off("the loss is divided by the label tokens of the step: gradients are summed", "mean"),
    "sparse_gradients": off("gradients of embeddings are dense"),
    "allgather_size": COMMUNICATION,
    "disable_allgather": off("weights are gathered"),
    "bf16.enabled": rules.bf16,
    "bfloat16.enabled": rules.bf16,
    "bf16.check_grad_overflow": implied("a step whose gradients are not finite is skipped"),
    "bf16.immediate_grad_update": implied("gradients are added in fp32 as they come"),
    "bf16.bf16_master_weights_and_grads": rules.bf16_kept,
    "bf16.bf16_optimizer_states": rules.bf16_kept,
    "bf16.*": unsupported("unknown detail of bf16"),
    "fp16.enabled": rules.fp16_enabled,
    "fp16.auto_cast": rules.fp16,
    "fp16.loss_scale": rules.fp16,
    "fp16.initial_scale_power": rules.fp16,
    "fp16.loss_scale_window": rules.fp16,
    "fp16.hysteresis": rules.fp16,
    "fp16.consecutive_hysteresis": rules.fp16,
    "fp16.min_loss_scale": rules.fp16,
    "fp16.fp16_master_weights_and_grads": rules.fp16,
    "amp.enabled": rules.amp,
    "amp.*": rules.Switched("apex is not used; precision=bf16"),
    "torch_autocast.*": rules.Switched("precision= says what is computed in what"),
    "data_types.grad_accum_dtype": rules.accumulation_dtype,
    "data_types.*": unsupported("precision= says what is stored in what"),
    # ZeRO
    "zero_optimization.stage": rules.stage,
    "zero_optimization.contiguous_gradients": COMMUNICATION,
    "zero_optimization.reduce_scatter": COMMUNICATION,
    "zero_optimization.reduce_bucket_size": rules.Bucket(1.0),
    "zero_optimization.use_multi_rank_bucket_allreduce": COMMUNICATION,
    "zero_optimization.allgather_partitions": COMMUNICATION,
    "zero_optimization.allgather_bucket_size": COMMUNICATION,
    "zero_optimization.allgather_sequential": COMMUNICATION,
    "zero_optimization.stage3_allgather_sequential": COMMUNICATION,
    "zero_optimization.overlap_comm": COMMUNICATION,
    "zero_optimization.round_robin_gradients": COMMUNICATION,
    "zero_optimization.grad_hooks": COMMUNICATION,
    "zero_optimization.sub_group_size": implied("the optimizer steps all of a rank's rows at once"),
    "zero_optimization.load_from_fp32_weights": MODEL_IS_STREAMED,
    "zero_optimization.elastic_checkpoint": implied("checkpoints are read by any number of ranks"),
    "zero_optimization.offload_param": OFFLOAD,
    "zero_optimization.offload_optimizer": OFFLOAD,
    "zero_optimization.offload_param.*": OFFLOAD,
    "zero_optimization.offload_optimizer.*": OFFLOAD,
    "zero_optimization.cpu_offload": OFFLOAD,
    "zero_optimization.cpu_offload_param": OFFLOAD,
    "zero_optimization.cpu_offload_params": OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": OFFLOAD,
    "zero_optimization.zenflow.*": unsupported(
        "every update is made in its own step; offload=optimizer overlaps copies with it"
    ),
    "zero_optimization.stage3_prefetch_bucket_size": rules.Bucket(0.9, stage3=True),
    "zero_optimization.prefetch_bucket_size": rules.Bucket(0.9, stage3=True),
    "zero_optimization.stage3_param_persistence_threshold": rules.persistence,
    "zero_optimization.param_persistence_threshold": rules.persistence,
    "zero_optimization.stage3_model_persistence_threshold": rules.persistence,
    "zero_optimization.model_persistence_threshold": rules.persistence,
    "zero_optimization.stage3_max_live_parameters": LIVE,
    "zero_optimization.max_live_parameters": LIVE,
    "zero_optimization.stage3_max_reuse_distance": LIVE,
    "zero_optimization.max_reuse_distance": LIVE,
    "zero_optimization.stage3_module_granularity_threshold": LIVE,
    "zero_optimization.module_granularity_threshold": LIVE,
    "zero_optimization.leaf_module.*": LIVE,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": COMMUNICATION,
    "zero_optimization.use_all_reduce_for_fetch_params": COMMUNICATION,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": GATHERED,
    "zero_optimization.gather_16bit_weights_on_model_save": GATHERED,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": GATHERED,
    "zero_optimization.ignore_unused_parameters": implied("what can never get a gradient is found and frozen"),
    "zero_optimization.legacy_stage1": implied("sharding=zero1 is one row of one table"),
    "zero_optimization.zero_hpz_partition_size": rules.hpz,
    "zero_optimization.mics_shard_size": rules.mics,
    "zero_optimization.mics_hierarchical_params_gather": implied("hybrid gathers inside its group of ranks only"),
    "zero_optimization.zero_quantized_weights": off("weights travel in precision.param_dtype (ZeRO++ qwZ)"),
    "zero_optimization.zero_quantized_nontrainable_weights": off("frozen weights are bf16; quantized ones: not yet"),
    "zero_optimization.zero_quantized_gradients": off("gradients travel in precision.reduce_dtype (ZeRO++ qgZ)"),
    "zero_optimization.zeropp_loco_param.*": unsupported("gradients travel in precision.reduce_dtype (LoCo)"),
    "zero_optimization.memory_efficient_linear": implied("PyTorch's own linear layers"),
    "zero_optimization.pipeline_loading_checkpoint": MODEL_IS_STREAMED,
    "zero_optimization.override_module_apply": MODEL_IS_STREAMED,
    "zero_optimization.log_trace_cache_warnings": implied("nothing is traced"),
    "zero_optimization.enable_sanity_checks": implied("what must hold is always checked"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": OPTIMIZER_OTHER,
    "zero_optimization": rules.old_zero,
    "aio.*": rules.aio,
    # memory
    "activation_checkpointing.*": rules.activation_checkpointing,
    "compile.*": rules.Switched(
        "FSDP2 gathers around compiled blocks, not in them; compile=true compiles these", flag="deepcompile"
    ),
    # what is told
    "steps_per_print": implied("DeepSpeed's own line; --logging_steps is log_every, and metrics.jsonl has every step"),
    "wall_clock_breakdown": TIMES,
    "memory_breakdown": implied("metrics.jsonl has the memory of every step"),
    "dump_state": implied("config.yaml in output_dir has the whole configuration"),
    "log_level": implied("rank 0 speaks, and the others only when something is wrong"),
    "flops_profiler.*": rules.Switched("no such profile; metrics.jsonl has tokens and seconds of every step"),
    "comms_logger.*": rules.Switched("no such log"),
    "tensorboard.*": NO_LOGGER,
    "wandb.*": NO_LOGGER,
    "comet.*": NO_LOGGER,
    "csv_monitor.*": NO_LOGGER,
    "monitor_config.*": NO_LOGGER,
    # checkpoints
    "checkpoint.tag_validation": implied("rank 0 names checkpoints"),
    "checkpoint.load_universal": implied("checkpoints are read by any number of ranks"),
    "checkpoint.use_node_local_storage": off("output_dir is one folder that all machines see"),
    "checkpoint.parallel_write.*": implied("every rank writes its own shard"),
    "checkpoint.*": unsupported("checkpoints have a format of their own: docs/checkpoints.md"),
    "nebula.*": rules.Switched("checkpoints are written to output_dir"),
    # data
    "dataloader_drop_last": off("no sample is dropped"),
    "data_efficiency.*": rules.Switched("samples are neither chosen nor shortened"),
    "curriculum_learning.*": rules.Switched("samples come in an order without a curriculum"),
    "curriculum_params_legacy.*": rules.Switched("samples come in an order without a curriculum"),
    # other parallelism and other models
    "tensor_parallel.*": rules.Switched("no tensor parallelism: sharding=zero3 for large models", "autotp_size"),
    "expert_parallel.*": rules.Switched("no mixtures of experts"),
    "sequence_parallel_size": off("no sequence parallelism", 1),
    "autotp_size": off("no tensor parallelism", 0, 1),
    "pipeline.*": unsupported("no pipeline parallelism: sharding=zero3 for models that fit no GPU"),
    "sparse_attention.*": unsupported("attention is dense and causal"),
    "hybrid_engine.*": rules.Switched("no generation during training"),
    "inference.*": unsupported("for inference"),
    "use_data_before_expert_parallelism": implied("no mixtures of experts"),
    "data_parallel_group": unsupported("a run has one group of all ranks"),
    "graph_harvesting": off("no CUDA graphs"),
    "vocabulary_size": implied("the model's configuration says it"),
    # training otherwise
    "elasticity.*": rules.Switched("global_batch_size stays the same; NNODES=MIN:MAX launch/multinode.sh"),
    "autotuning.*": rules.Switched("nothing tries configurations out; llava_fsdp.sweep runs those you name"),
    "compression_training.*": rules.Switched("no compression while training"),
    "quantize_training.*": rules.Switched("no quantization while training"),
    "progressive_layer_drop.*": rules.Switched("every layer runs in every step"),
    "eigenvalue.*": rules.Switched("no eigenvalues are computed"),
    "weight_quantization.*": unsupported("no quantization while training"),
}


def rule_of(key: str) -> Outcome | Rule | None:
    """The row of the table for a dotted key: its own, else that of the nearest block around it."""
    if key in DEEPSPEED:
        return DEEPSPEED[key]
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = DEEPSPEED.get(".".join([*parts[:length], "*"]))
        if found is not None:
            return found
    return None
