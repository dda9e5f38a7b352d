"""Ranks that run other code, or other versions of what computes, are refused before a model is loaded."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import FAULTY, Run
from machine import ROOT
from small import Configure, make_config
from test_nodes import free_port

from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.setup import same_software
from llava_fsdp.train.setup.same_software import (
    FILES,
    check_same_software,
    differences,
    package_digest,
    package_files,
    readers_of_software,
)

PACKAGE, CONF = ROOT / "src" / "llava_fsdp", ROOT / "conf"
CPU = torch.device("cpu")


def test_a_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    """A wheel, which has conf/ within the package, is the checkout that it was built of."""
    wheel = tmp_path / "llava_fsdp"
    shutil.copytree(PACKAGE, wheel, copy_function=shutil.copyfile)  # with times of their own
    shutil.copytree(CONF, wheel / "conf")
    (wheel / "__pycache__").mkdir(exist_ok=True)
    (wheel / "__pycache__" / "train.cpython-399.pyc").write_bytes(b"other")
    (wheel / ".train.py.swp").write_bytes(b"other")
    here, there = package_files(PACKAGE, CONF), package_files(wheel, wheel / "conf")
    assert here == there and package_digest(here) == package_digest(there) == package_digest()
    assert {"train/main.py", "conf/train.yaml", "assets/tiny-llama/tokenizer.json"} <= here.keys()
    template = wheel / "data" / "text" / "templates.py"
    template.write_text(template.read_text() + "\n")
    (wheel / "model" / "mine.py").touch()
    changed = package_files(wheel, wheel / "conf")
    assert package_digest(changed) != package_digest(here)
    renamed = {("another.py" if name == "train/main.py" else name): content for name, content in here.items()}
    assert package_digest(renamed) != package_digest(here)


def compared(world: Any, parts: Path, dataset: Path, folder: Path, rank: int, name: str, value: Any) -> str:
    """What a rank says where one of them has another fact."""
    from llava_fsdp.parallel.ranks.mesh import gather_lists

    cfg = make_config(parts, dataset, folder)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(same_software, name, value if name == "__version__" else lambda *_: value)
        try:
            check_same_software(cfg, CPU, gather_lists)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name,value,shown", [
    ("__version__", "0.0.9", ("llava_fsdp: ", "0.0.9 on rank 1 (")),
    ("loaded_version", "4.99.0", ("transformers: ", "tokenizers: ", "pillow: ", "4.99.0 on rank 1 (")),
    ("torch_build", "2.11.0 (git 0, CUDA 12.6)", ("torch: ", f"{torch.__version__} (git ", "2.11.0 (git 0")),
    ("package_files", {"train/main.py": "0"}, (f"{FILES}: ",)),
])  # fmt: skip
def test_what_changes_numbers_is_refused_on_all_ranks(
    pools: dict, parts: Path, dataset: Path, tmp_path: Path, name: str, value: object, shown: tuple[str, ...]
) -> None:
    said = pools[2].run(compared, parts, dataset, tmp_path, 1, name, value)
    assert said[0] == said[1]
    assert all(each in said[0] for each in (*shown, "on rank 0 (")), said[0]


def test_equal_software_and_unlike_machines_go_on(pools: dict, parts: Path, dataset: Path, tmp_path: Path) -> None:
    assert pools[2].run(compared, parts, dataset, tmp_path, 1, "device_name", "H200") == ["", ""]


def test_many_ranks_are_named_in_stretches() -> None:
    hosts = [f"node{rank // 4}" for rank in range(12)]
    facts = [{"torch": "2.12" if rank in (2, *range(8, 12)) else "2.11"} for rank in range(12)]
    assert differences(hosts, facts) == [
        "torch: 2.11 on ranks 0-1, 3-7 (node0, node1), 2.12 on ranks 2, 8-11 (node0, node2)"
    ]
    (lacks,) = differences(hosts, [{"torch": "2.11"}] * 11 + [{}])
    assert lacks.endswith("unknown on rank 11 (node2)")


def test_which_software_must_be_the_same(configure: Configure) -> None:
    """What computes, and what is used only where it is switched on."""
    always = {"llava_fsdp", FILES, "Python", "torch", "transformers", "tokenizers", "pillow"}

    def more(*values: str) -> set[str]:
        found = readers_of_software(configure(*values)).keys()
        assert always <= found
        return found - always

    packed = ("pack=true", "tokens_per_micro_batch=null")
    assert more("pack=false") == set() and more(*packed, "attention=sdpa") == set()
    assert more(*packed, "attention=auto") == more(*packed, "attention=flash") == {"flash-attn"}
    adapters = ("pack=false", "model.lora.enabled=true")
    assert more(*adapters) == {"peft"}
    assert more(*adapters, "model.quantize.mode=nf4") == {"peft", "bitsandbytes"}
    assert more("pack=false", "precision=fp8") == more("pack=false", "precision=int8_mixed") == {"torchao"}


def test_which_files_are_the_packages_own(tmp_path: Path) -> None:
    own = {"train.py", "a/b.json", "a.pyc/b.py", "origin.py", "conf/a.yaml"}
    others = {"b.pyc", ".a.py.swp", "a/.hidden/b.py", "__pycache__/a.py", "a.py~", "a.py.orig", "a.py.rej", ".git/a"}
    for name in own | others:
        file = tmp_path / "package" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "conf").mkdir()
    assert package_files(tmp_path / "package", tmp_path / "conf").keys() == own


def test_a_name_that_a_rank_lacks_differs() -> None:
    found = differences(["h0", "h1", "h2"], [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}])
    assert [line.partition(":")[0] for line in found] == ["b", "c"]


def another_package(folder: Path) -> str:
    """A copy of the package with one line more."""
    shutil.copytree(ROOT / "src", folder / "copy" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "copy" / "conf").symlink_to(CONF)
    template = folder / "copy" / "src" / "llava_fsdp" / "data" / "text" / "templates.py"
    template.write_text(template.read_text() + "\nANOTHER = 1\n")
    return str(folder / "copy" / "src")


def another_python(folder: Path) -> str:
    """A path with which Python says that it is another version."""
    (folder / "patch").mkdir()
    fake = "import platform\n\nplatform.python_version_tuple = lambda: ('3', '99', '1')\n"
    (folder / "patch" / "sitecustomize.py").write_text(fake)
    return f"{folder / 'patch'}{os.pathsep}{ROOT / 'src'}"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("other,shown", [
    (another_package, (FILES,)),
    (another_python, ("Python: ", "3.99 on rank 1 (")),
])  # fmt: skip
def test_two_processes_of_different_software_end_before_a_model_is_loaded(
    start: Callable[..., Run], tmp_path: Path, other: Callable[[Path], str], shown: tuple[str, ...]
) -> None:
    port, paths = str(free_port()), [str(ROOT / "src"), other(tmp_path)]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    own = [{**env, "RANK": str(n), "LOCAL_RANK": str(n), "PYTHONPATH": paths[n]} for n in (0, 1)]
    runs = [start(script=[sys.executable, str(FAULTY)], env=each) for each in own]
    codes = [run.wait(280) for run in runs]
    assert codes == [2, 2], runs[0].said + runs[1].said
    status = runs[0].status
    assert (status["class"], status["exit_code"]) == ("config", 2)
    assert all(each in status["reason"] for each in (*shown, "rank 0 (", "rank 1 (")), status["reason"]
    assert not runs[0].checkpoints and not runs[0].rows
    beats = list((runs[0].output / ".heartbeats").glob("rank-?.json"))
    assert all('"step": 0' in beat.read_text() for beat in beats)
