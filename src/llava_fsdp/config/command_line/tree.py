"""Walk over configuration values in nested dictionaries and lists, and format values as on a command line."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

TARGETS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
"""Configuration keys by which Hydra calls Python functions."""
ENV = re.compile(r"\$\{\s*oc\.env\s*:([^}]*)")
"""A reference to an environment variable in a configuration value."""


def tree_of(value: Any) -> Any:
    """Return a configuration, or a value in it, as nested dictionaries and lists. A choice (Enum) becomes its name.
    OmegaConf's conversions give the same, and take a hundred times as long."""
    if is_dataclass(value):
        return {key.name: tree_of(getattr(value, key.name)) for key in fields(value)}
    if isinstance(value, dict):
        return {str(key): tree_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tree_of(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def dotted(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to {dotted key: value}. A list counts as one value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= dotted(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def written(value: object) -> str:
    """Format a value as on a command line: `true`, `null`, `[1, 2]`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return repr(value) if isinstance(value, float) else str(value)


def keys_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, last part of the name) of every key in nested dictionaries and lists; the name of a list's
    item is its index."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}", str(key)
            yield from keys_of(value, f"{prefix}{key}.")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from keys_of(value, f"{prefix}{number}.")


def leaves_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each value in nested dictionaries and lists that is itself neither a dictionary nor
    a list. The name of a list's item is its index."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield prefix.removesuffix("."), tree
        return
    for key, value in items:
        yield from leaves_of(value, f"{prefix}{key}.")
