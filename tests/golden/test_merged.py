"""The original's adapter: merged as its own script merges it, and written by us as it was by it."""

import json
from pathlib import Path

import pytest
import torch
from golden_folder import golden_folder
from safetensors.torch import load_file
from small import conversion

from llava_fsdp.config import ConversionConfig
from llava_fsdp.export.main import export
from llava_fsdp.export.source_model import open_source
from llava_fsdp.export.write.adapter_folder import AdapterWriter, Base, prove_adapter, small_files
from llava_fsdp.model.adapters.lora_files import OTHERS_FILES, open_adapter
from llava_fsdp.model.adapters.lora_names import without_base
from llava_fsdp.model.sources.pretrained_config import read_base
from llava_fsdp.runtime.errors import ConfigError, ModelError

ORIGINAL = golden_folder() / "training" / "lora"
MODELS = golden_folder() / "model"
BASE = f"base={MODELS / 'llm-mha32'}"
TOWER = f"vision={MODELS / 'clip-vit-toy-patch14-56'}"
LOADED = (
    "model_type", "mm_hidden_size", "mm_projector_type", "mm_vision_select_layer",
    "mm_vision_select_feature", "mm_patch_merge_type", "use_mm_proj", "image_aspect_ratio", "mm_use_im_start_end",
    "mm_use_im_patch_token", "tokenizer_model_max_length", "tokenizer_padding_side", "vocab_size", "hidden_size",
    "torch_dtype",
)  # fmt: skip
"""What the original's loader reads of config.json, beside the name of the tower."""
ULP = 2.0**-23

pytestmark = pytest.mark.skipif(not ORIGINAL.is_dir(), reason="this folder of golden cases has no adapter")


def asked(to: Path, *values: str) -> ConversionConfig:
    return conversion(ORIGINAL, to, BASE, TOWER, "format=llava", *values)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return load_file(export(asked(tmp_path_factory.mktemp("merged") / "model")) / "model.safetensors")


def test_merged_in_fp32_as_the_original_would(merged: dict[str, torch.Tensor], count) -> None:
    """A product of rank 8 and a sum, added up in another order: the last digit of the larger."""
    for name, expected in load_file(ORIGINAL / "merged_fp32.safetensors").items():
        assert merged[name].dtype == expected.dtype == torch.float32
        worst = (merged[name] - expected).abs().max() / expected.abs().max()
        assert worst <= ULP, (name, float(worst))
        count("merged weights", "to the bit" if torch.equal(merged[name], expected) else "to the last digit")


def test_merged_in_fp16_by_its_own_script(merged: dict[str, torch.Tensor]) -> None:
    """It adds in fp16 what we add in fp32 and round once: one step of fp16, of the larger summand, apart."""
    script = load_file(ORIGINAL / "merged_by_original_script.fp16.safetensors")
    assert script.keys() == {n for n in merged if "vision_tower" not in n}
    for name, theirs in script.items():
        assert (merged[name].half() - theirs).abs().max() <= 2.0**-10 * theirs.abs().max(), name
    frozen = [n for n in script if "norm" in n or n in ("lm_head.weight", "model.embed_tokens.weight")]
    assert frozen and all(torch.equal(merged[n].half(), script[n]) for n in frozen)


def test_written_again_it_is_the_originals(tmp_path: Path) -> None:
    """Names, shapes, dtypes and values of every tensor; what loaders read of both configurations."""
    found, opened, folder = open_adapter(ORIGINAL), open_source(asked(tmp_path / "none")), tmp_path / "adapter"
    assert opened.adapted is not None
    stored = {without_base(name) for name in found.tensors}
    tensors = {n: t for n, t in opened.adapted.sources.items() if without_base(n) in stored}
    base = Base(read_base(found, str(MODELS / "llm-mha32"), str(MODELS / "clip-vit-toy-patch14-56")), 0, "")
    small = small_files(opened.source, next(iter(tensors.values())).dtype)
    AdapterWriter(opened.source, found.lora, found.modules, base, small).write(folder, tensors, {})
    prove_adapter(folder, tensors)
    pairs = [(load_file(folder / n), load_file(ORIGINAL / n)) for n in ("adapter_model.safetensors",)]
    others = torch.load(ORIGINAL / OTHERS_FILES[1], weights_only=True)
    pairs += [(load_file(folder / OTHERS_FILES[0]), others)]
    pairs += [(torch.load(folder / OTHERS_FILES[1], weights_only=True), others)]
    for own, theirs in pairs:
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[n], t) and own[n].dtype == t.dtype for n, t in theirs.items())
    own, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (folder, ORIGINAL))
    assert own.keys() <= theirs.keys(), "keys that the original's peft does not know"
    differing = {key for key in own if own[key] != theirs[key]}
    assert differing == {"target_modules"}
    assert {name.rpartition(".")[2] for name in own["target_modules"]} == set(theirs["target_modules"])
    stored = load_file(ORIGINAL / "adapter_model.safetensors")
    in_full = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in stored}
    assert set(own["target_modules"]) == in_full
    own, theirs = (json.loads((f / "config.json").read_text()) for f in (folder, ORIGINAL))
    assert {key: own[key] for key in LOADED} == {key: theirs[key] for key in LOADED}
    assert own["mm_vision_tower"] == str(MODELS / "clip-vit-toy-patch14-56")


@pytest.mark.slow
def test_a_whole_model_as_the_base(merged: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The same language model inside a LLaVA model, whose projector gives way to the adapter's."""
    whole = f"base={MODELS / 'llava-mha32'}"
    got = load_file(export(conversion(ORIGINAL, tmp_path / "to", whole, TOWER, "format=llava")) / "model.safetensors")
    projector = [n for n in merged if "mm_projector" in n]
    base = load_file(MODELS / "llava-mha32" / "model.safetensors")
    assert len(projector) == 4 and all(torch.equal(got[n], merged[n]) for n in projector)
    assert not any(torch.equal(got[n], base[n]) for n in projector)


def test_without_its_base_or_with_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_model_name_or_path=llm-mha32, which is no folder here; give the base"):
        export(conversion(ORIGINAL, tmp_path / "to", TOWER))
    with pytest.raises(ModelError, match="is an adapter, not a whole model"):
        export(conversion(ORIGINAL, tmp_path / "to", f"base={ORIGINAL}", TOWER))
