"""Each language model with one vision tower, and each vision tower with one language model: read from the files that
transformers writes, packed if it can be, trained in all parts, exported, and loaded by transformers with equal logits;
or refused before the first step. The table in docs/models.md says the same."""

import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import RankPool
from kinds_of_models import IMAGE, LANGUAGE, TEXT, UNEXPORTED, VISION
from reference import train_on, trained
from safetensors.torch import load_file, save_file
from small import make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.load_weights import stored_buffers
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import LlavaFsdpError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.preflight import preflight

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PADDED = ("stablelm", "llama4_text", "lfm2", "doge", "biogpt")
"""Language models whose rows are padded, because they cannot keep the samples of a packed row apart."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "phi": ({"num_attention_heads": 2, "head_dim": 20}, "lm_head.bias"),
    "siglip2_vision_model": ({"num_patches": 4}, "no image_size"),
    "beit": ({}, "keeps tensors of the meta device"),
    "sam_vision_model": ({}, "its layers give features of shape"),
}  # fmt: skip
"""Kinds with the reason for which they are refused."""
BOTH = ["model.random_weights=false", "model.select_feature=auto", "model.train=[projector,language,vision]"]


@pytest.fixture
def saved(parts: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Parts in which the language model or the vision tower is of the named kind, as transformers saves it."""

    def save(kind: str) -> Path:
        is_vision = kind in VISION or "vision" in kind or kind == "beit"
        folder = tmp_path / "parts"
        shutil.copytree(parts, folder)
        pairs = {
            "language": ("llama" if is_vision else kind, AutoModelForCausalLM),
            "vision": (kind if is_vision else "clip_vision_model", AutoModel),
        }
        for part, (name, auto) in pairs.items():
            torch.manual_seed(1)
            config = config_of_kind(name, part, parts)
            model = auto.from_config(config, dtype=torch.float32)
            in_files = model.state_dict().keys()
            for buffer in (own for key, own in model.named_buffers() if key in in_files):
                buffer.normal_()  # it starts with zeros
            model.save_pretrained(folder / part)
        return folder

    return save


def config_of_kind(kind: str, part: str, parts: Path) -> PretrainedConfig:
    values = VISION.get(kind) or LANGUAGE.get(kind) or (REFUSED[kind][0] if kind in REFUSED else {})
    common = IMAGE if part == "vision" else TEXT | {"vocab_size": vocabulary(parts)}
    if kind == "siglip2_vision_model":
        common = {key: value for key, value in common.items() if key != "image_size"}
    return AutoConfig.for_model(kind, **(common | values))


def exported(kind: str) -> str:
    return f"export.enabled={str(kind not in UNEXPORTED).lower()}"


def vocabulary(parts: Path) -> int:
    return json.loads((parts / "language" / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("kind", slow_after(1, [*VISION]) + slow_after(2, [*LANGUAGE]))
def test_trains_and_exports(kind: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path) -> None:
    """Packed, if the model can be. `export.verify` loads the export with transformers and compares logits."""
    folder = saved(kind)
    if kind in UNEXPORTED:
        train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, "max_steps=2"))
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["pack"] is (kind not in PADDED)
        return
    values = [*BOTH, "export.enabled=true", "export.verify=true", "export.dtype=fp32", "max_steps=2"]
    train.train(make_config(folder, dataset, tmp_path / "run", *values))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["pack"] is (kind not in PADDED)
    before = load_file(folder / ("vision" if kind in VISION else "language") / "model.safetensors")
    after = load_file(tmp_path / "run" / "export" / "model.safetensors")
    names = {name.rpartition("vision_tower.")[2].removeprefix("vision_model.") for name in after}
    for name in (own for own in before if own.endswith("e_score_correction_bias")):
        assert torch.equal(after[f"language_model.{name}"], before[name]) and before[name].any()
    if kind in VISION:  # none of the tower's tensors has another name than in its own files
        assert names >= {name.removeprefix("vision_model.") for name in before}


