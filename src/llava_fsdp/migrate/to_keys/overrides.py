"""Decide the Hydra overrides (`key=value`) with which llava_fsdp trains as a training of another system does.

The overrides are decided for the training as a whole, since the meaning of one key depends on other keys. The tables of
single keys (`deepspeed.py`, `accelerate.py`, `llava_flags.py`, ...) only explain the overrides to the user.
"""

from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from llava_fsdp.config import config_dir
from llava_fsdp.migrate.source.source_run import AUTO, SourceRun, plain
from llava_fsdp.migrate.to_keys import next_overrides
from llava_fsdp.migrate.to_keys.trainer_overrides import LONGEST_TIMEOUT, trainer_overrides

Overrides = dict[str, object]

STAGES = {0: "zero0", 1: "zero1", 2: "zero2", 3: "zero3"}
FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3", "1": "zero3",
    "SHARD_GRAD_OP": "zero2", "2": "zero2",
    "NO_SHARD": "zero0", "3": "zero0",
    "HYBRID_SHARD": "hybrid", "4": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid2", "_HYBRID_SHARD_ZERO2": "hybrid2", "5": "hybrid2",
}  # fmt: skip
"""{PyTorch's ShardingStrategy, by name or by its number in older Accelerate files: value of `sharding=`}."""
# --version of LLaVA -> data.template (LLaVA conversation.py:374-395; train.py:894-908: `v0`, `v0.5` keep the default).
TEMPLATES = {
    "plain": "plain", "v0_plain": "plain",
    "v1": "v1", "vicuna_v1": "v1", "v0": "v1", "v0.5": "v1",
    "default": "v0", "llava_v0": "v0", "v0_mmtag": "v0_mmtag",
    "llava_v1": "llava_v1", "v1_mmtag": "v1_mmtag",
    "llama_2": "llama_2", "llava_llama_2": "llava_llama_2", "mistral_instruct": "mistral_instruct",
    "mpt": "mpt", "chatml_direct": "chatml", "mistral_direct": "chatml",
}  # fmt: skip
# --lr_scheduler_type of transformers -> optim.schedule; transformers' `constant` has no warm-up.
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant_with_warmup": "constant", "constant": "constant"}
# DeepSpeed's (schedule type, kind of warm-up) -> optim.schedule (lr_schedules.py).
DS_SCHEDULES = {
    ("WarmupLR", "log"): "warmup_log", ("WarmupLR", "linear"): "constant",
    ("WarmupDecayLR", "log"): "warmup_decay", ("WarmupDecayLR", "linear"): "linear",
}  # fmt: skip
HALF = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
"""{block of DeepSpeed's configuration that switches on a dtype: that dtype}."""
DS_ADAM = frozenset({"adam", "adamw"})
LEAST_WARMUP = 2
"""DeepSpeed's minimum number of warm-up steps."""
LEAST_KEPT = 2
TRACKERS: Mapping[str, tuple[str, object]] = {
    "wandb": ("track.wandb", "online"), "tensorboard": ("track.tensorboard", True),
}  # fmt: skip
"""{transformers' name of a tracker: (configuration key, value that turns the tracker on)}."""


def decide(run: SourceRun) -> Overrides:
    """Return all Hydra overrides with which llava_fsdp does the training `run`: value by configuration key. They
    include those that only repeat defaults; `command.drop_defaults` removes these."""
    # those that are decided by the rules of ms-swift, LLaMA-Factory or TRL; they replace the others
    own_overrides = trainer_overrides(run) if run.trainer else {}
    overrides = dict(own_overrides) or (model(run) | data(run) if run.launch.is_original else other_program(run))
    overrides |= (
        output_and_training_length(run)
        | tracking(run)
        | sharding(run)
        | parallel(run)
        | offload(run)
        | precision(run)
        | compiling(run)
    )
    checkpointing = (
        run.trainer_value("gradient_checkpointing")
        or plain(run.accelerate_value("fsdp_activation_checkpointing")) is True
    )
    overrides["activation_checkpointing"] = "full" if checkpointing else "none"
    overrides |= {"global_batch_size": run.batch, "micro_batch_size": run.trainer_value("per_device_train_batch_size")}
    return overrides | optimizer(run) | schedule(run) | own_overrides


