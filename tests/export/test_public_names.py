"""What an exported folder says about the machine on which it was made: nothing in the files that others read."""

import json
import shutil
from pathlib import Path

import pytest
from reference import EXPORTED
from small import conversion, make_config

from llava_fsdp.export.main import export
from llava_fsdp.model.sources.pretrained import public_name
from llava_fsdp.train import main as train

NOTES = "llava_fsdp.json"
"""The project's own record, which names the parts of a model as the run did, so that they are found again."""


def test_a_folder_has_its_last_name_and_a_hub_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert public_name("lmsys/vicuna-7b-v1.5") == "lmsys/vicuna-7b-v1.5"
    assert public_name("package:tiny-llama") == "package:tiny-llama"
    assert public_name(str(tmp_path / "my model")) == "my model"
    assert public_name("../models/mine") == "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert public_name("models/mine") == "mine" and public_name("models/other") == "models/other"


def test_no_file_of_an_export_has_a_path_of_this_machine(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of every form, by its name in any text; the original needs the path of a vision tower that is a folder."""
    values = ["model.lora.r=3", "max_steps=2", "optim.warmup_ratio=0", "data.template=v1"]
    train.train(make_config(parts, dataset, tmp_path / "run", *values, *EXPORTED, stage="finetune_lora"))
    shutil.copytree(tmp_path / "run" / "export", tmp_path / "copy")
    folders = {"merged": tmp_path / "run" / "export", "adapter": tmp_path / "run" / "adapter"}
    for form in ("hf", "llava", "projector"):
        words = [f"format={form}", "verify=false"]
        folders[form] = export(conversion(tmp_path / "copy", tmp_path / f"to_{form}", *words))
        folders[f"{form} of adapter"] = export(conversion(folders["adapter"], tmp_path / f"of_{form}", *words))
    for name, folder in folders.items():
        texts = [path for path in folder.rglob("*") if path.suffix in (".json", ".jinja", ".md", ".txt")]
        assert texts
        for path in texts:
            text = path.read_text()
            if path.name == "config.json" and "mm_vision_tower" in text:
                text = text.replace(json.dumps(json.loads(text)["mm_vision_tower"]), "")
            for machine in (str(parts.parent), str(tmp_path), "is_local", "local_files_only"):
                assert path.name == NOTES or machine not in text, (name, path.name, machine)
            assert path.name == NOTES or "_name_or_path" not in text or path.name == "adapter_config.json"
    assert json.loads((folders["adapter"] / "adapter_config.json").read_text())["base_model_name_or_path"] == "language"


@pytest.mark.parametrize(("aspect", "said"), [("pad", "pad"), ("square", "square")])
def test_an_export_says_in_its_configuration_how_images_are_fitted(
    aspect: str, said: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """SGLang reads it there, and not in the processor's files."""
    words = ["max_steps=1", f"data.image_aspect_ratio={aspect}", *EXPORTED]
    train.train(make_config(parts, dataset, tmp_path / "run", *words))
    assert json.loads((tmp_path / "run" / "export" / "config.json").read_text())["image_aspect_ratio"] == said
