"""Convert a configuration that Hydra has composed to typed objects, with clear errors for wrong keys and values."""

import copy
import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, ValidationError

from llava_fsdp.config.command_line.describe import takes
from llava_fsdp.config.command_line.foreign_names import called_here
from llava_fsdp.config.command_line.renamed import VALUES, present_key
from llava_fsdp.config.command_line.tree import ENV, TARGETS, keys_of, leaves_of
from llava_fsdp.config.keys.data import HeldOutConfig, SourceConfig, list_text
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.redact import has_secret, is_secret_variable

T = TypeVar("T")
NAMED: Mapping[str, type] = MappingProxyType({"data.sources.": SourceConfig, "val.sources.": HeldOutConfig})
"""Prefix of dotted keys -> class of the keys below it. After the prefix comes a name that the user chooses, as in
`data.sources.NAME.path`."""
SOURCES = tuple(NAMED)


def config_dir() -> Path:
    """Return the folder `conf` of YAML files: in the package if installed from a wheel, else in the git checkout."""
    here = Path(__file__).parents[2]
    packaged = here / "conf"
    return packaged if packaged.is_dir() else here.parents[1] / "conf"


def load(schema: type[T], node: DictConfig) -> T:
    """Convert a configuration that Hydra has composed to an object of the dataclass `schema`, and check it. Raise
    ConfigError if a key does not exist, a value has a wrong type, or a check refuses it; the message names the key, the
    value and what the user can do."""
    refuse_calls(node)
    refuse_unknown_keys(schema, node)
    node = with_lists_as_texts(node)
    try:
        merged = OmegaConf.merge(node_of(schema), without_hydra(node))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it on the command line: {missing[0]}=VALUE")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(describe_error(schema, node, error)) from error
    assert isinstance(config, schema)
    for name, value in leaves_of(OmegaConf.to_container(merged, resolve=True)):
        if isinstance(value, str) and has_secret(value):
            raise ConfigError(
                f"{name} holds a secret (a token, or a password in an address), and is written to files: take it out"
            )
    return config


def with_lists_as_texts(node: DictConfig) -> DictConfig:
    """Return a composed configuration in which lists of paths (`data.path`, `val.sources.NAME.path`, ...) are texts, as
    on the command line: OmegaConf has no type for a text or a list. Raise ConfigError if an item is no path."""
    keys = [f"{group}.path" for group in ("data", "val")]
    for prefix in SOURCES:
        sources = OmegaConf.select(node, prefix.removesuffix("."))
        keys += [f"{prefix}{name}.path" for name in sources] if isinstance(sources, DictConfig) else []
    found = {key: value for key in keys if OmegaConf.is_list(value := OmegaConf.select(node, key))}
    if not found:
        return node
    node = copy.deepcopy(without_hydra(node))
    with open_dict(node):
        for key, value in found.items():
            paths = OmegaConf.to_container(value, resolve=True)
            assert isinstance(paths, list), "found by is_list"
            OmegaConf.update(node, key, list_text(paths, key))
    return node


@functools.cache
def node_of(schema: type) -> DictConfig:
    """Return OmegaConf's node of a dataclass, with those of the dataclasses in it. Later calls return the same node, so
    it must not be changed: to make it takes longer than to copy it."""
    node = OmegaConf.structured(schema)
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and OmegaConf.is_missing(node, name):
            node[name] = node_of(kind)  # a copy
    assert isinstance(node, DictConfig)
    return node


def refuse_calls(node: DictConfig) -> None:
    """Raise ConfigError for a key by which Hydra would call Python code, such as `_target_`, or a value that would read
    a secret from an environment variable."""
    raw = OmegaConf.to_container(without_hydra(node), resolve=False)
    for name, key in keys_of(raw):
        if key in TARGETS:
            raise ConfigError(f"{name}: no configuration may name Python to call; take it out")
    for name, value in leaves_of(raw):
        for variable in ENV.findall(value) if isinstance(value, str) else ():
            plain = variable.partition(",")[0].strip()
            if not re.fullmatch(r"\w+", plain) or is_secret_variable(plain):
                raise ConfigError(f"{name}={value}: this environment variable may hold a secret, and is not read")


