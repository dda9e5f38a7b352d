"""Describe a training of another system, as its script, its DeepSpeed JSON file and its Accelerate YAML file set it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from llava_fsdp.migrate.source.launch_command import LaunchedRanks, TrainingCommand, positive_number, ranks_of
from llava_fsdp.migrate.source.trainers import OLD_NAMES, TUNING, Trainer
from llava_fsdp.runtime.errors import ConfigError

AUTO = "auto"
TRUE = frozenset({"yes", "true", "t", "y", "1"})
FALSE = frozenset({"no", "false", "f", "n", "0"})
# DeepSpeed's default values (runtime/constants.py, lr_schedules.py, ops/adam).
DS_DEFAULTS: Mapping[str, object] = {
    "zero_optimization.stage": 0,
    "gradient_clipping": 0.0,
    "optimizer.params.lr": 0.001,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_max_lr": 0.001,
    "scheduler.params.warmup_num_steps": 1000,
    "scheduler.params.warmup_type": "log",
    "bf16.enabled": False,
}
TORCH_ADAMW_DECAY = 0.01  # DeepSpeed's default weight decay with torch_adam=true
# DeepSpeed's key -> Accelerate's name for the same setting.
ACCELERATE_NAMES = {
    "zero_optimization.stage": "zero_stage",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.offload_param.device": "offload_param_device",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
    "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
}
# LLaVA's flag -> names that other training programs use for the same flag.
ALIASES = {
    "model_name_or_path": ("model_id", "model_name", "pretrained_model_name_or_path"),
    "model_max_length": ("max_seq_length", "max_seq_len", "max_length", "cutoff_len"),
    "data_path": ("train_file", "train_data_path", "train_data"),
    "image_folder": ("image_dir", "image_root"),
    "lora_enable": ("use_peft", "use_lora"),
    "lora_r": ("lora_rank",),
    "quant_type": ("bnb_4bit_quant_type",),
    "double_quant": ("use_bnb_nested_quant",),
}


@dataclass(frozen=True)
class Settings:
    """The settings in a configuration file. Names of nested keys are joined with dots."""

    name: str
    values: Mapping[str, object]


@dataclass(frozen=True)
class Flag:
    """A flag of a training program, as its argument parser defines it, and the rule that says what it becomes."""

    default: object
    rule: object
    """A `keys.Rule`."""
    kind: type | None = None
    """Type of the flag's value; None: the type of `default`."""

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


