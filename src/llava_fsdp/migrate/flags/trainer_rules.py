"""Rules and flags that the tables of ms-swift, LLaMA-Factory and TRL share: those of transformers' TrainingArguments,
from which the arguments of all three are derived."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags.llava_flags import ADAPTERS, FLAGS, METRICS, flags_with
from llava_fsdp.migrate.flags.trainer_flags import TRAINER
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.source.trainer_records import records_of
from llava_fsdp.migrate.source.trainers import Trainer
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    Rule,
    RuleContext,
    Translation,
    implied,
    mapped,
    no_effect,
    only_off,
    unsupported,
)
from llava_fsdp.migrate.to_keys.trainer_overrides import FREEZES

PIXELS = "images are resized as the checkpoint's preprocessor_config.json says: write the limit into it, in a copy"
PACKED = (
    "a step there is a number of packed rows, here of samples: give global_batch_size=ROWS*SAMPLES_IN_A_ROW. Rows here "
    "are packed by pack=auto"
)
CODE = implied("transformers' own class is trained; code of the checkpoint is never run")
ATTENTION = implied("attention is PyTorch's own")
EVALUATION = no_effect("only for validation, which has keys of its own here: val.batch_size")
ALL_LINEAR = frozenset("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
"""Names of the linear layers in a block of the usual language models."""


def model_name(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag with the name of the checkpoint becomes in llava_fsdp."""
    if not value:
        return unsupported("the checkpoint is not named: give model.checkpoint=DIR")
    return mapped(f"{context.text_of_override('model.checkpoint')}: a whole model of transformers")


