"""What becomes of those flags of LLaVA's training script that need more than a name (`flags.FLAGS` is the table).
One function a flag, none of them long."""

from pathlib import PurePosixPath

from llava_fsdp.migrate.bash_script import is_open, shown
from llava_fsdp.migrate.context import Context, Rule
from llava_fsdp.migrate.key_outcome import Outcome, implied, mapped, no_effect, unsupported
from llava_fsdp.migrate.overrides import FSDP_STRATEGIES, LEAST_KEPT, SCHEDULES, TEMPLATES, TRACKERS
from llava_fsdp.migrate.source_run import AUTO

DECAYS = "; DeepSpeed's entry also decays norms and biases, this does not"


def model_name(context: Context, value: object) -> Outcome:
    run, frame = context.run, context.tell("model")
    if run.stage == "finetune_task":
        why = "its name has llava in it and there is no --pretrain_mm_mlp_adapter, so it is taken for a whole LLaVA"
        return mapped(f"stage=finetune_task, {frame}, {context.tell('model.checkpoint')}: {why}")
    text = f"{frame}, {context.tell('model.language')}"
    if "mpt" in shown(value):
        return unsupported(f"{text}; the original takes every name with mpt in it for an MPT model, which fails there")
    return mapped(text)


def version(context: Context, value: object) -> Outcome:
    text = context.tell("data.template")
    if is_open(value):
        return mapped(f"{text}: the original's name, as far as ours is the same")
    if value in ("v0", "v0.5"):
        return mapped(f"{text}: LLaVA train.py:894-901 leaves the template at vicuna_v1 for {value}")
    if value not in TEMPLATES:
        return unsupported(
            f"no such template; the original silently trains with vicuna_v1 (train.py:908), which is data.template=v1; "
            f"{text}"
        )
    if value in ("mpt", "chatml_direct", "mistral_direct"):
        return mapped(f"{text}: with a Llama tokenizer the original masks every label of it")
    return mapped(text)


def freeze_backbone(context: Context, value: object) -> Outcome:
    if not value:
        return implied("off, as here")
    return unsupported(
        f"the original then trains the projector and lm_head alone (train.py:844), and lm_head alone has no name in "
        f"model.train; the nearest is {context.tell('model.train')}"
    )


def vision_tower(context: Context, value: object) -> Outcome:
    if value is None:
        return unsupported("without it the original trains a language model on text; every model here has a tower")
    return mapped(context.tell("model.vision"))


def projector(context: Context, value: object) -> Outcome:
    if value is None or value == "":
        if context.run.stage != "finetune":
            return implied("the stage has it so")
        return mapped(f"{context.tell('model.projector')}: without it the original draws one, unseeded")
    if context.run.stage == "pretrain":
        return unsupported("stage=pretrain draws its projector; the original would start from this one")
    run = PurePosixPath(shown(value)).parent
    return mapped(f"{context.tell('model.projector')}; of a stage=pretrain run made here, its folder: {run}")


def projector_type(context: Context, value: object) -> Outcome:
    text = context.tell("model.projector_type")
    if "export.enabled" in context.decided:
        return mapped(
            f"{text}, export.enabled=false: transformers' LLaVA has no equal of it; llava_fsdp.export format=llava does"
        )
    return mapped(text)


def im_start_end(context: Context, value: object) -> Outcome:
    if context.run.stage == "finetune_task":
        return mapped(f"{context.tell('model.image_start_end')}: the checkpoint's tokenizer has both tokens")
    if not value:
        return implied("off, as here")
    return unsupported("it adds two tokens and draws their rows; no run here changes a vocabulary")


def im_patch_token(context: Context, value: object) -> Outcome:
    if not value:
        return implied("off, as here")
    return unsupported(
        "it adds <im_patch> to the vocabulary, which no sample ever uses; no run here changes a vocabulary, and the "
        "numbers are the same without"
    )


def patch_merge_type(context: Context, value: object) -> Outcome:
    if value == "flat":
        return implied("as here")
    return unsupported("only for pictures of several tiles, which the original does not make in training")


def aspect_ratio(context: Context, value: object) -> Outcome:
    text = context.tell("data.image_aspect_ratio")
    if value in ("pad", "square") or is_open(value):
        return mapped(text)
    return mapped(f"{text}: the original trains with square pictures for everything but pad (train.py:702-718)")


