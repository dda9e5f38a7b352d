"""Table of rules for training programs other than LLaVA's: what the flags of transformers' Trainer, peft and TRL
become. All other flags are unknown, because only the program's code defines what they mean."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.flags.llava_flags import ADAPTERS, FLAGS, flags_with
from llava_fsdp.migrate.source.source_run import ALIASES, Flag, SourceRun
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    OnlyIf,
    RuleContext,
    Translation,
    becomes,
    implied,
    mapped,
    no_effect,
    only_off,
    unsupported,
)

TRAINER = """
    per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps
    optim optim_args adafactor label_smoothing_factor neftune_noise_alpha bf16 fp16 tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode torchdynamo deepspeed fsdp
    fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap ddp_timeout ddp_backend
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers local_rank dataloader_num_workers
    dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers remove_unused_columns group_by_length
    seed data_seed full_determinism output_dir overwrite_output_dir save_strategy save_steps save_total_limit
    save_safetensors save_only_model logging_steps logging_strategy logging_dir logging_first_step log_level
    disable_tqdm report_to run_name push_to_hub evaluation_strategy load_best_model_at_end do_train
""".split()
"""Flags of transformers' TrainingArguments, which mean the same in every program that uses transformers' Trainer."""
NEEDED = {"data_path": "data.path", "model_name_or_path": "model.checkpoint", "model_max_length": "data.max_length"}
"""{flag that the script must set, because the stage has another value than the program's default: key of the
override}."""
NEEDED_BY_LORA = {"lora_r": "model.lora.r", "lora_alpha": "model.lora.alpha", "lora_dropout": "model.lora.dropout"}
OTHER_PROGRAM = (
    "not the original LLaVA's program, so only its flags are read. Which parts train, the prompts, the labels and the "
    "images' preprocessing are in its code; here they are the stage's"
)
NO_CODE = unsupported("the model's own code is never run, and its revision is that of the folder or the hub's newest")
NOT_LLAVA = unsupported(
    "its name has no llava in it: give model.checkpoint=WHOLE_LLAVA, or model.language and model.vision"
)


def lora_targets_flag(context: RuleContext, value: object) -> Translation:
    text = "adapters are in every linear layer of the language model's blocks"
    return implied(text) if value in ("all-linear", None) else unsupported(f"{text}, not in {value} alone")


def bits(context: RuleContext, value: object) -> Translation:
    """Return what --load_in_4bit or --load_in_8bit becomes: only the base model of LoRA adapters can be quantized."""
    if not value:
        return OFF
    if "model.quantize.mode" in context.decided:
        return mapped(context.text_of_override("model.quantize.mode"))
    return unsupported("without adapters weights in few bits cannot be trained")


def lora(key: str) -> IfDecided:
    return IfDecided(f"model.lora.{key}", ADAPTERS)


OWN: Mapping[str, Flag] = {
    "model_name_or_path": Flag(None, IfDecided("model.checkpoint", NOT_LLAVA, "a whole model"), str),
    "model_max_length": Flag(None, becomes("data.max_length", note="image tokens included"), int),
    "data_path": Flag(None, rules.data_path, str),
    "image_folder": Flag(None, becomes("data.images"), str),
    "lora_enable": Flag(False, becomes("stage", "model.train")),
    "lora_r": Flag(None, lora("r"), int),
    **{f"lora_{key}": Flag(None, lora(key), float) for key in ("alpha", "dropout")},
    **{key: Flag(False, lora(key)) for key in ("use_dora", "use_rslora")},
    "lora_target_modules": Flag(None, lora_targets_flag, str),
    "lora_task_type": Flag("CAUSAL_LM", only_off("adapters are of a causal language model", "CAUSAL_LM")),
    **flags_with(bits, load_in_4bit=False, load_in_8bit=False),
    "quant_type": Flag("nf4", IfDecided("model.quantize.mode", no_effect("only with load_in_4bit"))),
    "double_quant": Flag(False, IfDecided("model.quantize.double", no_effect("only with load_in_4bit"))),
    **flags_with(implied("precision= chooses the dtypes, and masters are fp32"), torch_dtype=str, dtype=str),
    "attn_implementation": Flag(None, implied("attention is PyTorch's own"), str),
    "trust_remote_code": Flag(False, only_off(NO_CODE.text)),
    "model_revision": Flag("main", OnlyIf(("main",), "the newest", NO_CODE.text)),
}
OTHER_FLAGS: Mapping[str, Flag] = {
    **{name: FLAGS[name] for name in TRAINER},
    **OWN,
    **{alias: Flag(None, OWN[name].rule, OWN[name].type) for name, aliases in ALIASES.items() for alias in aliases},
}


def lacking(run: SourceRun, decided: Mapping[str, object]) -> list[str]:
    """Return a message for every configuration key that the command needs, but that neither the original training nor a
    default sets. `decided` has the overrides of the command. `run.trainer` is ms-swift, LLaMA-Factory or TRL; a program
    that is neither one of these nor LLaVA's must set a flag for each key in NEEDED."""
    if run.trainer:
        given = any(run.given(flag) for flag in ("dataset", "dataset_name", "datasets"))
        found = [] if "model.checkpoint" in decided else ["model.checkpoint: the checkpoint is not named"]
        # where records are named but not read, the row of their flag says why
        return found if "data.path" in decided or given else [*found, "data.path: no records are named"]
    # without `data.path`, `run.data_files` is a message that says why
    if run.launch.is_original:
        return [] if "data.path" in decided else [f"data.path: {run.data_files}"]
    needed = NEEDED | (NEEDED_BY_LORA if run.is_lora else {})
    absent = {flag: key for flag, key in needed.items() if key not in decided}
    texts = {flag: f"the script has no --{flag}" for flag in absent} | {"data_path": str(run.data_files)}
    return [f"{key}: {texts[flag]}" for flag, key in absent.items()]
