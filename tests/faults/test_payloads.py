"""Hostile files: each is refused with an error of ours, at once and in little memory, and nothing of it is run."""

import json
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forged import forge_manifest
from harness import single_world
from readers import TENSORS, read_model, read_records, read_settings, write_records
from safetensors.torch import save_file
from saves import loaded_alone, save_steps
from small import make_config, write_json, write_parts
from xxhash import xxh3_128

from llava_fsdp.checkpoint.verify import newest_alone, verify
from llava_fsdp.config import Config, load
from llava_fsdp.config.command_line import cli
from llava_fsdp.data.index.integrity import read_column
from llava_fsdp.export.write.processor import write_tokenizer
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, LlavaFsdpError, ModelError

SECONDS = 10
MEMORY = 1 << 30


class Program:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def refused(read: Callable[[], object], kind: type[LlavaFsdpError] = LlavaFsdpError, match: str = "") -> None:
    """An error of ours, within seconds and a gigabyte."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(kind, match=match):
        read()
    assert time.monotonic() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mm_projector.bin"])
@pytest.mark.parametrize("wrapped", ["zip", "legacy", "pickle"])
def test_programs_in_weights(name: str, wrapped: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / name
    content = {"model.mm_projector.0.weight": Program(mark)}
    if wrapped == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=wrapped == "zip")
    refused(lambda: open_tensors(tmp_path), ModelError, "run code")
    assert not mark.exists()


def test_programs_in_arrays(tmp_path: Path) -> None:
    import numpy as np

    mark, path = tmp_path / "mark", tmp_path / "index" / "state" / "part" / "lengths.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.array([Program(mark)], dtype=object), allow_pickle=True)
    refused(lambda: read_column(path))
    assert not mark.exists()


def test_programs_in_parquet_metadata(tmp_path: Path) -> None:
    """Arrow's own types for Python objects stay bytes."""
    import pyarrow
    from pyarrow import parquet

    mark = tmp_path / "mark"
    path = write_records(tmp_path, "parquet")
    table = parquet.read_table(path)
    payload = pickle.dumps(Program(mark))
    kept = {b"pandas": payload, b"huggingface": payload, b"ARROW:extension:metadata": payload}
    parquet.write_table(table.replace_schema_metadata(kept), path)
    read_records(path)
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    column = pyarrow.field("id", pyarrow.string(), metadata=extension)
    parquet.write_table(table.set_column(table.schema.get_field_index("id"), column, table["id"]), path)
    read_records(path)
    assert not mark.exists()


CODE = "import os\nos.mkdir({mark!r})\n"
FILES = {
    ("language", "config.json"): {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"},
    ("vision", "config.json"): {"AutoModel": "modeling_x.X"},
    ("vision", "preprocessor_config.json"): {"AutoImageProcessor": "modeling_x.X"},
    ("language", "tokenizer_config.json"): {"AutoTokenizer": ["modeling_x.X", None]},
}


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("place", FILES, ids="/".join)
def test_code_beside_a_model(place: tuple[str, str], unknown: bool, tmp_path: Path) -> None:
    part, name = place
    path = write_parts(tmp_path) / part / name
    (path.parent / "modeling_x.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    fields = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, fields | {"auto_map": FILES[place]} | ({"model_type": "x"} if unknown else {}))
    refused(lambda: read_model(path), ModelError, "never run|does not know")
    assert not (tmp_path / "mark").exists()


def test_templates_are_not_run(tmp_path: Path) -> None:
    """A chat template of a model is replaced, never rendered."""
    attack = "{{ cycler.__init__.__globals__.os.mkdir('" + str(tmp_path / "mark") + "') }}"
    folder = write_parts(tmp_path) / "language"
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, fields | {"chat_template": attack})
    (folder / "chat_template.jinja").write_text(attack)
    parts = find_parts(make_config(tmp_path, tmp_path, tmp_path).model)
    staged = tmp_path / "staged"
    staged.mkdir()
    write_tokenizer(folder, staged, parts.language, "v1", False)
    assert not (tmp_path / "mark").exists()
    assert not any("cycler" in path.read_text(errors="replace") for path in staged.rglob("*") if path.is_file())


OUTSIDE = [
    "../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors", "..\\outside.safetensors",
    "sub/x.safetensors",
    "", ".", "..", "a\0.safetensors", "file:///etc/hostname", "http://127.0.0.1/x.safetensors",
    "~/x.safetensors", 7, None,
    ["x"],
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_index_of_shards_stays_in_its_folder(name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "outside.safetensors", folder / "sub" / "x.safetensors"):
        save_file(TENSORS, path)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a.weight": name}})
    opened = []
    monkeypatch.setattr("llava_fsdp.model.weights.tensor_files.open_file", lambda path: opened.append(path) or {})
    refused(lambda: open_tensors(folder), ModelError, "not a file beside it")
    assert not opened


def header(fields: object, size: int | None = None) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


def tensor(begin: int, end: int, shape: list[int]) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


BOMBS = {
    "length of 2^63": header({}, 1 << 63),
    "length beyond the file": header({}, 1 << 20),
    "overlapping": header({"a": tensor(0, 16, [4]), "b": tensor(8, 24, [4])}) + bytes(24),
    "beyond the end": header({"a": tensor(0, 1 << 40, [1 << 38])}) + bytes(16),
    "shape that overflows": header({"a": tensor(0, 16, [1 << 40, 1 << 40])}) + bytes(16),
    "negative": header({"a": tensor(-16, 0, [4])}) + bytes(16),
    "a hole": header({"a": tensor(64, 80, [4])}) + bytes(80),
    "nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_heads_of_safetensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(BOMBS[name])
    refused(lambda: open_tensors(tmp_path), ModelError)


def test_packed_archives(tmp_path: Path) -> None:
    """A .bin is no place for a thousandfold of itself."""
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole:
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
            for name in whole.namelist():
                packed.writestr(name, whole.read(name))
    refused(lambda: open_tensors(tmp_path), ModelError, "packed")


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 100_000 + "}", "[]", "7", ""])
@pytest.mark.parametrize("place", [("language", "config.json"), ("vision", "preprocessor_config.json")], ids="/".join)
def test_json_without_end(nested: str, place: tuple[str, str], tmp_path: Path) -> None:
    path = write_parts(tmp_path) / place[0] / place[1]
    path.write_text(nested)
    refused(lambda: read_model(path), ModelError, "cannot be read|no preprocessor")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = write_parts(tmp_path) / "language" / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: read_model(path), ModelError, "more than the")


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [10**12, 0, -1, 1.5, "3"])
def test_models_without_end(field: str, value: object, tmp_path: Path) -> None:
    path = write_parts(tmp_path) / "language" / "config.json"
    write_json(path, json.loads(path.read_text()) | {field: value})
    refused(lambda: read_model(path), ModelError)


