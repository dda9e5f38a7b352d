"""Table of rules: what the flags of `swift sft` become. The flags and their default values are those of ms-swift 4.6
(swift/arguments, swift/trainers/arguments.py)."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.flags import trainer_rules as shared
from llava_fsdp.migrate.flags.llava_flags import ADAPTERS, METRICS, flags_with
from llava_fsdp.migrate.flags.trainer_rules import TRAINING
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    OnlyIf,
    Rule,
    RuleContext,
    Translation,
    becomes,
    implied,
    mapped,
    no_effect,
    only_off,
    unsupported,
)

IN_PLACE = implied("records are indexed once and read where they lie")
SHUFFLED = OnlyIf((True,), "samples are shuffled by seed and epoch", "samples are always shuffled by seed and epoch")
PARTS = only_off("model.train names parts of the model, or their blocks")
NOT_TRAINED = no_effect("the part does not train")
BITS = no_effect("only with --quant_bits 4")
PLUGIN = only_off("code of plugins is not run")


def truncation(context: RuleContext, value: object) -> Translation:
    """Return what ms-swift's --truncation_strategy, for samples that are too long, becomes in llava_fsdp."""
    if "data.max_length" not in context.decided:
        return no_effect("only with --max_length")
    if value in ("delete", "right"):
        return mapped(context.text_of_override("data.too_long"))
    return unsupported("a longer sample is skipped (delete) or cut at its end (right)")


def fsdp(context: RuleContext, value: object) -> Translation:
    """Return what ms-swift's --fsdp becomes here. `fsdp2`, the only known value, also checkpoints activations."""
    if not value:
        return OFF
    if value == "fsdp2":
        return mapped(f"{context.text_of_override('sharding')}, {context.text_of_override('activation_checkpointing')}")
    return unsupported(f"{value}: only fsdp2 is known; sharding=zero3 shards everything, zero2 all but the weights")


