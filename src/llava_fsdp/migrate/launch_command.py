"""How a training is started: `deepspeed`, `torchrun`, `accelerate launch` or plain `python`, told from its script."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from llava_fsdp.migrate.bash_script import Command, is_open, shown
from llava_fsdp.migrate.key_outcome import Outcome, implied, mapped, unsupported

PYTHON = re.compile(r"python[\d.]*")
# Commands that name a program without starting it.
TALKS = frozenset("echo printf which type command pkill killall grep cp mv ls rm alias".split())
TRAINING = re.compile(r"train", re.IGNORECASE)
PLACE = mapped("torchrun's flag of the same meaning on several machines; --standalone needs none")
ON_ITS_OWN = implied("torchrun needs no such flag")
NUMBER = mapped("the number of ranks: --nproc-per-node, and a factor of global_batch_size")
ELASTIC = mapped("NNODES=MIN:MAX launch/multinode.sh, which is torchrun's --nnodes=MIN:MAX")
RESTARTS = mapped("torchrun's --max-restarts; launch/node.sh and launch/multinode.sh have MAX_RESTARTS, 3 unless set")
LOGS = implied("each worker's errors are told by rank 0 and written to run_status.json; torchrun has --log-dir")

# Flags of the launchers, in their own spelling with `_`. A flag that takes no value is in SWITCHES too.
DEEPSPEED_LAUNCHER: dict[str, Outcome] = {
    "hostfile": unsupported("torchrun is started on every machine: launch/multinode.sh"),
    "H": unsupported("torchrun is started on every machine: launch/multinode.sh"),
    "include": mapped("the number of ranks, and CUDA_VISIBLE_DEVICES before the command"),
    "i": mapped("the number of ranks, and CUDA_VISIBLE_DEVICES before the command"),
    "exclude": unsupported("say which GPUs to use: CUDA_VISIBLE_DEVICES=0,1 before the command, and gpus=N here"),
    "e": unsupported("say which GPUs to use: CUDA_VISIBLE_DEVICES=0,1 before the command, and gpus=N here"),
    "num_gpus": NUMBER,
    "num_accelerators": NUMBER,
    "num_nodes": NUMBER,
    "min_elastic_nodes": ELASTIC,
    "max_elastic_nodes": ELASTIC,
    "elastic_training": ELASTIC,
    "master_port": PLACE,
    "master_addr": PLACE,
    "node_rank": PLACE,
    "launcher": unsupported("torchrun is the launcher; launch/multinode.sh runs it on several machines"),
    "launcher_args": unsupported("torchrun is the launcher; launch/multinode.sh runs it on several machines"),
    "module": ON_ITS_OWN,
    "m": ON_ITS_OWN,
    "no_python": ON_ITS_OWN,
    "no_local_rank": ON_ITS_OWN,
    "no_ssh": ON_ITS_OWN,
    "no_ssh_check": ON_ITS_OWN,
    "force_multi": ON_ITS_OWN,
    "save_pid": ON_ITS_OWN,
    "enable_each_rank_log": LOGS,
    "autotuning": unsupported("nothing here tries configurations out; python -m llava_fsdp.sweep runs those you name"),
    "bind_cores_to_rank": unsupported("bind with numactl or the scheduler"),
    "bind_core_list": unsupported("bind with numactl or the scheduler"),
    "ssh_port": ON_ITS_OWN,
    "venv_script": unsupported("activate the environment before the command"),
    "log_level": LOGS,
    "q": LOGS,
    "quiet": LOGS,
}  # fmt: skip
TORCHRUN: dict[str, Outcome] = {
    "nproc_per_node": NUMBER,
    "nnodes": NUMBER,
    "standalone": PLACE,
    "node_rank": PLACE,
    "master_addr": PLACE,
    "master_port": PLACE,
    "rdzv_backend": PLACE,
    "rdzv_endpoint": PLACE,
    "rdzv_id": PLACE,
    "rdzv_conf": PLACE,
    "local_addr": PLACE,
    "max_restarts": RESTARTS,
    "monitor_interval": LOGS,
    "start_method": ON_ITS_OWN,
    "event_log_handler": LOGS,
    "role": ON_ITS_OWN,
    "module": ON_ITS_OWN,
    "m": ON_ITS_OWN,
    "no_python": ON_ITS_OWN,
    "use_env": ON_ITS_OWN,
    "run_path": ON_ITS_OWN,
    "log_dir": LOGS,
    "r": LOGS,
    "redirects": LOGS,
    "t": LOGS,
    "tee": LOGS,
    "local_ranks_filter": LOGS,
    "logs_specs": LOGS,
    "numa_binding": PLACE,
}
SWITCHES = frozenset("""
    module m no_python no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log bind_cores_to_rank
    q quiet elastic_training standalone use_env run_path
    cpu multi_gpu tpu ipex enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
    use_deepspeed use_fsdp use_megatron_lm use_xpu use_mps_device same_network tpu_cluster no_tpu_cluster tpu_use_sudo
    downcast_bf16 debug use_parallelism_config
