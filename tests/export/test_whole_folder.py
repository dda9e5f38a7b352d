"""A model of one of transformers' own classes is written as `save_pretrained` writes it, beside its other files."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, make_model, make_tokenizer, resolve, write_family
from safetensors.torch import load_file, save_file
from small import write_json
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llava_fsdp.config import FolderFormat, SpecialTokens
from llava_fsdp.export.write.generation_file import ends_of_class
from llava_fsdp.export.write.weights_writer import Weights
from llava_fsdp.export.write.whole_folder import WholeSource, write_whole_folder
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.weights.conversions import tied_weights, whole_model_of
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import check_folder, read_notes

KINDS = ["gemma3", "aya_vision", "aria", "deepseek_vl", "janus", "granite4_vision", "paligemma"]
"""Families whose processors work without torchvision."""


def opened(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def trained(folder: Path) -> Any:
    """The class of a folder, with other weights than the folder has."""
    model = opened(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))) / 8)
    return model


def source_of(folder: Path, is_tied: bool | None = None) -> WholeSource:
    text = read_config(folder, "").get_text_config()
    is_one = tied_weights(whole_model_of(read_config(folder, ""))) is not None
    text.tie_word_embeddings = is_one if is_tied is None else is_tied
    model: Any = SimpleNamespace(language_config=text)
    return WholeSource(model, folder, 64, SpecialTokens.text, {"run": "abc", "step": 3})


def write(model: Any, source: WholeSource, to: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    values = {name: value.detach() for name, value in model.named_parameters()}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    write_whole_folder(
        FolderFormat.hf, source, Weights(shapes, dict.fromkeys(shapes, dtype), values.__getitem__), to, {"dtype": "x"}
    )
    return tensors_of(to)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `generation_config.json` names all tokens that end an answer."""
    folder = write_family("gemma3", tmp_path_factory.mktemp("gemma") / "source")
    ends = ends_of_class(folder, read_config(folder, "").get_text_config())
    assert ends
    write_json(folder / "generation_config.json", {"eos_token_id": [*ends], "temperature": 0.5})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_and_bits_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    folder = write_family(kind, tmp_path / "source")
    model = trained(folder)
    written = write(model, source_of(folder), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    expected = tensors_of(tmp_path / "theirs")
    assert written.keys() == expected.keys() == tensors_of(folder).keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)
    assert all(torch.equal(value, model.state_dict()[n]) for n, value in opened(tmp_path / "ours").state_dict().items())


def test_buffers_of_the_source_are_written_with_their_values_and_their_dtype(tmp_path: Path) -> None:
    """Routers correct the choice of experts by buffers, which no trainer holds as parameters."""
    row = FAMILIES["glm4v_moe"]
    model = make_model(CONFIG_MAPPING[row.kind](**resolve(row.config, make_tokenizer(row))))
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    for buffer in buffers.values():
        buffer.normal_(generator=torch.Generator().manual_seed(1))
    folder = tmp_path / "source"
    model.save_pretrained(folder)
    written = write(model, source_of(folder), tmp_path / "ours", torch.bfloat16)
    assert written.keys() == tensors_of(folder).keys()
    found = dict(opened(tmp_path / "ours").named_buffers())
    assert buffers and all(torch.equal(found[name], buffer) for name, buffer in buffers.items())


def test_names_of_an_older_release_are_kept(gemma: Path, tmp_path: Path) -> None:
    older = {
        "language_model.lm_head." if name.startswith("lm_head.") else name: value
        for name, value in tensors_of(gemma).items()
    }
    older = {name.replace("model.language_model.", "language_model.model."): value for name, value in older.items()}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes((gemma / "config.json").read_bytes())
    save_file(older, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    model = opened(tmp_path / "source")
    written = write(model, source_of(tmp_path / "source"), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert written.keys() == tensors_of(tmp_path / "theirs").keys()


def test_all_other_files_are_those_of_the_source(gemma: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for file in gemma.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    extra = {
        "README.md": b"card",
        "additional_chat_templates/tools.jinja": b"{{ 1 }}",
        "notes.txt": b"\xff\x00",
        "original/consolidated.00.pth": b"weights",
        "original/params.json": b"{}",
        ".cache/huggingface/x": b"",
        "pytorch_model.bin.index.json": b"{}",
        "llava_fsdp.json.old": b"kept",
    }
    for name, content in extra.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write(opened(folder), source_of(folder), tmp_path / "ours")
    found = {
        path.relative_to(tmp_path / "ours").as_posix() for path in (tmp_path / "ours").rglob("*") if path.is_file()
    }
    kept = {*extra} - {"original/consolidated.00.pth", "original/params.json", ".cache/huggingface/x"}
    kept = {*kept, *(file.name for file in gemma.iterdir())} - {"pytorch_model.bin.index.json"}
    assert found == kept | {"llava_fsdp.json"}
    same = found - {"llava_fsdp.json", "model.safetensors", "README.md"}
    assert all((tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes() for name in same)
    check_folder(tmp_path / "ours")
    assert read_notes(tmp_path / "ours").items() >= {"run": "abc", "step": 3, "dtype": "x", "max_length": 64}.items()


def test_the_configuration_changes_only_with_the_dtype(gemma: Path, tmp_path: Path) -> None:
    model = opened(gemma)
    written = write(model, source_of(gemma), tmp_path / "half", torch.bfloat16)
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (gemma, tmp_path / "half"))
    assert before.pop("dtype") == "float32" and after.pop("dtype") == "bfloat16"
    for part in ("text_config", "vision_config"):
        if (stated := before[part].pop("dtype", None)) is not None:
            assert stated == "float32" and after[part].pop("dtype") == "bfloat16"
    assert before == after
    again: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(p.bfloat16(), again.get_parameter(name)) for name, p in model.named_parameters())


def test_two_weights_that_the_configuration_calls_one_stay_two(gemma: Path, tmp_path: Path) -> None:
    assert tied_weights(whole_model_of(read_config(gemma, ""))) is not None
    model = opened(gemma)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    write(model, source_of(gemma, is_tied=False), tmp_path / "ours")
    again = opened(tmp_path / "ours")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)


def test_a_weight_that_the_class_does_not_save_is_refused(gemma: Path, tmp_path: Path) -> None:
    model = opened(gemma)
    model.register_parameter("stranger", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(ModelError, match="does not save stranger, which was trained or kept"):
        write(model, source_of(gemma), tmp_path / "ours")
