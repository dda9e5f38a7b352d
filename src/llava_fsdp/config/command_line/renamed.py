"""Old names of configuration keys, of their values, and of files and columns in a run's folder; for error messages and
for reading what older versions have written."""

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
"""Old key or group -> present one. The part of a key after a group's name is unchanged."""
VALUES: Mapping[tuple[str, str], str] = MappingProxyType({
    ("data.bad_records", "quarantine"): "skip",
    ("data.too_long", "quarantine"): "skip",
    ("data.pixels", "lean"): "fast",
})  # fmt: skip
"""(present key, old value) -> present value."""
OLD_FILES: Mapping[str, str] = MappingProxyType({"quarantine.jsonl": "skipped_records.jsonl"})
"""Old name of a file in a run's folder -> present name."""


def present_key(key: str) -> str | None:
    """Return the present name of a renamed key; None if `key` was not renamed."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def present_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert a configuration that an older version may have written to the present names of keys and values. `prefix`:
    dotted name, with a dot at the end, of the group of keys in `tree`; empty for the whole configuration."""
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
    """Convert a row of `metrics.jsonl` that an older version may have written to the present column names."""
    if isinstance(row, dict) and "quarantined" in row:
        row = {**row, "skipped_records": row["quarantined"]}
        del row["quarantined"]
    return row


def rename_old_files(folder: Path) -> None:
    """Rename files that an older version has written into a run's folder, before the run continues."""
    for old, new in OLD_FILES.items():
        if (folder / old).is_file() and not (folder / new).exists():
            (folder / old).rename(folder / new)
