"""What becomes of those DeepSpeed keys that need more than a name (`deepspeed.DEEPSPEED` is the table).

One function a key, none of them long. A rule gets the whole dotted key in `context.key`; `auto` is resolved as
transformers does (integrations/deepspeed.py).
"""

from dataclasses import dataclass

from llava_fsdp.migrate.bash_script import is_open, shown
from llava_fsdp.migrate.context import Context, written
from llava_fsdp.migrate.key_outcome import REFUSED, Outcome, Verdict, implied, mapped, no_effect, refused, unsupported
from llava_fsdp.migrate.overrides import DS_ADAM, DS_SCHEDULES, SCALER, STAGES
from llava_fsdp.migrate.source_run import AUTO, plain

NO_SCRIPT = "filled in by the training script: give that as another PATH"
AS_TEXT = "; written as text, which transformers takes for another value than the script's and refuses"


def unsaid(context: Context, flag: str) -> Outcome:
    """`auto` without a script."""
    return mapped(NO_SCRIPT, f"--{flag} ({written(context.run.table[flag].default)} where it is not given)")


def from_flag(context: Context, value: object, flag: str, text: str) -> Outcome:
    """`auto` is the trainer's flag; another value than the flag's is a mistake that transformers refuses."""
    if value == AUTO and not context.run.launch:
        return unsaid(context, flag)
    return compared(context, value, context.run.hf(flag), text, f"--{flag}")


def compared(context: Context, value: object, theirs: object, text: str, name: str) -> Outcome:
    """What transformers' `fill_match` does with a value of the JSON and one of the script."""
    if value == AUTO:
        return mapped(text, theirs)
    if not context.run.launch or is_open(theirs) or value == theirs:
        return mapped(text)
    same = [plain(v) for v in value] == theirs if isinstance(value, list) else plain(value) == theirs
    return mapped(text + AS_TEXT) if same else refused(f"{name} is {shown(theirs)}")


def train_batch_size(context: Context, value: object) -> Outcome:
    run, text = context.run, context.tell("global_batch_size")
    if run.launch:
        return compared(context, value, run.batch, text, "micro-batch x accumulation x GPUs")
    if value != AUTO:
        mistake = run.ds_batch.mistake
        return unsupported(f"{REFUSED}: {mistake}; the command has {text}") if mistake else mapped(text)
    if "global_batch_size" in context.decided:
        return mapped(text, context.decided["global_batch_size"])
    known = [run.ds("train_micro_batch_size_per_gpu"), run.ds("gradient_accumulation_steps"), run.gpus]
    names = ("micro-batch", "accumulation", "GPUs")
    return mapped(NO_SCRIPT, " x ".join(str(k) if isinstance(k, int) else n for k, n in zip(known, names, strict=True)))


def micro_batch_size(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "per_device_train_batch_size", context.tell("micro_batch_size"))


def accumulation(context: Context, value: object) -> Outcome:
    text = f"a factor of {context.tell('global_batch_size')}"
    return from_flag(context, value, "gradient_accumulation_steps", text)


def optimizer_type(context: Context, value: object) -> Outcome:
    if str(value).lower() not in DS_ADAM:
        return unsupported(f"AdamW is the optimizer, and stands in: {value} has no equal here")
    text = "optim=adamw"
    if context.run.launch:
        text += f", in one group as DeepSpeed makes it, without LLaVA's own: {context.tell('optim.projector_lr')}"
    return mapped(text)


def lr(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "learning_rate", context.tell("optim.lr"))


def eps(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "adam_epsilon", context.tell("optim.eps"))


def weight_decay(context: Context, value: object) -> Outcome:
    found = from_flag(context, value, "weight_decay", context.tell("optim.weight_decay"))
    if context.decided.get("optim.weight_decay"):
        return Outcome(
            found.verdict, f"{found.text}; DeepSpeed decays norms and biases too, this does not", found.resolved
        )
    return found


