"""Writes the tables of other systems' keys: `python docs/make_moving.py`. They are the tables of `llava_fsdp.migrate`,
each key answered for one example value."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from make_recipes import GOLDEN
from make_trainers import tables
from pages import DOCS, cell, code, replaced, table

from llava_fsdp.migrate.configs.accelerate import ACCELERATE
from llava_fsdp.migrate.configs.deepspeed import DEEPSPEED, Switched
from llava_fsdp.migrate.flags.llava_flags import FLAGS
from llava_fsdp.migrate.reading.settings_files import read_json
from llava_fsdp.migrate.source.launch_command import TrainingCommand
from llava_fsdp.migrate.source.source_run import AUTO, Flag, Settings, SourceRun
from llava_fsdp.migrate.to_keys.keys import OnlyIf, RuleContext, Translation, Verdict, outcome, written
from llava_fsdp.migrate.to_keys.overrides import decide

GPUS = 8
# Example values of flags that the scripts of LLaVA 1.5 do not give. Without a row: the flag's default.
EXAMPLES = {
    "bits": "4", "double_quant": "False", "quant_type": "fp4", "lora_bias": "all", "max_steps": "1000",
    "warmup_steps": "100", "fp16": "True", "torch_compile": "True", "torch_compile_backend": "inductor",
    "torch_compile_mode": "default", "torchdynamo": "inductor", "fsdp": "full_shard auto_wrap",
    "full_determinism": "True",
    "ddp_timeout": "7200", "adam_beta1": "0.9", "adam_beta2": "0.95", "adam_epsilon": "1e-6", "max_grad_norm": "1.0",
    "seed": "7", "run_name": "mine", "freeze_backbone": "True", "freeze_mm_mlp_adapter": "True",
    "fsdp_config": "fsdp.json", "dataloader_drop_last": "True",
}  # fmt: skip
# Flags that have an effect in one kind of run only: the recorded script that the example is put into.
LORA = ("lora_enable", "lora_r", "lora_alpha", "lora_dropout", "lora_bias", "mm_projector_lr", "bits", "double_quant",
        "quant_type")  # fmt: skip
SCRIPTS = {"tune_mm_mlp_adapter": "v1_5_pretrain"} | dict.fromkeys(LORA, "v1_5_finetune_lora")
BESIDE = {
    "double_quant": {"bits": "4"}, "quant_type": {"bits": "4"}, "fp16": {"bf16": "False"},
    "fsdp_config": {"fsdp": "full_shard"},
}  # fmt: skip
NOT_WITH = {"fsdp": "deepspeed", "fsdp_config": "deepspeed"}
# What a DeepSpeed key is given in its example. Without a row: `auto`.
DEEPSPEED_EXAMPLES: Mapping[str, object] = {
    "optimizer.type": "AdamW", "optimizer.params.adam_w_mode": True, "optimizer.params.adamw_mode": True,
    "scheduler.type": "WarmupLR", "scheduler.params.warmup_type": "log", "zero_optimization.stage": 3,
    "bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True,
    "zero_optimization.cpu_offload": True, "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_params": True, "zero_optimization.cpu_offload_use_pin_memory": True,
    "zero_optimization.offload_param": "nvme", "zero_optimization.offload_optimizer": "nvme",
    "zero_optimization.offload_param.*": 1, "zero_optimization.offload_optimizer.*": 1,
    "aio.*": 1,
    "fp16.*": 2,
    "tensor_parallel.autotp_size": 2, "autotp_size": 2, "sequence_parallel_size": 2,
}  # fmt: skip
ACCELERATE_EXAMPLES: Mapping[str, object] = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "zero_stage": 3, "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0, "offload_optimizer_device": "nvme", "offload_param_device": "nvme",
    "offload_optimizer_nvme_path": "/nvme", "offload_param_nvme_path": "/nvme",
    "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": True, "fsdp_offload_params": True,
    "dynamo_backend": "INDUCTOR", "deepspeed_config_file": "zero3.json", "dynamo_mode": "default",
    "dynamo_config.*": None, "config_file": "accelerate.yaml",
}  # fmt: skip


def script(name: str, flags: Mapping[str, str], without: str = "") -> SourceRun:
    """A recorded script of LLaVA 1.5 on 8 GPUs, with other flags beside its own."""
    record = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    given = {k: v for k, v in (record["explicit_cli"] | dict(flags)).items() if k != without}
    launch = TrainingCommand("deepspeed", {"num_gpus": str(GPUS)}, record["entry_point"], [], 1, None)
    zero = None
    if "deepspeed" in given:
        zero = read_json(GOLDEN / "configs" / Path(given["deepspeed"]).name)
    return SourceRun(record["script"], launch, FLAGS, given, deepspeed=zero)


def answer(run: SourceRun, key: str, rule: object, value: object) -> Translation:
    return outcome(rule, replace(RuleContext(run, decide(run)), key=key), value)


def fixed(rule: object) -> Translation | None:
    """The answer of a rule that does not depend on the run; None where it needs an example."""
    if isinstance(rule, Translation):
        return rule
    if isinstance(rule, OnlyIf):
        if rule.text == "as here":
            return Translation(Verdict.implied, f"always so here: {rule.why}")
    if isinstance(rule, OnlyIf | Switched):
        return Translation(Verdict.unsupported, f"{rule.why} *")
    return None


def row(key: str, example: str, found: Translation) -> list[str]:
    stands = f" (`auto` stands for {found.resolved})" if found.resolved is not None else ""
    return [code(key), code(example), found.verdict.value, cell(found.text) + cell(stands)]


def flag_row(name: str, flag: Flag) -> list[str]:
    found = fixed(flag.rule)
    if found is not None:
        return row(f"--{name}", "", found)
    kind = SCRIPTS.get(name, "v1_5_finetune")
    example = {name: EXAMPLES[name]} if name in EXAMPLES else {}
    run = script(kind, BESIDE.get(name, {}) | example, NOT_WITH.get(name, ""))
    found = answer(run, name, flag.rule, run.trainer_value(name))
    return row(f"--{name}", str(run.flags[name]) if name in run.flags else "", found)


def flags_table() -> str:
    """Every flag of the original's parser."""
    return by_verdict([flag_row(name, flag) for name, flag in FLAGS.items()])


