"""What llava_fsdp has to be told so that it trains as a run of somebody else's did: Hydra overrides, one decision each.

The tables of keys say which key became which of these; what a script does not say has the original's default here.
"""

from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from llava_fsdp.config import config_dir
from llava_fsdp.migrate.bash_script import is_open, open_mark, shown
from llava_fsdp.migrate.source_run import AUTO, HALF, Run, plain

Overrides = dict[str, object]

STAGES = {0: "zero0", 1: "zero1", 2: "zero2", 3: "zero3"}
# PyTorch's ShardingStrategy, by name and by the number that older Accelerate files have.
FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3", "1": "zero3",
    "SHARD_GRAD_OP": "zero2", "2": "zero2",
    "NO_SHARD": "zero0", "3": "zero0",
    "HYBRID_SHARD": "hybrid", "4": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid2", "_HYBRID_SHARD_ZERO2": "hybrid2", "5": "hybrid2",
}  # fmt: skip
# LLaVA conversation.py:374-395 and train.py:894-908; `v0` and `v0.5` leave the template at its default there.
TEMPLATES = {
    "plain": "plain", "v0_plain": "plain",
    "v1": "v1", "vicuna_v1": "v1", "v0": "v1", "v0.5": "v1",
    "default": "v0", "llava_v0": "v0", "v0_mmtag": "v0_mmtag",
    "llava_v1": "llava_v1", "v1_mmtag": "v1_mmtag",
    "llama_2": "llama_2", "llava_llama_2": "llava_llama_2", "mistral_instruct": "mistral_instruct",
    "mpt": "mpt", "chatml_direct": "chatml", "mistral_direct": "chatml",
}  # fmt: skip
# transformers' names to ours; `constant` has no warm-up there.
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant_with_warmup": "constant", "constant": "constant",
}  # fmt: skip
# DeepSpeed's, by type and kind of warm-up (lr_schedules.py).
DS_SCHEDULES = {
    ("WarmupLR", "log"): "warmup_log", ("WarmupLR", "linear"): "constant",
    ("WarmupDecayLR", "log"): "warmup_decay", ("WarmupDecayLR", "linear"): "linear",
}  # fmt: skip
# Keys of DeepSpeed's block `fp16`.
SCALER = {
    "loss_scale": "precision.scaler.scale",
    "initial_scale_power": "precision.scaler.initial_power",
    "loss_scale_window": "precision.scaler.window",
    "hysteresis": "precision.scaler.hysteresis",
    "min_loss_scale": "precision.scaler.minimum",
}
DS_ADAM = frozenset({"adam", "adamw"})
LEAST_WARMUP = 2  # DeepSpeed's
LEAST_KEPT = 2
TRACKERS: Mapping[str, tuple[str, object]] = {
    "wandb": ("track.wandb", "online"),
    "tensorboard": ("track.tensorboard", True),
}
# torch.compile's backends that write no kernels.
EAGER = frozenset({"eager", "eager_noexcept", "aot_eager", "aot_eager_default_partitioner"})


def decide(run: Run) -> Overrides:
    """Every override, also those that a stage or a recipe already has; `command` leaves those out."""
    found: Overrides = {}
    if run.launch:
        found |= model(run) | data(run) | writing(run) | tracking(run)
    memory = activation_checkpointing(run) | sharding(run) | offload(run) | precision(run)
    return found | memory | compiling(run) | batch(run) | optimizer(run) | schedule(run)