def bits(context: Context, value: object) -> Outcome:
    if value == 16:
        return implied("weights are not quantized")
    if context.run.bits is None:
        return unsupported(f"weights are quantized to 4 or 8 bits, and this command quantizes none to {shown(value)}")
    if "model.quantize.mode" not in context.decided:
        return unsupported(f"without --lora_enable the original refuses to train {value}-bit weights; so does this")
    text = f"{context.tell('model.quantize.mode')}: in the language model's blocks, lm_head stays as it is"
    return mapped(f"{text}; inputs of products are not quantized" if value == 8 else text)


def quantized(key: str) -> Rule:
    """A setting of 4-bit weights."""

    def rule(context: Context, value: object) -> Outcome:
        if context.run.bits != 4:
            return no_effect("only with --bits 4")
        if f"model.quantize.{key}" not in context.decided:
            return unsupported("like --bits")
        return mapped(context.tell(f"model.quantize.{key}"))

    return rule


def lora_enable(context: Context, value: object) -> Outcome:
    if not context.run.is_lora:
        return implied("off, as here") if not value else no_effect("the original's first stage trains no adapters")
    return mapped(
        f"{context.tell('stage')}; a loaded tower gets no adapters here, which the original gives it and never trains"
    )


def lora(key: str) -> Rule:
    """A setting of adapters, which only a run with them has."""

    def rule(context: Context, value: object) -> Outcome:
        if not context.run.is_lora:
            return no_effect("only with --lora_enable")
        return mapped(context.tell(f"model.lora.{key}"))

    return rule


def projector_lr(context: Context, value: object) -> Outcome:
    if value is None:
        return implied(f"{context.tell('optim.projector_lr')}: the projector learns at optim.lr")
    if context.run.has_ds_optimizer:
        return no_effect("DeepSpeed's optimizer entry makes one group of everything, without LLaVA's for the projector")
    if context.run.has_ds_warmup:
        return no_effect("DeepSpeed's scheduler gives every group the same rate, warmup_max_lr")
    return mapped(context.tell("optim.projector_lr"))


def group_by_modality_length(context: Context, value: object) -> Outcome:
    return mapped(
        f"{context.tell('sampler.group_by_modality_length')}: read with sampler=llava_v1_5 or compat=llava_v1_5; "
        f"else the "
        "order is a permutation of (seed, epoch)"
    )


def accumulation(context: Context, value: object) -> Outcome:
    return mapped(
        f"a factor of {context.tell('global_batch_size')}; accumulation follows from micro_batch_size and ranks"
    )


def epochs(context: Context, value: object) -> Outcome:
    if "max_steps" in context.decided:
        return no_effect("--max_steps wins")
    if "epochs" not in context.decided:
        return unsupported(f"epochs are whole; give max_steps={value} x the steps of an epoch")
    return mapped(context.tell("epochs"))


def max_steps(context: Context, value: object) -> Outcome:
    return mapped(context.tell("max_steps")) if "max_steps" in context.decided else implied("null: the whole epochs")


def of_optimizer(key: str, note: str = "") -> Rule:
    """A setting that the DeepSpeed configuration may have another value for, which then counts."""

    def rule(context: Context, value: object) -> Outcome:
        text = context.tell(key)
        if key in context.decided and context.decided[key] != value:
            return no_effect(f"the DeepSpeed configuration says {text}")
        return mapped(text + (note if value and context.run.has_ds_optimizer else ""))

    return rule


def max_grad_norm(context: Context, value: object) -> Outcome:
    run = context.run
    if not run.uses_deepspeed:
        return mapped(context.tell("optim.clip"))
    given = run.ds("gradient_clipping")
    if given is None and run.lacks_deepspeed:
        return unsupported("DeepSpeed clips by its own configuration, which was not found")
    if given is None:
        return no_effect(
            f"DeepSpeed clips, and no gradient_clipping in its configuration means none: {context.tell('optim.clip')}"
        )
    if given != AUTO and given != value:
        return unsupported(f"the original refuses to start: gradient_clipping={given} is another value")
    return mapped(context.tell("optim.clip"))


