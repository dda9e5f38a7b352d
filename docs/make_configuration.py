"""Writes docs/configuration.md: `python docs/make_configuration.py`. A key's meaning is the first sentence of its
docstring, or all of it if it explains choices in few words; its default is what `conf/` gives it."""

import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pages import DOCS, table

from llava_fsdp import config
from llava_fsdp.config.bounds import TAKES
from llava_fsdp.config.command_line.help import first_sentence, meanings
from llava_fsdp.config.command_line.tree import dotted, written

MODEL = "llava_v1_5_7b"
ADAPTERS = ("finetune_lora", "finetune_qlora", "finetune_task_lora", "finetune_task_qlora")
STAGES = ("finetune", "pretrain", "finetune_task", *ADAPTERS)
MODELS = ("own", "tiny", "qwen2_5_siglip", "llava_onevision_7b", "smollm2_dinov2")
# Keys that a choice of their group sets, and keys of one embedded dataset.
CHOSEN = {
    "stage.name", "stage.corpus", "model.name", "data.source", "data.root", "sampler.name", "sharding.strategy",
    "activation_checkpointing.mode", "offload.mode", "compat.name",
}  # fmt: skip
WORDS: Mapping[Any, str] = {
    bool: "true/false", int: "integer", float: "number", str: "text", types.NoneType: "null", list: "list",
}  # fmt: skip
FEW = 50  # words
SPANS = re.compile(r"(`[^`]*`)")
# A page's file where it is no link yet.
PAGES = re.compile(r"(?<![\w/`])(?<!\]\()(\w+)\.md\b")
# A key, a setting or a path: a word with an underscore, a dot or an equals sign in it.
TYPED = re.compile(r"(?<![\w/])[A-Za-z][\w/]*[._=][\w./=]*\w(?![\w(])")
INTRO = """\
# Configuration

YAML under `conf/` sets values, Hydra composes them, and `src/llava_fsdp/config/keys/` has types, meanings and checks.
Later ones win: `conf/train.yaml`, the groups, `stage`, `recipe/STAGE_MODEL.yaml` (where it exists), `compat`, the
command line. Your own files: `--config-dir my_conf` with `my_conf/model/mine.yaml`, then `model=mine`.

Defaults are those of `stage=finetune model=llava_v1_5_7b`. Stages and models that have another one stand behind it;
*adapters* are the stages `finetune_lora`, `finetune_qlora`, `finetune_task_lora` and `finetune_task_qlora`.
`llava-fsdp train --help GROUP` prints the values of your command line. This page is written by
`python docs/make_configuration.py`."""
GROUPS = {
    "stage": "`pretrain` trains the projector; `finetune` projector and language model; `finetune_task` the same, from "
    "a whole model (`model.checkpoint`); `finetune_lora`, `finetune_qlora`, `finetune_task_lora`, "
    "`finetune_task_qlora` train adapters (adapters.md); `prefer`, `prefer_lora`: preferences.md; "
    "`onevision_1_5`, `onevision_2_single_image`, `onevision_2` "
    "are LLaVA-OneVision's (models.md)",
    "model": "`tiny`, `llava_v1_5_7b`, `llava_v1_5_13b`, `qwen2_5_siglip`, `llava_onevision_7b`, "
    "`llava_onevision_0_5b`, `smollm2_dinov2`; with `stage=finetune`, `finetune_task`, "
    "`finetune_task_lora` or `finetune_task_qlora`: `qwen2_5_vl_3b`, `qwen2_5_vl_7b`, `qwen3_vl_2b`, `qwen3_vl_4b`, "
    "`qwen3_vl_8b`, `qwen3_vl_30b_a3b`, `gemma3_4b`, `gemma3_12b`, `pixtral_12b`, `smolvlm2_2_2b`, `internvl3_2b`, "
    "`internvl3_8b`; "
    "`own`, the neutral LLaVA recipe, is chosen where `model.language` or `model.checkpoint` is named without it",
    "data": "`shapes` (embedded), `llava_json` (records in files)",
    "sharding": "`zero0`, `zero1`, `zero2`, `zero3`, `hybrid`, `hybrid2` (sharding.md); `auto`: the planner's choice",
    "precision": "`auto`: as `bf16` where all devices can, else `fp32`; `bf16_pure`: masters and moments too; `fp16`: "
    "with a loss scale; `fp8`, `int8_mixed`: linear layers in 8 bits (precision.md)",
    "activation_checkpointing": "what a block keeps for the backward pass: `none` everything, `full` its input, "
    "`selective` also matrix products and attention, `budget` and `dynamic` a share of the memory, `offload` its input "
    "in host memory (memory.md); `auto`, the default but for `tiny`: the planner's choice",
    "offload": "`none`; `optimizer`: moments in host memory; `params`: shards and gradients too; `nvme`: in files",
    "parallel": "`none`; `auto`: the planner chooses the kinds of parallelism (parallelism.md)",
    "optim": "`adamw`; `muon` ([sharding](sharding.md#muon))",
    "sampler": "`shuffle`; `computed_shuffle`, whose memory does not grow with the records (data.md); `llava_v1_5`",
    "compat": "`none`; `llava_v1_5` sets `labels`, `sampler`, `loss.normalize`, `data.pixels`, `precision` and `pack` "
    "to the original's (llava.md)",
}
# Heading, groups of keys in it, and text behind the table.
SECTIONS = (
    ("The run", ("", "compat", "stage"), ""),
    ("Model", ("model", "model.lora", "model.quantize"), "See [Models](models.md), adapters.md and quantized.md."),
    ("Data", ("data", "data.sources.NAME", "sampler"), "See data.md."),
    ("Optimizer and loss", ("optim", "loss", "pref"),
     "`image_newline`, the vector that ends a line of tiles' features, learns at `optim.lr`, as in the original."),
    ("Precision and memory", ("precision", "precision.scaler", "activation_checkpointing", "offload"),
     "See precision.md and memory.md."),
    ("Parallelism", ("sharding", "parallel", "comm"), "See sharding.md and parallelism.md."),
    ("Checkpoints and export", ("checkpoint", "export", "numeric"), "See checkpoints.md and artifacts.md."),
    ("Validation and trackers", ("val", "val.sources.NAME", "track"), "See validation.md and report.md."),
)  # fmt: skip
COMMANDS = {
    "prepare": "The keys of a training, and (data.md):",
    "plan": "The keys of a training, and (plan.md):",
    "doctor": "The keys of a training, and (doctor.md):",
    "sweep": "The keys of a training, and (sweeps.md):",
    "evaluate": "The keys of the group `data`, and (evaluation.md):",
}
END = """\
`llava-fsdp chat` and `llava-fsdp export` have keys of their own, which `--help` lists: chat.md, artifacts.md.
`llava-fsdp report RUN...` takes folders, also as `output_dir=RUN`, and `out=FILE`: report.md.

Values of keys that hold text or a path are taken as they are typed, without Hydra's grammar for lists and functions
(`question="What's this?"` needs the shell's quotes alone).

Exit codes are in [running](running.md#how-a-run-ended). A mistake in the keys themselves is written to
`run_status.json` only where `output_dir` exists and is known."""
NAMED = {"data.sources.NAME": config.SourceConfig, "val.sources.NAME": config.HeldOutConfig}