def model(run: Run) -> Overrides:
    name, stage = run.hf("model_name_or_path"), run.stage
    adapted = "qlora" if run.bits is not None and stage == "finetune" else "lora"
    found: Overrides = {"stage": f"{stage}_{adapted}" if run.is_lora else stage, "model": frame(shown(name))}
    found["model.checkpoint" if stage == "finetune_task" else "model.language"] = name
    if run.hf("vision_tower"):
        found["model.vision"] = run.hf("vision_tower")
    projector = run.hf("mm_projector_type")
    found |= {
        "model.projector_type": projector,
        "model.select_layer": run.hf("mm_vision_select_layer"),
        "model.select_feature": "full" if run.hf("mm_vision_select_feature") == "cls_patch" else "patch",
        "model.train": trained(run),
    }
    if stage == "finetune":
        found["model.projector"] = run.hf("pretrain_mm_mlp_adapter") or "random"
    if stage == "finetune_task":
        found["model.image_start_end"] = run.truth("mm_use_im_start_end")
    if projector != "mlp2x_gelu" and not is_open(projector):
        found["export.enabled"] = False
    return found | lora(run) | quantized(run)


def lora(run: Run) -> Overrides:
    """Adapters; the stages have the values of the original's scripts, its program has others."""
    keys = ("r", "alpha", "dropout", "bias") if run.is_lora else ()
    return {f"model.lora.{key}": run.hf(f"lora_{key}") for key in keys}


def quantized(run: Run) -> Overrides:
    """A base in few bits, which cannot train itself (LLaVA train.py:796-817)."""
    if run.bits is None or not (run.is_lora or run.stage == "pretrain"):
        return {}
    if run.bits == 8:
        return {"model.quantize.mode": "int8"}
    return {"model.quantize.mode": run.hf("quant_type"), "model.quantize.double": run.truth("double_quant")}


def frame(name: str) -> str:
    """The choice of `model=` with this language model, else the one of its size."""
    for path in sorted((config_dir() / "model").glob("*.yaml")):
        if OmegaConf.select(OmegaConf.load(path), "language") == name:
            return path.stem
    return "llava_v1_5_13b" if "13b" in Path(name).name.lower() else "llava_v1_5_7b"


def trained(run: Run) -> list[str]:
    """LLaVA train.py:843-845, 926-935; a frozen backbone leaves lm_head trainable there, which has no name here."""
    if run.stage == "pretrain" or (run.truth("freeze_backbone") and not run.is_lora):
        return ["projector"]
    return ["language"] if run.truth("freeze_mm_mlp_adapter") else ["projector", "language"]


def data(run: Run) -> Overrides:
    version = run.hf("version")
    ratio = run.hf("image_aspect_ratio")
    found: Overrides = {
        "data": "llava_json",
        "data.path": run.hf("data_path") or open_mark("$DATA_PATH"),
        "data.template": version if is_open(version) else TEMPLATES.get(str(version)),
        "data.image_aspect_ratio": ratio if is_open(ratio) or ratio == "pad" else "square",
        "data.max_length": run.hf("model_max_length"),
        "data.workers": run.hf("dataloader_num_workers"),
        "sampler.group_by_modality_length": run.truth("group_by_modality_length"),
    }
    if run.hf("image_folder"):
        found["data.images"] = run.hf("image_folder")
    return {key: value for key, value in found.items() if value is not None}


def writing(run: Run) -> Overrides:
    """Where a run writes, when, and how long it is."""
    found: Overrides = {"seed": run.hf("seed"), "comm.timeout": run.hf("ddp_timeout")}
    if run.hf("output_dir"):
        found["output_dir"] = run.hf("output_dir")
    epochs, steps = run.hf("num_train_epochs"), run.hf("max_steps")
    if is_open(epochs):
        found["epochs"] = epochs
    elif isinstance(epochs, float) and epochs == int(epochs) >= 1:
        found["epochs"] = int(epochs)
    if is_open(steps) or (isinstance(steps, int) and steps > 0):
        found["max_steps"] = steps
    every = run.hf("save_steps")
    if run.hf("save_strategy") != "steps":
        found["checkpoint.every"] = None
    elif is_open(every) or (isinstance(every, float) and every >= 1):
        found["checkpoint.every"] = every if is_open(every) else int(str(every).partition(".")[0])
    keep = run.hf("save_total_limit")
    if keep:
        found["checkpoint.keep"] = max(LEAST_KEPT, keep) if isinstance(keep, int) else keep
    lines = run.hf("logging_steps")
    if run.hf("logging_strategy") == "steps" and (is_open(lines) or (isinstance(lines, float) and lines >= 1)):
        found["log_every"] = int(lines) if isinstance(lines, float) else lines
    if run.truth("full_determinism"):
        found["deterministic"] = True
    return found


