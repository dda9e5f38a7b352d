"""Table of rules: what the keys of `llamafactory-cli train` become. The keys and their default values are those of
LLaMA-Factory 0.9.6 (src/llamafactory/hparams)."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.flags import trainer_rules as shared
from llava_fsdp.migrate.flags.llava_flags import METRICS, flags_with
from llava_fsdp.migrate.flags.trainer_rules import TRAINING
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.source.trainer_records import DATASET_INFO
from llava_fsdp.migrate.to_keys.keys import (
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

IN_PLACE = implied("records are indexed once and read where they lie")
METHOD = only_off("whole weights are trained, or LoRA adapters, with AdamW")
VOCABULARY = only_off("a run does not change a vocabulary")
BITS = no_effect("only with quantization_bit 4")
VIDEO = no_effect("only for videos")


def half_precision(context: RuleContext, value: object) -> Translation:
    """Return what LLaMA-Factory's `bf16` or `fp16` becomes in llava_fsdp. Without both, LLaMA-Factory takes the dtype
    of the checkpoint (model/patcher.py), which is not known here: this is reported once, for the key `bf16`. In all
    other cases `rules.half_precision`, the rule for transformers' flags --bf16 and --fp16, translates the value."""
    run = context.run
    if not any(map(run.trainer_value, ("bf16", "fp16", "pure_bf16"))) and context.key == "bf16":
        return unsupported(
            "neither bf16 nor fp16 is set, and the checkpoint's dtype is not known here: set one of them"
        )
    return rules.half_precision(context, value)


def pure_bf16(context: RuleContext, value: object) -> Translation:
    return (
        mapped(f"{context.text_of_override('precision')}: without fp32 masters")
        if value
        else implied("masters are fp32")
    )


def disable_checkpointing(context: RuleContext, value: object) -> Translation:
    return mapped(context.text_of_override("activation_checkpointing"))