def test_buffers_in_the_files_of_a_language_model_are_read(
    saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    """A small copy, whose weights are in no file, has none of them."""
    folder = saved("deepseek_v3")
    cfg = make_config(folder, dataset, tmp_path / "run", *BOTH).model
    parts, own = find_parts(cfg), load_file(folder / "language" / "model.safetensors")
    found = stored_buffers(build_architecture(parts, cfg, torch.float32))
    wanted = {f"language_{name}": own[name] for name in own if name.endswith("e_score_correction_bias")}
    assert found.keys() == wanted.keys() and len(wanted) == 2
    assert all(torch.equal(found[name], wanted[name]) and wanted[name].any() for name in wanted)
    copied = replace(find_parts(cfg), is_small_copy=True)
    assert stored_buffers(build_architecture(copied, cfg, torch.float32)) == {}


@pytest.mark.parametrize(("kind", "base"), slow_after(0, itertools.product(LANGUAGE, ("nf4", "none"))))
def test_trains_adapters_and_exports_them_merged(
    kind: str, base: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    """Over a base in full precision, and over one in 4 bits."""
    keys = ["model.train=[projector,language]", "model.lora.enabled=true", "model.lora.r=3"]
    merge = f"export.merge={str(kind not in UNEXPORTED).lower()}"
    values = [*keys, f"model.quantize.mode={base}", "export.enabled=true", merge, "export.dtype=fp32", "max_steps=2"]
    train.train(make_config(saved(kind), dataset, tmp_path / "run", *BOTH[:2], *values))
    assert (tmp_path / "run" / "adapter").is_dir()
    assert (tmp_path / "run" / "export").is_dir() is (kind not in UNEXPORTED)


@pytest.mark.parametrize("kind", slow_after(0, LANGUAGE))
def test_every_language_model_goes_with_every_vision_tower(
    kind: str, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks before the first step. Among them is the export of a small copy, which can be made of each."""
    shutil.copytree(parts, tmp_path / "parts")
    config_of_kind(kind, "language", parts).save_pretrained(tmp_path / "parts" / "language")
    for tower in VISION:
        config_of_kind(tower, "vision", parts).save_pretrained(tmp_path / "parts" / "vision")
        values = ["model.select_feature=auto", "model.train=[projector,language,vision]", exported(kind)]
        with caplog.at_level(logging.WARNING):
            preflight(make_config(tmp_path / "parts", dataset, tmp_path / "run", *values), torch.device("cpu"))
    assert "without values" not in caplog.text and "not compared" not in caplog.text


@pytest.mark.parametrize("kind", slow_after(0, [*LANGUAGE, *VISION]))
def test_a_small_copy_of_a_real_size(
    kind: str, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes are the defaults of transformers' configurations, which are those of released models."""
    folder = tmp_path / "parts"
    shutil.copytree(parts / "language", folder / "language")
    sizes = {"pad_token_id": 0, **({"num_key_value_heads": 8} if kind == "nemotron" else {})}
    (AutoConfig.for_model("llama") if kind in VISION else AutoConfig.for_model(kind, **sizes)).save_pretrained(
        folder / "language"
    )
    AutoConfig.for_model(kind if kind in VISION else "siglip_vision_model").save_pretrained(folder / "vision")
    with caplog.at_level(logging.WARNING):
        preflight(make_config(folder, dataset, tmp_path / "run", *BOTH[1:2], exported(kind)), torch.device("cpu"))
    assert "without values" not in caplog.text and "not compared" not in caplog.text


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gemma2", "dinov2", "dinov3_vit", "aimv2_vision_model"])
def test_equal_on_two_ranks_and_padded(
    kind: str, saved: Callable[[str], Path], dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    folder = saved(kind)
    runs = {}
    for name, size, values in (("one", 1, []), ("two", 2, []), ("padded", 1, ["pack=false"])):
        cfg = make_config(folder, dataset, tmp_path / name, *BOTH, "sharding=zero3", "max_steps=4", *values)
        runs[name] = trained(train_on(size, cfg, pools))
    assert runs["two"].losses == pytest.approx(runs["one"].losses, rel=1e-5)
    assert runs["padded"].losses == pytest.approx(runs["one"].losses, rel=1e-5)


INSIDE = {
    "gemma3": ("gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
    "internvl": ("qwen2", "internvl_vision", {}),
    "llava_onevision": ("qwen2", "siglip_vision_model", {}),
    "llava_next": ("llama", "clip_vision_model", {}),
}
"""Vision-language models: their language model, vision tower and further values."""


@pytest.mark.parametrize(
    ("kind", "part"),
    slow_after(1, itertools.product(INSIDE, ("vision", "language"))),
)
def test_a_part_of_a_whole_model(
    kind: str, part: str, saved: Callable[[str], Path], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """`model.language` and `model.vision` take the folder of a vision-language model."""
    folder = saved("llama")
    language, tower, values = INSIDE[kind]
    own = AutoConfig.for_model(language, **(TEXT | LANGUAGE[language] | {"vocab_size": vocabulary(parts)}))
    vision = AutoConfig.for_model(tower, **(IMAGE | VISION[tower]))
    config = AutoConfig.for_model(
        kind, text_config=own.to_dict(), vision_config=vision.to_dict(), image_token_index=3, **values
    )
    torch.manual_seed(2)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / part)
    weights = ["export.enabled=true", "export.verify=false", "export.dtype=fp32", "max_steps=1", "optim.lr=0"]
    train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, *weights, "optim.projector_lr=0"))
    after = load_file(tmp_path / "run" / "export" / "model.safetensors")
    named = {name.rpartition("vision_tower.")[2].removeprefix("vision_model."): value for name, value in after.items()}
    module = model.model.language_model if part == "language" else model.model.vision_tower
    prefix = "language_model.model." if part == "language" else ""
    compared = [n for n in module.state_dict() if "embed_tokens" not in n and prefix + n in named]
    assert len(compared) > 20
    assert all(torch.equal(named[prefix + n], module.state_dict()[n]) for n in compared)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_work_is_refused_before_the_first_step(
    kind: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    folder = saved(kind)
    with pytest.raises(LlavaFsdpError, match=REFUSED[kind][1]):
        train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, "max_steps=1"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("rwkv", "past_key_values"), ("recurrent_gemma", "logits_soft_cap"), ("gemma2", "final_logit_softcapping")],
)
def test_what_cannot_be_exported_is_refused_before_the_first_step(
    kind: str, reason: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    folder = saved(kind)
    values = [*BOTH, "export.enabled=true", "pack=false", "max_steps=1"]
    with pytest.raises(LlavaFsdpError, match=rf"{reason}.*export\.enabled=false"):
        train.train(make_config(folder, dataset, tmp_path / "run", *values))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_quantized_files_are_refused(saved: Callable[[str], Path], dataset: Path, tmp_path: Path) -> None:
    """By their configuration, or by their dtype: their scales would be lost."""
    folder = saved("llama")
    path = folder / "language" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(LlavaFsdpError, match="quantization_config"):
        train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, "max_steps=1"))
    path.write_text(json.dumps(config))
    weights = load_file(folder / "language" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, folder / "language" / "model.safetensors")
    with pytest.raises(LlavaFsdpError, match=re.escape(name)):
        train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, "max_steps=1"))


