"""Files in the user's folder that are named like modules of Python do not hide these."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llava_fsdp.runtime.process.safe_path import prepare_python

HIDING = ("random", "json", "logging", "dataclasses", "inspect", "copy", "difflib", "yaml", "torch")


@pytest.mark.parametrize("module", ["llava_fsdp", "llava_fsdp.train", "llava_fsdp.status"])
def test_a_command_runs_in_a_folder_with_files_that_are_named_like_modules(module: str, tmp_path: Path) -> None:
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text("raise ImportError(__file__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_without_texts_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "2"}
    command = [sys.executable, "-m", "llava_fsdp", "status", "x"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and "PYTHONOPTIMIZE" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("is_searched", [True, False])
def test_a_file_that_python_has_imported_already_is_named(
    is_searched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the folder was not searched, the module came from elsewhere, and nothing is wrong."""
    hiding = ModuleType("colorsys")
    hiding.__file__ = str(tmp_path / "colorsys.py")
    monkeypatch.setitem(sys.modules, "colorsys", hiding)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if is_searched else list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    if is_searched:
        with pytest.raises(SystemExit) as ended:
            prepare_python()
        assert ended.value.code == 2 and str(tmp_path / "colorsys.py") in capsys.readouterr().err
    else:
        prepare_python()
    assert str(tmp_path) not in sys.path and os.environ["PYTHONSAFEPATH"] == "1"