def tracking(run: Run) -> Overrides:
    """Who is told of the steps; a script without `--report_to` tells whatever is installed, which nobody knows here."""
    names = [] if is_open(run.hf("report_to")) else str(run.hf("report_to") or "").split()
    names = list(TRACKERS) if "all" in names else names
    found = dict(TRACKERS[name] for name in names if name in TRACKERS)
    if "track.wandb" in found and run.hf("run_name"):
        found["track.name"] = run.hf("run_name")
    return found


def activation_checkpointing(run: Run) -> Overrides:
    """The script's; without one what the JSON asks for, for models that call DeepSpeed's own checkpointing."""
    if run.launch:
        return {"activation_checkpointing": "full" if run.truth("gradient_checkpointing") else "none"}
    if run.ds("activation_checkpointing.cpu_checkpointing") is True:
        return {"activation_checkpointing": "offload"}
    accelerates = plain(run.launched("fsdp_activation_checkpointing")) if run.distributed_type == "FSDP" else None
    return {"activation_checkpointing": "full" if accelerates else "none"} if isinstance(accelerates, bool) else {}


def compiling(run: Run) -> Overrides:
    """The script's torch_compile, which a backend or a mode switches on too, or the launcher's dynamo_backend.

    What is switched off is so here; a script that says nothing leaves compile=auto, which `migrate` says.
    """
    launched = run.launched("dynamo_backend")
    named = [launched, *(run.hf(name) for name in ("torch_compile_backend", "torchdynamo") if run.launch)]
    backends = [str(name).lower() for name in named if name and not is_open(name)]
    backends = [name for name in backends if name not in ("no", "none", "false")]
    asked = [run.hf(name) for name in ("torch_compile", "torch_compile_mode") if run.launch]
    if backends or any(value and not is_open(value) for value in asked):
        return {"compile": not EAGER & set(backends)}
    is_off = run.launch and "torch_compile" in run.flags and run.hf("torch_compile") is False
    return {"compile": False} if is_off or launched is not None else {}


def sharding(run: Run) -> Overrides:
    if run.uses_deepspeed:
        if run.lacks_deepspeed:
            return {}
        stage = run.ds_or_default("zero_optimization.stage")
        group = run.ds("zero_optimization.zero_hpz_partition_size", 1)
        group = group if isinstance(group, int) and group > 1 else run.ds("zero_optimization.mics_shard_size", -1)
        if (
            stage == 3
            and isinstance(group, int)
            and 1 < group < (run.gpus or group + 1)
            and not (run.gpus or 0) % group
        ):
            return {"sharding": "hybrid", "sharding.shard_size": group}
        return {"sharding": STAGES[stage]} if isinstance(stage, int) and stage in STAGES else {}
    named = fsdp_strategy(run)
    if named is not None:
        return {"sharding": named}
    return {"sharding": "zero0"} if run.launch or run.distributed_type == "MULTI_GPU" else {}


