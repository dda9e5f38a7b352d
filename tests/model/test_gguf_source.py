"""A GGUF file as the language model of a training: its weights are those that transformers reads from the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_models import write_model
from small import conversion
from transformers import AutoModelForCausalLM, AutoTokenizer

from llava_fsdp.export.main import export
from llava_fsdp.model.sources import gguf_source
from llava_fsdp.model.sources.gguf_source import folder_of_gguf
from llava_fsdp.model.sources.pretrained import public_name, resolve
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.runtime.errors import ConfigError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The language model of a LLaVA, and the GGUF file that was made of it."""
    folder = tmp_path_factory.mktemp(request.param)
    source, keys = write_model(folder / "parts", request.param)
    made = export(conversion(source, folder / "gguf", "format=gguf", "dtype=fp32", "verify=false", *keys))
    hf = export(conversion(source, folder / "hf", "verify=false", *keys))
    return hf, made / "model.gguf"


def test_weights_and_ids_are_those_of_the_model(exported: tuple[Path, Path]) -> None:
    hf, file = exported
    folder = resolve(str(file), "model.language")
    read = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((hf / "config.json").read_text())["text_config"]
    assert read.config.model_type == config["model_type"]
    source = {name.replace("language_model.model", "model"): value for name, value in open_tensors(hf).items()}
    compared = [name for name in read.state_dict() if name in source]
    assert len(compared) > 10
    for name in compared:
        value = read.get_parameter(name)
        assert torch.equal(value, source[name].rows(0, value.shape[0]).float()), name
    text = "What is this? 12 cats, and a dog."
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, hf))
    assert ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids


def test_a_file_is_converted_once(exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = exported[1]
    first = folder_of_gguf(file, "model.language")
    monkeypatch.setattr(gguf_source, "convert", lambda *_: pytest.fail("again"))
    assert folder_of_gguf(file, "model.language") == first
    os.utime(file, (1, 1))  # another version of it
    with pytest.raises(pytest.fail.Exception):
        folder_of_gguf(file, "model.language")


def test_two_processes_make_one_folder(exported: tuple[Path, Path], cache: Path) -> None:
    program = f"""
from pathlib import Path
from llava_fsdp.model.sources.gguf_source import folder_of_gguf
print(folder_of_gguf(Path({str(exported[1])!r}), "model.language"))
"""
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=120)[0].splitlines()[-1] for process in running}
    (found,) = outputs
    assert [path.name for path in (cache / "llava_fsdp" / "gguf").iterdir() if path.is_dir()] == [Path(found).name]


def test_a_damaged_file_is_named(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        folder_of_gguf(file, "model.language")
    assert not [path for path in (cache / "llava_fsdp" / "gguf").iterdir() if path.is_dir()]


@pytest.mark.parametrize("key", ["model.vision", "model.checkpoint"])
def test_it_is_a_language_model_alone(key: str, exported: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(str(exported[1]), key)


def test_its_public_name_is_the_files(exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported[1].parents[1])
    assert public_name("gguf/model.gguf") == "model.gguf"