@pytest.mark.slow
def test_a_planner_that_cannot_compute_a_model_stops_no_training(
    saved: Callable[[str], Path], dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels of a mixture of experts take no fp32 on the meta device."""
    folder = saved("mixtral")
    auto = ["activation_checkpointing=auto", "tokens_per_micro_batch=auto", "max_steps=1"]
    with caplog.at_level(logging.INFO):
        train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, *auto))
    assert "activation_checkpointing=full, tokens_per_micro_batch=null: the planner cannot compute" in caplog.text
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_page_says_what_was_tried() -> None:
    page = PAGE.read_text().partition("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    names = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows]
    cells_of = [[cell.strip() for cell in row.split("|")[2:-2]] for row in rows]
    said = {kind: cells for kinds, cells in zip(names, cells_of, strict=True) for kind in kinds}
    works = {**dict.fromkeys(LANGUAGE, ["yes"] * 3), **dict.fromkeys(VISION, ["yes"] * 2)}
    assert {kind: cells for kind, cells in said.items() if "refused" not in cells} == works
    assert {kind for kind, cells in said.items() if {*cells} == {"refused"}} == {*REFUSED}
    assert said.keys() == {*works, *REFUSED}
    assert {kind for kinds, row in zip(names, rows, strict=True) for kind in kinds if "padded" in row} == {*PADDED}