def model(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for model, stage and adapters of a training with LLaVA's or LLaVA-NeXT's code."""
    name, stage, projector = run.trainer_value("model_name_or_path"), run.stage, run.trainer_value("mm_projector_type")
    adapter_kind = "qlora" if run.bits is not None and stage == "finetune" else "lora"
    found: Overrides = {
        "stage": f"{stage}_{adapter_kind}" if run.is_lora else stage,
        "model": model_choice(str(name)),
        "model.checkpoint" if stage == "finetune_task" else "model.language": name,
        "model.projector_type": projector,
        "model.select_layer": run.trainer_value("mm_vision_select_layer"),
        "model.select_feature": "full" if run.trainer_value("mm_vision_select_feature") == "cls_patch" else "patch",
        "model.train": trained_parts(run),
    }
    if run.trainer_value("vision_tower"):
        found["model.vision"] = run.trainer_value("vision_tower")
    if stage == "finetune":
        found["model.projector"] = run.trainer_value("pretrain_mm_mlp_adapter") or "random"
    if stage == "finetune_task":
        found["model.image_start_end"] = run.trainer_value("mm_use_im_start_end")
    if projector != "mlp2x_gelu":  # transformers' LLaVA has no other projector
        found["export.enabled"] = False
    if run.is_lora:  # LLaVA's default values differ from those of the stages, which are the values in LLaVA's scripts
        found |= {f"model.lora.{key}": run.trainer_value(f"lora_{key}") for key in ("r", "alpha", "dropout", "bias")}
    return found | quantization(run)


def other_program(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for model and data of a training with a program other than LLaVA's: one for each
    flag that was given. A model whose name contains llava is taken for a whole LLaVA checkpoint, such as those of
    llava-hf. If the training uses peft, only the adapters are trained."""
    name = run.trainer_value("model_name_or_path")
    found: Overrides = {
        "stage": "finetune_task_lora" if run.is_lora else "finetune_task",
        "data": "llava_json",
        "model": model_choice(str(name)),
    }
    flags = {
        "data.images": "image_folder", "data.max_length": "model_max_length",
        "data.workers": "dataloader_num_workers",
    }  # fmt: skip
    if "llava" in str(name).lower():
        flags["model.checkpoint"] = "model_name_or_path"
    if run.is_lora:
        found["model.train"] = ["language"]
        flags |= {f"model.lora.{key}": f"lora_{key}" for key in ("r", "alpha", "dropout")}
        flags |= {"model.lora.use_dora": "use_dora", "model.lora.use_rslora": "use_rslora"}
    found |= {key: run.trainer_value(flag) for key, flag in flags.items() if run.given(flag)}
    found |= {"data.path": path} if (path := data_path(run)) is not None else {}
    return found | quantization(run)


def quantization(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for a quantized base model, as in LLaVA train.py:796-817; empty without one, or if
    the training changes more than adapters or a projector."""
    if run.bits is None or not (run.is_lora or run.stage == "pretrain"):
        return {}
    if run.bits == 8:
        return {"model.quantize.mode": "int8"}
    return {
        "model.quantize.mode": run.trainer_value("quant_type"),
        "model.quantize.double": run.trainer_value("double_quant"),
    }


def model_choice(name: str) -> str:
    """Return the value of `model` for a language model's name on the hub: the model configuration that uses it, or else
    the LLaVA-1.5 model of the same size (13B or 7B)."""
    for path in sorted((config_dir() / "model").glob("*.yaml")):
        if OmegaConf.select(OmegaConf.load(path), "language") == name:
            return path.stem
    return "llava_v1_5_13b" if "13b" in Path(name).name.lower() else "llava_v1_5_7b"


def trained_parts(run: SourceRun) -> list[str]:
    """Return the value of `model.train`: the parts that LLaVA trains (train.py:843-845, 926-935), except lm_head."""
    usual = ["language"] if run.trainer_value("freeze_mm_mlp_adapter") else ["projector", "language"]
    if run.stage == "pretrain" or (run.trainer_value("freeze_backbone") and not run.is_lora):
        usual = ["projector"]
    return next_overrides.trained_parts(run, usual) if run.is_next else usual


def data(run: SourceRun) -> Overrides:
    """Return the overrides (only keys with a value) for data and images of a run of LLaVA's or LLaVA-NeXT's program."""
    found: Overrides = {
        "data": "llava_json",
        "data.path": data_path(run),
        "data.images": run.trainer_value("image_folder"),
        "data.template": TEMPLATES.get(str(run.trainer_value("version"))),
        "data.max_length": run.trainer_value("model_max_length"),
        "data.workers": run.trainer_value("dataloader_num_workers"),
        "sampler.group_by_modality_length": run.trainer_value("group_by_modality_length"),
    }
    if run.is_next:
        if run.trainer_value("version") in ("qwen_1_5", "qwen_2"):
            found["data.template"] = "chat_template"
        found |= next_overrides.images(run)
    else:
        is_padded = run.trainer_value("image_aspect_ratio") == "pad"
        found["data.image_aspect_ratio"] = "pad" if is_padded else "square"
    return {key: value for key, value in found.items() if value is not None}


def data_path(run: SourceRun) -> object:
    """Return the value of llava_fsdp's key `data.path`: a file or a list of files; None if they are not known."""
    files = run.data_files
    if isinstance(files, str):  # the reason why the files are not known
        return None
    return files if len(files) > 1 else files[0]


def output_and_training_length(run: SourceRun) -> Overrides:
    """Return the overrides for output folder, checkpoints, logging, training length, seed, determinism and timeouts."""
    found: Overrides = {"seed": run.trainer_value("seed")}
    timeout = run.trainer_value("ddp_timeout")
    # ms-swift, LLaMA-Factory and TRL may set years, which stand for no limit
    if not run.trainer or (isinstance(timeout, int) and run.given("ddp_timeout") and timeout <= LONGEST_TIMEOUT):
        found["comm.timeout"] = timeout
    if run.trainer_value("output_dir"):
        found["output_dir"] = run.trainer_value("output_dir")
    epochs, steps, save_steps, num_kept = map(
        run.trainer_value, ("num_train_epochs", "max_steps", "save_steps", "save_total_limit")
    )
    if isinstance(epochs, float) and epochs == int(epochs) >= 1:
        found["epochs"] = int(epochs)
    if isinstance(steps, int) and steps > 0:
        found["max_steps"] = steps
    if run.trainer_value("save_strategy") != "steps":
        found["checkpoint.every"] = None
    elif isinstance(save_steps, float) and save_steps >= 1:
        found["checkpoint.every"] = int(save_steps)
    if isinstance(num_kept, int) and num_kept:
        found["checkpoint.keep"] = max(LEAST_KEPT, num_kept)
    lines = run.trainer_value("logging_steps")
    if run.trainer_value("logging_strategy") == "steps" and isinstance(lines, float) and lines >= 1:
        found["log_every"] = int(lines)
    if run.trainer_value("full_determinism"):
        found["deterministic"] = True
    return found


def tracking(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for trackers (wandb, tensorboard). `--report_to all` stands for both of them."""
    names = str(run.trainer_value("report_to") or "").split()
    found = dict(TRACKERS[name] for name in TRACKERS if name in names or "all" in names)
    if "track.wandb" in found and run.trainer_value("run_name"):
        found["track.name"] = run.trainer_value("run_name")
    return found


def compiling(run: SourceRun) -> Overrides:
    """Return llava_fsdp's override `compile`; empty if neither script nor launcher sets it, so that the default `auto`
    stays."""
    backend = run.accelerate_value("dynamo_backend")
    names = ("torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo")
    if str(backend or "no").lower() not in ("no", "none", "false") or any(map(run.trainer_value, names)):
        return {"compile": True}
    return {"compile": False} if "torch_compile" in run.flags or backend is not None else {}


def sharding(run: SourceRun) -> Overrides:
    """Return the override for the sharding strategy, such as {"sharding": "zero3"}; empty if the original's has no
    equivalent, or is not known because its DeepSpeed file was not found (`lacks_deepspeed`)."""
    if run.lacks_deepspeed:
        return {}
    if run.uses_deepspeed:
        stage = run.ds_or_default("zero_optimization.stage")
        return {"sharding": STAGES[stage]} if isinstance(stage, int) and stage in STAGES else {}
    return {"sharding": fsdp_strategy(run) or "zero0"}


def parallel(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for DeepSpeed's tensor and sequence parallelism; empty if it uses neither."""
    sizes = {"parallel.tensor": run.tensor, "parallel.context": run.context}
    return {key: size for key, size in sizes.items() if size > 1}


def offload(run: SourceRun) -> Overrides:
    """Return the overrides for offloading to host memory or disk.

    DeepSpeed's optimizer offload keeps master weights, gradients and moments in host memory, as `offload=params` does.
    At ZeRO stage 1, gradients stay on the GPU and only the moments are offloaded: this is `offload=optimizer`.
    """
    if run.lacks_deepspeed:
        return {}
    if run.uses_deepspeed:
        stage = run.ds_or_default("zero_optimization.stage")
        blocks = ["zero_optimization.offload_optimizer"] + ["zero_optimization.offload_param"] * (stage == 3)
        devices = [run.ds(f"{block}.device", "none") for block in blocks]
        if "nvme" in devices and stage != 1:
            folder = run.ds(f"{blocks[devices.index('nvme')]}.nvme_path")
            return {"offload": "nvme"} | ({"offload.folder": folder} if folder else {})
        old_names = ("cpu_offload", "cpu_offload_param", "cpu_offload_params")
        has_old_key = any(plain(run.ds(f"zero_optimization.{key}")) is True for key in old_names)
        if has_old_key or {"cpu", "nvme"} & set(map(str, devices)):
            return {"offload": "optimizer" if stage == 1 else "params"}
        return {}
    is_offloaded = run.distributed_type == "FSDP" and plain(run.accelerate_value("fsdp_offload_params")) is True
    return {"offload": "params"} if is_offloaded or "OFFLOAD" in fsdp_words(run) else {}


def fsdp_words(run: SourceRun) -> list[str]:
    """Return the words of transformers' flag --fsdp, such as "full_shard auto_wrap", in upper case."""
    return str(run.trainer_value("fsdp") or "").upper().split()


def fsdp_strategy(run: SourceRun) -> str | None:
    """Return the value of `sharding` for the strategy in Accelerate's `fsdp_config` or the flag --fsdp; None if
    unknown."""
    if run.distributed_type == "FSDP":
        reshard = plain(run.accelerate_value("fsdp_reshard_after_forward"))
        if isinstance(reshard, bool):
            return "zero3" if reshard else "zero2"
        # with the first version of FSDP, Accelerate also accepts a strategy's name under the newer key
        named = reshard or run.accelerate_value("fsdp_sharding_strategy") or "FULL_SHARD"
        return FSDP_STRATEGIES.get(str(named).upper())
    return next((FSDP_STRATEGIES[word] for word in fsdp_words(run) if word in FSDP_STRATEGIES), None)


def precision(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for the precision: bf16 for both bf16 and fp16, which the original refuses."""
    dtypes_on = {HALF[name] for name in HALF if run.ds(f"{name}.enabled") is True}
    dtypes_on |= {flag for flag in ("bf16", "fp16") if run.is_half(flag)}
    dtypes_on.add(str(run.accelerate_value("mixed_precision")))
    dtype = next((dtype for dtype in ("bf16", "fp16", "fp8") if dtype in dtypes_on), "fp32")
    if dtype == "bf16" and run.ds("bf16.bf16_master_weights_and_grads") is True:
        if run.ds("bf16.bf16_optimizer_states") is True:
            return {"precision": "bf16_pure"}
        return {"precision": "bf16_pure", "precision.moment_dtype": "fp32"}
    if dtype == "fp16" and not run.uses_deepspeed:  # transformers then uses torch's GradScaler
        return {"precision": "fp16", "precision.scaler.window": 2000, "precision.scaler.hysteresis": 1}
    return {"precision": dtype}


def optimizer(run: SourceRun) -> Overrides:
    """Return the overrides for the optimizer, from DeepSpeed's `optimizer` entry if there is one, else from flags."""
    values = {
        "optim.lr": ("optimizer.params.lr", "learning_rate"),
        "optim.weight_decay": ("optimizer.params.weight_decay", "weight_decay"),
        "optim.eps": ("optimizer.params.eps", "adam_epsilon"),
    }
    found: Overrides = {} if run.lacks_deepspeed else {"optim.clip": clip(run)}
    found |= {key: from_deepspeed_or_flag(run, theirs, flag) for key, (theirs, flag) in values.items()}
    betas = run.ds_or_default("optimizer.params.betas") if run.has_ds_optimizer else AUTO
    pair = [plain(b) for b in betas] if isinstance(betas, list) and len(betas) == 2 else [AUTO, AUTO]
    for beta, flag in zip(pair, ("adam_beta1", "adam_beta2"), strict=True):
        found[f"optim.{flag[5:]}"] = run.trainer_value(flag) if beta == AUTO else beta  # optim.beta1, optim.beta2
    if run.has_ds_warmup:
        found["optim.lr"] = from_deepspeed_or_flag(run, "scheduler.params.warmup_max_lr", "learning_rate")
    # learning rates by part are LLaVA's own; an optimizer that DeepSpeed makes, or its schedule, has one for all parts
    one_group = run.has_ds_optimizer or run.has_ds_warmup or not run.launch.is_original
    found["optim.projector_lr"] = None if one_group else run.trainer_value("mm_projector_lr")
    if run.is_next and not one_group and run.trainer_value("mm_vision_tower_lr") and "vision" in trained_parts(run):
        found["optim.vision_lr"] = run.trainer_value("mm_vision_tower_lr")
    return found


def from_deepspeed_or_flag(run: SourceRun, deepspeed_key: str, flag: str) -> object:
    """Return a setting of the optimizer or scheduler: the value of `deepspeed_key` in DeepSpeed's configuration or, if
    that is `auto` or it has no optimizer (or scheduler), the value of the script's flag."""
    value = AUTO if run.ds(deepspeed_key.partition(".")[0] + ".type") is None else run.ds_or_default(deepspeed_key)
    return run.trainer_value(flag) if value == AUTO else value


def clip(run: SourceRun) -> object:
    """Return the norm to which the original training clips gradients; None if it does not (DeepSpeed's default)."""
    # a DeepSpeed configuration that Accelerate makes clips as the script says (its DeepSpeedPlugin)
    default = AUTO if run.trainer and run.deepspeed is None else 0
    value = run.ds("gradient_clipping", default) if run.uses_deepspeed else run.trainer_value("max_grad_norm")
    return (run.trainer_value("max_grad_norm") if value == AUTO else value) or None


def schedule(run: SourceRun) -> Overrides:
    """Return llava_fsdp's overrides for the learning rate schedule. DeepSpeed's schedule, if there is one, replaces
    that of transformers' Trainer; `optim.schedule` is left out if llava_fsdp has no equivalent."""
    kind = run.ds("scheduler.type")
    if kind is not None:
        linear = run.ds("scheduler.params.warmup_type") == "linear"
        named = DS_SCHEDULES.get((str(kind), "linear" if linear else "log"))
        found: Overrides = {"optim.schedule": named} if named else {}
        steps = run.ds_or_default("scheduler.params.warmup_num_steps")
        if steps != AUTO:
            steps = max(LEAST_WARMUP, steps) if isinstance(steps, int) else steps  # as DeepSpeed does
            return found | ({"optim.warmup_steps": steps} if named else {})
        return found | warmup(run)
    name = str(run.trainer_value("lr_scheduler_type"))
    if name == "constant":
        return {"optim.schedule": "constant", "optim.warmup_ratio": 0.0}
    return ({"optim.schedule": SCHEDULES[name]} if name in SCHEDULES else {}) | warmup(run)


def warmup(run: SourceRun) -> Overrides:
    """Return llava_fsdp's override for the warm-up of transformers' schedules, as a number or as a share of steps."""
    steps = run.trainer_value("warmup_steps")
    if isinstance(steps, int | float) and steps >= 1:
        return {"optim.warmup_steps": int(steps)}
    return {"optim.warmup_ratio": steps or run.trainer_value("warmup_ratio")}  # below 1 it is a share of all steps