def betas(context: Context, value: object) -> Outcome:
    run, text = context.run, f"{context.tell('optim.beta1')}, {context.tell('optim.beta2')}"
    if value == AUTO and not run.launch:
        return mapped(NO_SCRIPT, "--adam_beta1, --adam_beta2 (0.9, 0.999 where they are not given)")
    return compared(context, value, [run.hf("adam_beta1"), run.hf("adam_beta2")], text, "--adam_beta1, --adam_beta2")


def adam_w_mode(context: Context, value: object) -> Outcome:
    if plain(value) or str(context.run.ds("optimizer.type")).lower() == "adamw":
        return implied("decay apart from the gradient: AdamW")
    if context.decided.get("optim.weight_decay") == 0:
        return implied("without weight decay Adam is AdamW")
    return unsupported("AdamW is the optimizer: decay apart from the gradient, not L2")


def scheduler_type(context: Context, value: object) -> Outcome:
    if not any(value == kind for kind, _ in DS_SCHEDULES):
        return unsupported(f"{value} has no equal here; {context.tell('optim.schedule')}")
    return mapped(
        f"{context.tell('optim.schedule')}: DeepSpeed's {value} replaces --lr_scheduler_type. Its engine steps once "
        "before the schedule begins; here step n has the schedule's n-th value"
    )


def warmup_min_lr(context: Context, value: object) -> Outcome:
    if value == AUTO:
        return implied("warm-up begins at 0", 0)
    return implied("warm-up begins at 0") if not plain(value) else unsupported("warm-up begins at 0")


def warmup_max_lr(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "learning_rate", context.tell("optim.lr"))


def warmup_num_steps(context: Context, value: object) -> Outcome:
    run = context.run
    key = "optim.warmup_steps" if "optim.warmup_steps" in context.decided else "optim.warmup_ratio"
    if value == AUTO and not run.launch:
        return mapped(NO_SCRIPT, "--warmup_steps, else ceil(--warmup_ratio x steps) (0 where neither is given)")
    if value != AUTO and run.launch and not isinstance(run.warmup_steps, int):
        return mapped(f"{context.tell(key)}; the original refuses another number than the script's {run.warmup_steps}")
    return compared(context, value, run.warmup_steps, context.tell(key), "the script's warm-up in steps")


def total_num_steps(context: Context, value: object) -> Outcome:
    steps = context.run.total_steps
    if value == AUTO:
        return implied("schedules end with the run", steps or "all steps")
    if plain(value) == steps:
        return implied("schedules end with the run")
    if context.run.launch and steps:
        return refused(f"the run has {steps} steps")
    return unsupported(f"schedules end with the run; give max_steps={value} if it is that long")


def gradient_clipping(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "max_grad_norm", context.tell("optim.clip"))


def communication_dtype(context: Context, value: object) -> Outcome:
    if value in ("fp32", None):
        return implied("gradients are reduced in fp32 (precision.reduce_dtype)")
    if value == "bf16":
        return unsupported("gradients are reduced in fp32; compat=llava_v1_5 reduces them in bf16")
    return unsupported("gradients are reduced in fp32 (precision.reduce_dtype)")


def accumulation_dtype(context: Context, value: object) -> Outcome:
    if value in ("fp32", None):
        return implied("gradients are added in fp32 (precision.reduce_dtype)")
    return unsupported("gradients are added in fp32 (precision.reduce_dtype)")


def bf16(context: Context, value: object) -> Outcome:
    run, text = context.run, context.tell("precision")
    if value == AUTO and not run.launch:
        return unsaid(context, "bf16")
    return compared(context, value, run.truth("bf16") or run.truth("bf16_full_eval"), text, "--bf16")


def fp16_enabled(context: Context, value: object) -> Outcome:
    run = context.run
    if value == AUTO and not run.launch:
        return unsaid(context, "fp16")
    theirs = run.truth("fp16") or run.truth("fp16_full_eval")
    on = theirs if value == AUTO else plain(value)
    found = compared(context, value, theirs, context.tell("precision") if on else "off, as here", "--fp16")
    return found if on or found.verdict is Verdict.unsupported else implied(found.text, found.resolved)


