"""Packages of other versions than those of the tests, unpacked into folders outside the tree for programs that tests
start with such a folder on their path."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def unpacked(name: str, packages: Sequence[str]) -> Path:
    """Return the folder with these packages, without what they depend on. They are fetched once, and a test is skipped
    where that is not possible.

    Args:
        name: name of the folder.
        packages: as pip takes them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "llava_fsdp" / name
    if not folder.is_dir():
        made = folder.with_name(f"{name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made), *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {' '.join(packages)} here: {done.stderr[-300:]}")
        if not folder.exists():
            made.rename(folder)
    return folder


def run_with(folder: Path, program: str, *arguments: str) -> None:
    """Run a Python program with the packages in a folder before all others."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program, *arguments], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