def composed(command: str, *choices: str) -> dict[str, object]:
    """Every key's value, dotted."""
    with initialize_config_dir(str(config.config_dir()), version_base="1.3"):
        node = config.without_hydra(compose(command, list(choices)))
    OmegaConf.resolve(node)
    tree = OmegaConf.to_container(node)
    assert isinstance(tree, dict)
    return dotted({str(key): value for key, value in tree.items()})


def training(stage: str, model: str) -> dict[str, object]:
    own = ["model.language=DIR"] if model == "own" else []
    return composed("train", f"stage={stage}", f"model={model}", "data=llava_json", *own)


def kind(field_type: Any) -> str:
    """What a key of this type takes, in the fewest words."""
    if isinstance(field_type, types.UnionType):
        kinds = [kind(one) for one in get_args(field_type)]
        return (", " if "`" in kinds[0] else "/").join(kinds)
    if isinstance(field_type, type) and issubclass(field_type, Enum):
        return ", ".join(f"`{name}`" for name in field_type.__members__)
    return WORDS.get(get_origin(field_type) or field_type, "group")


def shown(value: object) -> str:
    if value == "???":
        return "must be set"
    if isinstance(value, float) and value and math.log10(abs(value)) < -2:
        return f"`{value:.0e}`".replace("e-0", "e-")
    return f"`{written(value)}`"


