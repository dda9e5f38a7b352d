"""Writes the tables of other systems' keys: `python docs/make_moving.py`. They are those that `llava_fsdp.migrate` goes
by, each key answered for one example value, so that a page says what the command says."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from make_recipes import GOLDEN
from pages import DOCS, cell, code, replaced, table

from llava_fsdp.migrate.accelerate import ACCELERATE
from llava_fsdp.migrate.context import Context, Usual, outcome, written
from llava_fsdp.migrate.deepspeed import DEEPSPEED
from llava_fsdp.migrate.deepspeed_rules import Switched
from llava_fsdp.migrate.inputs import read_json
from llava_fsdp.migrate.key_outcome import Outcome, Verdict
from llava_fsdp.migrate.launch_command import Launch
from llava_fsdp.migrate.llava_flags import FLAGS
from llava_fsdp.migrate.overrides import decide
from llava_fsdp.migrate.source_run import AUTO, Block, Flag, Options, Run

GPUS = 8
HEAD = ("key", "example", "verdict", "here")
# The flag that each section of the table begins with, in the order of `flags.FLAGS`.
SECTIONS = {
    "model_name_or_path": "ModelArguments",
    "data_path": "DataArguments",
    "cache_dir": "TrainingArguments: LLaVA's own",
    "per_device_train_batch_size": "TrainingArguments: how long, and in what steps",
    "learning_rate": "TrainingArguments: optimizer and schedule",
    "bf16": "TrainingArguments: numbers and memory",
    "deepspeed": "TrainingArguments: how it is spread over GPUs",
    "dataloader_num_workers": "TrainingArguments: data",
    "output_dir": "TrainingArguments: what is written",
    "logging_steps": "TrainingArguments: what is told",
    "do_train": "TrainingArguments: evaluation",
}
# What a flag is given in its example, where the scripts of LLaVA 1.5 do not give it. Without a row: its default.
EXAMPLES = {
    "bits": "4", "double_quant": "False", "quant_type": "fp4", "lora_bias": "all", "max_steps": "1000",
    "warmup_steps": "100", "fp16": "True", "torch_compile": "True", "torch_compile_backend": "inductor",
    "torch_compile_mode": "default", "torchdynamo": "inductor", "fsdp": "full_shard auto_wrap",
    "full_determinism": "True",
    "ddp_timeout": "7200", "adam_beta1": "0.9", "adam_beta2": "0.95", "adam_epsilon": "1e-6", "max_grad_norm": "1.0",
    "seed": "7", "run_name": "mine", "freeze_backbone": "True", "freeze_mm_mlp_adapter": "True",
    "fsdp_config": "fsdp.json", "dataloader_drop_last": "True",
}  # fmt: skip
# Flags that mean something in runs of one kind alone: the recorded script that its example is put into.
LORA = ("lora_enable", "lora_r", "lora_alpha", "lora_dropout", "lora_bias", "mm_projector_lr", "bits", "double_quant",
        "quant_type")  # fmt: skip
SCRIPTS = {"tune_mm_mlp_adapter": "v1_5_pretrain"} | dict.fromkeys(LORA, "v1_5_finetune_lora")
BESIDE = {
    "double_quant": {"bits": "4"}, "quant_type": {"bits": "4"}, "fp16": {"bf16": "False"},
    "fsdp_config": {"fsdp": "full_shard"},
}  # fmt: skip
NOT_WITH = {"fsdp": "deepspeed", "fsdp_config": "deepspeed"}
# What a DeepSpeed key is given in its example, where neither LLaVA's files nor `auto` say more.
DEEPSPEED_EXAMPLES: Mapping[str, object] = {
    "train_batch_size": 128, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1,
    "optimizer.params.lr": 2e-5, "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8, "optimizer.params.weight_decay": 0.0, "optimizer.params.adam_w_mode": True,
    "optimizer.params.adamw_mode": True, "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-5, "gradient_clipping": 1.0, "communication_data_type": "fp32",
    "bf16.enabled": True, "bfloat16.enabled": True, "bf16.bf16_master_weights_and_grads": True,
    "bf16.bf16_optimizer_states": True, "data_types.grad_accum_dtype": "fp32", "amp.enabled": True,
    "fp16.auto_cast": True, "fp16.consecutive_hysteresis": True, "fp16.fp16_master_weights_and_grads": True,
    "zero_optimization.zero_hpz_partition_size": 4, "zero_optimization.mics_shard_size": 4,
    "zero_optimization.cpu_offload": True, "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_params": True, "zero_optimization.cpu_offload_use_pin_memory": True,
    "zero_optimization.offload_param.*": 1, "zero_optimization.offload_optimizer.*": 1,
    "zero_optimization.offload_param": "cpu", "zero_optimization.offload_optimizer": "cpu", "zero_optimization": True,
    "zero_optimization.stage3_param_persistence_threshold": 100000,
    "zero_optimization.param_persistence_threshold": 100000,
    "zero_optimization.stage3_model_persistence_threshold": 100000,
    "zero_optimization.model_persistence_threshold": 100000,
    "aio.*": 1, "activation_checkpointing.*": True,
}  # fmt: skip
FP16 = {"fp16.enabled": True, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2,
        "fp16.min_loss_scale": 1, "fp16.loss_scale": 0}  # fmt: skip
ACCELERATE_EXAMPLES: Mapping[str, object] = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "gpu_ids": "0,1", "zero_stage": 3,
    "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu", "offload_optimizer_nvme_path": "/nvme", "offload_param_nvme_path": "/nvme",
    "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": True, "fsdp_offload_params": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_activation_checkpointing": True, "dynamo_backend": "INDUCTOR",
    "deepspeed_config_file": "zero3.json", "dynamo_mode": "default", "dynamo_config.*": None,
    "config_file": "accelerate.yaml",
}  # fmt: skip
AS_DEEPSPEED = ("zero_stage", "gradient_clipping", "offload_optimizer_device", "offload_param_device",
                "offload_optimizer_nvme_path", "offload_param_nvme_path")  # fmt: skip


def script(name: str, flags: Mapping[str, str], without: str = "") -> Run:
    """A recorded script of LLaVA 1.5 on 8 GPUs, with other flags beside its own."""
    record = json.loads((GOLDEN / "configs" / f"{name}.json").read_text())
    given = {k: v for k, v in (record["explicit_cli"] | dict(flags)).items() if k != without}
    launch = Launch("deepspeed", {"num_gpus": str(GPUS)}, record["entry_point"], [], 1, None)
    zero = None
    if "deepspeed" in given:
        zero = read_json(GOLDEN / "configs" / Path(given["deepspeed"]).name)
    return Run(record["script"], FLAGS, Options(), launch, given, deepspeed=zero)


def answer(run: Run, key: str, rule: object, value: object) -> Outcome:
    return outcome(rule, replace(Context(run, decide(run)), key=key), value)


def told(rule: object) -> Outcome | None:
    """What a rule says whatever the value; None where it must be asked with one."""
    if isinstance(rule, Outcome):
        return rule
    if isinstance(rule, Usual):
        if rule.text == "as here":
            return Outcome(Verdict.implied, f"always so here: {rule.why}")
    if isinstance(rule, Usual | Switched):
        return Outcome(Verdict.unsupported, f"{rule.why} (left out or off: as here)")
    return None


def row(key: str, example: str, found: Outcome) -> list[str]:
    stands = f" (`auto` stands for {found.resolved})" if found.resolved is not None else ""
    return [code(key), code(example), found.verdict.value, cell(found.text) + cell(stands)]


def flag_row(name: str, flag: Flag) -> list[str]:
    default = "none" if flag.default in (None, "", {}) else written(flag.default)
    found = told(flag.rule)
    if found is not None:
        return [code(f"--{name}"), code(default), "", found.verdict.value, cell(found.text)]
    kind = SCRIPTS.get(name, "v1_5_finetune")
    example = {name: EXAMPLES[name]} if name in EXAMPLES else {}
    run = script(kind, BESIDE.get(name, {}) | example, NOT_WITH.get(name, ""))
    found = answer(run, name, flag.rule, run.hf(name))
    shown = str(run.flags[name]) if name in run.flags else ""
    return [code(f"--{name}"), code(default), code(shown), found.verdict.value, cell(found.text)]


def flags_table() -> str:
    """Every flag of the original's parser, by its class."""
    assert SECTIONS.keys() <= FLAGS.keys()
    parts: list[str] = []
    rows: list[list[str]] = []
    head = ("flag", "default there", "example", "verdict", "here")
    title = ""
    for name, flag in FLAGS.items():
        if name in SECTIONS:
            parts += [f"### {title}", table(head, rows)] if rows else []
            title, rows = SECTIONS[name], []
        rows.append(flag_row(name, flag))
    return "\n\n".join([*parts, f"### {title}", table(head, rows)])


