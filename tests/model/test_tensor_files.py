"""Files of tensors: what is read, and what is refused before it can do anything."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small import ASSETS, make_config

from llava_fsdp.data.images.check import open_checked
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights, missing
from llava_fsdp.model.sources.pretrained import find_parts, read_config
from llava_fsdp.model.weights.init_weights import Drawn
from llava_fsdp.model.weights.tensor_files import LARGEST_HEADER, open_file, open_tensors
from llava_fsdp.runtime.errors import ImageError, ModelError


class Program:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle", "plain pickle, protocol 0"])
def test_a_pickle_with_code_is_refused(kind: str, tmp_path: Path) -> None:
    file, made = tmp_path / "mm_projector.bin", tmp_path / "made"
    content = {"model.mm_projector.0.weight": Program(made)}
    if kind.startswith("plain"):
        file.write_bytes(pickle.dumps(content, protocol=0 if kind.endswith("0") else None))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(ModelError, match=r"mm_projector\.bin is not loaded: .*run code") as caught:
        open_tensors(file)
    assert not made.exists() and "weights_only" not in str(caught.value)


def test_what_else_is_no_file_of_weights(tmp_path: Path) -> None:
    torch.save({"a": np.ones(2)}, tmp_path / "numpy.bin")
    torch.save({"a": torch.ones(2), "step": 3}, tmp_path / "more.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("a text")
    said = {"numpy.bin": "numpy", "more.bin": "more than tensors", "empty.bin": "empty", "text.safetensors": "is not a"}
    for name, why in said.items():
        with pytest.raises(ModelError, match=why):
            open_tensors(tmp_path / name)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_rows_parts_and_dtypes(kind: str, tmp_path: Path) -> None:
    content = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    file = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.bin")
    if kind == "safetensors":
        save_file(content, file)
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    found = open_tensors(file)
    assert torch.equal(found["a"].rows(1, 3), content["a"][1:3]) and found["a"].shape == (4, 3)
    for box in ((1, 3), (0, 2)), ((0, 4), (2, 3)), ((2, 2), (1, 3)):
        (top, bottom), (left, right) = box
        assert torch.equal(found["a"].part(box), content["a"][top:bottom, left:right]), box
    assert (found["a"].dtype, found["b"].dtype) == (torch.float32, torch.bfloat16)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.int8)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"a is I8; quantized"):
        _ = open_tensors(tmp_path / "w.safetensors")["a"].dtype


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def write(file: Path, tensors: dict[str, torch.Tensor]) -> Path:
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".bin":
        torch.save(tensors, file)
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    return file


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "mm_projector.bin"])
def test_what_was_saved_from_a_wrapped_model_is_refused_as_that(name: str, tmp_path: Path) -> None:
    """Parts of weights under ZeRO-3, names of a wrapper, and names of peft; a file or a folder, one file or several."""
    one = torch.ones(2, 2)
    for number, (tensors, reason) in enumerate(
        (
            (
                {"model.a.weight": one, "model.b.weight": torch.empty(0)},
                r"model\.b\.weight .*shape \[0\].*zero_to_fp32",
            ),
            ({"module.a.weight": one, "module.b.weight": one}, r"begin with module\. \(module\.a"),
            ({"base_model.model.model.a.weight": one}, "inside peft"),
        )
    ):
        file = write(tmp_path / str(number) / name, tensors)
        for path in (file, file.parent):
            with pytest.raises(ModelError, match=reason):
                open_tensors(path)
        if not name.startswith("mm_"):
            index = file.parent / f"{file.name}.index.json"
            index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
            with pytest.raises(ModelError, match=reason):
                open_tensors(file.parent)
    assert open_tensors(write(tmp_path / "right" / name, {"module.a": one, "scale": torch.ones(())}))


@pytest.mark.parametrize("name", ["non_lora_trainables.bin", "non_lora_trainables.safetensors", "adapter_model.bin"])
def test_files_of_an_adapter_are_no_model_and_no_projector(name: str, tmp_path: Path) -> None:
    """In the file and in its folder, whatever its names; the message says how adapters are used."""
    for names in ("base_model.model.model.mm_projector.0.weight", "model.mm_projector.0.weight"):
        file = write(tmp_path / name, {names: torch.ones(2, 2)})
        for path in (file, tmp_path):
            with pytest.raises(ModelError, match=r"of a LoRA adapter, .*model\.lora\.checkpoint"):
                open_tensors(path, projector_only=True)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "mm_projector.bin"]
)
def test_a_pointer_of_git_lfs_is_told_as_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ModelError, match=f"{name} is a pointer of git-LFS.*git lfs pull"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "preprocessor_config.json"]
)
def test_a_pointer_in_place_of_a_small_file_is_told_as_one(name: str, tmp_path: Path) -> None:
    assets = ASSETS / "tiny-llama"
    shutil.copytree(assets, tmp_path / "model")
    (tmp_path / "model" / name).write_text(POINTER)
    if name == "tokenizer.model":
        (tmp_path / "model" / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=f"{name} is a pointer of git-LFS"):
        if name.startswith("tokenizer"):
            open_tokenizer(tmp_path / "model")
        elif name == "config.json":
            read_config(tmp_path / "model", "model.language")
        else:
            preprocessor_fields(tmp_path / "model")


def test_a_pointer_in_place_of_an_image_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_text(POINTER)
    with (
        pytest.raises(ImageError, match=r"cat\.jpg is a pointer of git-LFS"),
        open_checked(tmp_path / "cat.jpg", "record 3"),
    ):
        pass


KINDS = {"linear": 1, "mlp2x_gelu": 2, "mlp3x_gelu": 3}


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("wanted", KINDS)
def test_a_projector_of_another_type_is_told_as_one(stored: str, wanted: str, parts: Path, tmp_path: Path) -> None:
    """Also one with more layers, whose first layers would fit."""
    cfg = make_config(parts, tmp_path, tmp_path, f"model.projector_type={wanted}").model
    model = build_llava(find_parts(cfg), cfg, torch.float32)
    shapes = {1: (36, 20), 2: (36, 36), 3: (36, 36)}
    place = "" if stored == "linear" else "{}."
    tensors = {
        f"model.mm_projector.{place.format(2 * number - 2)}{kind}": torch.ones(shapes[number][: 2 - (kind == "bias")])
        for number in range(1, KINDS[stored] + 1)
        for kind in ("weight", "bias")
    }
    file = write(tmp_path / "mm_projector.bin", tensors)
    found = lambda: find_weights(model, model.parts, cfg, file)  # noqa: E731
    if stored == wanted:
        assert {n for n, s in found().items() if not isinstance(s, Drawn)} == {
            n for n, _ in model.named_parameters() if n.startswith("multi_modal_projector.")
        }
        return
    with pytest.raises(ModelError, match=f"of type {stored}, and the model's is {wanted}; set .*type={stored}"):
        found()


def test_an_output_layer_that_is_missing_names_the_flag(parts: Path, tmp_path: Path) -> None:
    """In a language model's folder and in a whole model's."""
    cfg = make_config(parts, tmp_path, tmp_path).model
    own = find_parts(cfg)
    for whole in (None, tmp_path):
        error = missing("lm_head.weight", replace(own, whole=whole), None)
        assert "tie_word_embeddings to true" in str(error) and str(whole or own.language_folder) in str(error)


def test_a_header_of_a_million_tensors_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, size = tmp_path / "a.safetensors", LARGEST_HEADER
    for length, refused in ((size + 1, True), (size, False)):
        path.write_bytes(length.to_bytes(8, "little") + b"[" + b" " * (length - 1))
        with pytest.raises(ModelError, match="20,971,521 bytes" if refused else "is not a safetensors file"):
            open_file(path)