def scheduler_type(context: Context, value: object) -> Outcome:
    kind = context.run.ds("scheduler.type")
    if kind is not None:
        return no_effect(f"DeepSpeed's {kind} replaces it: {context.tell('optim.schedule')}")
    if value == "constant":
        return mapped(f"{context.tell('optim.schedule')}, optim.warmup_ratio=0: transformers' constant has no warm-up")
    if value in SCHEDULES or is_open(value):
        return mapped(context.tell("optim.schedule"))
    return unsupported(f"choose one of {sorted(set(SCHEDULES.values()))}; {context.tell('optim.schedule')}")


def warmup_ratio(context: Context, value: object) -> Outcome:
    steps = context.run.warmup_steps
    if "optim.warmup_steps" in context.decided:
        return no_effect(f"a number of steps wins: {context.tell('optim.warmup_steps')}")
    if context.run.hf("lr_scheduler_type") == "constant" and context.run.ds("scheduler.type") is None:
        return no_effect("transformers' constant schedule has no warm-up")
    return mapped(f"{context.tell('optim.warmup_ratio')}: {steps} steps")


def warmup_steps(context: Context, value: object) -> Outcome:
    if not value:
        return implied("0: by --warmup_ratio")
    return (
        mapped(context.tell("optim.warmup_steps"))
        if "optim.warmup_steps" in context.decided
        else no_effect("transformers' constant schedule has no warm-up")
    )


def optimizer_name(context: Context, value: object) -> Outcome:
    if context.run.has_ds_optimizer:
        return no_effect("DeepSpeed's optimizer entry replaces it")
    if value in ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"):
        return implied("AdamW, fused")
    return unsupported("AdamW is the optimizer, with the settings of the other flags")


def bf16(context: Context, value: object) -> Outcome:
    text = context.tell("precision")
    if not value:
        return mapped(text + ("; the original keeps the tower in fp16 then (train.py:917)" if "fp32" in text else ""))
    if context.run.uses_deepspeed:
        return mapped(f"{text}: fp32 masters and moments, as DeepSpeed has them; gradients are added in fp32 here")
    return mapped(f"{text}: with fp32 masters; without DeepSpeed the original steps the bf16 weights themselves")


def fp16(context: Context, value: object) -> Outcome:
    if not value:
        return implied("off, as here")
    text = context.tell("precision")
    if "precision.scaler.window" in context.decided and not context.run.uses_deepspeed:
        told = ", ".join(context.tell(f"precision.scaler.{key}") for key in ("window", "hysteresis"))
        return mapped(f"{text}, {told}: as torch's GradScaler, which stands behind it without DeepSpeed")
    return mapped(f"{text}: fp32 masters and norms, a loss scale as DeepSpeed's; bf16 needs none where the GPU has it")


def tf32(context: Context, value: object) -> Outcome:
    if context.decided.get("precision") not in (None, "fp32"):
        return implied("matrices are multiplied in 16 bits or fewer, which tf32 does not touch")
    if value:
        return unsupported(
            "precision=fp32 multiplies in full fp32; NVIDIA_TF32_OVERRIDE=1 before the command allows tf32"
        )
    return implied("off, as here")


def deepspeed_file(context: Context, value: object) -> Outcome:
    if value is None:
        return implied("none: " + context.tell("sharding"))
    if context.run.deepspeed is None:
        return unsupported("this file was not found: give it as another PATH")
    return mapped(f"read: {context.run.deepspeed.name}; {context.tell('sharding')}")


def fsdp(context: Context, value: object) -> Outcome:
    if not value:
        return implied("none: " + context.tell("sharding"))
    if context.run.uses_deepspeed:
        return unsupported("the original refuses --fsdp with --deepspeed")
    words = str(value).upper().split()
    unknown = [w.lower() for w in words if w not in FSDP_STRATEGIES and w not in ("AUTO_WRAP", "OFFLOAD")]
    if unknown:
        return unsupported(f"{context.tell('sharding')}; {', '.join(unknown)}: unknown to us")
    offload = f"; {context.tell('offload')}" if "OFFLOAD" in words else ""
    return mapped(f"{context.tell('sharding')}{offload}; every block of layers is a unit")