FACTORY_FLAGS: Mapping[str, Flag] = {
    **TRAINING,
    # model
    "model_name_or_path": Flag(None, shared.model_name, str),
    "model_revision": Flag("main", only_off("give a folder with that revision", "main")),
    "trust_remote_code": Flag(False, shared.CODE),
    "cache_dir": Flag(None, only_off("set the environment variable HF_HOME"), str),
    "flash_attn": Flag("auto", shared.ATTENTION),
    "use_fast_tokenizer": Flag(True, implied("the checkpoint's own tokenizer")),
    "low_cpu_mem_usage": Flag(True, implied("weights are read piece by piece")),
    "enable_liger_kernel": Flag(False, TRAINING["use_liger_kernel"].rule),
    **flags_with(VOCABULARY, resize_vocab=False, add_tokens=str, add_special_tokens=str),
    "rope_scaling": Flag(None, only_off("rotary embeddings are those of the checkpoint's config.json"), str),
    "adapter_name_or_path": Flag(None, only_off(
        "model.lora.checkpoint continues from an adapter that was made here"), str),
    "moe_aux_loss_coef": Flag(None, only_off("routers get no balance loss"), float),
    "image_max_pixels": Flag(None, only_off(shared.PIXELS), int),
    "image_min_pixels": Flag(None, only_off(shared.PIXELS), int),
    **flags_with(only_off("the checkpoint's preprocessor_config.json decides"), image_do_pan_and_scan=False,
           crop_to_patches=False),
    **flags_with(VIDEO, video_max_pixels=int, video_min_pixels=int, video_fps=float, video_maxlen=int),
    # data
    "dataset": Flag(None, shared.dataset, str),
    "eval_dataset": Flag(None, shared.held_out, str),
    "dataset_dir": Flag("data", implied(f"the folder of {DATASET_INFO} and of the files that it names")),
    "media_dir": Flag(None, becomes("data.images"), str),
    "val_size": Flag(0.0, only_off("write held-out records into a file of their own: val.path", 0.0)),
    "max_samples": Flag(None, only_off("write the records that are to be trained on into a file of their own"), int),
    "mix_strategy": Flag("concat", only_off("give data.sources.NAME.weight", "concat")),
    "interleave_probs": Flag(None, only_off("give data.sources.NAME.weight"), str),
    **flags_with(IN_PLACE, streaming=False, overwrite_cache=False, preprocessing_batch_size=1000,
           preprocessing_num_workers=int, tokenized_path=str, data_shared_file_system=False),
    "disable_shuffling": Flag(False, only_off("samples are always shuffled by seed and epoch")),
    # prompts and labels
    "template": Flag(None, implied("prompts are those of the checkpoint's own chat template"), str),
    "default_system": Flag(None, only_off("write it into the records as a system turn"), str),
    "enable_thinking": Flag(True, implied("the checkpoint's own chat template decides")),
    "cutoff_len": Flag(2048, shared.max_length(
        "a longer sample is cut at its end; there every exchange is cut in turn, prompt and answer in proportion")),
    "train_on_prompt": Flag(False, only_off("answers alone have labels")),
    "mask_history": Flag(False, only_off("every answer has labels; a loss of 0 in a turn takes one out")),
    "packing": Flag(None, only_off(shared.PACKED), bool),
    "neat_packing": Flag(False, only_off(shared.PACKED)),
    "ignore_pad_token_for_loss": Flag(True, implied("padding has no labels")),
    # what trains
    "stage": Flag("sft", OnlyIf(("sft",), "supervised fine-tuning", "only sft, supervised fine-tuning, is done here")),
    "finetuning_type": Flag("lora", shared.tuning),
    **flags_with(shared.freeze_flag, freeze_vision_tower=True, freeze_multi_modal_projector=True,
           freeze_language_model=False),
    "lora_target": Flag("all", shared.lora_targets_flag),
    "lora_rank": Flag(8, shared.lora("r")),
    "lora_alpha": Flag(None, shared.lora("alpha"), int),
    "lora_dropout": Flag(0.0, shared.lora("dropout")),
    **shared.WEIGHTS,
    "additional_target": Flag(None, only_off("adapters alone train"), str),
    "loraplus_lr_ratio": Flag(None, only_off("both matrices of an adapter have one learning rate"), float),
    **flags_with(METHOD, pissa_init=False, use_galore=False, use_apollo=False, use_badam=False,
           use_adam_mini=False, use_llama_pro=False, use_unsloth=False, use_dft_loss=False, shift_attn=False),
    "use_muon": Flag(False, only_off("optim=muon is Muon here: set it, and look at its learning rate")),
    "quantization_method": Flag("bnb", OnlyIf(("bnb",), "by bitsandbytes", "weights are quantized by bitsandbytes")),
    "quantization_bit": Flag(None, shared.quantization_flag, int),
    "quantization_type": Flag("nf4", IfDecided("model.quantize.mode", BITS)),
    "double_quantization": Flag(True, IfDecided("model.quantize.double", BITS)),
    # precision and memory
    **flags_with(half_precision, bf16=False, fp16=False),
    "pure_bf16": Flag(False, pure_bf16),
    "upcast_layernorm": Flag(False, implied("norms that train have fp32 masters")),
    "disable_gradient_checkpointing": Flag(False, disable_checkpointing),
    "use_reentrant_gc": Flag(True, implied("never the reentrant kind")),
    "gradient_checkpointing": Flag(None, no_effect("it is on unless disable_gradient_checkpointing is set"), bool),
    "fp8": Flag(False, only_off("whole models have no products in 8 bits")),
    # output
    "plot_loss": Flag(False, implied("report.html has the curve")),
    **flags_with(METRICS, include_effective_tokens_per_second=False),
    "compute_accuracy": Flag(False, no_effect("only for validation, which has the loss here")),
    "use_swanlab": Flag(False, only_off("give track.wandb or track.tensorboard")),
}  # fmt: skip
