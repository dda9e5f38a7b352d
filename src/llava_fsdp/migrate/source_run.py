"""One training of somebody else's, as its script, its DeepSpeed JSON and its Accelerate file together say it.

A file of 300 lines because whatever depends on two of the three is asked here, and nowhere else.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llava_fsdp.migrate.bash_script import is_open, open_mark, shown
from llava_fsdp.migrate.launch_command import Launch, Ranks, number, ranks_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.safe_load import read_json

AUTO = "auto"
TRUE = frozenset({"yes", "true", "t", "y", "1"})
FALSE = frozenset({"no", "false", "f", "n", "0"})
# Of the models that LLaVA's scripts name, by the size in the name: for DeepSpeed's buckets, which are made of it.
HIDDEN_SIZES = {"7b": 4096, "13b": 5120, "70b": 8192}
LLAMA_LIKE = re.compile(r"(?:vicuna|llama|llava).*?[-_](7b|13b|70b)(?![a-z0-9])", re.IGNORECASE)
# What DeepSpeed takes where its configuration is silent (runtime/constants.py, lr_schedules.py, ops/adam).
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
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
}
TORCH_ADAMW_DECAY = 0.01
HALF = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "amp": "fp16"}  # DeepSpeed's blocks, and what each is


@dataclass(frozen=True)
class Options:
    """What the user of `migrate` knows and the files do not say."""

    gpus: int | None = None
    hidden_size: int | None = None
    steps: int | None = None
    """Optimizer steps of the whole training."""


@dataclass(frozen=True)
class Block:
    """A file of keys, nested ones with dots."""

    name: str
    values: Mapping[str, object]


@dataclass(frozen=True)
class Flag:
    """A flag of the original's training script, as its argument parser has it."""

    default: object
    rule: object
    """An Outcome, or what makes one of the value."""
    kind: type | None = None
    """Type of the value where the default does not tell."""

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


@dataclass(frozen=True)
class Batch:
    """Of a DeepSpeed JSON that has no script."""

    whole: object = None
    micro: int | None = None
    mistake: str = ""