def without_hydra(node: DictConfig) -> DictConfig:
    """Return a composed configuration without Hydra's own keys; the same object if it has none."""
    if "hydra" not in node:
        return node
    kept = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
    assert isinstance(kept, DictConfig)
    return kept


def describe_error(schema: Any, node: DictConfig, error: OmegaConfBaseException) -> str:
    """Return a message for an error of OmegaConf: the key, its value and the values that the key accepts."""
    key = str(error.full_key or error.key)
    try:
        value: object = OmegaConf.select(node, key)
    except OmegaConfBaseException:
        value = "?"
    expected = None
    if isinstance(error, ValidationError):
        # a key of a data source has the form `data.sources.NAME.KEY`, with a name that the user has chosen
        prefix = next((prefix for prefix in SOURCES if key.startswith(prefix)), None)
        inner = "" if prefix is None else key.removeprefix(prefix).partition(".")[2]
        if prefix is None:
            expected = takes(schema, key)
        else:
            expected = takes(NAMED[prefix], inner) if inner else f"a source with keys of its own: {key}.path=FILE"
    if expected is None:
        return f"{key}={value}: {str(error).splitlines()[0]}"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    new = VALUES.get((key, str(value)))  # the present name of a value that was renamed
    return f"{key}={text} must be {expected}" + (f"; it is called {key}={new} now" if new else "")


def schema_keys(schema: Any, prefix: str = "") -> list[str]:
    """Return all dotted keys of a configuration, also those of groups: `model`, `model.lora`, `model.lora.r`."""
    keys = []
    for key in fields(schema):
        keys.append(prefix + key.name)
        if is_dataclass(key.type):
            keys += schema_keys(key.type, prefix + key.name + ".")
    return keys


def refuse_unknown_keys(schema: Any, node: DictConfig) -> None:
    """Raise ConfigError if a composed configuration has an unknown key. Hydra accepts any key in `+key=value`."""
    known = schema_keys(schema)
    groups = {key.rpartition(".")[0] for key in known}  # names with keys below them

    def visit(part: DictConfig, prefix: str) -> None:
        """Check the keys in `part`, whose dotted names begin with `prefix`, which is empty or ends in a dot. Below a
        prefix of NAMED the user chooses names of data sources; their keys are added to `known` and `groups`."""
        for key in part:
            name = f"{prefix}{key}"
            if name == "hydra":
                continue
            if name not in known and prefix not in NAMED:
                raise ConfigError(f"{name} is not a key of the configuration{did_you_mean(name, known)}")
            child = part._get_node(key)
            if name in groups and not isinstance(child, DictConfig) and not OmegaConf.is_interpolation(part, str(key)):
                inside = next(k for k in known if k.startswith(f"{name}."))
                raise ConfigError(f"{name}={part[key]} is a group of keys, which are set one by one: {inside}=VALUE")
            if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
                of_source = schema_keys(NAMED[prefix], name + ".") if prefix in NAMED else []
                known.extend(of_source)
                groups.update(one.rpartition(".")[0] for one in of_source)
                visit(child, name + ".")

    visit(node, "")


def did_you_mean(name: str, known: list[str]) -> str:
    """Return a suggestion for an unknown key, as the end of an error message; empty if there is none. It is the first
    of these that exists: the key's present name, if it was renamed; the key with the same meaning, if another program
    has this key; the only key with the same last part; the most similar key (for a dotted name, no group)."""
    if new := present_key(name):
        return f"; it is called {new} now"
    is_mistyped = "." in name and difflib.get_close_matches(name, known, 1, 0.9)
    if not is_mistyped and (here := called_here(name, known)):
        return f"; {here}"
    groups = {key.rpartition(".")[0] for key in known}
    leaf = name.rpartition(".")[2]
    moved = [key for key in known if key.rpartition(".")[2] == leaf]
    if len(moved) == 1 and moved[0] != name:
        return f"; did you mean {moved[0]}?"
    return nearest(name, [key for key in known if "." not in name or key not in groups])


def nearest(name: str, known: list[str]) -> str:
    """Return "; did you mean NAME?" with the most similar name, or an empty text if none is similar enough."""
    area, _, leaf = name.rpartition(".")
    same_area = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == area}
    near = difflib.get_close_matches(leaf, list(same_area), n=1, cutoff=0.7)
    found = same_area[near[0]] if near else next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), "")
    return f"; did you mean {found}?" if found else ""
