"""The tables of the flags of ms-swift, LLaMA-Factory and TRL, for `make_moving.py`: which keys each flag becomes."""

from collections.abc import Mapping
from dataclasses import replace

from pages import code, table

from llava_fsdp.migrate.flags.trainer_rules import TRAINING
from llava_fsdp.migrate.flags.trainer_tables import TABLES
from llava_fsdp.migrate.source.launch_command import TrainingCommand
from llava_fsdp.migrate.source.source_run import Settings, SourceRun
from llava_fsdp.migrate.source.trainers import ENTRIES, Trainer
from llava_fsdp.migrate.to_keys.keys import RuleContext, Verdict, outcome
from llava_fsdp.migrate.to_keys.overrides import decide

PAGES: Mapping[Trainer, str] = {
    Trainer.swift: "from_ms_swift.md", Trainer.factory: "from_llama_factory.md", Trainer.trl: "from_trl.md",
}  # fmt: skip
INFO = Settings("dataset_info.json", {"a.file_name": "a.json", "a.formatting": "sharegpt"})
EVALUATED = {"eval_strategy": "steps", "eval_steps": "100"}
# Runs that together give every flag an effect: whole weights, and adapters over four bits.
RUNS: Mapping[Trainer, tuple[dict[str, object], ...]] = {
    Trainer.swift: (
        {"model": "m", "dataset": "a.json", "val_dataset": "b.json", "tuner_type": "full", "max_length": "9",
         "freeze_vit": "false", "freeze_aligner": "false", "vit_lr": "1", "aligner_lr": "1", "fsdp": "fsdp2",
         "torch_dtype": "bfloat16", **EVALUATED},
        {"model": "m", "dataset": "a.json", "quant_method": "bnb", "quant_bits": "4", "use_dora": "true",
         "use_rslora": "true"},
    ),
    Trainer.factory: (
        {"model_name_or_path": "m", "dataset": "a", "eval_dataset": "a", "media_dir": "i", "bf16": "true",
         "finetuning_type": "full", "pure_bf16": "true", **EVALUATED},
        {"model_name_or_path": "m", "dataset": "a", "bf16": "true", "quantization_bit": "4", "use_dora": "true",
         "use_rslora": "true", "lora_alpha": "16"},
    ),
    Trainer.trl: (
        {"model_name_or_path": "m", "dataset_name": "a/b", **EVALUATED},
        {"model_name_or_path": "m", "dataset_name": "a/b", "use_peft": True, "load_in_4bit": True, "use_dora": True,
         "use_rslora": True, "dataset_config": "c"},
    ),
}  # fmt: skip


def keys_of(run: SourceRun, name: str) -> tuple[str, ...]:
    """The configuration keys that a flag becomes in a run; empty if it becomes none."""
    context = replace(RuleContext(run, decide(run)), key=name, mentioned=set())
    found = outcome(run.table[name].rule, context, run.trainer_value(name))
    return tuple(sorted(context.mentioned & context.decided.keys())) if found.verdict is Verdict.mapped else ()


def trainer_table(trainer: Trainer) -> str:
    """A row for each set of keys: the flags of the program that become them, without those of transformers' Trainer."""
    words = next(words for words, entry in ENTRIES.items() if entry is trainer)
    launch = TrainingCommand("torchrun", {"nproc_per_node": "8"}, " ".join(words), [], 1, None, trainer=trainer)
    runs = [SourceRun("run.sh", launch, TABLES[trainer], flags, datasets=INFO) for flags in RUNS[trainer]]
    flags: dict[tuple[str, ...], list[str]] = {}
    for name in TABLES[trainer]:
        found = () if name in TRAINING else next(filter(None, (keys_of(run, name) for run in runs)), ())
        if found:
            flags.setdefault(found, []).append(name)
    dashes = "" if trainer is Trainer.factory else "--"
    for keys in [keys for keys in flags if keys[0].startswith("model.lora.")]:  # in one row
        flags.setdefault(("model.lora.*",), []).extend(flags.pop(keys))
    rows = (
        [", ".join(code(dashes + name) for name in names), ", ".join(map(code, keys))] for keys, names in flags.items()
    )
    return table(("there", "here"), rows)


def tables() -> dict[str, tuple[str, str]]:
    """The name and text of the generated part of each page, by the page's name."""
    return {page: ("flags", trainer_table(trainer)) for trainer, page in PAGES.items()}