RATE: Rule = rules.of_optimizer("optim.lr")
SWIFT_FLAGS: Mapping[str, Flag] = {
    **TRAINING,
    # model
    "model": Flag(None, shared.model_name, str),
    "model_type": Flag(None, implied("the type in the checkpoint's config.json"), str),
    "model_revision": Flag(None, only_off("give a folder with that revision as --model"), str),
    "task_type": Flag(None, only_off("answers are learnt as text", "causal_lm"), str),
    "torch_dtype": Flag(None, becomes("precision", note="masters and moments are fp32"), str),
    "attn_impl": Flag(None, shared.ATTENTION, str),
    "use_hf": Flag(False, implied("names are those of Hugging Face's hub, or folders")),
    # data
    "dataset": Flag(None, shared.dataset, str),
    "val_dataset": Flag(None, shared.held_out, str),
    "split_dataset_ratio": Flag(0.0, only_off("write held-out records into a file of their own: val.path", 0.0)),
    "columns": Flag(None, only_off("give data.question and data.answer, or data.image_column"), str),
    **flags_with(SHUFFLED, dataset_shuffle=True, train_dataloader_shuffle=True),
    **flags_with(IN_PLACE, dataset_num_proc=1, load_from_cache_file=False, lazy_tokenize=bool, streaming=False),
    "strict": Flag(False, implied(
        "a record that cannot be trained on ends the run before its first step; data.bad_records=skip leaves it out")),
    "data_seed": Flag(42, only_off("the order of samples comes from seed", 42)),
    **flags_with(no_effect("only for the dataset swift/self-cognition"), model_name=str, model_author=str),
    **flags_with(PLUGIN, custom_dataset_info=str, external_plugins=str, custom_register_path=str, optimizer=str,
           loss_type=str, callbacks=str),
    # prompts and labels
    "template": Flag(None, implied("prompts are those of the checkpoint's own chat template"), str),
    "system": Flag(None, only_off("write it into the records as a system turn"), str),
    "max_length": Flag(None, shared.max_length("--truncation_strategy says what becomes of a longer sample"), int),
    "truncation_strategy": Flag("delete", truncation),
    "max_pixels": Flag(None, only_off(shared.PIXELS), int),
    "loss_scale": Flag("default", OnlyIf(
        ("default",), "every answer has labels",
        "every answer has labels; a loss of 0 in a turn takes one out, and other weights are not read")),
    "packing": Flag(False, only_off(shared.PACKED)),
    "packing_length": Flag(None, no_effect("only with --packing"), int),
    "packing_num_proc": Flag(1, no_effect("only with --packing")),
    "padding_free": Flag(False, implied("rows are packed without padding where the model can (pack=auto)")),
    "sequence_parallel_size": Flag(1, only_off("a rank computes whole rows", 1)),
    # what trains
    "tuner_type": Flag("lora", shared.tuning),
    "train_type": Flag(None, shared.tuning, str),
    "tuner_backend": Flag("peft", only_off("adapters are peft's", "peft")),
    **flags_with(shared.freeze_flag, freeze_llm=False, freeze_vit=True, freeze_aligner=True),
    **flags_with(PARTS, freeze_parameters=str, freeze_parameters_regex=str, trainable_parameters=str,
           trainable_parameters_regex=str, modules_to_save=str, target_regex=str),
    "freeze_parameters_ratio": Flag(0.0, only_off(PARTS.why, 0.0)),
    "adapters": Flag(None, only_off("model.lora.checkpoint continues from an adapter that was made here"), str),
    "target_modules": Flag("all-linear", shared.lora_targets_flag),
    "lora_rank": Flag(8, shared.lora("r")),
    "lora_alpha": Flag(32, shared.lora("alpha")),
    "lora_dropout": Flag(0.05, shared.lora("dropout")),
    "lora_bias": Flag("none", shared.lora("bias")),
    "lora_dtype": Flag(None, implied("adapters have fp32 masters"), str),
    "lorap_lr_ratio": Flag(None, only_off("both matrices of an adapter have one learning rate"), float),
    "init_weights": Flag("true", only_off("adapters begin as LoRA's paper says", "true")),
    **shared.WEIGHTS,
    "quant_method": Flag(None, OnlyIf((None, "bnb"), "by bitsandbytes", "weights are quantized by bitsandbytes"), str),
    "quant_bits": Flag(None, shared.quantization_flag, int),
    "bnb_4bit_compute_dtype": Flag(None, implied("precision= chooses it"), str),
    "bnb_4bit_quant_type": Flag("nf4", IfDecided("model.quantize.mode", BITS)),
    "bnb_4bit_use_double_quant": Flag(True, IfDecided("model.quantize.double", BITS)),
    # batches, optimizer, precision
    "per_device_train_batch_size": Flag(1, shared.batch),
    "gradient_accumulation_steps": Flag(None, becomes("global_batch_size", note="a factor of it"), int),
    "max_epochs": Flag(None, only_off("give --num_train_epochs"), int),
    "learning_rate": Flag(None, RATE, float),
    "vit_lr": Flag(None, IfDecided("optim.vision_lr", NOT_TRAINED), float),
    "aligner_lr": Flag(None, IfDecided("optim.projector_lr", NOT_TRAINED), float),
    "weight_decay": Flag(0.1, TRAINING["weight_decay"].rule),
    "adam_beta2": Flag(0.95, TRAINING["adam_beta2"].rule),
    "lr_scheduler_type": Flag("cosine", rules.scheduler_type),
    **flags_with(rules.half_precision, bf16=bool, fp16=bool),
    "gradient_checkpointing": Flag(True, TRAINING["gradient_checkpointing"].rule),
    "vit_gradient_checkpointing": Flag(None, implied("activation_checkpointing decides"), bool),
    "deepspeed": Flag(None, rules.deepspeed_file, str),
    "zero_hpz_partition_size": Flag(None, only_off("sharding=hybrid shards inside of a machine"), int),
    "deepspeed_autotp_size": Flag(None, only_off("a rank computes whole layers"), int),
    "fsdp": Flag(None, fsdp, str),
    "ddp_timeout": Flag(18000000, shared.timeout),
    "router_aux_loss_coef": Flag(0.0, only_off("routers get no balance loss", 0.0)),
    # output
    "add_version": Flag(True, implied("output_dir is taken as it is: give each run one of its own")),
    "create_checkpoint_symlink": Flag(False, implied("output_dir/export has the last weights")),
    "logging_steps": Flag(5.0, TRAINING["logging_steps"].rule),
    **flags_with(METRICS, logging_first_step=True, acc_strategy="token"),
    "report_to": Flag("tensorboard", rules.report_to),
    "check_model": Flag(True, implied("files are checked when they are read")),
    **flags_with(shared.EVALUATION, per_device_eval_batch_size=1),
    "eval_strategy": Flag(None, shared.eval_strategy, str),
    **flags_with(no_effect("only for answers in a validation; here val.max_new_tokens"), predict_with_generate=False,
           max_new_tokens=64, temperature=0.0),
    **flags_with(ADAPTERS, use_swift_lora=False),
}  # fmt: skip
