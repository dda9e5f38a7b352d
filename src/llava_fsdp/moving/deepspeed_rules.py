"""What becomes of those DeepSpeed keys that need more than a name (`deepspeed.DEEPSPEED` is the table).

A rule gets the whole dotted key in `context.key`; `auto` is resolved as transformers does (integrations/deepspeed.py).
"""

from dataclasses import dataclass

from llava_fsdp.moving.context import Context
from llava_fsdp.moving.decide import DS_ADAM, DS_SCHEDULES, STAGES
from llava_fsdp.moving.outcome import Outcome, implied, mapped, no_effect, unsupported
from llava_fsdp.moving.run import AUTO, plain
from llava_fsdp.moving.shell import is_open, shown

NO_SCRIPT = mapped("filled in by the training script: give that as another PATH")


def from_flag(context: Context, value: object, flag: str, text: str) -> Outcome:
    """`auto` is the trainer's flag; another value than the flag's is a mistake that transformers refuses."""
    run = context.run
    if value == AUTO:
        return mapped(text, run.hf(flag)) if run.launch else NO_SCRIPT
    if run.launch and not is_open(run.hf(flag)) and value != run.hf(flag):
        return refused(f"--{flag} is {shown(run.hf(flag))}")
    return mapped(text)


def refused(why: str) -> Outcome:
    return unsupported(f"the original refuses to start: {why}; say auto here, or the same in both")


def train_batch_size(context: Context, value: object) -> Outcome:
    run, text = context.run, context.tell("global_batch_size")
    if not run.launch:
        whole = f"micro-batch x accumulation x {run.gpus or 'GPUs'}"
        return mapped(NO_SCRIPT.text, whole) if value == AUTO else mapped(text)
    if value == AUTO:
        return mapped(text, shown(run.batch) if is_open(run.batch) else run.batch)
    if not is_open(run.batch) and value != run.batch:
        return refused(f"micro-batch x accumulation x GPUs is {run.batch}")
    return mapped(f"{text}: micro-batch x accumulation x GPUs must be {value}")


def micro_batch_size(context: Context, value: object) -> Outcome:
    return from_flag(context, value, "per_device_train_batch_size", context.tell("micro_batch_size"))


def accumulation(context: Context, value: object) -> Outcome:
    text = f"a factor of {context.tell('global_batch_size')}"
    return from_flag(context, value, "gradient_accumulation_steps", text)


def optimizer_type(context: Context, value: object) -> Outcome:
    if str(value).lower() not in DS_ADAM:
        return unsupported(f"AdamW is the optimizer: {value} has no equal here")
    return mapped(
        "optim=adamw, in one group as DeepSpeed makes it: without LLaVA's own group for the projector "
        "(optim.projector_lr=null)"
    )


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
    if not run.launch:
        return NO_SCRIPT if value == AUTO else mapped(text)
    theirs = [run.hf("adam_beta1"), run.hf("adam_beta2")]
    if value == AUTO:
        return mapped(text, theirs)
    return mapped(text) if value == theirs else refused(f"--adam_beta1, --adam_beta2 are {theirs}")


def adam_w_mode(context: Context, value: object) -> Outcome:
    if value in (True, "true") or str(context.run.ds("optimizer.type")).lower() == "adamw":
        return implied("decay apart from the gradient: AdamW")
    if not context.decided.get("optim.weight_decay"):
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
    if value == AUTO:
        return mapped(context.tell(key), run.warmup_steps) if run.launch else NO_SCRIPT
    if run.launch and isinstance(run.warmup_steps, int) and value != run.warmup_steps:
        return refused(f"the trainer's warm-up is {run.warmup_steps} steps")
    return mapped(context.tell(key))


def total_num_steps(context: Context, value: object) -> Outcome:
    if value == AUTO:
        return implied("all steps of the run", context.run.total_steps or "all steps")
    return unsupported(f"schedules end with the run; give max_steps={value} if it is that long")


