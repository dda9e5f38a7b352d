"""Table of rules: what the flags of `trl sft` and of TRL's script sft_vlm.py become. The flags and their default values
are those of TRL 1.10: ScriptArguments, SFTConfig and ModelConfig."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.flags import trainer_rules as shared
from llava_fsdp.migrate.flags.llava_flags import flags_with
from llava_fsdp.migrate.flags.trainer_rules import TRAINING
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.to_keys.keys import (
    IfDecided,
    RuleContext,
    Translation,
    implied,
    mapped,
    no_effect,
    only_off,
    unsupported,
)
from llava_fsdp.migrate.to_keys.trainer_overrides import cuts_nothing

TEXT_ALONE = no_effect("only for records without images")
BITS = no_effect("only with load_in_4bit")
SPLIT = no_effect("only with --dataset_name")


def max_length(context: RuleContext, value: object) -> Translation:
    """Return what TRL's --max_length becomes in llava_fsdp. TRL's script sft_vlm.py (`cuts_nothing`) ignores it."""
    if not cuts_nothing(context.run):
        return mapped(
            f"{context.text_of_override('data.max_length')}: image tokens included; a longer sample is cut at its end"
        )
    return no_effect(f"sft_vlm.py cuts nothing: {context.text_of_override('data.too_long')}, above data.max_length")


def labels(context: RuleContext, value: object) -> Translation:
    """Return what TRL's --assistant_only_loss or --completion_only_loss becomes in llava_fsdp."""
    if value:
        return implied("answers alone have labels")
    return unsupported("answers alone have labels, and the prompt has none")


TRL_FLAGS: Mapping[str, Flag] = {
    **TRAINING,
    # ModelConfig
    "model_name_or_path": Flag(None, shared.model_name, str),
    "model_revision": Flag("main", only_off("give a folder with that revision", "main")),
    "trust_remote_code": Flag(False, shared.CODE),
    **flags_with(implied("precision= chooses the dtypes, and masters are fp32"), dtype="float32", torch_dtype=str),
    "attn_implementation": Flag(None, shared.ATTENTION, str),
    "use_peft": Flag(False, shared.tuning),
    "lora_r": Flag(16, shared.lora("r")),
    "lora_alpha": Flag(32, shared.lora("alpha")),
    "lora_dropout": Flag(0.05, shared.lora("dropout")),
    "lora_target_modules": Flag("", shared.lora_targets_flag),
    **flags_with(only_off("adapters alone train"), lora_target_parameters=str, lora_modules_to_save=str),
    "lora_task_type": Flag("CAUSAL_LM", only_off("adapters are of a causal language model", "CAUSAL_LM")),
    **shared.WEIGHTS,
    **flags_with(shared.quantization_flag, load_in_4bit=False, load_in_8bit=False),
    "bnb_4bit_quant_type": Flag("nf4", IfDecided("model.quantize.mode", BITS)),
    "use_bnb_nested_quant": Flag(False, IfDecided("model.quantize.double", BITS)),
    # ScriptArguments
    "dataset_name": Flag(None, shared.dataset, str),
    "dataset_config": Flag(None, IfDecided("data.path", SPLIT), str),
    "dataset_train_split": Flag("train", IfDecided("data.path", SPLIT)),
    "dataset_test_split": Flag("test", IfDecided("val.path", no_effect("only with --eval_strategy"))),
    "dataset_streaming": Flag(False, implied("records are read where they lie")),
    "ignore_bias_buffers": Flag(False, no_effect("only for DDP")),
    "datasets": Flag(None, only_off("give data.path or data.sources.NAME.path"), str),
    # SFTConfig
    "max_length": Flag(1024, max_length),
    "max_seq_length": Flag(None, max_length, int),
    "truncation_mode": Flag("keep_start", only_off("a longer sample is cut at its end", "keep_start")),
    "packing": Flag(False, only_off("TRL itself refuses it for models with images; rows here are packed by pack=auto")),
    "packing_strategy": Flag("bfd", no_effect("only with --packing")),
    "eval_packing": Flag(None, no_effect("only with --packing"), bool),
    "padding_free": Flag(False, only_off(
        "TRL itself refuses it for models with images; rows here are packed by pack=auto")),
    "pad_to_multiple_of": Flag(None, only_off("TRL itself refuses it for models with images"), int),
    "assistant_only_loss": Flag(None, labels, bool),
    "completion_only_loss": Flag(None, labels, bool),
    "loss_type": Flag(None, only_off("the loss is cross entropy", "nll", "chunked_nll"), str),
    "chat_template_path": Flag(None, only_off("write the template into a copy of the checkpoint"), str),
    "eos_token": Flag(None, only_off("answers end as the chat template says"), str),
    "router_aux_loss_coef": Flag(0.001, no_effect("only for mixtures of experts, which get no balance loss here")),
    "model_init_kwargs": Flag(None, only_off("config.json of the checkpoint decides"), str),
    **flags_with(TEXT_ALONE, dataset_text_field="text", dataset_num_proc=int, dataset_kwargs=str),
    "shuffle_dataset": Flag(False, implied("samples are shuffled by seed and epoch, as by TRL's own sampler")),
    "activation_offloading": Flag(False, only_off("give activation_checkpointing=offload")),
    # defaults of TRL's own
    "learning_rate": Flag(2e-5, TRAINING["learning_rate"].rule),
    "logging_steps": Flag(10.0, TRAINING["logging_steps"].rule),
    "gradient_checkpointing": Flag(True, TRAINING["gradient_checkpointing"].rule),
    "bf16": Flag(None, rules.half_precision, bool),
}  # fmt: skip
