"""Decide the Hydra overrides for what ms-swift, LLaMA-Factory and TRL have beside transformers' Trainer: the model and
its parts that train, adapters, records, and learning rates of parts."""

from collections.abc import Mapping
from pathlib import PurePosixPath

from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.source.trainer_records import RecordFiles, image_folder, records_of
from llava_fsdp.migrate.source.trainers import Trainer

FREEZES: Mapping[Trainer, Mapping[str, str]] = {
    Trainer.swift: {"projector": "freeze_aligner", "language": "freeze_llm", "vision": "freeze_vit"},
    Trainer.factory: {
        "projector": "freeze_multi_modal_projector", "language": "freeze_language_model",
        "vision": "freeze_vision_tower",
    },
}  # fmt: skip
"""{program: {part of the model in model.train: flag that freezes it}}. TRL freezes no part."""
LORA: Mapping[Trainer, Mapping[str, str]] = {
    trainer: {"r": rank, **{key: f"lora_{key}" for key in ("alpha", "dropout")}}
    for trainer, rank in {Trainer.swift: "lora_rank", Trainer.factory: "lora_rank", Trainer.trl: "lora_r"}.items()
}
"""{program: {key of model.lora: flag}}."""
QUANTIZED: Mapping[Trainer, tuple[str, str]] = {
    Trainer.swift: ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    Trainer.factory: ("quantization_type", "double_quantization"),
    Trainer.trl: ("bnb_4bit_quant_type", "use_bnb_nested_quant"),
}
"""{program: flags for the type of weights in four bits, and for the quantization of their scales}."""
TOO_LONG = {"delete": "skip", None: "skip", "right": "truncate"}
"""{ms-swift's --truncation_strategy: value of data.too_long}."""
LONGEST_TIMEOUT = 86400
"""Seconds. Greater timeouts stand for none, and are not taken over."""


def trainer_overrides(run: SourceRun) -> dict[str, object]:
    """Return those overrides for a run of ms-swift, LLaMA-Factory or TRL that do not follow from flags of transformers'
    Trainer. They replace overrides of the same keys that follow from such flags."""
    name = run.trainer_value("model" if run.trainer is Trainer.swift else "model_name_or_path")
    found: dict[str, object] = {
        "stage": "finetune_task_lora" if run.is_lora else "finetune_task",
        "model": "own",
        "data": "llava_json",
        "model.train": trained_parts(run),
    }
    found |= {"model.checkpoint": name, "model.language": name} if name else {}
    found |= adapters(run) | records(run) | lengths(run) | validation(run)
    if run.trainer is Trainer.swift:
        found |= swift_rates(run)
        if run.trainer_value("fsdp") == "fsdp2":
            found |= {"sharding": "zero3", "activation_checkpointing": "full"}
    if run.trainer is Trainer.factory:
        found["activation_checkpointing"] = "none" if run.trainer_value("disable_gradient_checkpointing") else "full"
        if run.trainer_value("pure_bf16"):
            found["precision"] = "bf16_pure"
    return found


def trained_parts(run: SourceRun) -> list[str]:
    """Return the value of `model.train`. With LoRA the projector is not one of the parts: ms-swift puts adapters into
    it, and llava_fsdp can only train it as a whole. TRL's adapters outside of the language model are left out."""
    assert run.trainer
    freezes = FREEZES.get(run.trainer)  # {part: flag that freezes it}; TRL has no such flags
    if freezes is None:
        return ["language"] if run.is_lora else ["projector", "language", "vision"]
    parts = [part for part, flag in freezes.items() if not run.trainer_value(flag)]
    return [part for part in parts if part != "projector"] if run.is_lora else parts


def adapters(run: SourceRun) -> dict[str, object]:
    """Return llava_fsdp's overrides for LoRA and a quantized base model; empty if whole weights are trained."""
    if not run.is_lora:
        return {}
    assert run.trainer
    found = {f"model.lora.{key}": run.trainer_value(flag) for key, flag in LORA[run.trainer].items()}
    if run.trainer is Trainer.factory and not found["model.lora.alpha"]:
        rank = run.trainer_value("lora_rank")
        assert isinstance(rank, int)
        found["model.lora.alpha"] = 2 * rank  # finetuning_args.py of LLaMA-Factory
    for key in ("use_dora", "use_rslora"):
        if run.trainer_value(key):
            found[f"model.lora.{key}"] = True
    if run.trainer is Trainer.swift:
        found["model.lora.bias"] = run.trainer_value("lora_bias")
    if run.bits == 8:
        found["model.quantize.mode"] = "int8"
    elif run.bits == 4:
        kind, double = QUANTIZED[run.trainer]
        found |= {
            "model.quantize.mode": run.trainer_value(kind),
            "model.quantize.double": run.trainer_value(double),
        }
    return found


