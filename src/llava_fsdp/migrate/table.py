"""Build the table that `migrate` prints: what every key in the files becomes in llava_fsdp."""

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from llava_fsdp.migrate.configs import accelerate, deepspeed
from llava_fsdp.migrate.flags.launcher_flags import LAUNCHER
from llava_fsdp.migrate.flags.trainer_flags import OTHER_PROGRAM
from llava_fsdp.migrate.flags.trainer_tables import DIFFERS
from llava_fsdp.migrate.source.source_run import Settings, plain
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    Rule,
    RuleContext,
    TableRow,
    Translation,
    Verdict,
    implied,
    mapped,
    outcome,
    unsupported,
)

DEFAULT = "not in the script"
PROGRAM = "the program"
MOST_COMPARED = 1000
"""Maximum number of keys of a file for which similar names are searched. With more, this would take minutes."""
DEFAULTS = {
    "gradient_clipping": "optim.clip",
    "zero_optimization.stage": "sharding",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.betas": "optim.beta1",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_num_steps": "optim.warmup_steps",
    "scheduler.params.warmup_type": "optim.schedule",
}
"""{DeepSpeed's key whose default value the command must set: key of the override}."""


def rows_of(context: RuleContext) -> list[TableRow]:
    """Return all rows of the table that shows what becomes of another system's settings: those of its launcher, of its
    program's flags, of its DeepSpeed and Accelerate files, and of default values that the command must set."""
    run = context.run
    rows = launcher_rows(context) + flag_rows(context)
    if run.deepspeed:
        rows += settings_rows(context, run.deepspeed, deepspeed.rule_of, deepspeed.DEEPSPEED)
    if run.accelerate:
        rows += settings_rows(context, run.accelerate, accelerate.rule_of, accelerate.ACCELERATE)
    return [*rows, *default_rows(context)]


def launcher_rows(context: RuleContext) -> list[TableRow]:
    """Return the rows for the start of the training: devices, the launcher's flags and the program's name."""
    launch = context.run.launch
    source = f"{context.run.name} ({launch.launcher})"
    rows = []
    if launch.devices is not None:
        where = mapped("CUDA_VISIBLE_DEVICES before the command")
        rows.append(TableRow(source, "CUDA_VISIBLE_DEVICES", launch.devices, where))
    for name, value in launch.flags.items():
        rule = accelerate.rule_of(name) if launch.launcher == "accelerate" else LAUNCHER.get(name)
        rows.append(row_of(context, source, name, value, rule, ()))  # (): if unknown, no similar flag is suggested
    program = "the original LLaVA's program; attention is PyTorch's own" if launch.is_original else OTHER_PROGRAM
    if launch.trainer:
        program = f"{launch.trainer.value}: {DIFFERS[launch.trainer]}"
    return [*rows, TableRow(source, PROGRAM, launch.script, mapped(f"llava-fsdp train: {program}"))]


def flag_rows(context: RuleContext) -> list[TableRow]:
    """Return the rows for the flags of the training program that the command gives."""
    run = context.run
    # names from which a similar one is suggested for an unknown flag; with many flags this would take minutes
    similar_from = run.table if len(run.flags) < MOST_COMPARED else ()
    rows = []
    for name, value in run.flags.items():
        flag = run.table.get(name)
        rows.append(
            row_of(
                context, run.name, name, run.trainer_value(name) if flag else value, flag and flag.rule, similar_from
            )
        )
    return rows


def settings_rows(
    context: RuleContext, settings: Settings, rule_of: Callable[[str], Rule | None], known_keys: Collection[str]
) -> list[TableRow]:
    """Return the rows for the keys of a DeepSpeed or Accelerate file. `rule_of` returns the rule for a key, or None if
    the key is unknown; `known_keys` has the known keys, from which a similar one is suggested for an unknown key."""
    rows = []
    similar_from = known_keys if len(settings.values) < MOST_COMPARED else ()
    for key, value in settings.values.items():
        rule = rule_of(key)
        if key not in known_keys and value in ({}, None) and any(known.startswith(key + ".") for known in known_keys):
            rule = implied("an empty block: all of it has its defaults")  # no key below it is set
        if rule is None and settings is context.run.accelerate and plain(value) in (None, False, "", "no", {}, []):
            rule = OFF  # `accelerate config` also writes keys for features that are off
        rows.append(row_of(context, settings.name, key, value, rule, similar_from))
    return rows


def row_of(
    context: RuleContext, source: str, key: str, value: object, rule: object, similar_from: Collection[str]
) -> TableRow:
    """Return the row for a key of `source` (a file or a command). `rule` says what the key becomes; if it is None, the
    key is unknown, and a similar one among the keys `similar_from` is suggested."""
    if rule is not None:
        return TableRow(source, key, value, outcome(rule, replace(context, key=key), value))
    similar = difflib.get_close_matches(key, list(similar_from), n=1, cutoff=0.8)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return TableRow(source, key, value, unsupported("not a name that migrate knows" + hint), known=False)


def default_rows(context: RuleContext) -> Iterator[TableRow]:
    """Yield the rows of the table for settings that the files leave at their default value (DeepSpeed's or the training
    program's), if the command must set this value or cannot express it."""
    run = context.run
    for key, override in DEFAULTS.items() if run.deepspeed else ():
        assert run.deepspeed is not None
        applies = {"optimizer": run.has_ds_optimizer, "scheduler": run.has_ds_warmup}
        # such a scheduler sets the learning rate, whatever the optimizer's is
        is_set_by_scheduler = key == "optimizer.params.lr" and run.has_ds_warmup
        if key in run.deepspeed.values or is_set_by_scheduler or not applies.get(key.partition(".")[0], True):
            continue
        also = f", {context.text_of_override('optim.beta2')}" if key.endswith("betas") else ""
        text = f"{context.text_of_override(override)}{also}: DeepSpeed's default"
        if key == "gradient_clipping":
            norm = run.trainer_value("max_grad_norm")
            text = context.text_of_override(override)
            text = f"{text}: without it DeepSpeed does not clip, though --max_grad_norm is {norm}"
        yield TableRow(f"{run.deepspeed.name} (not in it)", key, run.ds_or_default(key), mapped(text))
    for name, flag in run.table.items():
        if run.given(name) is None and (run.launch.is_original or flag.default is not None):
            mentioned: set[str] = set()  # gets the keys of the overrides that the rule mentions
            found: Translation = outcome(flag.rule, replace(context, key=name, mentioned=mentioned), flag.default)
            # the default needs a row only if the command sets a key for it that the recipe does not already set so
            needed = (mentioned & context.decided.keys()) - context.omitted
            if found.verdict is Verdict.unsupported or (found.verdict is Verdict.mapped and needed):
                yield TableRow(DEFAULT, name, flag.default, found)