def by_verdict(rows: list[list[str]]) -> str:
    """A table for each verdict, in which rows with the same answer are one."""
    parts = []
    for verdict in Verdict:
        own = [(key, example, answer_text) for key, example, said, answer_text in rows if said == verdict.value]
        if verdict is Verdict.mapped:
            found = table(("key", "example", "here"), together(map(list, own)))
        else:
            given = ([f"{key} ({example})" if example else key, answer_text] for key, example, answer_text in own)
            found = table(("key", "here"), together(given))
        parts += [f"### {verdict.value.capitalize()}", found] if own else []
    return "\n\n".join(parts)


def together(rows: Iterable[list[str]]) -> list[list[str]]:
    """Rows with the same answer are one, in which the cells of a column are in the same order."""
    same: dict[str, list[list[str]]] = {}
    for *columns, answer_text in rows:
        same.setdefault(answer_text, []).append(columns)
    return [
        [*(", ".join(filter(None, column)) for column in zip(*group, strict=True)), answer_text]
        for answer_text, group in same.items()
    ]


def deepspeed_row(key: str, rule: object) -> list[str]:
    """A key's answer for an example value, in a JSON in which the key means something."""
    found = fixed(rule)
    if found is not None:
        return row(key, "", found)
    full = (
        f"{key}.device"
        if key.endswith((".offload_param", ".offload_optimizer"))
        else key.replace("*", "hysteresis" if key.startswith("fp16") else "buffer_count")
    )
    values: dict[str, object] = {"zero_optimization.stage": 3}
    if key.startswith("optimizer"):
        values |= {"optimizer.type": "AdamW", "optimizer.params.lr": AUTO}
    if key.startswith("scheduler"):
        values |= {"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": AUTO}
    half = "fp16" if key.startswith("fp16") else "bf16"
    values |= {f"{half}.enabled": AUTO}
    if key.startswith("bf16.bf16"):
        values |= {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True, "bf16.enabled": True}
    if ".offload_" in key or key == "aio.*":
        for block in ("offload_param", "offload_optimizer"):
            values |= {f"zero_optimization.{block}.device": "nvme", f"zero_optimization.{block}.nvme_path": "/nvme"}
    value = DEEPSPEED_EXAMPLES.get(key, values.get(full, AUTO))
    base = script("v1_5_finetune", {"fp16": "True", "bf16": "False"} if half == "fp16" else {})
    run = replace(base, deepspeed=Settings("a JSON", values | {full: value}))
    return row(full, written(value), answer(run, full, rule, value))


def deepspeed_table() -> str:
    return by_verdict([deepspeed_row(key, rule) for key, rule in DEEPSPEED.items()])


def accelerate_row(key: str, rule: object) -> list[str]:
    found = fixed(rule)
    if found is not None:
        return row(key, "", found)
    value = ACCELERATE_EXAMPLES.get(key, True)
    values: dict[str, object] = {"distributed_type": "FSDP", "fsdp_sharding_strategy": "FULL_SHARD"}
    if key in ("zero_stage", "gradient_clipping") or key.startswith("offload_"):
        values = {"distributed_type": "DEEPSPEED", "zero_stage": 3}
    if key.endswith("nvme_path"):
        values |= {key.replace("nvme_path", "device"): "nvme"}
    if key.startswith("dynamo"):
        values |= {"dynamo_backend": "INDUCTOR"}
    block = Settings("accelerate.yaml", values | {"mixed_precision": "bf16", key: value})
    zero = Settings("zero3.json", {"zero_optimization.stage": 3}) if key == "deepspeed_config_file" else None
    run = replace(script("v1_5_finetune", {}, "deepspeed"), deepspeed=zero, accelerate=block)
    return row(key, written(value), answer(run, key, rule, value))


def accelerate_table() -> str:
    return by_verdict([accelerate_row(key, rule) for key, rule in ACCELERATE.items()])


def pages() -> dict[str, str]:
    """The whole text of every page, by name."""
    parts = {
        "from_llava.md": ("flags", flags_table()),
        "from_deepspeed.md": ("keys", deepspeed_table()),
        "from_accelerate.md": ("keys", accelerate_table()),
        **tables(),
    }
    return {page: replaced((DOCS / page).read_text(), name, block) for page, (name, block) in parts.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        (DOCS / page).write_text(text)
        sys.stdout.write(f"{DOCS / page}\n")
