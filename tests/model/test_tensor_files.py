"""Files of tensors: what is read, and what is refused before it can do anything."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llava_fsdp.model.tensor_files import open_tensors
from llava_fsdp.runtime.errors import ModelError


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
