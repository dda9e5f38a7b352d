"""Find out whether a command in a shell script starts a training: with which launcher (`deepspeed`, `torchrun`,
`accelerate launch`, plain `python`, or a trainer's own entry such as `swift sft`), and which program."""

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from llava_fsdp.migrate.source.shell import ShellCommand
from llava_fsdp.migrate.source.trainers import (
    LAUNCH_VARIABLES,
    PROGRAM_VARIABLES,
    Trainer,
    trainer_of,
    trainer_of_command,
)

PYTHON = re.compile(r"python[\d.]*")
MODULES = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed",
}  # fmt: skip
MENTIONS = frozenset("echo printf which type command pkill killall grep cp mv ls rm alias".split())
"""Shell commands whose arguments may name a training program without starting it."""
TRAINING = re.compile(r"train|sft|fine_?tune", re.IGNORECASE)
PROGRAMS = frozenset({"train", "train_mem", "train_xformers"})
OWN_FLAGS = re.compile(r"--(mm_\w+|vision_tower|(tune|pretrain|freeze)_mm_mlp_adapter|lazy_preprocess|version)(=.*)?")
"""Pattern of flags that only LLaVA's training program and its forks have."""
SWITCHES = frozenset("""
    module m no_python no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log bind_cores_to_rank
    q quiet elastic_training standalone use_env run_path
    cpu multi_gpu tpu ipex enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
    use_deepspeed use_fsdp use_megatron_lm use_xpu use_mps_device same_network tpu_cluster no_tpu_cluster tpu_use_sudo
    downcast_bf16 debug use_parallelism_config
""".split())  # fmt: skip
"""Flags of the launchers that take no value."""


@dataclass(frozen=True)
class TrainingCommand:
    """A shell command that starts a training."""

    launcher: str
    """Program that starts the processes: deepspeed, torchrun, accelerate, python, swift or llamafactory-cli; or yaml,
    if only a file of a trainer's flags was given."""
    flags: dict[str, str | bool]
    """The launcher's flags, with `_` instead of `-` in their names."""
    script: str
    arguments: list[str]
    line: int
    devices: str | None
    """Value of CUDA_VISIBLE_DEVICES that the script sets."""
    notes: tuple[str, ...] = ()
    trainer: Trainer | None = None
    """The training program, if it is one whose own flags are known beside LLaVA's."""

    @property
    def is_original(self) -> bool:
        """Whether the training program is LLaVA's own, by its path, or by its name and a flag that only LLaVA has."""
        path = PurePosixPath(self.script.removesuffix(".py").replace(".", "/"))
        if path.name not in PROGRAMS:
            return False
        return path.parts[-3:-1] == ("llava", "train") or any(OWN_FLAGS.fullmatch(word) for word in self.arguments)


def find_launch(command: ShellCommand) -> TrainingCommand | None:
    """Return a shell command as a training command; None if it starts no training."""
    words = command.words
    # a command such as `echo` or `pip install` only mentions a training program
    if words[0] in MENTIONS or "install" in words:
        return None
    for index, word in enumerate(words):
        name = PurePosixPath(word).name
        rest = words[index + 1 :]
        # a trainer's own command, such as `swift sft`
        if trainer_of_command(words[index:]) is not None:
            return training_of_trainer_command(command, name, index)
        if name in ("deepspeed", "torchrun"):
            return split_launch(command, name, rest)
        if name == "accelerate" and rest[:1] == ["launch"]:
            return split_launch(command, name, rest[1:])
        if PYTHON.fullmatch(name):
            while rest and re.fullmatch(r"-[a-lnoq-zB-VX-Z]+", rest[0]):  # -u, -O; not -m, -W, which take a value
                rest = rest[1:]
            if rest[:1] == ["-m"] and rest[1:2] and rest[1] in MODULES:
                return split_launch(command, MODULES[rest[1]], rest[2:])
            launch = split_launch(command, "python", rest)
            return launch if launch and TRAINING.search(PurePosixPath(launch.script).name) else None
    return None


def training_of_trainer_command(command: ShellCommand, name: str, index: int) -> TrainingCommand:
    """Return the training that a trainer's own command starts, such as `swift sft` at `index` of the command's words;
    `name` is the first of the two words. TRL's command starts `accelerate launch`; the others take torchrun's flags
    (LAUNCH_VARIABLES) and further settings (PROGRAM_VARIABLES) from environment variables."""
    words = command.words
    launcher = {"trl": "accelerate", "lmf": "llamafactory-cli"}.get(name, name)
    environment = dict(command.environment)
    variables_read = [key for key in environment if key in PROGRAM_VARIABLES or key in LAUNCH_VARIABLES]
    flags: dict[str, str | bool] = {}
    for key in variables_read if launcher != "accelerate" else []:
        flags[key.lower() if key in LAUNCH_VARIABLES else key] = environment.pop(key)
    devices, notes = devices_and_notes(environment)
    return TrainingCommand(
        launcher,
        flags,
        f"{name} {words[index + 1]}",
        words[index + 2 :],
        command.line,
        devices,
        notes,
        trainer=trainer_of_command(words[index:]),
    )


