"""Training programs beside LLaVA's whose own flags are known (ms-swift, LLaMA-Factory and TRL), and how a command or a
YAML file of each is recognized."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath


class Trainer(Enum):
    """A training program. The value is its name in messages."""

    swift = "ms-swift"
    factory = "LLaMA-Factory"
    trl = "TRL"


ENTRIES: Mapping[tuple[str, str], Trainer] = {
    ("swift", "sft"): Trainer.swift,
    ("llamafactory-cli", "train"): Trainer.factory,
    ("lmf", "train"): Trainer.factory,
    ("trl", "sft"): Trainer.trl,
}
"""{first two words of a command that starts a training: its program}."""
LAUNCH_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables from which ms-swift and LLaMA-Factory make torchrun's flags of the same names."""
PROGRAM_VARIABLES = frozenset(
    "ROOT_IMAGE_DIR USE_HF MAX_PIXELS MIN_PIXELS IMAGE_MAX_TOKEN_NUM IMAGE_MIN_TOKEN_NUM MAX_NUM INPUT_SIZE "
    "HD_NUM NUM_CROPS MAX_SLICE_NUMS "
    "FORCE_TORCHRUN DISABLE_VERSION_CHECK USE_MODELSCOPE_HUB".split()
)
"""Environment variables that ms-swift or LLaMA-Factory read as settings."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def trainer_of_command(words: Sequence[str]) -> Trainer | None:
    """Return the program that a command of these words starts; None if its first two words are not in ENTRIES."""
    return ENTRIES.get((PurePosixPath(words[0]).name, words[1])) if len(words) > 1 else None


def trainer_of(script: str, arguments: Sequence[str]) -> Trainer | None:
    """Return which of ms-swift, LLaMA-Factory and TRL a training command runs; None for another program.

    Args:
        script: path of the program, its module's name, or the two words of an entry such as `swift sft`.
        arguments: the words after it.
    """
    if (entry := trainer_of_command(script.split())) is not None:
        return entry
    parts = PurePosixPath(script.removesuffix(".py").replace(".", "/")).parts
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if parts[-3:] == ("swift", "cli", "sft"):
        return Trainer.swift
    is_factory = parts[-2:] in (("src", "train"), ("llamafactory", "launcher"))
    if is_factory and (flags & {"--finetuning_type", "--template"} or has_config(arguments)):
        return Trainer.factory
    is_trl = parts[-2:] in (("scripts", "sft"), ("scripts", "sft_vlm")) or parts[-1:] in (("sft",), ("sft_vlm",))
    return Trainer.trl if is_trl and flags & {"--dataset_name", "--config"} else None


def has_config(arguments: Sequence[str]) -> bool:
    """Return whether the first word after the program's name is a file of its flags."""
    return bool(arguments) and arguments[0].endswith(CONFIG_SUFFIXES)


def trainer_of_config(keys: Collection[str]) -> Trainer | None:
    """Return which of ms-swift, LLaMA-Factory and TRL has the keys of a YAML file as flags; None for other files."""
    if "model_name_or_path" in keys:
        if {"dataset_name", "datasets"} & set(keys):
            return Trainer.trl
        return Trainer.factory if {"dataset", "finetuning_type", "template", "cutoff_len"} & set(keys) else None
    return Trainer.swift if "model" in keys and {"dataset", "tuner_type", "train_type"} & set(keys) else None


# Flag of a trainer -> its name in other versions.
OLD_NAMES: Mapping[str, tuple[str, ...]] = {
    "tuner_type": ("train_type",), "eval_strategy": ("evaluation_strategy",), "dtype": ("torch_dtype",),
    "max_length": ("max_seq_length",),
}  # fmt: skip
TUNING: Mapping[Trainer, str] = {Trainer.swift: "tuner_type", Trainer.factory: "finetuning_type"}
"""{program: flag that says whether all weights or adapters are trained}. TRL has a switch, `use_peft`."""
# Names of the DeepSpeed files that ms-swift brings -> what in them has an effect (swift/config/*.json).
SWIFT_ZERO: Mapping[str, Mapping[str, object]] = {
    name: {
        "zero_optimization.stage": int(name[4]), "bf16.enabled": "auto", "gradient_clipping": "auto",
        **dict.fromkeys(offloaded, "cpu"),
    }
    for name, offloaded in {
        "zero0": (), "zero1": (), "zero2": (), "zero3": (),
        "zero2_offload": ("zero_optimization.offload_optimizer.device",),
        "zero3_offload": ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
    }.items()
}  # fmt: skip
# Names of the Accelerate files that TRL brings -> what in them has an effect (trl/accelerate_configs/*.yaml).
TRL_ACCELERATE: Mapping[str, Mapping[str, object]] = {
    name: {"num_processes": 8, "num_machines": 1, "mixed_precision": "bf16"} | own
    for name, own in {
        "single_gpu": {"distributed_type": "NO"},
        "multi_gpu": {"distributed_type": "MULTI_GPU"},
        **{
            f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": stage}
            for stage in (1, 2, 3)
        },
        "fsdp1": {"distributed_type": "FSDP", "fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD"},
        "fsdp2": {"distributed_type": "FSDP", "fsdp_config.fsdp_reshard_after_forward": True},
    }.items()
}  # fmt: skip
ACCELERATE_FLAGS = frozenset(
    "config_file num_processes num_machines machine_rank main_process_ip main_process_port mixed_precision multi_gpu "
    "use_deepspeed use_fsdp zero_stage gpu_ids deepspeed_config_file fsdp_version".split()
)
"""Flags of `accelerate launch` that `trl sft` passes on to it."""