class Defaults:
    """The values of all keys of a training, by stage and by model."""

    def __init__(self) -> None:
        stages = {stage: training(stage, MODEL) for stage in STAGES}
        models = {model: training(STAGES[0], model) for model in MODELS}
        self.first, self.recipes = stages[STAGES[0]], stages | models

    def text(self, key: str) -> str:
        """The default of a key, with the stages and models that have another."""
        if key not in self.first:
            return ""
        first = shown(self.first[key]).replace(f"/{STAGES[0]}", "/STAGE")
        others: dict[str, list[str]] = {}
        for recipe, values in self.recipes.items():
            text = shown(values[key]).replace(f"/{recipe}", "/STAGE").replace(f"/{STAGES[0]}", "/STAGE")
            if text != first:
                others.setdefault(text, []).append(recipe)
        if len(others) > 3:
            return "by `model`"
        return "; ".join([first, *(f"{text} ({names(where)})" for text, where in others.items())])


def names(recipes: list[str]) -> str:
    """Stages and models in words."""
    own = [name for name in recipes if name not in ADAPTERS]
    return ", ".join(own + (["adapters"] if set(ADAPTERS) <= set(recipes) else sorted(set(recipes) & set(ADAPTERS))))


def rows(schema: Any, prefix: str, default: Callable[[str], str], left_out: Iterable[str] = ()) -> list[list[str]]:
    """A row for each key of a class that is no group: key, default, what it takes, meaning.

    Raises:
        SystemExit: a key has no docstring.
    """
    docs = meanings(schema)
    found = []
    for key in fields(schema):
        name = f"{prefix}{key.name}"
        if is_dataclass(key.type) or key.name in left_out or name in CHOSEN:
            continue
        if key.name not in docs:
            raise SystemExit(f"{schema.__name__}.{key.name} has no docstring")
        usual = "" if key.default is MISSING else shown(key.default)
        takes = key.metadata.get(TAKES) or kind(key.type)
        found.append([f"`{name}`", default(name) or usual, takes, marked(meaning(docs[key.name], takes))])
    return found


def meaning(text: str, takes: str) -> str:
    """The part of a key's docstring that the page has."""
    return text.rstrip(".") if takes.startswith("`") and len(text.split()) <= FEW else first_sentence(text)


def marked(text: str) -> str:
    """Plain text as one cell: keys, settings and files stand in backticks."""
    found = [part if part.startswith("`") else re.sub(TYPED, r"`\g<0>`", part) for part in re.split(SPANS, text)]
    return "".join(found).replace("|", "\\|")


def group_rows(group: str, defaults: Defaults) -> list[list[str]]:
    schema: Any = NAMED.get(group, config.Config)
    if group and group not in NAMED:
        for part in group.split("."):
            schema = next(key.type for key in fields(schema) if key.name == part)
    return rows(schema, f"{group}." if group else "", defaults.text)


def command_rows(command: str) -> list[list[str]]:
    """The keys that a command has beside those of a training or of the group `data`."""
    schema = getattr(config, f"{command.title()}Config")
    values = composed(command)
    left_out = {key.name for key in fields(config.Config)} if issubclass(schema, config.Config) else {"data", "stage"}

    def default(key: str) -> str:
        return shown(values[key]) if key in values else ""

    found = rows(schema, "", default, left_out)
    for key in fields(schema):
        if is_dataclass(key.type) and key.name not in left_out:
            found += rows(key.type, f"{key.name}.", default)
    return found


def compact(head: Sequence[str], lines: list[list[str]]) -> str:
    return table(head, lines).replace(" | ", "|").replace("| ", "|").replace(" |", "|")


def page() -> str:
    """The whole document."""
    defaults = Defaults()
    head = ("key", "default", "takes", "meaning")
    parts = [INTRO, table(("group", "choices"), [[f"`{group}`", text] for group, text in GROUPS.items()])]
    for title, groups, text in SECTIONS:
        lines = [line for group in groups for line in group_rows(group, defaults)]
        parts += [f"## {title}", compact(head, lines), *([text] if text else [])]
    for command, text in COMMANDS.items():
        parts += [f"## llava-fsdp {command}", text, compact(head, command_rows(command))]
    return re.sub(PAGES, r"[\1](\1.md)", "\n\n".join([*parts, END]) + "\n")


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(page())
    sys.stdout.write(f"{DOCS / 'configuration.md'}\n")
