"""The table of Accelerate's words: the keys of its YAML file and the flags of `accelerate launch`, which are the
same (accelerate/commands/launch.py, commands/config/). A file's blocks `deepspeed_config` and
`fsdp_config` count as flat."""

from collections.abc import Mapping

from llava_fsdp.migrate.bash_script import is_open
from llava_fsdp.migrate.context import Context, Rule, off, to
from llava_fsdp.migrate.key_outcome import Outcome, implied, mapped, no_effect, refused, unsupported
from llava_fsdp.migrate.launch_command import LOGS, NUMBER, ON_ITS_OWN, PLACE, RESTARTS
from llava_fsdp.migrate.overrides import FSDP_STRATEGIES
from llava_fsdp.migrate.source_run import plain

TPU = off("CUDA or CPU, as the machine has it")
FP8 = unsupported("precision=fp8 scales every tensor by its largest element, in torchao; it has no settings")
MEGATRON = unsupported("no tensor or pipeline parallelism: sharding=zero3 for models that fit no GPU")
UNITS = implied("every block of layers is a unit; sharding.blocks_per_unit takes several together")
AHEAD = implied("FSDP2 gathers the next block ahead of the computation; sharding.prefetch takes more")
STREAMED = implied("every rank reads its own rows of every weight from the files")


def distributed_type(context: Context, value: object) -> Outcome:
    name = str(value).upper()
    if name in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO", "MULTI_CPU"):
        return mapped(context.tell("sharding"))
    return unsupported(f"{value}: a run uses CUDA or CPU, on FSDP2")


def mixed_precision(context: Context, value: object) -> Outcome:
    note = {"fp8": ": torchao's float8 training of the language model's linear layers, on GPUs that have fp8"}
    told = [context.tell(key) for key in context.decided if key.startswith("precision")]
    return mapped(", ".join(told) + note.get(str(value), "")) if told else mapped(context.tell("precision"))


def zero_stage(context: Context, value: object) -> Outcome:
    if context.run.deepspeed is not None:
        return no_effect(f"the DeepSpeed configuration {context.run.deepspeed.name} says it")
    return mapped(context.tell("sharding"))


def gradient_clipping(context: Context, value: object) -> Outcome:
    if context.run.deepspeed is not None:
        return no_effect(f"the DeepSpeed configuration {context.run.deepspeed.name} says it")
    norm = context.run.hf("max_grad_norm")
    if context.run.launch and plain(value) != norm and not is_open(norm):
        return refused(f"--max_grad_norm is {norm}")
    return mapped(context.tell("optim.clip"))


def accumulation(context: Context, value: object) -> Outcome:
    run = context.run
    if run.deepspeed is not None:
        return no_effect(f"the DeepSpeed configuration {run.deepspeed.name} says it")
    if not run.launch:
        return unsupported("a factor of global_batch_size; give the training script as another PATH")
    ours = run.hf("gradient_accumulation_steps")
    if plain(value) != ours and not is_open(ours):
        return refused(f"--gradient_accumulation_steps is {ours}")
    return mapped(f"a factor of {context.tell('global_batch_size')}")


def offload(context: Context, value: object) -> Outcome:
    if plain(value) in (False, None, "none", ""):
        return implied("off, as here")
    if context.run.deepspeed is not None:
        return no_effect(f"the DeepSpeed configuration {context.run.deepspeed.name} says it")
    return mapped(context.tell("offload.folder" if context.key.endswith("nvme_path") else "offload"))


def gpu_ids(context: Context, value: object) -> Outcome:
    if value in (None, "all"):
        return implied("all of the machine, as here")
    return mapped("CUDA_VISIBLE_DEVICES before the command")


def config_file(context: Context, value: object) -> Outcome:
    if context.run.deepspeed is None:
        return unsupported("this file was not found: give it as another PATH")
    return mapped(f"read: {context.run.deepspeed.name}")


