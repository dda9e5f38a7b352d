"""What neither a command line nor somebody's YAML may make Hydra do: call Python, tell secrets, write elsewhere.

Hydra calls classes that its own node names (callbacks, logging) before our code sees a configuration. So where others
may have had a say in that node (`--config-dir`, `hydra...` on the command line), it is composed once without effect and
looked at first. Imports no torch.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llava_fsdp.config import config_dir
from llava_fsdp.config.tree import TARGETS, keys_of, leaves_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.redact import HIDDEN, has_secret, is_secret_name
from llava_fsdp.runtime.safe_load import refuse_yaml_bombs

FOLDER_FLAGS = ("--config-dir", "-cd")
PATH_FLAGS = ("--config-path", "-cp")
NAME_FLAGS = ("--config-name", "-cn")
PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
"""Where Hydra itself looks for launchers and sweepers, and nowhere else."""
SAMPLERS = {"sweeper.sampler": "optuna.samplers."}
"""What a plugin's node may name below itself, by the node."""
CODE_IN_SWEEPERS = ("custom_search_space",)
CODE_IN_LOGGING = ("()", "class", "factory", "ext://", "cfg://")
MOST_JOBS = 64
"""Jobs of a sweep that are looked at; further ones differ from these in values alone."""


def check_command_line(words: list[str], config_name: str) -> None:
    """Look at the words behind a program's name, before Hydra does.

    Raises:
        ConfigError: one holds a secret, or Hydra would call what somebody's YAML names.
    """
    refuse_secrets(words)
    flags = flag_values(words)
    for flag in PATH_FLAGS:
        if flag in flags:
            raise ConfigError(
                f"{flag}={flags[flag]}: the configuration is the package's own; add to it with --config-dir"
            )
    folder = next((flags[f] for f in FOLDER_FLAGS if f in flags), None)
    overrides = [word for word in words if (not word.startswith("-") and "=" in word) or word.startswith("~")]
    if any(re.match(r"[+~]*hydra\.searchpath\b", word) for word in overrides):
        raise ConfigError("hydra.searchpath is fixed; add a folder of YAML files with --config-dir FOLDER")
    if folder is None and not any(re.match(r"[+~]*hydra[./=]", word) for word in overrides):
        return
    if folder is not None:
        for path in [*Path(folder).rglob("*.yaml"), *Path(folder).rglob("*.yml")]:
            refuse_yaml_bombs(path)
    name = next((flags[f] for f in NAME_FLAGS if f in flags), config_name)
    for job in jobs_of(overrides):
        check_hydra(name, job, folder)


def flag_values(words: list[str]) -> dict[str, str]:
    """`--flag value` and `--flag=value`, by flag."""
    found = {}
    for word, behind in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag in (*FOLDER_FLAGS, *PATH_FLAGS, *NAME_FLAGS):
            found[flag] = value if equals else behind
    return found


def refuse_secrets(words: list[str]) -> None:
    """Raises ConfigError where a word sets a key that a secret belongs to, or has one for its value."""
    for word in words:
        key, equals, _ = word.partition("=")
        if (equals and is_secret_name(key.rpartition(".")[2])) or has_secret(word):
            shown = key if equals and not has_secret(key) else HIDDEN
            raise ConfigError(
                f"{shown}: a secret does not belong on a command line or into a configuration, which are written to "
                "files and logs; programs that need one read it from the environment (HF_TOKEN, WANDB_API_KEY)"
            )


def jobs_of(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of every job of a sweep; of a single run, one list."""
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return  # Hydra says it better in a moment, and calls nothing
    keys = [o.get_key_element() for o in parsed]
    own = [
        [f"{key}={value}" for value in choice.sweep_string_iterator()] if choice.is_discrete_sweep() else [text]
        for key, choice, text in zip(keys, parsed, overrides, strict=True)
        if not choice.is_interval_sweep()  # a sweeper draws numbers from it
    ]
    first = [values[0] for values in own]
    yield from (list(job) for job in itertools.islice(itertools.product(*own), MOST_JOBS))
    for place, values in enumerate(own):  # every value once, however many jobs there are
        yield from ([*first[:place], value, *first[place + 1 :]] for value in values[1:])


def check_hydra(config_name: str, overrides: list[str], folder: str | None) -> None:
    """Raises ConfigError where Hydra's own node names Python to call, or writes files of its own."""
    added = [f"hydra.searchpath=[{Path(folder).absolute().as_uri()}]"] if folder is not None else []
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            node = compose(config_name, [*overrides, *added], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException):
        return  # Hydra says it better in a moment, and calls nothing
    found = raw_of(node)["hydra"]
    if found.get("callbacks"):
        raise ConfigError(f"hydra.callbacks={sorted(found['callbacks'])}: no configuration may name Python to call")
    for name, key in keys_of(found):
        if key in TARGETS and not name.startswith(("launcher.", "sweeper.")):
            raise ConfigError(f"hydra.{name}: no configuration may name Python to call")
    for name, value in leaves_of({part: found.get(part) for part in ("launcher", "sweeper")}):
        check_plugin(name, value)
    for part in ("job_logging", "hydra_logging"):
        for name, key in keys_of(found.get(part) or {}):
            if key in CODE_IN_LOGGING:
                raise ConfigError(f"hydra.{part}.{name}: logging is the package's own; choose hydra/{part}=none")
    if (found["run"]["dir"], found["output_subdir"]) != (".", None):
        raise ConfigError("hydra.run.dir and hydra.output_subdir are fixed: Hydra writes nothing here; give output_dir")


def check_plugin(name: str, value: Any) -> None:
    """Raises ConfigError where a value below hydra.launcher or hydra.sweeper names Python of another's."""
    node, _, key = name.rpartition(".")
    if key in TARGETS and not (key == "_partial_" and node in SAMPLERS):
        allowed = PLUGINS if node in ("launcher", "sweeper") else SAMPLERS.get(node, ())
        if not str(value).startswith(allowed):
            raise ConfigError(f"hydra.{name}={value} is no launcher or sweeper of Hydra's or of one of its plugins")
    if key in CODE_IN_SWEEPERS and value is not None:
        raise ConfigError(f"hydra.{name}={value}: no configuration may name Python to call")
    if name.startswith("sweeper.params.") and re.match(r"[+~]*hydra\b", name.removeprefix("sweeper.params.")):
        raise ConfigError(f"hydra.{name}: a job's overrides leave Hydra's own settings alone")


def raw_of(node: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(node, resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
