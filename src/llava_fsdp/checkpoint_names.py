"""The names of a run's checkpoints, and which there are. Imports no torch: launch scripts ask too."""

import re
from pathlib import Path

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{6,})")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name says; None: no checkpoint has such a name."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match and folder.name == folder_name(int(match[1])) else None


def list_checkpoints(parent: Path) -> list[Path]:
    """What bears the name of a checkpoint, oldest first. Whether it is one, `verify` says."""
    if not parent.is_dir():
        return []
    found = [(step, path) for path in parent.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]
