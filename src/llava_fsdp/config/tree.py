"""Walk nested values of a configuration: by dotted key, as a command line has them, and keys that Hydra would run."""

import re
from collections.abc import Iterator
from typing import Any

TARGETS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
"""What Hydra calls Python by."""
ENV = re.compile(r"\$\{\s*oc\.env\s*:([^}]*)")


def dotted(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= dotted(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def written(value: object) -> str:
    """A value as a command line has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return repr(value) if isinstance(value, float) else str(value)


def keys_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of nested settings, lists included: its dotted name, and its own."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}", str(key)
            yield from keys_of(value, f"{prefix}{key}.")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from keys_of(value, f"{prefix}{number}.")


def leaves_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested settings that is no collection, by its dotted name."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield prefix.removesuffix("."), tree
        return
    for key, value in items:
        yield from leaves_of(value, f"{prefix}{key}.")
