"""Print the help of a command (`--help`): its choices and keys, each key with its value, its type and one line of
meaning.

The meanings are the docstrings in the configuration classes; the values are those that result from the command line.
"""

import ast
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from llava_fsdp.config.command_line.describe import takes
from llava_fsdp.config.command_line.load import config_dir, nearest
from llava_fsdp.config.command_line.tree import written
from llava_fsdp.runtime.errors import ConfigError

FLAGS = ("--help", "-h")
WIDEST_VALUE = 34
EXAMPLES = {
    "train": "stage=pretrain model=llava_v1_5_7b data=llava_json data.path=FILE.json data.images=FOLDER",
    "prepare": "data=llava_json data.path=FILE.json data.images=FOLDER",
    "plan": "stage=finetune model=llava_v1_5_7b gpus=8 gpu=h100",
    "doctor": "stage=finetune model=llava_v1_5_7b",
    "evaluate": "outputs/finetune",
    "chat": "outputs/finetune image=cat.jpg question='What is this?'",
    "export": "outputs/finetune to=outputs/llava-mine format=llava",
    "sweep": "-m stage=finetune optim.lr=1e-5,2e-5",
}
"""Arguments of a typical call of each command."""


def asked_help(arguments: list[str]) -> str | None:
    """Return the group of keys for which `--help GROUP` asks; empty for all keys, None without `--help`."""
    for word, behind in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if word in FLAGS:
            return "" if "=" in behind or behind.startswith("-") else behind
    return None


def render_help(config_name: str, schema: type, arguments: list[str], group: str = "") -> str:
    """Return the help of the command `config_name`.

    Args:
        schema: dataclass with the keys of its configuration.
        arguments: keys and choices that the command line sets; the shown values include them.
        group: group of keys such as `data` or `model.lora` to show; empty: all groups.

    Raises:
        ConfigError: the group does not exist, or the values contradict each other.
    """
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            node = compose(config_name, arguments)
    except HydraException as error:
        raise ConfigError(str(error).partition("\n")[0]) from error
    groups = groups_of(schema)
    if group and group not in groups:
        raise ConfigError(
            f"--help {group}: it is no group of keys; there are {', '.join(groups)}{nearest(group, list(groups))}"
        )
    if group:
        return "\n".join([*about(group, groups[group]), *table(group, groups[group], node)])
    lines = [
        f"usage: llava-fsdp {config_name} key=value ...",
        f"example: llava-fsdp {config_name} {EXAMPLES.get(config_name, '')}",
        "",
        *choices_of(schema),
        *table("", schema, node),
        "",
        "groups of keys, each shown by --help GROUP:",
        *wrapped("  ", ", ".join(groups)),
    ]
    return "\n".join(lines)


def groups_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """Return the classes of all groups of keys (fields that are dataclasses) by dotted name, such as `model.lora`."""
    found: dict[str, Any] = {}
    for key in fields(schema):
        if is_dataclass(key.type):
            found |= {prefix + key.name: key.type} | groups_of(key.type, f"{prefix}{key.name}.")
    return found


def about(group: str, schema: Any) -> list[str]:
    text = inspect.cleandoc(schema.__doc__ or "")
    meaning = "" if text.startswith(f"{schema.__name__}(") else " ".join(text.split())  # dataclass writes such a text
    return [*wrapped("", meaning), *choices_of(None, group)]


def choices_of(schema: Any, group: str = "") -> list[str]:
    """Return lines of help with the choices (`GROUP=CHOICE`) of Hydra's config group `group`, or of all groups that are
    fields of `schema`. Each YAML file in the group's folder in `conf/` is a choice."""
    names = [group] if group else [key.name for key in fields(schema)]
    lines = []
    for name in names:
        stems = sorted(path.stem for path in (config_dir() / name).glob("*.yaml"))
        lines += wrapped(f"  {name}=".ljust(27), " | ".join(stems)) if stems else []
    return ["sets of values, each a file of conf/:", *lines, ""] if lines else []


def table(group: str, schema: Any, node: DictConfig) -> list[str]:
    """Return lines of help: name, value, type and meaning of each key of a group, without its subgroups.

    Args:
        group: dotted name; empty: the keys that are in no group.
        schema: dataclass of the group.
        node: the whole configuration, from which the values are taken.
    """
    docs = meanings(schema)
    values = OmegaConf.select(node, group) if group else node
    lines = []
    for key in fields(schema):
        if is_dataclass(key.type):
            continue
        value = shown(values, key.name)
        kind = takes(schema, key.name) or ""
        name = f"{group}.{key.name}" if group else key.name
        meaning = first_sentence(docs.get(key.name, ""))
        lines += wrapped(f"  {name}={value}".ljust(44) + " ", f"{meaning} ({kind})" if kind else meaning)
    return lines


def shown(values: Any, name: str) -> str:
    """Return the value of a key as help shows it, shortened; `?` if it cannot be known yet."""
    try:
        value = values[name] if values is not None else None
    except Exception:  # an interpolation that needs other keys on the command line, or a value that must be given
        return "?"
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return textwrap.shorten(written(value), WIDEST_VALUE, placeholder="...")


def meanings(schema: Any) -> dict[str, str]:
    """Return the docstrings of the fields of a configuration class and its bases, which are the strings behind the
    fields in the source code."""
    found: dict[str, str] = {}
    classes: list[type] = [base for base in schema.__mro__ if hasattr(base, "__dataclass_fields__")]
    for one in reversed(classes):
        tree = ast.parse(inspect.getsource(sys.modules[one.__module__]))
        (body,) = [item.body for item in tree.body if isinstance(item, ast.ClassDef) and item.name == one.__name__]
        for statement, behind in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
                    found[statement.target.id] = " ".join(str(behind.value.value).split())
    return found


def first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def wrapped(start: str, text: str) -> Iterable[str]:
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 140))
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]