def fp16(context: Context, value: object) -> Outcome:
    """A key of the block beside `enabled`."""
    run, key = context.run, context.key.partition(".")[2]
    enabled = run.ds("fp16.enabled", False)
    if enabled == AUTO and not run.launch:
        return no_effect("only with --fp16")
    if not (run.truth("fp16") if enabled == AUTO else enabled):
        return no_effect("fp16 is off")
    if key in SCALER:
        fixed = run.ds("fp16.loss_scale") not in (None, 0)
        if fixed and key != "loss_scale":
            return no_effect("the loss scale is fixed: loss_scale")
        return mapped(context.tell(SCALER[key]) if SCALER[key] in context.decided else "dynamic, as here")
    if key == "auto_cast":
        return implied("pictures are cast to what the model computes in")
    if plain(value) is False:
        return implied("off, as here")
    why = {"consecutive_hysteresis": "a step without an overflow does not fill the hysteresis; a doubled scale does"}
    return unsupported(why.get(key, "masters are fp32 beside fp16 (precision.master_dtype)"))


def bf16_kept(context: Context, value: object) -> Outcome:
    """Masters, and with them moments, in bf16."""
    if not plain(value):
        return implied("fp32, as here")
    if context.decided.get("precision") != "bf16_pure":
        return no_effect("only with bf16, and moments only with bf16_master_weights_and_grads")
    moments = ", " + context.tell("precision.moment_dtype") if "precision.moment_dtype" in context.decided else ""
    return mapped(f"{context.tell('precision')}{moments}: rounded at random here, so that small updates are not lost")


def amp(context: Context, value: object) -> Outcome:
    if value == AUTO:
        return implied("off, as here", False)
    return unsupported(f"apex is not used; {context.tell('precision')}") if plain(value) else implied("off, as here")


def stage(context: Context, value: object) -> Outcome:
    text = context.tell("sharding")
    if plain(value) not in list(STAGES):
        return unsupported("ZeRO has stages 0 to 3")
    if "sharding.shard_size" in context.decided:
        return mapped(f"{text}, {context.tell('sharding.shard_size')}")
    if context.run.uses_deepspeed and plain(value) == 2:
        return mapped(f"{text}: as little memory as ZeRO-2 or less; weights are sharded between steps too")
    return mapped(text)


@dataclass(frozen=True)
class Bucket:
    """Elements of a bucket: `factor` x hidden size squared where it is auto."""

    factor: float
    stage3: bool = False

    def __call__(self, context: Context, value: object) -> Outcome:
        text = "FSDP2 gathers and reduces one block of layers at a time, ahead of the computation; "
        text += "sharding.prefetch=N" if self.stage3 else "sharding.blocks_per_unit=N"
        text += " is in units of blocks, not in elements"
        if self.stage3 and context.run.ds("zero_optimization.stage") != 3:
            return no_effect("only at stage 3")
        if value != AUTO:
            return implied(text)
        hidden = context.run.hidden_size
        if hidden is None:
            return implied(text, f"{self.factor:g} x hidden_size^2 (give hidden_size=N)")
        return implied(text, hidden * hidden if self.factor == 1 else self.factor * hidden * hidden)


def persistence(context: Context, value: object) -> Outcome:
    text = "small parameters are gathered with the block that they belong to"
    if context.run.ds("zero_optimization.stage") != 3:
        return no_effect("only at stage 3")
    if value != AUTO:
        return implied(text)
    hidden = context.run.hidden_size
    return implied(text, 10 * hidden if hidden else "10 x hidden_size (give hidden_size=N)")


def hpz(context: Context, value: object) -> Outcome:
    if plain(value) in (0, 1, None):
        return implied("off, as here")
    if context.run.ds("zero_optimization.stage") != 3:
        return no_effect("only at stage 3")
    if "sharding.shard_size" not in context.decided:
        return outside(context, value)
    return mapped(
        f"{context.tell('sharding')}, {context.tell('sharding.shard_size')}: weights are gathered inside the group, as "
        "hpZ does in backward; optimizer states are sharded over the group too, where ZeRO++ shards them over all ranks"
    )