""".split())  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A started training, in three parts: launcher, script, and what follows the script."""

    launcher: str
    """deepspeed, torchrun, accelerate or python."""
    flags: dict[str, str | bool]
    script: str
    arguments: list[str]
    line: int
    devices: str | None
    """CUDA_VISIBLE_DEVICES, where the script sets it."""
    notes: tuple[str, ...] = ()
    """What the reader of the launcher's table should know besides."""


def find_launch(command: Command) -> Launch | None:
    """The training that a command starts; None where it starts none."""
    words = list(command.words)
    if words[0] in TALKS or "install" in words:
        return None
    for place, word in enumerate(words):
        name = PurePosixPath(word).name
        rest = words[place + 1 :]
        if name == "deepspeed":
            return split(command, "deepspeed", rest)
        if name == "torchrun":
            return split(command, "torchrun", rest)
        if name == "accelerate" and rest[:1] == ["launch"]:
            return split(command, "accelerate", rest[1:])
        if PYTHON.fullmatch(name):
            while rest and re.fullmatch(r"-[a-lnoq-zB-VX-Z]+", rest[0]):  # -u, -O; not -m, -W with their words
                rest = rest[1:]
            if rest[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
                return split(command, "torchrun", rest[2:])
            if rest[:2] in (["-m", "accelerate.commands.launch"], ["-m", "deepspeed.launcher.runner"]):
                return split(command, rest[1].split(".")[0], rest[2:])
            launch = split(command, "python", rest)
            return launch if launch and TRAINING.search(PurePosixPath(launch.script).name) else None
    return None


def split(command: Command, launcher: str, words: list[str]) -> Launch | None:
    """The launcher's flags end where the script begins: the first word that is no flag's value."""
    flags: dict[str, str | bool] = {}
    notes = []
    place = 0
    while place < len(words):
        word = words[place]
        if not word.startswith("-"):
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in flags:
            notes.append(f"{word.partition('=')[0]} is given twice; the last one counts")
        place += 1
        if equals:
            flags[name] = value
        elif name in SWITCHES or place == len(words) or words[place].startswith("-"):
            flags[name] = True
        else:
            flags[name] = words[place]
            place += 1
    if place == len(words):
        return None
    devices = command.variables.get("CUDA_VISIBLE_DEVICES")
    notes += surroundings(command)
    return Launch(launcher, flags, words[place], words[place + 1 :], command.line, devices, tuple(notes))


def surroundings(command: Command) -> list[str]:
    """Variables of the environment, which the command does not repeat."""
    own = [f"{name}={shown(value)}" for name, value in command.environment.items() if name != "CUDA_VISIBLE_DEVICES"]
    return [f"the script sets {', '.join(own)}: set for the command too what it needs"] if own else []


@dataclass(frozen=True)
class Ranks:
    """How many processes train, as far as the launcher says."""

    per_node: int | None
    nodes: int | None = 1
    devices: str | None = None
    """The value of CUDA_VISIBLE_DEVICES that the same choice of GPUs needs."""


def ranks_of(launch: Launch) -> Ranks:
    """From the launcher's flags alone; Accelerate's file is looked at elsewhere."""
    flags = launch.flags
    if launch.launcher == "deepspeed":
        include = flags.get("include", flags.get("i"))
        if isinstance(include, str):
            return included(include)
        per_node = number(flags.get("num_gpus", flags.get("num_accelerators")))
        unknown = {"exclude", "e", "hostfile", "H"} & flags.keys()
        nodes = number(flags.get("num_nodes", None if unknown else "1"))
        return Ranks(per_node or (None if unknown else visible(launch.devices)), nodes)
    if launch.launcher == "torchrun":
        per_node = flags.get("nproc_per_node", "1")
        counted = visible(launch.devices) if per_node in ("gpu", "auto") else number(per_node)
        return Ranks(counted, number(flags.get("nnodes", "1")))
    if launch.launcher == "accelerate":
        total, nodes = number(flags.get("num_processes")), number(flags.get("num_machines", "1"))
        return Ranks(total // nodes if total and nodes else None, nodes)
    return Ranks(1)


def included(text: str) -> Ranks:
    """DeepSpeed's `host:0,1@host:2,3`; a host alone stands for all of its GPUs, which nobody here can count."""
    hosts = [host.partition(":")[2] for host in text.split("@")]
    counts = {len(slots.split(",")) if slots and not is_open(slots) else None for slots in hosts}
    per_node = counts.pop() if len(counts) == 1 else None
    return Ranks(per_node, len(hosts), hosts[0] if len(hosts) == 1 and per_node else None)


def visible(devices: str | None) -> int | None:
    return len([d for d in devices.split(",") if d.strip()]) if devices and not is_open(devices) else None


def number(value: object) -> int | None:
    return int(value) if isinstance(value, str) and value.isdigit() and int(value) > 0 else None