def dataset(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag that names the records to train on becomes in llava_fsdp."""
    found = records_of(context.run)
    if found.problem:
        return unsupported(found.problem)
    images = f", {context.text_of_override('data.images')}" if "data.images" in context.decided else ""
    note = f": {found.note}" if found.note else ""
    return mapped(f"{context.text_of_override('data.path')}{images}{note}")


def held_out(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag that names the records of the validation becomes in llava_fsdp."""
    if not value:
        return OFF
    if problem := records_of(context.run, is_held_out=True).problem:
        return unsupported(problem)
    if "val.path" not in context.decided:
        return unsupported("validation is every N steps: give val.path and val.every=N")
    return mapped(f"{context.text_of_override('val.path')}, {context.text_of_override('val.answers')}: the loss alone")


def eval_strategy(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag that says when the validation runs becomes in llava_fsdp."""
    if value in (None, "no"):
        return OFF
    held = records_of(context.run, is_held_out=True)
    if not held.paths and not held.problem:
        return no_effect("no held-out records are named")
    if "val.every" in context.decided:
        return mapped(context.text_of_override("val.every"))
    return unsupported("validation is every N steps of the records in val.path: give val.path and val.every=N")


def freeze_flag(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag that freezes a part of the model becomes in llava_fsdp. With LoRA, ms-swift puts
    adapters into a projector that is not frozen, which llava_fsdp cannot do."""
    run = context.run
    assert run.trainer
    (part,) = [part for part, flag in FREEZES[run.trainer].items() if flag == context.key]
    text = context.text_of_override("model.train")
    if value or not run.is_lora:
        return mapped(text)
    if part == "projector":
        if run.trainer is Trainer.factory:
            return no_effect("adapters are never put into the projector")
        return unsupported("the projector has no adapters here: model.train=[projector,...] trains it as a whole")
    if part == "vision" and context.decided["model.lora.dropout"]:
        return unsupported(f"{text}: adapters of the vision part have no dropout here; give --lora_dropout 0")
    return mapped(text)


def lora_targets_flag(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag with the names of the layers that get LoRA adapters becomes in llava_fsdp. `all` and
    `all-linear` stand for every linear layer."""
    if not context.run.is_lora:
        return ADAPTERS  # no effect without adapters
    words = {name.strip() for word in context.run.words(context.key) for name in word.replace(",", " ").split()}
    text = f"{context.text_of_override('model.train')}: adapters are in every linear layer of these parts' blocks"
    if context.run.trainer is Trainer.trl:
        text += ". peft also puts them into linear layers of other parts with these names"
        if not words:
            return mapped(f"{text}; without this flag it chooses layers by the type of the model, often fewer")
    if not words or words in ({"all"}, {"all-linear"}, ALL_LINEAR):
        return mapped(text)
    return unsupported(f"{text}, not in {value} alone")


def quantization_flag(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag with the number of bits of the base model's weights becomes in llava_fsdp. Only a
    base model under LoRA adapters is quantized; `context.decided` then has an override for it."""
    if not value:
        return OFF
    if "model.quantize.mode" in context.decided:
        return mapped(f"{context.text_of_override('model.quantize.mode')}: in the language model's blocks")
    return unsupported("only weights under adapters are quantized, to 4 or 8 bits by bitsandbytes")


def timeout(context: RuleContext, value: object) -> Translation:
    """Return what --ddp_timeout, the seconds that a collective waits, becomes in llava_fsdp. Some trainers set years by
    default; then `context.decided`, the overrides of the command, has no timeout."""
    if "comm.timeout" in context.decided:
        return mapped(context.text_of_override("comm.timeout"))
    return implied("so long that it means no limit; comm.timeout stays at half an hour")


def warmup_steps(context: RuleContext, value: object) -> Translation:
    """Return what --warmup_steps (a number of steps, or below 1 a share of all steps) becomes in llava_fsdp."""
    if not value:
        return implied("by --warmup_ratio, or none")
    key = "optim.warmup_steps" if "optim.warmup_steps" in context.decided else "optim.warmup_ratio"
    return mapped(context.text_of_override(key))


def batch(context: RuleContext, value: object) -> Translation:
    """Return what --per_device_train_batch_size becomes in llava_fsdp: it is also a factor of the global batch size."""
    run = context.run
    product = "x --gradient_accumulation_steps x GPUs"
    if run.trainer_value("gradient_accumulation_steps") is None:
        product += ", which is the smallest number that gives 16 samples in a step"
    return mapped(
        f"{context.text_of_override('micro_batch_size')}, {context.text_of_override('global_batch_size')} ({product})"
    )


def tuning(context: RuleContext, value: object) -> Translation:
    """Return what a trainer's flag that chooses between whole weights and LoRA adapters becomes in llava_fsdp."""
    text = f"{context.text_of_override('stage')}, {context.text_of_override('model.train')}"
    if context.run.tuning in ("full", "lora"):
        return mapped(text)
    return unsupported(f"{value}: whole weights are trained (full) or LoRA adapters (lora); {text}")


def lora(key: str) -> IfDecided:
    return IfDecided(f"model.lora.{key}", ADAPTERS)


def epochs(context: RuleContext, value: object) -> Translation:
    """Return what --num_train_epochs becomes in llava_fsdp, which has no fractions of epochs."""
    if "epochs" in context.decided:
        return mapped(context.text_of_override("epochs"))
    return unsupported("epochs are whole; give max_steps=N")


def max_length(note: str) -> Rule:
    """Return the rule for a trainer's flag with the longest sample in tokens. If the migrated training sets
    `data.max_length`, the flag becomes this override; if not, the flag is reported as implied. `note`: what the
    original trainer does with a longer sample; printed behind the override."""
    return IfDecided(
        "data.max_length",
        implied("the longest sample is not set: a sample above data.max_length ends the run before its first step"),
        f"image tokens included; {note}",
    )


TRAINING: Mapping[str, Flag] = {
    **{name: FLAGS[name] for name in TRAINER},
    "per_device_train_batch_size": Flag(8, batch),
    "num_train_epochs": Flag(3.0, epochs),
    "warmup_steps": Flag(0.0, warmup_steps),
    "ddp_timeout": Flag(1800, timeout),
    "do_train": Flag(False, implied("train trains")),
    "optim": Flag("adamw_torch_fused", FLAGS["optim"].rule),
    "overwrite_output_dir": Flag(False, implied(
        "a run continues what it finds in output_dir; checkpoint.resume=never starts over")),
    "resume_from_checkpoint": Flag(None, only_off(
        "checkpoints of other trainers are not read; a run continues its own by itself"), str),
    "save_only_model": Flag(False, implied(
        "a checkpoint always holds what a run needs to continue; output_dir/export has the weights alone")),
    "dataloader_num_workers": Flag(0, IfDecided("data.workers", implied("data.workers processes prepare steps"))),
    "remove_unused_columns": Flag(True, FLAGS["remove_unused_columns"].rule),
    "eval_strategy": Flag("no", eval_strategy),
    "evaluation_strategy": Flag(None, eval_strategy, str),
    "eval_steps": Flag(None, eval_strategy, float),
    **flags_with(EVALUATION, per_device_eval_batch_size=8, do_eval=False, eval_delay=0.0,
           prediction_loss_only=False, metric_for_best_model=str, greater_is_better=bool, eval_on_start=False),
    "torch_empty_cache_steps": Flag(None, implied("memory that torch caches stays cached"), int),
    "use_liger_kernel": Flag(False, implied("the loss is computed in chunks: loss.chunk_tokens")),
    "average_tokens_across_devices": Flag(True, implied("the loss is a mean over the label tokens of the whole step")),
    "include_num_input_tokens_seen": Flag(None, METRICS, str),
    **flags_with(implied("steps are prepared ahead by data.workers"), dataloader_prefetch_factor=int),
}  # fmt: skip
"""Flags of transformers' TrainingArguments, with the defaults of transformers 5."""
WEIGHTS: Mapping[str, Flag] = {
    "use_rslora": Flag(False, lora("use_rslora")),
    "use_dora": Flag(False, lora("use_dora")),
}