def records(run: SourceRun) -> dict[str, object]:
    """Return llava_fsdp's overrides for the files of records, the folder of their images, and the workers."""
    files = records_of(run)
    found: dict[str, object] = paths(files, "data")
    images = image_folder(run)
    if found and images is not None and not all(path.startswith("hf:") for path in files.paths):
        found["data.images"] = images
    if run.given("dataloader_num_workers"):
        found["data.workers"] = run.trainer_value("dataloader_num_workers")
    return found


def paths(files: RecordFiles, group: str) -> dict[str, object]:
    """Return the overrides that name files of records in group `data` or `val`; empty if the files are unknown."""
    if files.problem or not files.paths:
        return {}
    several = list(files.paths)
    found: dict[str, object] = {f"{group}.path": several if len(several) > 1 else several[0]}
    return found | ({"data.image_column": files.image_column} if files.image_column and group == "data" else {})


def lengths(run: SourceRun) -> dict[str, object]:
    """Return the overrides for the maximum length of a sample, and for what happens to a longer one: without a limit in
    the original, or with that of the checkpoint's configuration, it is an error (`data.too_long=fail`)."""
    if run.trainer is Trainer.factory:
        return {"data.max_length": run.trainer_value("cutoff_len"), "data.too_long": "truncate"}
    if run.trainer is Trainer.trl:
        if cuts_nothing(run):
            return {"data.too_long": "fail"}
        return {"data.max_length": run.trainer_value("max_length"), "data.too_long": "truncate"}
    length, strategy = run.trainer_value("max_length"), run.trainer_value("truncation_strategy")
    if length is None:
        return {"data.too_long": "fail"}
    too_long = TOO_LONG.get(strategy if isinstance(strategy, str) else None)
    return {"data.max_length": length} | ({"data.too_long": too_long} if too_long else {})


def cuts_nothing(run: SourceRun) -> bool:
    """Whether the program is TRL's sft_vlm.py, which sets the longest sample to none whatever --max_length says."""
    return run.trainer is Trainer.trl and PurePosixPath(run.launch.script).name == "sft_vlm.py"


def validation(run: SourceRun) -> dict[str, object]:
    """Return the overrides for held-out records, whose loss alone is measured every N steps; empty if there are no such
    records, they cannot be read, or the original does not measure at steps."""
    held = records_of(run, is_held_out=True)
    strategy = run.trainer_value("eval_strategy")
    steps = run.trainer_value("eval_steps") if run.given("eval_steps") else None
    if run.trainer is Trainer.swift:  # its sft_args.py: by default, it validates when it writes checkpoints
        strategy = run.trainer_value("save_strategy") if strategy is None else strategy
        steps = run.trainer_value("save_steps") if steps is None else steps
    elif steps is None:  # transformers: by default, it validates as often as it logs
        steps = run.trainer_value("logging_steps")
    if held.problem or not held.paths or strategy != "steps" or not isinstance(steps, float) or steps < 1:
        return {}
    return paths(held, "val") | {"val.every": int(steps), "val.answers": 0}


def swift_rates(run: SourceRun) -> dict[str, object]:
    """Return the overrides for ms-swift's learning rates: its default, which depends on what trains (sft_args.py), and
    those of single parts. Empty if DeepSpeed's optimizer or schedule sets the rate."""
    found: dict[str, object] = {}
    if run.has_ds_optimizer or run.has_ds_warmup:
        return found
    if run.trainer_value("learning_rate") is None:
        found["optim.lr"] = 1e-5 if run.tuning == "full" else 1e-4
    parts = trained_parts(run)
    for part, flag in {"projector": "aligner_lr", "vision": "vit_lr"}.items():
        if part in parts and run.trainer_value(flag) is not None:
            found[f"optim.{part}_lr"] = run.trainer_value(flag)
    return found