@dataclass(frozen=True)
class Run:
    name: str
    table: Mapping[str, Flag]
    options: Options
    launch: Launch | None = None
    flags: Mapping[str, object] = field(default_factory=dict)
    """As given on the command line, before their types are known."""
    deepspeed: Block | None = None
    accelerate: Block | None = None
    notes: tuple[str, ...] = ()
    """What was assumed, chosen or not found while reading."""

    def hf(self, name: str) -> object:
        """The value that the original's script would see; open text stays text."""
        flag = self.table[name]
        if name not in self.flags:
            return flag.default
        return parse(self.flags[name], flag.type, f"{self.name}: --{name}")

    def truth(self, name: str) -> bool:
        """A switch; one that the script leaves to an unknown variable counts as its default."""
        value = self.hf(name)
        return bool(self.table[name].default) if is_open(value) else bool(value)

    def launched(self, name: str) -> object:
        """A value of Accelerate's: its launcher's flag, or its file's key in whatever block."""
        if self.launch and self.launch.launcher == "accelerate" and name in self.launch.flags:
            return self.launch.flags[name]
        for prefix in ("", "deepspeed_config.", "fsdp_config.", "dynamo_config."):
            if self.accelerate and prefix + name in self.accelerate.values:
                return self.accelerate.values[prefix + name]
        return None

    @property
    def distributed_type(self) -> str:
        """Accelerate's word for what it sets up; empty where it does not say."""
        for flag, name in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP")):
            if self.launched(flag):
                return name
        return str(self.launched("distributed_type") or "").upper()

    @property
    def uses_deepspeed(self) -> bool:
        return self.deepspeed is not None or "deepspeed" in self.flags or self.distributed_type == "DEEPSPEED"

    @property
    def lacks_deepspeed(self) -> bool:
        """Its DeepSpeed configuration is named and was not found: what it says is unknown."""
        return self.uses_deepspeed and self.deepspeed is None and self.distributed_type != "DEEPSPEED"

    def ds(self, key: str, default: object = None) -> object:
        """A value of the DeepSpeed configuration: of the JSON, else of what Accelerate makes one of."""
        if self.deepspeed is not None:
            if key == "zero_optimization.stage" and self.deepspeed.values.get("zero_optimization") is True:
                return 1  # the old form
            return plain(self.deepspeed.values.get(key, default))
        words = {
            "zero_optimization.stage": "zero_stage",
            "gradient_clipping": "gradient_clipping",
            "zero_optimization.offload_param.device": "offload_param_device",
            "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
            "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
            "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
        }
        found = self.launched(words[key]) if key in words else None
        if found is None and key == "zero_optimization.stage" and self.distributed_type == "DEEPSPEED":
            return 2  # accelerate/utils/dataclasses.py, DeepSpeedPlugin
        return plain(default if found is None else found)

    def ds_or_default(self, key: str) -> object:
        """What DeepSpeed goes by."""
        default = DS_DEFAULTS[key]
        if key == "optimizer.params.weight_decay" and self.ds("optimizer.params.torch_adam") is True:
            default = TORCH_ADAMW_DECAY
        return self.ds(key, default)

    @property
    def has_ds_optimizer(self) -> bool:
        return self.ds("optimizer.type") is not None

    @property
    def has_ds_warmup(self) -> bool:
        """A scheduler that gives every group of parameters one rate."""
        return self.ds("scheduler.type") in ("WarmupLR", "WarmupDecayLR")

    @property
    def ds_batch(self) -> Batch:
        """The JSON's numbers alone, made whole as DeepSpeed does (runtime/config.py)."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        whole, micro, accumulation = map(self.ds, names)
        if isinstance(micro, int) and (accumulation is None or isinstance(accumulation, int)) and whole in (None, AUTO):
            return Batch(self.product(micro, accumulation or 1, *self.rank_factors), micro)
        found = Batch(whole if isinstance(whole, int) else None, micro if isinstance(micro, int) else None)
        if not isinstance(whole, int) or AUTO in (micro, accumulation) or not self.gpus:
            return found
        if micro is None:
            micro = whole // self.gpus // (accumulation if isinstance(accumulation, int) and accumulation else 1)
        if accumulation is None and isinstance(micro, int):
            accumulation = whole // max(1, micro) // self.gpus
        if isinstance(micro, int) and isinstance(accumulation, int) and whole != micro * accumulation * self.gpus:
            text = f"{whole} is not micro-batch {micro} x accumulation {accumulation} x {self.gpus} GPUs"
            return replace(found, mistake=text)
        return Batch(whole, micro if isinstance(micro, int) else None)

    @property
    def devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES, as the launcher chooses it or the script sets it."""
        chosen = self.launched("gpu_ids")
        ids = str(chosen) if chosen not in (None, "all") else None
        return self.ranks.devices or ids or (self.launch.devices if self.launch else None)

    @property
    def ranks(self) -> Ranks:
        found = ranks_of(self.launch) if self.launch else Ranks(None)
        if self.options.gpus:
            nodes = found.nodes if found.nodes and self.options.gpus % found.nodes == 0 else 1
            return Ranks(self.options.gpus // nodes, nodes, found.devices)
        launcher = self.launch.launcher if self.launch else "accelerate"
        if launcher == "accelerate" and not found.per_node:
            total, nodes = number(str(self.launched("num_processes"))), number(str(self.launched("num_machines") or 1))
            return Ranks(total // nodes if total and nodes else None, nodes)
        return found

    @property
    def gpus(self) -> int | None:
        ranks = self.ranks
        return ranks.per_node * ranks.nodes if ranks.per_node and ranks.nodes else None

    @property
    def hidden_size(self) -> int | None:
        """Given, of a model folder that is here, or of a known name."""
        name = shown(self.hf("model_name_or_path"))
        if self.options.hidden_size or self.launch is None:
            return self.options.hidden_size
        config = Path(name) / "config.json"
        if config.is_file():
            size = read_json(config, ConfigError).get("hidden_size")
            return size if isinstance(size, int) else None
        known = LLAMA_LIKE.search(name)
        return HIDDEN_SIZES[known[1].lower()] if known else None

    @property
    def total_steps(self) -> int | None:
        steps = self.hf("max_steps")
        return self.options.steps or (steps if isinstance(steps, int) and steps > 0 else None)

    @property
    def warmup_steps(self) -> object:
        """transformers' `get_warmup_steps`: the number, else the fraction of all steps; text where they are unknown."""
        steps, ratio = self.hf("warmup_steps"), self.hf("warmup_ratio")
        if steps or ratio == 0:
            return steps or 0
        if self.total_steps is None or not isinstance(ratio, float):
            return f"ceil({shown(ratio)} x steps)"
        return math.ceil(ratio * self.total_steps)

    def product(self, *factors: object) -> object:
        """Their product; where one is not known, the arithmetic for the shell to do."""
        if all(isinstance(f, int) for f in factors):
            return math.prod(f for f in factors if isinstance(f, int))
        known = math.prod(f for f in factors if isinstance(f, int))
        names = [re.sub(r"^\$\{?(\w+)\}?$", r"\1", shown(f)) for f in factors if not isinstance(f, int)]
        return open_mark("$((" + " * ".join([str(known), *names] if known != 1 else names) + "))")

    @property
    def rank_factors(self) -> list[object]:
        """Ranks a machine, and machines; what is not known is for the shell to say."""
        ranks = self.ranks
        return [ranks.per_node or open_mark("$GPUS"), ranks.nodes or open_mark("$NODES")]

    @property
    def batch(self) -> object:
        """Samples a step: micro-batch x accumulation x ranks."""
        micro, accumulation = self.hf("per_device_train_batch_size"), self.hf("gradient_accumulation_steps")
        return self.product(micro, accumulation, *self.rank_factors)

    @property
    def bits(self) -> int | None:
        """4 or 8, that the base is packed in; other numbers of --bits pack nothing."""
        bits = self.hf("bits")
        return bits if isinstance(bits, int) and bits in (4, 8) else None

    @property
    def is_lora(self) -> bool:
        """Adapters train; the first stage freezes them again (LLaVA train.py:926-930)."""
        return self.truth("lora_enable") and self.stage != "pretrain"

    @property
    def stage(self) -> str:
        if self.truth("tune_mm_mlp_adapter"):
            return "pretrain"
        from_llava = "llava" in shown(self.hf("model_name_or_path")).lower()
        return "finetune_task" if from_llava and not self.hf("pretrain_mm_mlp_adapter") else "finetune"


def plain(value: object) -> object:
    """A value of a JSON or YAML file; booleans and numbers that were written as text are what they say."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return as_number(value, value)


def as_number(text: str, otherwise: object) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return otherwise


def parse(given: object, kind: type, where: str) -> object:
    """A flag's text as its type.

    Raises:
        ConfigError: it is none; the original's parser would have stopped too.
    """
    if given is True:
        if kind is bool:
            return True
        raise ConfigError(f"{where} has no value")
    if isinstance(given, list):
        given = " ".join(given)
    assert isinstance(given, str), given
    if is_open(given) or kind is str:
        return given
    if kind is bool:
        if given.lower() in TRUE | FALSE:
            return given.lower() in TRUE
        raise ConfigError(f"{where}={given} must be True or False")
    if given in ("None", "none", "null"):
        return None
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"{where}={given} is not {'a whole number' if kind is int else 'a number'}") from None
