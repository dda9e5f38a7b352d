"""Rules for flags of LLaVA's training program that need more than a fixed answer. They are entries of
`llava_flags.FLAGS`."""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from llava_fsdp.migrate.to_keys.keys import OFF, RuleContext, Translation, implied, mapped, no_effect, unsupported
from llava_fsdp.migrate.to_keys.overrides import FSDP_STRATEGIES, SCHEDULES, TEMPLATES, TRACKERS

Function = Callable[[RuleContext, object], Translation]
DECAYS = "; DeepSpeed's entry also decays norms and biases, a run here does not"


def model_name(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --model_name_or_path, a whole LLaVA or a language model, becomes in llava_fsdp."""
    chosen = context.text_of_override("model")
    if context.run.stage == "finetune_task":
        why = "its name has llava in it and there is no --pretrain_mm_mlp_adapter, so it is taken for a whole LLaVA"
        return mapped(f"stage=finetune_task, {chosen}, {context.text_of_override('model.checkpoint')}: {why}")
    text = f"{chosen}, {context.text_of_override('model.language')}"
    if "mpt" in str(value):
        return unsupported(f"{text}; the original takes every name with mpt in it for an MPT model, which fails there")
    return mapped(text)


def data_path(context: RuleContext, value: object) -> Translation:
    """Return what --data_path (a file, a pattern, or LLaVA-NeXT's YAML file with several) becomes in llava_fsdp."""
    files = context.run.data_files  # a text says why the files are not known
    if isinstance(files, str):
        return unsupported(files)
    listed = f"{context.run.datasets.name} lists {len(files)} files: " if context.run.datasets else ""
    return mapped(f"{listed}{context.text_of_override('data')}, {context.text_of_override('data.path')}")


def version(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --version, the template of the conversations, becomes in llava_fsdp."""
    text = context.text_of_override("data.template")
    if value in ("v0", "v0.5"):
        return mapped(f"{text}: LLaVA train.py:894-901 leaves the template at vicuna_v1 for {value}")
    if value not in TEMPLATES:
        why = "no such template; the original silently trains with vicuna_v1 (train.py:908), which is data.template=v1"
        return unsupported(f"{why}; {text}")
    if value in ("mpt", "chatml_direct", "mistral_direct"):
        return mapped(f"{text}: with a Llama tokenizer the original masks every label of it")
    return mapped(text)


def projector(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --pretrain_mm_mlp_adapter, the file of a trained projector, becomes in llava_fsdp. Without
    the flag LLaVA begins with a random projector."""
    stage = context.run.stage
    if not value:
        if stage != "finetune":
            return implied("the stage has it so")
        return mapped(f"{context.text_of_override('model.projector')}: without it the original draws one, unseeded")
    if stage == "pretrain":
        return unsupported("stage=pretrain draws its projector; the original would start from this one")
    folder = PurePosixPath(str(value)).parent
    return mapped(
        f"{context.text_of_override('model.projector')}; after stage=pretrain here, give that run's folder: {folder}"
    )


def projector_type(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --mm_projector_type (multimodal_projector/builder.py:33-51) becomes in llava_fsdp. For a type
    that transformers' LLaVA lacks, the command turns the run's export off (`export.enabled`)."""
    text = context.text_of_override("model.projector_type")
    if "export.enabled" in context.decided:
        text += f", {context.text_of_override('export.enabled')}"
    if re.fullmatch(r"linear|identity|mlp[1-9]\d*x_gelu", str(value)) is None:
        return unsupported(f"{text}: the original has no such projector, and stops at it")
    if "export.enabled" in context.decided:
        text += ": transformers' LLaVA has no such projector; llava-fsdp export format=llava writes it with a Llama"
    return mapped(text)


def bits(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --bits, the number of bits of the language model's weights, becomes in llava_fsdp."""
    if value == 16:
        return implied("weights are not quantized")
    if context.run.bits is None:  # neither 4 nor 8, and not 16
        return unsupported(f"weights are quantized to 4 or 8 bits, not to {value}")
    if "model.quantize.mode" not in context.decided:  # the command sets it only with adapters: bits are not trained
        return unsupported(f"without adapters {value}-bit weights cannot be trained, in the original or here")
    text = f"{context.text_of_override('model.quantize.mode')}: in the language model's blocks, lm_head stays as it is"
    if value == 8:  # the original's Linear8bitLt also quantizes what it multiplies with its weight
        text += "; inputs of products are not quantized"
    return mapped(text)


def lora_enable(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA's --lora_enable becomes in llava_fsdp. LLaVA ignores it in the first stage."""
    if not context.run.is_lora:
        return OFF if not value else no_effect("the original's first stage trains no adapters")
    text = context.text_of_override("stage")
    return mapped(f"{text}; the vision tower gets no adapters here; the original adds some and never trains them")


def of_optimizer(key: str, note: str = "") -> Function:
    """Return a rule for an optimizer flag, which becomes the override `key`. If DeepSpeed's configuration sets another
    value, that value counts, and the flag has no effect. `note` is added to the rule's text if DeepSpeed's
    configuration has an `optimizer` entry and the flag's value is not 0."""

    def rule(context: RuleContext, value: object) -> Translation:
        """Return what the optimizer flag becomes in llava_fsdp: the override `key`, or nothing if DeepSpeed sets it."""
        text = context.text_of_override(key)
        if key in context.decided and context.decided[key] != value:
            return no_effect(f"DeepSpeed's configuration counts, its defaults too: {text}")
        return mapped(text + (note if value and context.run.has_ds_optimizer else ""))

    return rule


def scheduler_type(context: RuleContext, value: object) -> Translation:
    """Return what --lr_scheduler_type becomes in llava_fsdp. A scheduler of DeepSpeed's configuration replaces it."""
    kind = context.run.ds("scheduler.type")
    if kind is not None:
        return no_effect(f"DeepSpeed's {kind} replaces it: {context.text_of_override('optim.schedule')}")
    if value == "constant":
        return mapped(
            f"{context.text_of_override('optim.schedule')}, optim.warmup_ratio=0: transformers' constant has no warm-up"
        )
    if value in SCHEDULES:
        return mapped(context.text_of_override("optim.schedule"))
    return unsupported(
        f"choose one of {sorted(set(SCHEDULES.values()))}, with optim.decay_ratio for a stable phase and "
        f"optim.min_lr_ratio for a rate above 0 at the end; {context.text_of_override('optim.schedule')}"
    )


def warmup_ratio(context: RuleContext, value: object) -> Translation:
    """Return what --warmup_ratio becomes in llava_fsdp. A number of warm-up steps or a constant schedule wins."""
    if "optim.warmup_steps" in context.decided:
        return no_effect(f"a number of steps wins: {context.text_of_override('optim.warmup_steps')}")
    if context.run.trainer_value("lr_scheduler_type") == "constant" and context.run.ds("scheduler.type") is None:
        return no_effect("transformers' constant schedule has no warm-up")
    return mapped(context.text_of_override("optim.warmup_ratio"))


def half_precision(context: RuleContext, value: object) -> Translation:
    """Return what --bf16 or --fp16 (`context.key`) becomes in llava_fsdp. With fp16 and without DeepSpeed, transformers
    uses torch's GradScaler, whose settings are then overrides too (`precision.scaler.*`)."""
    text = context.text_of_override("precision")
    if not value:
        return OFF if context.key == "fp16" else mapped(text)
    if context.key == "bf16":
        return mapped(f"{text}: fp32 masters, moments and sums of gradients, with and without DeepSpeed")
    # `decided`: the overrides of the command
    if context.run.uses_deepspeed or "precision.scaler.window" not in context.decided:
        return mapped(f"{text}: fp32 masters and norms, a loss scale as DeepSpeed's")
    scaler = ", ".join(context.text_of_override(f"precision.scaler.{key}") for key in ("window", "hysteresis"))
    return mapped(f"{text}, {scaler}: as torch's GradScaler, which transformers uses without DeepSpeed")


def deepspeed_file(context: RuleContext, value: object) -> Translation:
    """Return what becomes of --deepspeed, the name of DeepSpeed's configuration file: the file is read, if found."""
    if value is None:
        return implied("no DeepSpeed: " + context.text_of_override("sharding"))
    if context.run.deepspeed is None:
        return unsupported("this file was not found: give it as another PATH")
    return mapped(f"read: {context.run.deepspeed.name}; {context.text_of_override('sharding')}")


def fsdp(context: RuleContext, value: object) -> Translation:
    """Return what --fsdp becomes in llava_fsdp. Its value is words separated by spaces: a sharding strategy,
    `auto_wrap`, `offload`."""
    if not value:
        return implied("no FSDP: " + context.text_of_override("sharding"))
    if context.run.uses_deepspeed:
        return unsupported("the original refuses --fsdp with --deepspeed")
    words = str(value).upper().split()
    unknown = [w.lower() for w in words if w not in FSDP_STRATEGIES and w not in ("AUTO_WRAP", "OFFLOAD")]
    if unknown:
        return unsupported(f"{context.text_of_override('sharding')}; {', '.join(unknown)}: not a known word of --fsdp")
    offload = f"; {context.text_of_override('offload')}" if "OFFLOAD" in words else ""
    return mapped(f"{context.text_of_override('sharding')}{offload}; every block of layers is a unit")


def save_strategy(context: RuleContext, value: object) -> Translation:
    """Return what --save_strategy (`no`, `steps` or `epoch`) becomes in llava_fsdp."""
    if value == "epoch":
        return unsupported(
            f"{context.text_of_override('checkpoint.every')}: give the steps of an epoch, checkpoint.every=N"
        )
    return mapped(context.text_of_override("checkpoint.every"))


def report_to(context: RuleContext, value: object) -> Translation:
    """Return what --report_to becomes in llava_fsdp: transformers' names of trackers, separated by spaces; "all" and
    "none" are allowed. They become the overrides of llava_fsdp's own trackers, such as `track.wandb=online`."""
    names = [w for w in str(value or "").split() if w != "none"]
    if not names:
        return implied("metrics.jsonl has every step")
    text = ", ".join(context.text_of_override(key) for key, _ in TRACKERS.values() if key in context.decided)
    others = [name for name in names if name != "all" and name not in TRACKERS]
    if others:
        why = f"{', '.join(others)} is not supported; metrics.jsonl has every step, and report.html shows it"
        return unsupported(f"{text}; {why}" if text else why)
    return mapped(f"{text}: transformers takes those that are installed" if "all" in names else text)


def torch_compile(context: RuleContext, value: object) -> Translation:
    """Return what a flag with which transformers turns on torch.compile (--torch_compile, --torch_compile_backend,
    --torch_compile_mode, --torchdynamo) becomes in llava_fsdp."""
    text = context.text_of_override("compile")
    if value in (None, False, ""):
        if context.key != "torch_compile" or "torch_compile" not in context.run.flags:
            return implied("off; compile=auto compiles blocks on CUDA all the same")
        # the command has --torch_compile False
        return no_effect(f"a backend or a mode switches it on: {text}") if context.decided["compile"] else mapped(text)
    if value is True or value in ("inductor", "default"):
        return mapped(f"{text}: blocks of layers, one at a time, with inductor")
    return unsupported(f"{value}: blocks are compiled with inductor in its default mode; {text}")