def merged(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Neighbours that have one answer, and no example, as one row."""
    for (example, *_), group in groupby(rows, key=lambda row: (row[1] or None, row[2:], row[0] if row[1] else "")):
        found = list(group)
        yield found[0] if example else [", ".join(row[0] for row in found), *found[0][1:]]


def around(key: str) -> dict[str, object]:
    """A DeepSpeed file in which a key means something."""
    values: dict[str, object] = {"zero_optimization.stage": 3, "bf16.enabled": True}
    if key.startswith("optimizer"):
        values |= {"optimizer.type": "AdamW", "optimizer.params.lr": 2e-5}
    if key.startswith("scheduler"):
        values |= {"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": 100}
    if key.startswith("fp16"):
        values |= FP16 | {"bf16.enabled": False}
    if key.startswith("bf16.bf16"):
        values |= {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}
    if ".offload_" in key or key == "aio.*":
        block = key.split(".")[1] if key != "aio.*" else "offload_param"
        values |= {f"zero_optimization.{block}.device": "nvme", f"zero_optimization.{block}.nvme_path": "/nvme"}
    if key in ("train_batch_size", "gradient_accumulation_steps"):
        values |= {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1}
    return values if key != "zero_optimization" else {}


def deepspeed_row(key: str, rule: object) -> list[str]:
    found = told(rule)
    if found is not None:
        return row(key, "", found)
    asked = key.replace("*", "buffer_count" if key.startswith("zero") else "cpu_checkpointing")
    if key.endswith((".offload_param", ".offload_optimizer")):  # a block: what it is decided by
        asked = f"{key}.device"
    values = around(key)
    value = DEEPSPEED_EXAMPLES.get(key, values.get(asked, AUTO))
    run = Run("a JSON", FLAGS, Options(gpus=GPUS, hidden_size=4096), deepspeed=Block("a JSON", values | {asked: value}))
    return row(asked, written(value), answer(run, asked, rule, value))


def deepspeed_table() -> str:
    return table(HEAD, merged(deepspeed_row(key, rule) for key, rule in DEEPSPEED.items()))


def accelerate_row(key: str, rule: object) -> list[str]:
    found = told(rule)
    if found is not None:
        return row(key, "", found)
    value = ACCELERATE_EXAMPLES.get(key, True)
    values: dict[str, object] = {"distributed_type": "FSDP", "fsdp_sharding_strategy": "FULL_SHARD"}
    if key in AS_DEEPSPEED:
        values = {"distributed_type": "DEEPSPEED", "zero_stage": 3}
    if key.endswith("nvme_path"):
        values |= {key.replace("nvme_path", "device"): "nvme"}
    if key.startswith("dynamo"):
        values |= {"dynamo_backend": "INDUCTOR"}
    values |= {"mixed_precision": "bf16", "num_processes": GPUS, key: value}
    given = {"per_device_train_batch_size": "16", "gradient_accumulation_steps": "1"}
    launch = Launch("accelerate", {}, "train.py", [], 1, None) if key == "gradient_accumulation_steps" else None
    zero = Block("zero3.json", {"zero_optimization.stage": 3}) if key == "deepspeed_config_file" else None
    run = Run(
        "a script", FLAGS, Options(gpus=GPUS), launch, given if launch else {}, zero, Block("accelerate.yaml", values)
    )
    return row(key, written(value), answer(run, key, rule, value))


def accelerate_table() -> str:
    return table(HEAD, merged(accelerate_row(key, rule) for key, rule in ACCELERATE.items()))


def pages() -> dict[str, str]:
    """Every page that this writes, whole."""
    parts = {
        "from_llava.md": ("flags", flags_table()),
        "from_deepspeed.md": ("keys", deepspeed_table()),
        "from_accelerate.md": ("keys", accelerate_table()),
    }
    return {page: replaced((DOCS / page).read_text(), name, block) for page, (name, block) in parts.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        (DOCS / page).write_text(text)
        sys.stdout.write(f"{DOCS / page}\n")