def mics(context: Context, value: object) -> Outcome:
    if plain(value) in (-1, 0, 1, None):
        return implied("off, as here")
    if context.run.ds("zero_optimization.stage") != 3:
        return no_effect("only at stage 3")
    if "sharding.shard_size" not in context.decided:
        return outside(context, value)
    return mapped(f"{context.tell('sharding')}, {context.tell('sharding.shard_size')}")


def outside(context: Context, value: object) -> Outcome:
    """A group of ranks that this many GPUs cannot be cut into."""
    gpus, size = context.run.gpus, plain(value)
    if isinstance(size, int) and gpus and size < gpus:
        return unsupported(f"{REFUSED}: {gpus} GPUs are no multiple of {size}; {context.tell('sharding')}")
    return mapped(f"{context.tell('sharding')}: the group is all ranks")


PINNED = implied("host memory is pinned wherever there is a GPU; the pages of files are not")


def offload(context: Context, value: object) -> Outcome:
    """A key of offload_param or offload_optimizer, or of the old form."""
    parts = context.key.split(".")
    if parts[1].startswith("cpu_"):
        if not plain(value):
            return implied("off, as here")
        return PINNED if "pin_memory" in parts[1] else mapped(context.tell("offload"))
    block, name = ".".join(parts[:2]), parts[-1]
    device = context.run.ds(f"{block}.device", "none")
    if device in ("none", None):
        return implied("off, as here")
    if parts[1] == "offload_param" and context.run.ds_or_default("zero_optimization.stage") != 3:
        return no_effect("parameters are offloaded with stage 3 alone")
    if name == "device":
        moved = "" if parts[1] == "offload_param" else ": masters, gradients and moments, as there"
        return mapped(context.tell("offload") + moved)
    if name == "nvme_path":
        return mapped(context.tell("offload.folder")) if device == "nvme" else no_effect("only with device nvme")
    if name == "pin_memory":
        return PINNED
    if name == "ratio" and plain(value) not in (1, 1.0):
        return unsupported("all of the optimizer's state is offloaded, not a share of it")
    return implied("buffers are of one size, and what comes next is read ahead")


def aio(context: Context, value: object) -> Outcome:
    if context.decided.get("offload") == "nvme":
        return implied("files are mapped into memory, and a thread reads ahead")
    return no_effect("only with offload to nvme")


def old_zero(context: Context, value: object) -> Outcome:
    if value in ({}, True, False, None):
        return mapped(f"{context.tell('sharding')}: the old form of this key is stage {int(bool(value))}")
    return unsupported(f'{context.tell("sharding")}: this is no block of settings; say {{"stage": 1}}')


def activation_checkpointing(context: Context, value: object) -> Outcome:
    """Its block counts for models that call DeepSpeed's checkpointing; LLaVA's call torch's."""
    asks_for_host = context.key.endswith(".cpu_checkpointing") and plain(value) is True
    if asks_for_host and not context.run.launch:
        return mapped(
            f"{context.tell('activation_checkpointing')}: blocks run again from inputs that wait in the host's memory"
        )
    nearest = "; activation_checkpointing=offload does what this asks for" if asks_for_host else ""
    return no_effect(
        "only for models that call DeepSpeed's own checkpointing; LLaVA's is --gradient_checkpointing, "
        "activation_checkpointing= here" + nearest
    )


@dataclass(frozen=True)
class Switched:
    """A block with a switch of its own (or a size, 1 is off): off, it is as here; on, it has no equal."""

    why: str
    flag: str = "enabled"

    def __call__(self, context: Context, value: object) -> Outcome:
        block = context.key.partition(".")[0]
        values = context.run.deepspeed.values if context.run.deepspeed else {}
        switch = plain(values.get(f"{block}.{self.flag}"))
        inner = [plain(v) for k, v in values.items() if k.startswith(block + ".") and k.endswith("." + self.flag)]
        on = [v for v in inner if v not in (None, 0, 1) or v is True]
        if switch is False or not on:
            return implied(f"{block} is off, as here")
        return unsupported(self.why)
