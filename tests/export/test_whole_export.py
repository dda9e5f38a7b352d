"""`llava-fsdp export` of a whole model of transformers, and what is compared before its folder gets its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from transformers import AutoModelForImageTextToText

from llava_fsdp.config import AUTO, ConversionConfig, FolderFormat, KeptDType
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.whole_class import prove_class
from llava_fsdp.export.source_model import open_source
from llava_fsdp.export.write.whole_folder import WholeSource, check_plan
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train.final_export import MemoryTensor


def conversion(source: Path, to: Path, form: FolderFormat = FolderFormat.hf) -> ConversionConfig:
    return ConversionConfig(
        source=str(source), to=str(to), accept=[], format=form, dtype=KeptDType.bf16, base=None, language=None,
        vision=None, template=AUTO, image_aspect_ratio=None, overwrite=False, verify=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("deepseek_vl", tmp_path_factory.mktemp("whole") / "source")


def test_the_class_loads_the_rounded_weights_of_an_export(folder: Path, tmp_path: Path) -> None:
    export(conversion(folder, tmp_path / "to"))
    kind: Any = AutoModelForImageTextToText
    source, written = (kind.from_pretrained(path, dtype=torch.float32) for path in (folder, tmp_path / "to"))
    for name, value in source.named_parameters():
        assert torch.equal(written.get_parameter(name), value.bfloat16().float())


@pytest.mark.parametrize("form", [FolderFormat.llava, FolderFormat.projector])
def test_no_other_format_is_written(form: FolderFormat, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"format={form.value}: a deepseek_vl is written for transformers alone"):
        export(conversion(folder, tmp_path / "to", form))
    assert not list(tmp_path.iterdir())


def test_one_bit_that_differs_after_loading_is_refused(folder: Path, tmp_path: Path) -> None:
    sources = open_source(conversion(folder, tmp_path)).sources
    prove_class(folder, sources)
    name = max(sources)
    values = sources[name].rows(0, sources[name].shape[0]).clone()
    values.view(torch.int32).view(-1)[-1] ^= 1
    with pytest.raises(ModelError, match=f"transformers loads another {name}"):
        prove_class(folder, {**sources, name: MemoryTensor(values)})


def test_a_class_that_does_not_save_a_parameter_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    source = open_source(conversion(folder, tmp_path)).source
    assert isinstance(source, WholeSource) and len(open_tensors(folder)) > 0
    check_plan(source)
    source.model.register_parameter("stranger", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ModelError, match="does not save stranger"):
        check_plan(source)