def gradient_clipping(context: Context, value: object) -> Outcome:
    run, text = context.run, context.tell("optim.clip")
    if value == AUTO:
        return mapped(text, run.hf("max_grad_norm")) if run.launch else NO_SCRIPT
    if run.launch and not is_open(run.hf("max_grad_norm")) and value != run.hf("max_grad_norm"):
        return refused(f"--max_grad_norm is {shown(run.hf('max_grad_norm'))}")
    return mapped(text)


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
    if value == AUTO:
        return mapped(text, run.hf("bf16") or run.hf("bf16_full_eval")) if run.launch else NO_SCRIPT
    if run.launch and plain(value) != run.truth("bf16"):
        return refused(f"--bf16 is {run.truth('bf16')}")
    return mapped(text)


def fp16_enabled(context: Context, value: object) -> Outcome:
    run = context.run
    resolved = None
    if value == AUTO:
        if not run.launch:
            return NO_SCRIPT
        resolved = run.truth("fp16") or run.truth("fp16_full_eval")
    if not (resolved if value == AUTO else plain(value)):
        return implied("off, as here", resolved)
    text = f"fp16 needs a loss scale and loses small gradients; {context.tell('precision')} stands in for it"
    return unsupported(text, resolved)


def fp16(context: Context, value: object) -> Outcome:
    enabled = plain(context.run.ds("fp16.enabled", False))
    if enabled == AUTO:
        enabled = context.run.truth("fp16")
    if not enabled:
        return no_effect("fp16 is off")
    return unsupported("bf16 needs no loss scale; there is no fp16 here")


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
class bucket:  # noqa: N801 - a rule with a parameter, used as the others are
    """Elements of a bucket: `factor` x hidden size squared where it is auto."""

    factor: float
    stage3: bool = False

    def __call__(self, context: Context, value: object) -> Outcome:
        text = "FSDP2 gathers and reduces one block of layers at a time, ahead of the computation"
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
        return mapped(f"{context.tell('sharding')}: the group is all ranks")
    return mapped(
        f"{context.tell('sharding')}, {context.tell('sharding.shard_size')}: weights are gathered inside the group, as "
        "hpZ does in backward; optimizer states are sharded over the group too, where ZeRO++ shards them over all ranks"
    )


def mics(context: Context, value: object) -> Outcome:
    if plain(value) in (-1, 0, 1, None):
        return implied("off, as here")
    return mapped(f"{context.tell('sharding')}, {context.tell('sharding.shard_size')}")


def offload(context: Context, value: object) -> Outcome:
    parts = context.key.split(".")
    block = ".".join(parts[:2])
    if parts[1].startswith("cpu_"):
        on = bool(plain(value))
    else:
        on = context.run.ds(f"{block}.device", "none") not in ("none", None)
    if not on:
        return implied("off, as here")
    return unsupported("offload: not yet. Shard over more GPUs, or take sharding=zero3 recompute=full")


def old_zero(context: Context, value: object) -> Outcome:
    if value in ({}, False, None):
        return implied("stage 0: " + context.tell("sharding"))
    return unsupported('the old form of this key; say {"stage": 1}')


def activation_checkpointing(context: Context, value: object) -> Outcome:
    return no_effect(
        "only for models that call DeepSpeed's own checkpointing; LLaVA's is --gradient_checkpointing, recompute= here"
    )


@dataclass(frozen=True)
class switched:  # noqa: N801 - a rule with a parameter, used as the others are
    """A block with a switch of its own: off, it is as here; on, it has no equal."""

    why: str
    flag: str = "enabled"

    def __call__(self, context: Context, value: object) -> Outcome:
        block = context.key.partition(".")[0]
        values = context.run.deepspeed.values if context.run.deepspeed else {}
        switch = plain(values.get(f"{block}.{self.flag}"))
        inner = [plain(v) for k, v in values.items() if k.startswith(block + ".") and k.endswith("." + self.flag)]
        if switch is False or not any(inner):
            return implied(f"{block} is off, as here")
        return unsupported(self.why)


@dataclass(frozen=True)
class single:  # noqa: N801 - a rule with a parameter, used as the others are
    """A block that does nothing at size 1."""

    why: str
    flag: str

    def __call__(self, context: Context, value: object) -> Outcome:
        block = context.key.partition(".")[0]
        if plain(context.run.ds(f"{block}.{self.flag}", 1)) in (0, 1):
            return implied(f"{block} is off, as here")
        return unsupported(self.why)
