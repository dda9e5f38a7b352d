"""Renamed keys: an old one is refused with its present name, and what an older version wrote is read."""

import json
from pathlib import Path

import pytest
from small import config_of

from llava_fsdp.config import did_you_mean
from llava_fsdp.config.command_line.renamed import (
    KEYS,
    OLD_FILES,
    VALUES,
    present_key,
    present_row,
    present_tree,
    rename_old_files,
)
from llava_fsdp.config.command_line.tree import dotted
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.checkpoints.resume import settings_then


def test_old_names_are_the_only_ones_that_change() -> None:
    old = {
        "recompute": {"mode": "budget", "budget": 0.5},
        "order": {"name": "shuffle", "group_by_modality_length": False},
        "data": {"bad": "quarantine", "bad_budget": "1%", "too_long": "quarantine", "pixels": "lean", "path": "lean"},
        "seed": 3,
    }
    new = {
        "activation_checkpointing": {"mode": "budget", "budget": 0.5},
        "sampler": {"name": "shuffle", "group_by_modality_length": False},
        "data": {
            "bad_records": "skip",
            "max_bad_records": "1%",
            "too_long": "skip",
            "pixels": "fast",
            "path": "lean",
        },
        "seed": 3,
    }
    assert present_tree(old) == new == present_tree(new)
    assert settings_then(old) == settings_then(new)
    assert {present_key(key) or key for key in dotted(old)} == set(dotted(new))
    assert present_row({"step": 1, "quarantined": 2}) == {"step": 1, "skipped_records": 2} and present_row(7) == 7


@pytest.mark.parametrize("key", [*KEYS, "recompute.budget", "order.name"])
def test_an_old_key_is_refused_with_the_present_one(key: str) -> None:
    assert present_key(key) in did_you_mean(key, ["data.bat", "border"])
    with pytest.raises(ConfigError, match=(present_key(key) or "").partition(".")[0]):
        config_of([f"+{key}=x"])


@pytest.mark.parametrize(("where", "new"), VALUES.items())
def test_an_old_value_is_refused_with_the_present_one(where: tuple[str, str], new: str) -> None:
    with pytest.raises(ConfigError, match=f"{where[0]}={new}"):
        config_of(["=".join(where)])


def test_files_of_an_older_run_are_renamed_once(tmp_path: Path) -> None:
    for old, new in OLD_FILES.items():
        (tmp_path / old).write_text(json.dumps({"step": 0}))
        rename_old_files(tmp_path)
        assert (tmp_path / new).read_text() and not (tmp_path / old).exists()
        (tmp_path / old).write_text("older")
        rename_old_files(tmp_path)
        assert (tmp_path / new).read_text() != "older"