def test_yaml_bombs(tmp_path: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = tmp_path / "accelerate.yaml"
    path.write_text("\n".join(["a0: &a0 [x, x, x]", *levels]))
    refused(lambda: read_settings(path), ConfigError, "part of itself")


TARGETS = [
    "os.system", "os.mkdir", "os.popen", "subprocess.run", "subprocess.Popen", "subprocess.check_output",
    "builtins.eval",
    "builtins.exec", "builtins.__import__", "pickle.loads", "pickle.load", "torch.load", "numpy.load",
    "yaml.unsafe_load",
    "importlib.import_module", "runpy.run_path", "logging.os.system", "shutil.rmtree", "pathlib.Path.mkdir", "os.execv",
]  # fmt: skip
KEYS = ["+_target_", "+model._target_", "+data._target_", "+optim._partial_", "+hydra.callbacks.x._target_"]
YAML = {
    "the run": "_target_: {target}\n_args_: [{mark}]\n",
    "a group": "model:\n  _target_: {target}\n  path: {mark}\n",
    "a list": "model:\n  train:\n    - _target_: {target}\n      path: {mark}\n",
    "a source": "data:\n  sources:\n    a:\n      path: x\n      _target_: {target}\n",
    "callbacks": "hydra:\n  callbacks:\n    x:\n      _target_: {target}\n      path: {mark}\n",
    "logging": "hydra:\n  job_logging:\n    version: 1\n    "
    "formatters:\n      f:\n        (): {target}\n        path: {mark}\n",
    "a handler": "hydra:\n  hydra_logging:\n    version: 1\n    "
    "handlers:\n      f:\n        class: {target}\n        path: {mark}\n",
    "the launcher": "hydra:\n  launcher:\n    _target_: {target}\n    path: {mark}\n",
    "the sweeper": "hydra:\n  sweeper:\n    x:\n      _target_: {target}\n      path: {mark}\n",
    "the folder": "hydra:\n  run:\n    dir: {mark}\n",
}


def composed(monkeypatch: pytest.MonkeyPatch, *words: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["train", *words])
    node = cli.compose("train", Config)
    assert node is not None
    return load(Config, node)


@pytest.mark.parametrize("target", TARGETS)
def test_overrides_call_nothing(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = KEYS[TARGETS.index(target) % len(KEYS)]
    refused(lambda: composed(monkeypatch, f"{key}={target}"), ConfigError, "Python to call")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", YAML)
def test_somebodys_yaml_calls_nothing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[1]
    mark = tmp_path / "mark"
    (tmp_path / "conf" / "extra").mkdir(parents=True)
    text = "# @package _global_\n" + YAML[place].format(target=target, mark=mark)
    (tmp_path / "conf" / "extra" / "evil.yaml").write_text(text)
    words = "--config-dir", str(tmp_path / "conf"), "+extra=evil"
    refused(lambda: composed(monkeypatch, *words), ConfigError)
    assert not mark.exists()


def test_good_yaml_of_ones_own_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "extra").mkdir(parents=True)
    (tmp_path / "conf" / "extra" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    assert composed(monkeypatch, "--config-dir", str(tmp_path / "conf"), "+extra=mine").seed == 7


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json", "rank-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("wrapped", ["zip", "pickle"])
def test_programs_in_checkpoints(name: str, wrapped: str, tmp_path: Path) -> None:
    """Beside its files, in the place of one, and under a manifest that has the very digest of it."""
    save_steps(single_world(), tmp_path / "saved", [2])
    mark, folder = tmp_path / "mark", tmp_path / "saved" / "step-000002"
    if wrapped == "pickle":
        (folder / name).write_bytes(pickle.dumps({"model": Program(mark)}))
    else:
        torch.save({"model": Program(mark)}, tmp_path / "archive.pt")
        (tmp_path / "archive.pt").rename(folder / name)
    refused(lambda: verify(folder), CheckpointError)
    if name != "manifest.json":
        content = (folder / name).read_bytes()
        known = {"bytes": len(content), "xxh128": xxh3_128(content).hexdigest()}
        forge_manifest(folder, lambda manifest: manifest["files"].update({name: known}))
        refused(lambda: loaded_alone(tmp_path / "saved"), CheckpointError)
    assert not mark.exists()


def test_checkpoints_of_the_format_before_are_not_unpickled(tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    (folder / "state.json").write_text(json.dumps({"format": 4, "step": 2}))
    refused(lambda: newest_alone(tmp_path / "checkpoints"), CheckpointError)
    assert not mark.exists()