def read_file(context: Context, value: object) -> Outcome:
    if context.run.accelerate is None:
        return unsupported("this file was not found: give it as another PATH")
    return mapped(f"read: {context.run.accelerate.name}")


def strategy(context: Context, value: object) -> Outcome:
    if str(value).upper() not in FSDP_STRATEGIES and not isinstance(plain(value), bool):
        return unsupported(f"{value} is none of PyTorch's strategies; {context.tell('sharding')}")
    return mapped(context.tell("sharding"))


def state_dict_type(context: Context, value: object) -> Outcome:
    return implied("checkpoints are sharded, and export/ holds the whole model")


def dynamo_backend(context: Context, value: object) -> Outcome:
    name = str(value).lower()
    if name in ("no", "none", "false", ""):
        if context.decided.get("compile"):
            return no_effect(f"the script switches it on: {context.tell('compile')}")
        return mapped(context.tell("compile"))
    if context.decided.get("compile") is False:
        return mapped(f"{context.tell('compile')}: this backend writes no kernels, and runs the operations as they are")
    if name != "inductor":
        return unsupported(
            f"{value}: torch.compile's own backend, inductor, compiles blocks; {context.tell('compile')}"
        )
    return mapped(context.tell("compile"))


def dynamo_detail(why: str, *usual: object) -> Rule:
    """A setting of torch.compile's, of no effect where nothing is compiled."""

    def rule(context: Context, value: object) -> Outcome:
        if not context.decided.get("compile"):
            return no_effect("only with dynamo_backend")
        return implied(why) if plain(value) in (None, False, "", {}, *usual) else unsupported(why)

    return rule


def checkpointing(context: Context, value: object) -> Outcome:
    if not context.run.launch:
        return mapped(context.tell("activation_checkpointing"))
    if bool(plain(value)) == context.run.truth("gradient_checkpointing"):
        return mapped(context.tell("activation_checkpointing"))
    return unsupported(
        f"--gradient_checkpointing of the script says otherwise: {context.tell('activation_checkpointing')}"
    )


