"""Check a command line before Hydra uses it: it must not contain secrets, or name Python code that Hydra would call.

Hydra instantiates classes that are named in its own `hydra` node (launcher, sweeper, callbacks, logging) before a
program sees its configuration. Therefore arguments that set this node, and all YAML files of a `--config-dir`, are
checked first. Imports neither Hydra nor torch.
"""

import itertools
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import yaml

from llava_fsdp.config.command_line.tree import TARGETS, leaves_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import refuse_yaml_bombs
from llava_fsdp.runtime.text.redact import HIDDEN, has_secret, is_secret_name

FOLDER_FLAGS = ("--config-dir", "-cd")
PATH_FLAGS = ("--config-path", "-cp")
FLAGS = (*FOLDER_FLAGS, *PATH_FLAGS)
SETTABLE = ("mode", "verbose", "sweep", "launcher", "sweeper")
"""Keys below `hydra` that users may set, as well as the config groups hydra/launcher, hydra/sweeper and
hydra/sweeper/..."""
CALLS = re.compile(rf"(?<!\w)(?:{'|'.join(TARGETS)}|custom_search_space)(?!\w)|oc\.(?:create|decode)\b")
"""Keys by which Hydra or its Optuna plugin calls Python, and resolvers that could create such a key from a text."""


def check_command_line(arguments: list[str], text_keys: Collection[str] = ()) -> None:
    """Raise ConfigError if an argument contains a secret or sets a key that users must not set, or if Hydra would call
    Python code that an argument or a YAML file names. `text_keys`: keys whose values are given to Hydra as quoted text,
    so that they may contain anything but `${...}`."""
    refuse_secrets(arguments)
    flags = flag_values(arguments)
    for flag in PATH_FLAGS:  # they would replace the package's YAML files
        if flag in flags:
            raise ConfigError(
                f"{flag}={flags[flag]}: the configuration is the package's own; add to it with --config-dir"
            )
    for word in arguments:
        key, _, value = word.partition("=")
        is_text = key in text_keys and value[:1] not in ("'", '"') and "${" not in value
        refuse_calls(key if is_text else word, word)
        check_hydra_key(key.lstrip("+~"), value, word)
    folder = next((flags[flag] for flag in FOLDER_FLAGS if flag in flags), None)
    if folder is not None:  # --config-dir adds the YAML files of a folder
        for path in yaml_files(folder):
            check_yaml(path, path.relative_to(folder))


def flag_values(arguments: list[str]) -> dict[str, str]:
    """Return flag -> value for each of Hydra's flags for a folder of YAML files (`FLAGS`) in the arguments. They may be
    written `--flag value` or `--flag=value`."""
    values = {}
    for word, behind in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            values[flag] = value if equals else behind
    return values


def refuse_secrets(arguments: list[str]) -> None:
    """Raise ConfigError if an argument sets a key that is named like a secret, or contains a secret such as a token."""
    for word in arguments:
        key, equals, _ = word.partition("=")
        if (equals and is_secret_name(key.rpartition(".")[2])) or has_secret(word):
            shown = key if equals and not has_secret(key) else HIDDEN
            raise ConfigError(
                f"{shown}: a secret does not belong on a command line or into a configuration, which are written to "
                "files and logs; programs that need one read it from the environment (HF_TOKEN, WANDB_API_KEY)"
            )


def refuse_calls(setting: str, shown: str) -> None:
    """Raise ConfigError, naming `shown`, if a setting (`key=value`, or a key) could make Hydra call Python code."""
    if CALLS.search(setting):
        raise ConfigError(f"{shown}: no configuration may name Python to call; take it out")


def check_hydra_key(key: str, value: str, shown: str) -> None:
    """Raise ConfigError, which names `shown`, if a setting belongs to Hydra's own `hydra` node. Exceptions, which users
    may set: keys and config groups of SETTABLE, and the groups that configure logging, if they turn it off. `key`:
    dotted key or config group, which may be followed by `@` and a package."""
    parts = re.split(r"[./@:]", key)
    if "hydra" not in parts:
        return
    if parts[0] == "hydra" and parts[1:2] == ["searchpath"]:
        raise ConfigError("hydra.searchpath is fixed; add a folder of YAML files with --config-dir FOLDER")
    turns_logging_off = key in ("hydra/job_logging", "hydra/hydra_logging") and value in ("none", "disabled")
    # keys below hydra.sweeper.params are settings of each job: a second `hydra` or an `@` could set Hydra's node there
    is_single = "@" not in key and parts.count("hydra") == 1 and parts[0] == "hydra"
    if not turns_logging_off and not (is_single and parts[1:2] and parts[1] in SETTABLE):
        raise ConfigError(
            f"{shown}: this key of Hydra's is fixed; settable are hydra.{', hydra.'.join(SETTABLE)}, and output_dir "
            "says where a run writes"
        )


def yaml_files(folder: str) -> Iterator[Path]:
    """Yield every YAML file below a folder. Links to folders are followed; each folder is searched once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in sorted(names) if name.endswith((".yaml", ".yml")))


def check_yaml(path: Path, relative_path: Path) -> None:
    """Check a YAML file of a `--config-dir`. Its path relative to that folder tells its config group. Raise ConfigError
    if it is not YAML, sets a key that users must not set, or names Python code for Hydra to call."""
    text = refuse_yaml_bombs(path)
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from error
    # a header `@package` puts the file's keys elsewhere in the configuration
    headers = [line for line in text.splitlines() if line.lstrip("# \t").startswith("@")]
    if any(re.search(r"\bhydra\b", line) for line in headers):
        raise ConfigError(f"{path}: its package is Hydra's; write its keys below `hydra:`")
    check_hydra_key(relative_path.with_suffix("").as_posix(), "", str(path))
    for name, value in leaves_of(tree):
        keys = name.split(".")
        refuse_calls(f"{name}={value}", f"{path}: {name}")
        if "defaults" in keys:  # the key of an entry is `defaults.INDEX` or `defaults.INDEX.GROUP`
            group, choice = default_of(keys[keys.index("defaults") + 2 :], str(value))
            check_hydra_key(group, choice, f"{path}: {group}")
        if "hydra" in keys:
            check_hydra_key(".".join(keys[keys.index("hydra") :]), str(value), f"{path}: {name}")


def default_of(keys: list[str], value: str) -> tuple[str, str]:
    """Return (group, choice) of an entry of a Hydra defaults list. The entry is `- override /GROUP: CHOICE`, where
    `keys` are the parts of its key between dots and `value` is CHOICE, or `- GROUP/CHOICE`, where `keys` is empty and
    `value` is the whole entry."""
    group, choice = (".".join(keys), value) if keys else value.rpartition("/")[::2]
    return re.sub(r"^(?:(?:override|optional)\s+)*/?", "", group), choice
