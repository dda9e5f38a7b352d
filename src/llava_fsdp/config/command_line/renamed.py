"""Old names of configuration keys, of their values, and of files and columns in a training's output folder; used for
error messages and for reading files that older versions have written."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

KEYS: Mapping[str, str] = MappingProxyType({
    "recompute": "activation_checkpointing",
    "order": "sampler",
    "data.bad": "data.bad_records",
    "data.bad_budget": "data.max_bad_records",
})  # fmt: skip
"""Old key or group -> present key or group. The part of a key after a group's name is unchanged."""
VALUES: Mapping[tuple[str, str], str] = MappingProxyType({
    ("data.bad_records", "quarantine"): "skip",
    ("data.too_long", "quarantine"): "skip",
    ("data.pixels", "lean"): "fast",
})  # fmt: skip
"""Renamed values of keys: (present key, old value) -> present value."""
OLD_FILES: Mapping[str, str] = MappingProxyType({"quarantine.jsonl": "skipped_records.jsonl"})
"""Old name of a file in a run's folder -> present name."""


def present_key(key: str) -> str | None:
    """Return the present name of a dotted configuration key that was renamed; None if `key` was not renamed."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def present_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert a configuration in nested dictionaries, which an older version may have written, to the present names of
    keys and values.

    Args:
        prefix: dotted name of the group of keys that `tree` is, followed by a dot; empty for a whole configuration.
    """
    present: dict[str, Any] = {}
    for key, value in tree.items():
        name = KEYS.get(f"{prefix}{key}", f"{prefix}{key}")
        if isinstance(value, dict):
            value = present_tree(value, f"{name}.")
        elif isinstance(value, str):
            value = VALUES.get((name, value), value)
        present[name.removeprefix(prefix)] = value
    return present


def present_row(row: Any) -> Any:
    """Convert a row of `metrics.jsonl`, which an older version may have written, to the present column names. Return
    anything that is not such an old row unchanged."""
    if isinstance(row, dict) and "quarantined" in row:
        row = {**row, "skipped_records": row["quarantined"]}
        del row["quarantined"]
    return row


def rename_old_files(folder: Path) -> None:
    """Rename files that an older version has written into the output folder `folder` of a training to their present
    names, before the training continues."""
    for old, new in OLD_FILES.items():
        if (folder / old).is_file() and not (folder / new).exists():
            (folder / old).rename(folder / new)
