"""Every key of every input of a run, once, with its verdict: nothing is dropped."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from llava_fsdp.migrate import accelerate, deepspeed
from llava_fsdp.migrate.bash_script import is_open, open_names, shown
from llava_fsdp.migrate.context import Context, Rule, outcome
from llava_fsdp.migrate.key_outcome import Outcome, Row, Verdict, implied, mapped, unsupported
from llava_fsdp.migrate.launch_command import DEEPSPEED_LAUNCHER, ON_ITS_OWN, TORCHRUN
from llava_fsdp.migrate.llava_flags import FLAGS
from llava_fsdp.migrate.source_run import Block

Lookup = Callable[[str], Outcome | Rule | None]
DEFAULT = "not in the script"
ENTRY = "the script"
MOST = 1000  # keys: a file with more is another program's, and looking for near names would take minutes


def rows_of(context: Context) -> list[Row]:
    run = context.run
    rows: list[Row] = []
    if run.launch:
        rows += launcher_rows(context) + flag_rows(context)
    if run.deepspeed:
        rows += rows_of_block(context, run.deepspeed.name, run.deepspeed.values, deepspeed.rule_of, deepspeed.DEEPSPEED)
    if run.accelerate:
        rows += rows_of_block(
            context, run.accelerate.name, run.accelerate.values, accelerate.rule_of, accelerate.ACCELERATE
        )
    return rows + list(silent_rows(context))


def launcher_rows(context: Context) -> list[Row]:
    launch = context.run.launch
    assert launch is not None
    tables: dict[str, Lookup] = {
        "deepspeed": DEEPSPEED_LAUNCHER.get, "torchrun": TORCHRUN.get, "accelerate": accelerate.rule_of,
        "python": {"m": ON_ITS_OWN}.get,
    }  # fmt: skip
    source = f"{context.run.name} ({launch.launcher})"
    rows = []
    if launch.devices is not None:
        where = mapped("CUDA_VISIBLE_DEVICES before the command")
        rows.append(row(source, "CUDA_VISIBLE_DEVICES", launch.devices, where))
    for name, value in launch.flags.items():
        rows.append(answered(context, source, name, value, tables[launch.launcher](name), ()))
    program = mapped("python -m llava_fsdp.train; attention is PyTorch's own")
    return [*rows, row(source, ENTRY, launch.script, program)]


def flag_rows(context: Context) -> list[Row]:
    run = context.run
    rows = []
    near = FLAGS if len(run.flags) < MOST else ()
    for name, given in run.flags.items():
        flag = FLAGS.get(name)
        value = run.hf(name) if flag else given
        if flag and flag.type is bool and is_open(value):
            names = ", ".join(open_names(value))
            rows.append(
                row(run.name, name, value, unsupported(f"{names} is not known: give NAME=VALUE after the PATHs"))
            )
            continue
        rows.append(answered(context, run.name, name, value, flag.rule if flag else None, near))
    return rows


def rows_of_block(
    context: Context, source: str, values: Mapping[str, object], rule_of: Lookup, table: Iterable[str]
) -> list[Row]:
    rows = []
    for key, value in values.items():
        rule = rule_of(key)
        if key not in table and value in ({}, None) and any(known.startswith(key + ".") for known in table):
            rule = implied("an empty block: all of it has its defaults")
        rows.append(answered(context, source, key, value, rule, table if len(values) < MOST else ()))
    return rows


def answered(context: Context, source: str, key: str, value: object, rule: object, table: Iterable[str]) -> Row:
    if rule is None:
        near = difflib.get_close_matches(key, list(table), n=1, cutoff=0.8)
        text = "unknown to us" + (f"; did you mean {near[0]}?" if near else "")
        return row(source, key, value, unsupported(text), known=False)
    return row(source, key, value, outcome(rule, replace(context, key=key), value))


def row(source: str, key: str, value: object, found: Outcome, known: bool = True) -> Row:
    return Row(source, key, value, found.verdict, found.text, found.resolved, known)


def deepspeed_defaults(context: Context, block: Block) -> Iterator[Row]:
    """What DeepSpeed takes where the JSON is silent, and the command has to say."""
    run = context.run
    ours = {
        "gradient_clipping": "optim.clip", "zero_optimization.stage": "sharding",
        "optimizer.params.lr": "optim.lr", "optimizer.params.betas": "optim.beta1", "optimizer.params.eps": "optim.eps",
        "optimizer.params.weight_decay": "optim.weight_decay", "scheduler.params.warmup_max_lr": "optim.lr",
        "scheduler.params.warmup_num_steps": "optim.warmup_steps", "scheduler.params.warmup_type": "optim.schedule",
    }  # fmt: skip
    if not run.launch and "bfloat16.enabled" not in block.values and context.decided.get("precision") == "fp32":
        ours["bf16.enabled"] = "precision"
    if not run.launch:
        ours |= {"train_batch_size": "global_batch_size", "train_micro_batch_size_per_gpu": "micro_batch_size"}
        ours = {key: override for key, override in ours.items() if override in context.decided}
    if run.has_ds_warmup:
        ours.pop("optimizer.params.lr", None)
    applies = {"optimizer": run.has_ds_optimizer, "scheduler": run.has_ds_warmup}
    for key, override in ours.items():
        old_form = key.startswith("zero") and "zero_optimization" in block.values
        if key in block.values or old_form or not applies.get(key.partition(".")[0], True):
            continue
        also = f", {context.tell('optim.beta2')}" if key.endswith("betas") else ""
        text = f"{context.tell(override)}{also}: DeepSpeed's default"
        if key == "gradient_clipping":
            norm = f", although --max_grad_norm is {shown(run.hf('max_grad_norm'))}" if run.launch else ""
            text = f"{context.tell(override)}: without this key DeepSpeed does not clip{norm}"
        if key.startswith("train"):
            text = f"{context.tell(override)}: batch = micro-batch x accumulation x GPUs"
        yield row(f"{block.name} (not in it)", key, run.ds_or_default(key), mapped(text))


def silent_rows(context: Context) -> Iterator[Row]:
    """What the inputs do not say, where the command has to say it or nothing can."""
    run = context.run
    if run.deepspeed:
        yield from deepspeed_defaults(context, run.deepspeed)
    if not run.launch:
        return
    for name, flag in FLAGS.items():
        if name in run.flags:
            continue
        told: set[str] = set()
        found = outcome(flag.rule, replace(context, key=name, told=told), flag.default)
        needed = (told & context.decided.keys()) - context.omitted
        if found.verdict is Verdict.unsupported or (found.verdict is Verdict.mapped and needed):
            yield row(DEFAULT, name, flag.default, found)