def offload(run: Run) -> Overrides:
    """DeepSpeed's optimizer on the CPU is masters, gradients and moments in host memory, updated there: `params` here.

    ZeRO-1 keeps whole gradients on the device under both; there the moments go.
    """
    if run.uses_deepspeed:
        if run.lacks_deepspeed:
            return {}
        stage = run.ds_or_default("zero_optimization.stage")
        blocks = ["zero_optimization.offload_optimizer"] + ["zero_optimization.offload_param"] * (stage == 3)
        devices = [run.ds(f"{block}.device", "none") for block in blocks]
        if "nvme" in devices and stage != 1:
            folder = run.ds(f"{blocks[devices.index('nvme')]}.nvme_path")
            return {"offload": "nvme"} | ({"offload.folder": folder} if folder else {})
        old_names = ("cpu_offload", "cpu_offload_param", "cpu_offload_params")
        old = any(plain(run.ds(f"zero_optimization.{key}")) is True for key in old_names)
        if old or {"cpu", "nvme"} & set(map(str, devices)):
            return {"offload": "optimizer" if stage == 1 else "params"}
        return {}
    words = str(run.hf("fsdp") or "").upper().split() if run.launch else []
    if run.distributed_type == "FSDP" or words:
        on = plain(run.launched("fsdp_offload_params")) is True or "OFFLOAD" in words
        return {"offload": "params"} if on else {}
    return {}


def cuts(gpus: int | None, group: int) -> bool:
    """Whether the ranks, where their number is known, make several groups of this size."""
    return gpus is None or (group < gpus and gpus % group == 0)


def fsdp_strategy(run: Run) -> str | None:
    """From the trainer's `--fsdp "full_shard auto_wrap"`, or from Accelerate's `fsdp_config`."""
    if run.distributed_type == "FSDP":
        reshard = plain(run.launched("fsdp_reshard_after_forward"))
        if isinstance(reshard, bool):
            return "zero3" if reshard else "zero2"
        named = reshard or run.launched("fsdp_sharding_strategy") or "FULL_SHARD"
        return FSDP_STRATEGIES.get(str(named).upper())
    words = str(run.hf("fsdp") or "").upper().split() if run.launch else []
    return next((FSDP_STRATEGIES[word] for word in words if word in FSDP_STRATEGIES), None)


def precision(run: Run) -> Overrides:
    """bf16 wins over fp16 where both are asked for; the original refuses that."""
    half = computed_in(run)
    if half == "bf16":
        return bf16(run)
    if half == "fp16":
        return {"precision": "fp16"} | scaler(run)
    if half == "fp8" or run.launch:
        return {"precision": half or "fp32"}
    told = run.deepspeed is not None and AUTO not in [run.ds(f"{name}.enabled") for name in HALF]
    return {"precision": "fp32"} if told or run.launched("mixed_precision") == "no" else {}


def computed_in(run: Run) -> str | None:
    """By DeepSpeed's blocks, the trainer's flags or Accelerate's word; apex's mixed precision is fp16."""
    asked = {HALF[name] for name in HALF if run.ds(f"{name}.enabled") is True}
    if run.launch:
        asked |= {flag for flag in ("bf16", "fp16") if run.truth(flag)}
    asked.add(str(run.launched("mixed_precision")))
    return next((half for half in ("bf16", "fp16", "fp8") if half in asked), None)


def bf16(run: Run) -> Overrides:
    """DeepSpeed's masters and moments in bf16 are rounded to nearest, ours at random."""
    if run.ds("bf16.bf16_master_weights_and_grads") is not True:
        return {"precision": "bf16"}
    if run.ds("bf16.bf16_optimizer_states") is True:
        return {"precision": "bf16_pure"}
    return {"precision": "bf16_pure", "precision.moment_dtype": "fp32"}


def scaler(run: Run) -> Overrides:
    """DeepSpeed's settings, as far as it is told them; without DeepSpeed torch's GradScaler, which has its own."""
    if not run.uses_deepspeed:
        return {"precision.scaler.window": 2000, "precision.scaler.hysteresis": 1}
    given = {ours: run.ds(f"fp16.{theirs}") for theirs, ours in SCALER.items()}
    numbers: Overrides = {key: value for key, value in given.items() if isinstance(value, int | float)}
    fixed = numbers.pop("precision.scaler.scale", 0)
    return {"precision.scaler.scale": fixed} if fixed else numbers