def devices_and_notes(environment: dict[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the value of CUDA_VISIBLE_DEVICES, and a remark about a script's other environment variables."""
    others = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    settings = ", ".join(f"{name}={value}" for name, value in others.items())
    note = f"the script sets {settings}: set the variables that the command needs"
    return environment.get("CUDA_VISIBLE_DEVICES"), (note,) if others else ()


def split_launch(command: ShellCommand, launcher: str, words: list[str]) -> TrainingCommand | None:
    """Return the training that a launcher starts; None if there is no program. `words` follow the launcher's name: its
    flags, of which those in SWITCHES take no value, the program (the first word that is neither a flag nor a flag's
    value), and the program's arguments."""
    flags: dict[str, str | bool] = {}
    notes = []
    index = 0
    while index < len(words) and words[index].startswith("-"):
        given, equals, value = words[index].partition("=")
        name = given.lstrip("-").replace("-", "_")
        if name in flags:
            notes.append(f"{given} is given twice; the last one counts")
        index += 1
        if equals:
            flags[name] = value
        elif name in SWITCHES or index == len(words) or words[index].startswith("-"):
            flags[name] = True
        else:
            flags[name] = words[index]
            index += 1
    if index == len(words):
        return None
    devices, others = devices_and_notes(dict(command.environment))
    launch = TrainingCommand(
        launcher, flags, words[index], words[index + 1 :], command.line, devices, (*notes, *others)
    )
    # `trainer` names a known program (such as ms-swift) that is not LLaVA's own (`is_original`)
    return launch if launch.is_original else replace(launch, trainer=trainer_of(launch.script, launch.arguments))


@dataclass(frozen=True)
class LaunchedRanks:
    """Number of processes on each machine, and number of machines; None if the launcher's flags do not give it."""

    per_node: int | None
    nodes: int | None = 1
    devices: str | None = None
    """Value of CUDA_VISIBLE_DEVICES that selects the same GPUs as the launcher's flags."""


def ranks_of(launch: TrainingCommand) -> LaunchedRanks:
    """Return the numbers of processes that the flags of DeepSpeed's launcher or torchrun give, or the environment
    variables of ms-swift or LLaMA-Factory. They are not known for a YAML file alone. For any other command, also
    `accelerate launch`, return one process: the caller reads Accelerate's flags and file."""
    flags = launch.flags
    if launch.launcher == "deepspeed":
        include = flags.get("include", flags.get("i"))
        if isinstance(include, str):
            return ranks_of_include(include)
        per_node = positive_number(flags.get("num_gpus", flags.get("num_accelerators")))
        unknown = {"exclude", "e", "hostfile", "H"} & flags.keys()
        nodes = positive_number(flags.get("num_nodes", None if unknown else "1"))
        return LaunchedRanks(per_node or (None if unknown else count_devices(launch.devices)), nodes)
    if launch.launcher == "torchrun":
        per_node = flags.get("nproc_per_node", "1")
        per_node_number = count_devices(launch.devices) if per_node in ("gpu", "auto") else positive_number(per_node)
        return LaunchedRanks(per_node_number, positive_number(flags.get("nnodes", "1")))
    if launch.launcher in ("swift", "llamafactory-cli"):
        # without the variable ms-swift starts one process, and LLaMA-Factory one for each GPU that it sees
        one = "1" if launch.launcher == "swift" else None
        per_node = positive_number(flags.get("nproc_per_node", one)) or count_devices(launch.devices)
        return LaunchedRanks(per_node, positive_number(flags.get("nnodes", "1")))
    return LaunchedRanks(None if launch.launcher == "yaml" else 1)


def ranks_of_include(text: str) -> LaunchedRanks:
    """Return what DeepSpeed's flag --include says, such as `host:0,1@host:2,3`. The number of processes per machine is
    None if a host lists no GPUs, or if hosts have different numbers of GPUs."""
    hosts = [host.partition(":")[2] for host in text.split("@")]
    counts = {len(slots.split(",")) if slots else None for slots in hosts}
    per_node = counts.pop() if len(counts) == 1 else None
    # (processes per machine, machines, CUDA_VISIBLE_DEVICES)
    return LaunchedRanks(per_node, len(hosts), hosts[0] if len(hosts) == 1 and per_node else None)


def count_devices(devices: str | None) -> int | None:
    """Return the number of GPUs in a value of CUDA_VISIBLE_DEVICES; None if it is not set."""
    return len([d for d in devices.split(",") if d.strip()]) if devices else None


def positive_number(value: object) -> int | None:
    """Return a text of digits as a number above 0; None for anything else, such as a range of machines."""
    return int(value) if isinstance(value, str) and value.isdigit() and int(value) > 0 else None
