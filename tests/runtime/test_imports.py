import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.process.imports import broken_package, importing

ALONE = """
import gc
from llava_fsdp.runtime.process.imports import importing
with importing():
    assert not gc.isenabled()
    import json
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_no_garbage_is_collected_while_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", "True"]


def test_where_torch_is_imported_nothing_changes() -> None:
    """The tests import torch first; what a test leaves must not be kept for good.

    The count may fall: a frozen object can still be freed, for example by a thread of an earlier test.
    """
    frozen = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_a_broken_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another package raises an error of its own because of it."""
    (tmp_path / "broken_inner").mkdir()
    (tmp_path / "broken_inner" / "__init__.py").write_text("raise ImportError('an undefined symbol')\n")
    outer = "try:\n import broken_inner\nexcept ImportError as error:\n raise ModuleNotFoundError('lazy') from error\n"
    (tmp_path / "broken_outer.py").write_text(outer)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_inner", "broken_outer"):
        with pytest.raises(ImportError) as raised:
            importlib.import_module(name)
        explained = broken_package(raised.value)
        assert isinstance(explained, ConfigError) and "broken_inner" in str(explained)
        assert "an undefined symbol" in str(explained)


def test_a_build_of_torchvision_for_another_torch_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails inside of torch, and transformers, which imports it, says nothing of it."""
    (tmp_path / "torchvision").mkdir()
    calls = "import torch\ntorch.library.register_fake('torchvision::no_such_operator')(print)\n"
    (tmp_path / "torchvision" / "__init__.py").write_text(calls)
    outer = "try:\n import torchvision\nexcept Exception as error:\n raise ModuleNotFoundError('lazy') from error\n"
    (tmp_path / "broken_lazy.py").write_text(outer)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("broken_lazy")
    explained = str(broken_package(raised.value))
    assert "the package torchvision is installed and cannot be imported" in explained
    assert "operator torchvision::no_such_operator does not exist" in explained
    assert torch.__version__ in explained and "--index-url" in explained


def test_an_import_that_a_module_of_this_project_gets_wrong_is_no_broken_package() -> None:
    code = compile("from json import nothing_of_this_name", "wrong", "exec")
    with pytest.raises(ImportError) as raised:
        exec(code, {"__name__": "llava_fsdp.wrong"})
    assert broken_package(raised.value) is None