def batch(run: Run) -> Overrides:
    if run.launch:
        return {"global_batch_size": run.batch, "micro_batch_size": run.hf("per_device_train_batch_size")}
    found = {"global_batch_size": run.ds_batch.whole, "micro_batch_size": run.ds_batch.micro}
    return {key: value for key, value in found.items() if value is not None}


def optimizer(run: Run) -> Overrides:
    """DeepSpeed's entry where there is one, the trainer's flags where it says `auto` or is absent."""
    knows = (run.launch or run.uses_deepspeed) and not run.lacks_deepspeed
    knows = knows and (run.launch or run.ds("gradient_clipping") != AUTO)
    found: Overrides = {"optim.clip": clip(run)} if knows else {}
    if run.launch and not run.has_ds_optimizer:
        names = {"lr": "learning_rate", "projector_lr": "mm_projector_lr", "weight_decay": "weight_decay"}
        names |= {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
        found |= {f"optim.{ours}": run.hf(theirs) for ours, theirs in names.items()}
    elif run.has_ds_optimizer:
        beta = run.ds_or_default("optimizer.params.betas")
        betas = [plain(b) for b in beta] if isinstance(beta, list) and len(beta) == 2 else [AUTO, AUTO]
        values = {
            "optim.lr": (run.ds_or_default("optimizer.params.lr"), "learning_rate"),
            "optim.weight_decay": (run.ds_or_default("optimizer.params.weight_decay"), "weight_decay"),
            "optim.eps": (run.ds_or_default("optimizer.params.eps"), "adam_epsilon"),
            "optim.beta1": (betas[0], "adam_beta1"),
            "optim.beta2": (betas[1], "adam_beta2"),
        }
        found |= filled(run, values)
        if run.launch:
            found["optim.projector_lr"] = None
    if run.has_ds_warmup:
        found |= filled(run, {"optim.lr": (run.ds_or_default("scheduler.params.warmup_max_lr"), "learning_rate")})
        found |= {"optim.projector_lr": None} if run.launch else {}
    return found


def filled(run: Run, values: Mapping[str, tuple[object, str]]) -> Overrides:
    """`auto` is the trainer's flag; without a script nobody knows it."""
    found = {key: run.hf(flag) if value == AUTO else value for key, (value, flag) in values.items()}
    return {key: value for key, value in found.items() if run.launch or values[key][0] != AUTO}


def clip(run: Run) -> object:
    """DeepSpeed clips by its own key, whose default is 0: none; HF fills it in only where it says `auto`."""
    value = run.ds("gradient_clipping", 0) if run.uses_deepspeed else run.hf("max_grad_norm")
    if value == AUTO:
        value = run.hf("max_grad_norm")
    return value or None


def schedule(run: Run) -> Overrides:
    kind = run.ds("scheduler.type")
    if kind is not None:
        linear = run.ds("scheduler.params.warmup_type") == "linear"
        named = DS_SCHEDULES.get((str(kind), "linear" if linear else "log"))
        found: Overrides = {"optim.schedule": named} if named else {}
        steps = run.ds_or_default("scheduler.params.warmup_num_steps")
        if steps != AUTO:
            steps = max(LEAST_WARMUP, steps) if isinstance(steps, int) else steps
            return found | ({"optim.warmup_steps": steps} if named else {})
        return found | (warmup(run) if run.launch else {})
    if not run.launch:
        return {}
    name = str(run.hf("lr_scheduler_type"))
    if name == "constant":
        return {"optim.schedule": "constant", "optim.warmup_ratio": 0.0}
    named = name if is_open(name) else SCHEDULES.get(name)
    return ({"optim.schedule": named} if named else {}) | warmup(run)


def warmup(run: Run) -> Overrides:
    steps = run.hf("warmup_steps")
    return {"optim.warmup_steps": steps} if steps else {"optim.warmup_ratio": run.hf("warmup_ratio")}
