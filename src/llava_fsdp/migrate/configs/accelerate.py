"""Table of rules: what each key of Accelerate's YAML file becomes. The rules also apply to the flags of `accelerate
launch` with the same names. A key inside a block of the file, such as `fsdp_config`, is listed without the block's
name."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags.launcher_flags import LAUNCHER
from llava_fsdp.migrate.source.source_run import plain
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    Rule,
    RuleContext,
    Translation,
    becomes,
    implied,
    mapped,
    no_effect,
    only_off,
    outcome,
    refused,
    rules,
    unsupported,
)
from llava_fsdp.migrate.to_keys.overrides import FSDP_STRATEGIES

UNITS = implied("every block of layers is a unit; sharding.blocks_per_unit takes several together")
AHEAD = implied("FSDP2 gathers the next block ahead of the computation; sharding.prefetch takes more")
READ_BY_ROWS = implied("the model is built without weights, and every rank reads its own rows from the files")
CHOOSE = unsupported("CUDA_VISIBLE_DEVICES before the command, and gpus=N here")


def distributed_type(context: RuleContext, value: object) -> Translation:
    """Return what Accelerate's `distributed_type` becomes in llava_fsdp: every type for CUDA or the CPU becomes a
    sharding strategy, which is decided already (`context.tell` returns it as `sharding=VALUE`)."""
    if str(value).upper() in ("DEEPSPEED", "FSDP", "MULTI_GPU", "NO", "MULTI_CPU"):
        return mapped(context.text_of_override("sharding"))
    return unsupported(f"{value}: a run uses CUDA or CPU, on FSDP2")


def unless_deepspeed(rule: Rule) -> Rule:
    """Return a rule for a setting that a DeepSpeed JSON file replaces: with such a file, the setting has no effect. A
    setting that is off is translated as off, in any case; else `rule` translates it."""

    def wrapped(context: RuleContext, value: object) -> Translation:
        """Return what the setting becomes in llava_fsdp."""
        if plain(value) is False or value in (None, "none", ""):
            return OFF
        json = context.run.deepspeed
        return no_effect(f"the DeepSpeed configuration {json.name} has it") if json else outcome(rule, context, value)

    return wrapped


def as_flag(flag: str, key: str) -> Rule:
    """Return a rule for a setting that the training script also sets by a flag. If both values are equal, it becomes
    the override `key`; if not, the original training does not start."""

    def rule(context: RuleContext, value: object) -> Translation:
        theirs = context.run.trainer_value(flag)
        return mapped(context.text_of_override(key)) if plain(value) == theirs else refused(f"--{flag} is {theirs}")

    return rule


def read_file(context: RuleContext, value: object) -> Translation:
    """Return what becomes of a key that names a file of settings, Accelerate's or DeepSpeed's: it is read, if found."""
    found = context.run.accelerate if context.key == "config_file" else context.run.deepspeed
    return mapped(f"read: {found.name}") if found else unsupported("this file was not found: give it as another PATH")


def strategy(context: RuleContext, value: object) -> Translation:
    """Return what Accelerate's key for the FSDP sharding strategy, in newer files a boolean, becomes in llava_fsdp."""
    if str(value).upper() not in FSDP_STRATEGIES and not isinstance(plain(value), bool):
        return unsupported(f"{value} is not one of PyTorch's strategies; {context.text_of_override('sharding')}")
    return mapped(context.text_of_override("sharding"))


def dynamo_backend(context: RuleContext, value: object) -> Translation:
    """Return what Accelerate's `dynamo_backend`, a backend of torch.compile, becomes in llava_fsdp. If it is off, a
    flag of the script may still switch torch.compile on."""
    name, text = str(value).lower(), context.text_of_override("compile")
    if name in ("no", "none", "false", ""):
        return no_effect(f"the script switches it on: {text}") if context.decided.get("compile") else mapped(text)
    return mapped(text) if name == "inductor" else unsupported(f"{value}: blocks are compiled with inductor; {text}")


ACCELERATE: Mapping[str, Rule] = {
    "config_file": read_file,
    "compute_environment": only_off("torchrun starts the machines", "LOCAL_MACHINE"),
    "distributed_type": distributed_type,
    **rules(becomes("sharding"), "use_deepspeed use_fsdp multi_gpu"),
    "mixed_precision": becomes("precision"),
    "gpu_ids": mapped("CUDA_VISIBLE_DEVICES before the command, unless it is all"),
    "num_cpu_threads_per_process": implied("OMP_NUM_THREADS before the command"),
    # DeepSpeed
    "deepspeed_config_file": read_file,
    "deepspeed_multinode_launcher": only_off("torchrun is the launcher, and is started on every machine", "standard"),
    "zero_stage": unless_deepspeed(becomes("sharding")),
    "gradient_accumulation_steps": unless_deepspeed(as_flag("gradient_accumulation_steps", "global_batch_size")),
    "gradient_clipping": unless_deepspeed(as_flag("max_grad_norm", "optim.clip")),
    **rules(unless_deepspeed(becomes("offload")), "offload_optimizer_device offload_param_device"),
    **rules(unless_deepspeed(becomes("offload.folder")), "offload_optimizer_nvme_path offload_param_nvme_path"),
    "zero3_init_flag": READ_BY_ROWS,
    "zero3_save_16bit_model": implied("export/ always holds the whole model"),
    **rules(CHOOSE, "deepspeed_inclusion_filter deepspeed_exclusion_filter"),
    # FSDP
    **rules(strategy, "fsdp_sharding_strategy fsdp_reshard_after_forward"),
    "fsdp_version": implied("FSDP2"),
    **rules(UNITS, "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params"),
    "fsdp_offload_params": unless_deepspeed(becomes("offload")),
    **rules(AHEAD, "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch"),
    "fsdp_state_dict_type": implied("checkpoints are sharded, and export/ holds the whole model"),
    "fsdp_use_orig_params": implied("FSDP2 keeps every parameter"),
    **rules(READ_BY_ROWS, "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states"),
    "fsdp_activation_checkpointing": becomes("activation_checkpointing"),
    # others
    "dynamo_backend": dynamo_backend,
    **rules(
        only_off("torch.compile's default settings", "default"), "dynamo_mode dynamo_use_fullgraph dynamo_config.*"
    ),
    **rules(
        implied("blocks are compiled one at a time, and lengths are variables"),
        "dynamo_use_dynamic dynamo_use_regional_compilation",
    ),
}


def rule_of(key: str) -> Rule | None:
    """Return the rule for a key of Accelerate's file, or for a flag of its launcher; None if it is unknown. A key may
    be inside one of the file's blocks. An entry `X*` of the table ACCELERATE is for all keys that begin with X."""
    name = key
    for block in ("deepspeed_config.", "fsdp_config.", "dynamo_config.", "fp8_config."):
        name = name.removeprefix(block) if key.removeprefix(block) in ACCELERATE else name
    if name in ACCELERATE or name in LAUNCHER:
        return ACCELERATE.get(name, LAUNCHER.get(name))
    return next((rule for row, rule in ACCELERATE.items() if row.endswith("*") and name.startswith(row[:-1])), None)
