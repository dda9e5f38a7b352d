"""From a composed Hydra configuration to typed objects, and the errors of unknown keys."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from llava_fsdp.config.data import HeldOutConfig, SourceConfig
from llava_fsdp.config.describe import takes
from llava_fsdp.config.renamed import VALUES, present_key
from llava_fsdp.config.tree import ENV, TARGETS, keys_of, leaves_of
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.redact import has_secret, is_secret_variable

T = TypeVar("T")
SOURCES = "data.sources.", "val.sources."
"""What follows is a name that the user chooses."""


def config_dir() -> Path:
    """The folder of YAML files: inside the package where it was installed from a wheel, else the checkout's."""
    here = Path(__file__).parents[1]
    packaged = here / "conf"
    return packaged if packaged.is_dir() else here.parents[1] / "conf"


def load(schema: type[T], node: DictConfig) -> T:
    """The typed configuration of a composed one.

    Raises:
        ConfigError: a key that no class here has, a value of another type, or one that a check refuses; the message
            names the key, the value and what would do.
    """
    refuse_what_acts(node)
    refuse_unknown_keys(schema, node)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), without_hydra(node))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it on the command line: {missing[0]}=VALUE")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(about_value(schema, node, error)) from error
    assert isinstance(config, schema)
    refuse_secret_values(OmegaConf.to_container(merged, resolve=True))
    return config


def refuse_what_acts(node: DictConfig) -> None:
    """Values are values: none names Python to call, and none reads a secret from the environment.

    Raises:
        ConfigError: naming the key.
    """
    raw = OmegaConf.to_container(without_hydra(node), resolve=False)
    for name, key in keys_of(raw):
        if key in TARGETS:
            raise ConfigError(f"{name}: no configuration may name Python to call; take it out")
    for name, value in leaves_of(raw):
        for variable in ENV.findall(value) if isinstance(value, str) else ():
            plain = variable.partition(",")[0].strip()
            if not re.fullmatch(r"\w+", plain) or is_secret_variable(plain):
                raise ConfigError(
                    f"{name}={value}: this variable of the environment may hold a secret, and is not read"
                )


def refuse_secret_values(tree: object) -> None:
    """Raises ConfigError where a value is a secret: a configuration is written to files, and told on the screen."""
    for name, value in leaves_of(tree):
        if isinstance(value, str) and has_secret(value):
            raise ConfigError(
                f"{name} holds a secret (a token, or a password in an address), and is written to files: take it out"
            )


def without_hydra(node: DictConfig) -> DictConfig:
    kept = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
    assert isinstance(kept, DictConfig)
    return kept


def about_value(schema: Any, node: DictConfig, error: OmegaConfBaseException) -> str:
    """What OmegaConf says of a value, in terms of the key."""
    key = str(error.full_key or error.key)
    value = value_at(node, key)
    wanted = None
    if isinstance(error, ValidationError):
        named = next((prefix for prefix in SOURCES if key.startswith(prefix)), None)
        own = "" if named is None else key.removeprefix(named).partition(".")[2]
        wanted = takes(schema, key) if named is None else takes(NAMED[named], own)
        if named is not None and not own:
            wanted = f"a source with keys of its own: {key}.path=FILE"
    if wanted is None:
        return f"{key}={value}: {str(error).splitlines()[0]}"
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    new = VALUES.get((key, str(value)))
    return f"{key}={shown} must be {wanted}" + (f"; it is called {key}={new} now" if new else "")


def value_at(node: DictConfig, key: object) -> object:
    try:
        return OmegaConf.select(node, str(key))
    except OmegaConfBaseException:
        return "?"


def schema_keys(schema: Any, prefix: str = "") -> list[str]:
    """Every key of a schema, dotted."""
    found = []
    for own in fields(schema):
        found.append(prefix + own.name)
        if is_dataclass(own.type):
            found += schema_keys(own.type, prefix + own.name + ".")
    return found


NAMED: Mapping[str, type] = MappingProxyType(dict(zip(SOURCES, (SourceConfig, HeldOutConfig), strict=True)))
"""What the user's own names stand for."""


def refuse_unknown_keys(schema: Any, node: DictConfig) -> None:
    """Hydra's `+key=value` adds any key; none is let through that nothing reads."""
    known = schema_keys(schema)

    def visit(part: DictConfig, prefix: str) -> None:
        for key in part:
            name = f"{prefix}{key}"
            if name == "hydra":
                continue
            if name not in known and prefix not in NAMED:
                raise ConfigError(f"{name} is not a key of the configuration{did_you_mean(name, known)}")
            child = part._get_node(key)
            inside = [k for k in known if k.startswith(f"{name}.")]
            if inside and not isinstance(child, DictConfig):
                raise ConfigError(f"{name}={part[key]} is a group of keys, which are set one by one: {inside[0]}=VALUE")
            if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
                known.extend(schema_keys(NAMED[prefix], name + ".") if prefix in NAMED else [])
                visit(child, name + ".")

    visit(node, "")


def did_you_mean(name: str, known: list[str]) -> str:
    """What to write instead of an unknown key: its present name, or the nearest key. No group is near a dotted name."""
    if new := present_key(name):
        return f"; it is called {new} now"
    groups = {key.rpartition(".")[0] for key in known}
    near = difflib.get_close_matches(name, [k for k in known if "." not in name or k not in groups], n=1)
    return f"; did you mean {near[0]}?" if near else ""