@dataclass(frozen=True)
class SourceRun:
    """A training of another system: its command, its flags, and its DeepSpeed and Accelerate settings."""

    name: str
    launch: TrainingCommand
    table: Mapping[str, Flag]
    """Flags that the training program accepts."""
    flags: Mapping[str, object]
    """The flags in the training command, as they are written there."""
    given_gpus: int | None = None
    """Number of GPUs that the user gave as `gpus=N`; None: the launcher's number is used."""
    deepspeed: Settings | None = None
    accelerate: Settings | None = None
    datasets: Settings | None = None
    """The YAML file that --data_path names, which lists files of records (LLaVA-NeXT train.py:977-1025), or
    LLaMA-Factory's dataset_info.json."""
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Paths of DeepSpeed or Accelerate files that the script names and that were not found."""

    @property
    def trainer(self) -> Trainer | None:
        return self.launch.trainer

    def given(self, name: str) -> str | None:
        """Return the name by which the command sets a flag: its own name, an older one that a trainer also accepts
        (OLD_NAMES), or one that programs other than LLaVA's use (ALIASES). None if the command does not set it."""
        others = OLD_NAMES if self.trainer else {} if self.launch.is_original else ALIASES
        names = (name, *others.get(name, ()))
        return next((spelling for spelling in names if spelling in self.flags), None)

    def trainer_value(self, name: str) -> object:
        """Return the value of a flag, converted to its type: that in the command, or else the program's default."""
        flag, spelling = self.table[name], self.given(name)
        if spelling is None:
            return flag.default
        return parse(self.flags[spelling], flag.type, f"{self.name}: --{spelling}")

    def words(self, name: str) -> list[str]:
        """Return the values of a flag that takes several; empty if it is not given."""
        spelling = self.given(name)
        value = self.flags[spelling] if spelling else True
        return [] if value is True else list(map(str, value)) if isinstance(value, list) else [str(value)]

    def is_half(self, flag: str) -> bool:
        """Whether the dtype `flag` (`bf16` or `fp16`) is on. Where neither is given, TRL takes bf16, and ms-swift
        chooses by --torch_dtype (its model_args.py): fp16 for float16 and float32. Without that flag it chooses by the
        checkpoint's dtype, for which bf16 is taken here."""
        if self.given("bf16") or self.given("fp16") or self.trainer not in (Trainer.swift, Trainer.trl):
            value = self.trainer_value(flag)
            return not self.trainer_value("fp16") if value is None and self.trainer is Trainer.trl else bool(value)
        in_fp16 = self.trainer is Trainer.swift and self.trainer_value("torch_dtype") in ("float16", "float32")
        return in_fp16 is (flag == "fp16")

    def accelerate_value(self, name: str) -> object:
        """Return the value of an Accelerate setting, from the flag of `accelerate launch` or else from Accelerate's
        YAML file; None if neither sets it. In `name`, a prefix such as `fsdp_config.` is left out."""
        if self.launch.launcher == "accelerate" and name in self.launch.flags:
            return self.launch.flags[name]
        for prefix in ("", "deepspeed_config.", "fsdp_config.", "dynamo_config."):
            if self.accelerate and prefix + name in self.accelerate.values:
                return self.accelerate.values[prefix + name]
        return None

    @property
    def distributed_type(self) -> str:
        """Accelerate's `distributed_type` (DEEPSPEED, FSDP, MULTI_GPU, ...); empty if it is not set."""
        for flag, name in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP")):
            if self.accelerate_value(flag):
                return name
        return str(self.accelerate_value("distributed_type") or "").upper()

    @property
    def uses_deepspeed(self) -> bool:
        return self.deepspeed is not None or "deepspeed" in self.flags or self.distributed_type == "DEEPSPEED"

    @property
    def lacks_deepspeed(self) -> bool:
        """Whether a DeepSpeed file was not found, so that DeepSpeed's settings are unknown."""
        return self.uses_deepspeed and self.deepspeed is None and self.distributed_type != "DEEPSPEED"

    def ds(self, key: str, default: object = None) -> object:
        """Return the value of a dotted key of DeepSpeed's configuration, or `default`. If there is no JSON file, the
        value comes from the settings from which Accelerate makes that configuration."""
        if self.deepspeed is not None:
            return plain(self.deepspeed.values.get(key, default))
        found = self.accelerate_value(ACCELERATE_NAMES[key]) if key in ACCELERATE_NAMES else None
        if found is None and key == "zero_optimization.stage" and self.distributed_type == "DEEPSPEED":
            return 2  # default of DeepSpeedPlugin (accelerate/utils/dataclasses.py)
        return plain(default if found is None else found)

    def ds_or_default(self, key: str) -> object:
        """Return the value of a dotted key of DeepSpeed's configuration, or DeepSpeed's own default."""
        torch_adam = key == "optimizer.params.weight_decay" and self.ds("optimizer.params.torch_adam") is True
        return self.ds(key, TORCH_ADAMW_DECAY if torch_adam else DS_DEFAULTS[key])

    @property
    def has_ds_optimizer(self) -> bool:
        return self.ds("optimizer.type") is not None

    @property
    def has_ds_warmup(self) -> bool:
        """Whether the learning rate is DeepSpeed's WarmupLR or WarmupDecayLR: one rate for all parameter groups."""
        return self.ds("scheduler.type") in ("WarmupLR", "WarmupDecayLR")

    @property
    def devices(self) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES for the training, by the launcher's flags, Accelerate or the script."""
        chosen = self.accelerate_value("gpu_ids")
        ids = str(chosen) if chosen not in (None, "all") else None
        return self.ranks.devices or ids or self.launch.devices

    @property
    def ranks(self) -> LaunchedRanks:
        """Number of processes on each machine, and number of machines. The user's `gpus=N` is the total number of
        processes; without it, the launcher's flags or Accelerate's file give both numbers."""
        launched_ranks = ranks_of(self.launch)
        if self.launch.launcher == "accelerate":  # both numbers may be flags, or in Accelerate's file
            total, nodes = (
                positive_number(str(self.accelerate_value("num_processes"))),
                positive_number(str(self.accelerate_value("num_machines") or 1)),
            )
            launched_ranks = LaunchedRanks(total // nodes if total and nodes else None, nodes)
        if self.given_gpus:
            nodes = launched_ranks.nodes if launched_ranks.nodes and self.given_gpus % launched_ranks.nodes == 0 else 1
            return LaunchedRanks(self.given_gpus // nodes, nodes, launched_ranks.devices)
        return launched_ranks

    @property
    def gpus(self) -> int | None:
        ranks = self.ranks
        return ranks.per_node * ranks.nodes if ranks.per_node and ranks.nodes else None

    def ranks_for_one_sample(self, key: str, gpus: int) -> int:
        """Return the value of a dotted key of DeepSpeed's configuration, if it is a number of GPUs that compute one
        sample together, and divides `gpus`; else 1."""
        size = self.ds(key)
        return size if isinstance(size, int) and size > 1 and gpus % size == 0 else 1

    @property
    def tensor(self) -> int:
        """Number of GPUs among which DeepSpeed divides each layer (AutoTP), from its configuration, which has it in a
        section or at the top; 1 if layers are not divided, or the number does not divide that of all GPUs."""
        nested, plain_key = (
            self.ranks_for_one_sample(key, self.gpus or 1) for key in ("tensor_parallel.autotp_size", "autotp_size")
        )
        return nested if nested > 1 else plain_key

    @property
    def context(self) -> int:
        """Number of GPUs among which DeepSpeed divides the tokens of a sample (Ulysses); 1: none."""
        return self.ranks_for_one_sample("sequence_parallel_size", (self.gpus or 1) // self.tensor)

    @property
    def batch(self) -> int:
        """Number of samples in an optimizer step: micro-batch size x accumulation x GPUs with samples of their own."""
        micro, accumulation = (
            self.trainer_value("per_device_train_batch_size"),
            self.trainer_value("gradient_accumulation_steps"),
        )
        assert isinstance(micro, int) and self.gpus  # read_training_command checks gpus
        if accumulation is None:  # ms-swift: at least 16 samples in a step (its trainers/arguments.py)
            accumulation = max(1, math.ceil(16 / max(1, micro) / self.gpus))
        assert isinstance(accumulation, int)
        return micro * accumulation * (self.gpus // (self.tensor * self.context))

    @property
    def is_next(self) -> bool:
        return "mm_tunable_parts" in self.table

    @property
    def tunable(self) -> tuple[str, ...] | None:
        """The parts of the model that LLaVA-NeXT's --mm_tunable_parts names."""
        value = self.trainer_value("mm_tunable_parts") if self.is_next else None
        return tuple(str(value).split(",")) if value is not None else None

    @property
    def data_files(self) -> list[str] | str:
        """The files of records that --data_path names: a file, several as `DIR/{a,b}.json`, or those that a YAML file
        lists; a text that says what is wrong if they are not known or if only a part of a file is trained on."""
        named = self.trainer_value("data_path") if self.given("data_path") else None
        if named is None:
            return "the script has no --data_path"
        path = str(named)
        if self.launch.is_original and (several := re.fullmatch(r"(.*)\{(.*)\}\.json", path)):
            return [f"{several[1]}{name}.json" for name in several[2].split(",")]
        if not path.endswith((".yaml", ".yml")):
            return [path]
        if self.datasets is None:
            return f"{path} was not found: give it as another PATH"
        return files_of(self.datasets)

    @property
    def bits(self) -> int | None:
        """Number of bits of a quantized base model's weights, 4 or 8; None for any other number, or none."""
        if self.trainer in (Trainer.swift, Trainer.factory):
            is_swift = self.trainer is Trainer.swift
            flag, method = ("quant_bits", "quant_method") if is_swift else ("quantization_bit", "quantization_method")
            bits = self.trainer_value(flag) if self.trainer_value(method) == "bnb" else None
            return bits if isinstance(bits, int) and bits in (4, 8) else None
        if not self.launch.is_original:
            return 4 if self.trainer_value("load_in_4bit") else 8 if self.trainer_value("load_in_8bit") else None
        bits = self.trainer_value("bits")
        return bits if isinstance(bits, int) and bits in (4, 8) else None

    @property
    def is_lora(self) -> bool:
        """Whether LoRA adapters train. LLaVA's pretraining stage freezes them again (train.py:926-930)."""
        if self.trainer:
            return self.tuning == "lora"
        return bool(self.trainer_value("lora_enable")) and self.stage != "pretrain"

    @property
    def tuning(self) -> str:
        """What a trainer trains, in ms-swift's and LLaMA-Factory's words: `full`, `lora`, or another method."""
        assert self.trainer
        if self.trainer is Trainer.trl:
            return "lora" if self.trainer_value("use_peft") else "full"
        return str(self.trainer_value(TUNING[self.trainer]))

    @property
    def stage(self) -> str:
        """The stage of llava_fsdp that trains as this run does. `finetune_task` continues from a whole LLaVA, and
        `finetune` from a language model and a projector."""
        if not self.launch.is_original:
            return "finetune_task"
        if self.tunable == ("mm_mlp_adapter",) or (self.tunable is None and self.trainer_value("tune_mm_mlp_adapter")):
            return "pretrain"
        from_llava = "llava" in str(self.trainer_value("model_name_or_path")).lower()
        return "finetune_task" if from_llava and not self.trainer_value("pretrain_mm_mlp_adapter") else "finetune"


def files_of(datasets: Settings) -> list[str] | str:
    """Return the paths of the files of records that a YAML file of LLaVA-NeXT lists; or a text that says what is wrong,
    if an entry has no path or takes only a part of its file."""
    rows = datasets.values.get("datasets")
    files = []
    for row in rows if isinstance(rows, list) else []:
        file = row.get("json_path") if isinstance(row, dict) else None
        if not isinstance(file, str):
            return f"{datasets.name}: an entry of datasets has no json_path"
        kind, _, number = str(row.get("sampling_strategy", "all")).partition(":")
        if number and kind in ("first", "end", "random"):
            return (
                f"{datasets.name}: sampling_strategy {kind}:{number} of {file}: parts of files are not taken; write "
                "the records that are to be trained on into a file of their own, or give data.sources.NAME.path of "
                "every file, and .epochs of this one"
            )
        files.append(file)
    return files or f"{datasets.name} has no datasets"


def plain(value: object) -> object:
    """Return a value of a configuration file; a text that spells a boolean or a number is converted to it."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def parse(given: object, kind: type, where: str) -> object:
    """Return a flag's value converted to its type. It is given as a text, a list of texts, or True if the flag has no
    value. Raise ConfigError for a value that the training program's own parser would not accept."""
    if given is True:
        if kind is bool:
            return True
        raise ConfigError(f"{where} has no value")
    text = " ".join(given) if isinstance(given, list) else str(given)
    if kind is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise ConfigError(f"{where}={text} must be True or False")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{where}={text} is not {'a whole number' if kind is int else 'a number'}") from None
