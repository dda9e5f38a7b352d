"""The end of a training of a whole model with adapters: its export, its adapter folder and its checkpoint are one
model, which transformers and peft load."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from whole_models import WholeModel

from llava_fsdp.config import AUTO, ConversionConfig, FolderFormat, KeptDType
from llava_fsdp.export.main import export
from llava_fsdp.model.adapters.lora_names import is_adapter
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train.main import train

pytestmark = pytest.mark.slow
PEFT = "base_model.model."


@pytest.fixture(scope="module")
def trained(whole: Callable[[str], WholeModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[WholeModel, Path]:
    """A model, and the output folder of a training of adapters in its vision and language parts, and of all of its
    projector."""
    model, out = whole("aya_vision"), tmp_path_factory.mktemp("trained") / "out"
    parts = ["model.train=[projector,language,vision]", "model.lora.dropout=0", "data.template=chat_template"]
    cfg = model.config(
        out, *parts, "export.enabled=true", "export.dtype=fp32", "max_steps=2", stage="finetune_task_lora"
    )
    train(cfg)
    return model, out


def conversion(source: Path, to: Path, form: FolderFormat = FolderFormat.hf) -> ConversionConfig:
    return ConversionConfig(
        source=str(source), to=str(to), accept=[], format=form, dtype=KeptDType.keep, base=None, language=None,
        vision=None, template=AUTO, image_aspect_ratio=None, overwrite=False, verify=True,
    )  # fmt: skip


def loaded(folder: Path) -> Any:
    kind: Any = AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(loaded(folder).named_parameters())


def test_a_run_its_checkpoint_and_its_adapters_are_one_model(trained: tuple[WholeModel, Path], tmp_path: Path) -> None:
    _, out = trained
    expected = parameters_of(out / "export")
    checkpoint = max((out / "checkpoints").glob("step-*"))
    for number, source in enumerate((out, checkpoint, out / "adapter")):
        found = parameters_of(export(conversion(source, tmp_path / str(number))))
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_peft_merges_the_adapters_over_the_class_to_the_export(trained: tuple[WholeModel, Path]) -> None:
    model, out = trained
    base = loaded(model.folder)
    before = {name: value.clone() for name, value in base.named_parameters()}
    merged = peft.PeftModel.from_pretrained(base, out / "adapter").merge_and_unload()
    found, expected = dict(merged.named_parameters()), parameters_of(out / "export")
    others = load_file(out / "adapter" / "non_lora_trainables.safetensors")
    apart = {name.removeprefix(PEFT) for name in others}
    assert apart and all("projector" in name for name in apart)
    assert all(torch.equal(others[PEFT + name], expected[name]) for name in apart)
    changed = [name for name in expected if not torch.equal(before[name], expected[name])]
    assert any("vision" in name for name in changed) and any("language" in name for name in changed)
    for name in expected.keys() - apart:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


def test_all_but_the_weights_is_the_source(trained: tuple[WholeModel, Path]) -> None:
    model, out = trained
    names = {path.name for path in model.folder.iterdir()}
    assert {path.name for path in (out / "export").iterdir()} == names | {"llava_fsdp.json"}
    same = names - {"model.safetensors", "generation_config.json"}  # it lacks a token that ends an answer
    assert all((out / "export" / name).read_bytes() == (model.folder / name).read_bytes() for name in same)


def test_a_later_training_begins_with_the_export_or_with_the_adapters(
    trained: tuple[WholeModel, Path], tmp_path: Path
) -> None:
    model, out = trained
    from_export = model.config(tmp_path, f"model.checkpoint={out}").model
    parts = find_parts(from_export)
    weights = find_weights(build_architecture(parts, from_export, torch.float32), parts, from_export)
    expected = parameters_of(out / "export")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[n].rows(0, len(v)), v) for n, v in expected.items())
    own = ["model.train=[projector,language,vision]", "model.lora.dropout=0", f"model.lora.checkpoint={out}"]
    continued = model.config(tmp_path, *own, stage="finetune_task_lora").model
    parts = find_parts(continued)
    weights = find_weights(build_architecture(parts, continued, torch.float32), parts, continued)
    stored = load_file(out / "adapter" / "adapter_model.safetensors")
    adapters = {name: source for name, source in weights.items() if is_adapter(name)}
    assert len(adapters) == len(stored) > 0
    for name, source in adapters.items():
        assert torch.equal(source.rows(0, source.shape[0]), stored[PEFT + name.replace(".default.weight", ".weight")])
    apart = load_file(out / "adapter" / "non_lora_trainables.safetensors")
    for name, values in apart.items():
        assert torch.equal(weights[name.removeprefix(PEFT)].rows(0, len(values)), values)


def test_adapters_are_not_used_with_a_base_of_another_configuration_or_other_weights(
    trained: tuple[WholeModel, Path], tmp_path: Path
) -> None:
    model, out = trained
    other = tmp_path / "other"
    other.mkdir()
    for path in model.folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    text = (other / "config.json").read_text()
    assert '"downsample_factor": 2' in text
    (other / "config.json").write_text(text.replace('"downsample_factor": 2', '"downsample_factor": 1'))
    asked = conversion(out / "adapter", tmp_path / "to")
    with pytest.raises(ModelError, match=r"is for another base: it was trained with class\.downsample_factor=2"):
        export(replace(asked, base=str(other)))
    with pytest.raises(ModelError, match="is for another base: the weights"):
        export(replace(asked, base=str(out)))


def test_peft_needs_no_other_adapter_folder(trained: tuple[WholeModel, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"peft puts the adapters of source=.* on their base model as they are"):
        export(conversion(trained[1] / "adapter", tmp_path / "to", FolderFormat.peft))