def fsdp_detail(context: Context, value: object) -> Outcome:
    if not context.run.hf("fsdp"):
        return no_effect("only with --fsdp")
    return implied("every block of layers is a unit, always")


def drop_last(context: Context, value: object) -> Outcome:
    if value:
        return unsupported("the last step of an epoch holds what is left; no sample is dropped")
    return implied(
        "no sample is dropped; the last step of an epoch is smaller, where the original fills it up with repeats"
    )


def seed(context: Context, value: object) -> Outcome:
    return mapped(f"{context.tell('seed')}: also of the projector, which the original draws before it seeds")


def determinism(context: Context, value: object) -> Outcome:
    return mapped(context.tell("deterministic")) if value else implied("off, as here")


def save_strategy(context: Context, value: object) -> Outcome:
    if value == "epoch":
        return unsupported(f"{context.tell('checkpoint.every')}: give the steps of an epoch, checkpoint.every=N")
    return mapped(context.tell("checkpoint.every"))


def save_steps(context: Context, value: object) -> Outcome:
    if context.run.hf("save_strategy") != "steps":
        return no_effect("only with --save_strategy steps")
    if "checkpoint.every" not in context.decided:
        return unsupported("a fraction of all steps; give checkpoint.every=N in steps")
    return mapped(context.tell("checkpoint.every"))


def save_total_limit(context: Context, value: object) -> Outcome:
    if not value:
        return unsupported("the original keeps every checkpoint; checkpoint.keep=N keeps the newest N, 2 unless set")
    few = isinstance(value, int) and value < LEAST_KEPT
    why = ": the newest may be the one that a crash interrupted" if few else ""
    return mapped(context.tell("checkpoint.keep") + why)


def logging_steps(context: Context, value: object) -> Outcome:
    if "log_every" not in context.decided:
        return implied("metrics.jsonl has every step")
    return mapped(f"{context.tell('log_every')}; metrics.jsonl has every step")


def logging_strategy(context: Context, value: object) -> Outcome:
    if value == "steps":
        return mapped(context.tell("log_every"))
    return implied("metrics.jsonl has every step; log_every is for the terminal")


def report_to(context: Context, value: object) -> Outcome:
    if is_open(value):
        return unsupported(f"{shown(value)} is not known; say track.wandb=online or track.tensorboard=true")
    names = [w for w in shown(value or "").split() if w != "none"]
    if not names:
        return implied("metrics.jsonl has every step")
    told = ", ".join(context.tell(key) for key, _ in TRACKERS.values() if key in context.decided)
    others = [name for name in names if name != "all" and name not in TRACKERS]
    if others:
        why = f"{', '.join(others)} is not told; metrics.jsonl has every step, and report.html shows it"
        return unsupported(f"{told}; {why}" if told else why)
    return mapped(f"{told}: the original takes those that are installed" if "all" in names else told)


def run_name(context: Context, value: object) -> Outcome:
    if value and "track.name" in context.decided:
        return mapped(f"{context.tell('track.name')}, at Weights & Biases; else a run is named by output_dir")
    return unsupported("a run is named by output_dir") if value else implied("a run is named by output_dir")


def evaluation(context: Context, value: object) -> Outcome:
    if value == "no":
        return implied("no evaluation during training")
    return unsupported("the original has no evaluation data and fails; name some with val.every and val.path")


def torch_compile(context: Context, value: object) -> Outcome:
    """One of four flags, each of which switches it on in transformers."""
    if value in (None, False, ""):
        if context.key != "torch_compile" or "torch_compile" not in context.run.flags:
            return implied("off; compile=auto compiles blocks on CUDA all the same")
        if context.decided.get("compile"):
            return no_effect(f"a backend or a mode switches it on: {context.tell('compile')}")
        return mapped(context.tell("compile"))
    if context.decided.get("compile") is False:
        return mapped(f"{context.tell('compile')}: its backend writes no kernels, and runs the operations as they are")
    if value is True or value in ("inductor", "default"):
        return mapped(f"{context.tell('compile')}: blocks of layers, one at a time, with inductor")
    why = "blocks are compiled by torch.compile's own backend, inductor, in its default mode"
    return unsupported(f"{shown(value)}: {why}; {context.tell('compile')}")