ACCELERATE: Mapping[str, Outcome | Rule] = {
    "config_file": read_file,
    "compute_environment": off("machines are started by torchrun", "LOCAL_MACHINE"),
    "distributed_type": distributed_type,
    "use_deepspeed": to("sharding"),
    "use_fsdp": to("sharding"),
    "multi_gpu": to("sharding"),
    "mixed_precision": mixed_precision,
    "num_processes": NUMBER,
    "num_machines": NUMBER,
    "machine_rank": PLACE,
    "main_process_ip": PLACE,
    "main_process_port": PLACE,
    "rdzv_backend": PLACE,
    "rdzv_conf": PLACE,
    "same_network": ON_ITS_OWN,
    "gpu_ids": gpu_ids,
    "max_restarts": RESTARTS,
    "monitor_interval": LOGS,
    "log_dir": LOGS,
    "tee": LOGS,
    "t": LOGS,
    "role": ON_ITS_OWN,
    "module": ON_ITS_OWN,
    "m": ON_ITS_OWN,
    "no_python": ON_ITS_OWN,
    "quiet": LOGS,
    "q": LOGS,
    "debug": LOGS,
    "main_training_function": ON_ITS_OWN,
    "num_cpu_threads_per_process": implied("OMP_NUM_THREADS before the command"),
    "enable_cpu_affinity": off("bind with numactl or the scheduler"),
    "use_cpu": off("CUDA_VISIBLE_DEVICES= before the command"),
    "cpu": off("CUDA_VISIBLE_DEVICES= before the command"),
    "command_file": TPU, "commands": TPU, "tpu": TPU, "tpu_name": TPU, "tpu_zone": TPU, "tpu_cluster": TPU,
    "tpu_use_cluster": TPU, "no_tpu_cluster": TPU, "tpu_use_sudo": TPU, "tpu_vm": TPU, "tpu_env": TPU, "vm": TPU,
    "env": TPU, "downcast_bf16": TPU, "ipex": TPU, "use_xpu": TPU, "use_mps_device": TPU, "ipex_config.*": TPU,
    "mpirun_config.*": unsupported("torchrun starts the ranks"),
    "mpirun_hostfile": unsupported("torchrun starts the ranks"),
    "aws_access_key_id": TPU, "aws_secret_access_key": TPU,
    # DeepSpeed
    "deepspeed_config_file": config_file,
    "zero_stage": zero_stage,
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": gradient_clipping,
    "offload_optimizer_device": offload,
    "offload_param_device": offload,
    "offload_optimizer_nvme_path": offload,
    "offload_param_nvme_path": offload,
    "zero3_init_flag": implied("the model is built without weights, and every rank reads its own rows"),
    "zero3_save_16bit_model": implied("export/ always holds the whole model"),
    "deepspeed_hostfile": unsupported("torchrun is started on every machine: launch/multinode.sh"),
    "deepspeed_inclusion_filter": unsupported("CUDA_VISIBLE_DEVICES before the command, and gpus=N here"),
    "deepspeed_exclusion_filter": unsupported("CUDA_VISIBLE_DEVICES before the command, and gpus=N here"),
    "deepspeed_multinode_launcher": unsupported("torchrun is the launcher; launch/multinode.sh"),
    "deepspeed_moe_layer_cls_names": off("no mixtures of experts"),
    # FSDP
    "fsdp_sharding_strategy": strategy,
    "fsdp_reshard_after_forward": strategy,
    "fsdp_version": implied("FSDP2"),
    "fsdp_auto_wrap_policy": UNITS,
    "fsdp_transformer_layer_cls_to_wrap": UNITS,
    "fsdp_min_num_params": UNITS,
    "fsdp_offload_params": offload,
    "fsdp_backward_prefetch": AHEAD,
    "fsdp_backward_prefetch_policy": AHEAD,
    "fsdp_forward_prefetch": AHEAD,
    "fsdp_state_dict_type": state_dict_type,
    "fsdp_use_orig_params": implied("FSDP2 keeps every parameter"),
    "fsdp_cpu_ram_efficient_loading": STREAMED,
    "fsdp_sync_module_states": STREAMED,
    "fsdp_activation_checkpointing": checkpointing,
    # others
    "dynamo_backend": dynamo_backend,
    "dynamo_mode": dynamo_detail("kernels are torch.compile's default ones", "default"),
    "dynamo_use_dynamic": dynamo_detail("lengths are variables of what is compiled", True),
    "dynamo_use_fullgraph": dynamo_detail("a block is one graph where its attention can be compiled"),
    "dynamo_use_regional_compilation": dynamo_detail("blocks are compiled one at a time", True),
    "dynamo_config.*": dynamo_detail("torch.compile's default settings"),
    "fp8_config.*": FP8, "fp8_*": FP8,
    "use_megatron_lm": MEGATRON, "megatron_lm_config.*": MEGATRON, "megatron_lm_*": MEGATRON,
    "use_parallelism_config": off("sharding= says how a model is spread"),
    "parallelism_config.*": off("sharding= says how a model is spread", 1),
    "parallelism_config_*": off("sharding= says how a model is spread", 1),
    # SageMaker
    "ec2_instance_type": TPU, "iam_role_name": TPU, "image_uri": TPU, "profile": TPU, "region": TPU,
    "base_job_name": TPU, "pytorch_version": TPU, "transformers_version": TPU, "py_version": TPU,
    "sagemaker_inputs_file": TPU, "sagemaker_metrics_file": TPU, "additional_args.*": TPU,
}  # fmt: skip


def rule_of(key: str) -> Outcome | Rule | None:
    """The row of the table for a flag or a file's dotted key."""
    name = key
    for block in ("deepspeed_config.", "fsdp_config.", "dynamo_config.", "fp8_config."):
        name = name.removeprefix(block) if key.removeprefix(block) in ACCELERATE else name
    if name in ACCELERATE:
        return ACCELERATE[name]
    for pattern, rule in ACCELERATE.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return rule
    return None
