"""`llava-fsdp export` of a whole model of transformers, and what is compared before its folder gets its name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, TEMPLATES, write_family
from small import write_json
from transformers import AutoModelForImageTextToText, LogitsProcessorList

from llava_fsdp.config import AUTO, ConversionConfig, FolderFormat, KeptDType
from llava_fsdp.data.text.tokens.detokenize import find_stops
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.prove.whole_class import prove_class
from llava_fsdp.export.source_model import open_source
from llava_fsdp.export.write.generation_file import (
    Prescribed,
    ends_of_class,
    warning_of_unnamed_ends,
    write_generation_of_class,
)
from llava_fsdp.export.write.whole_folder import WholeSource, check_plan
from llava_fsdp.model.sources.pretrained import read_config
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


def write_ends(folder: Path, ends: list[int] | None) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    if ends is not None:
        write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": True, "temperature": 0.5})


@pytest.mark.parametrize("named", [None, [7], [7, 8]])
def test_generate_ends_an_answer_of_the_export_where_chat_does(
    named: list[int] | None, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "source")
    write_ends(tmp_path / "source", named)
    export(conversion(tmp_path / "source", tmp_path / "to"))
    kind: Any = AutoModelForImageTextToText
    model = kind.from_pretrained(tmp_path / "to").eval()
    end = open_tokenizer(folder).special(TEMPLATES[FAMILIES["deepseek_vl"].template].end)
    assert end is not None and end not in (7, 8)
    language = model.config.get_text_config()
    stops = find_stops(None, [], language.eos_token_id, (tmp_path / "to",))
    assert stops >= {end, *(named or [])}
    assert model.generation_config.temperature == (None if named is None else 0.5)
    other = next(number for number in range(9, 99) if number not in stops)
    for stop in sorted(stops):
        answer = torch.tensor([[other, other, stop, other, other]])
        start, forced = torch.full((1, 1), other), LogitsProcessorList([Prescribed(answer)])
        made = model.generate(start, logits_processor=forced, max_new_tokens=5, do_sample=False)
        assert made[0, 1:].tolist() == [other, other, stop]


def test_a_token_that_generate_does_not_know_is_told_before_training(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "source")
    language = read_config(folder, "").get_text_config()
    ends = ends_of_class(folder, language)
    assert ends is not None and "" not in ends.values()
    for number, name in ends.items():
        write_ends(tmp_path / "source", [end for end in ends if end != number] or [7])
        assert f"{number} ({name})" in str(warning_of_unnamed_ends(tmp_path / "source", language))
    write_ends(tmp_path / "source", [*ends])
    assert warning_of_unnamed_ends(tmp_path / "source", language) is None
    (tmp_path / "to").mkdir()
    write_generation_of_class(tmp_path / "source", language, tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())
