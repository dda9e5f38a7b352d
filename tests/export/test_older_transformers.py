"""What transformers 4 makes of exports: the numbers of transformers 5, or an error."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import older_reader
import pytest
import torch
from kinds_of_models import EXPERTS, IMAGE, LANGUAGE, TEXT, UNEXPORTED, VISION
from PIL import Image
from small import make_config, write_json
from test_chat_template import KINDS, exported, write_source
from transformers import AutoConfig, PretrainedConfig
from unpacked import run_with, unpacked

from llava_fsdp.export.prove.rehearsal import compare, prepare_copy, write_hf
from llava_fsdp.export.prove.verify_logits import exported_logits
from llava_fsdp.export.write.chat_template import PROBES, as_parts, as_text
from llava_fsdp.export.write.formats import SourceModel, source_of_run, write_hf_except_weights
from llava_fsdp.export.write.older_transformers import NEEDS_5, older_tokenizer, with_older_fields
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts

VERSION = "4.57.3"
PACKAGES = [f"transformers=={VERSION}", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
CLOSE = 1e-5
"""Largest difference of logits, as a fraction of the largest: kernels of experts and of norms were rewritten."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0]}
SHORT = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "another base": ("llama", {"rope_theta": 1e5}),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "linear": ("mistral", {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "dynamic": ("llama", {"max_position_embeddings": 99, "rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}),
    "yarn": ("qwen2", {"rope_theta": 1e6, "rope_scaling": {**YARN, "factor": 3.0, "beta_fast": 20}}),
    "yarn without a length": ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "longrope of phi3": ("phi3", {"hidden_size": 24, "rope_theta": 1e5, "rope_scaling": LONG, **SHORT}),
    "longrope of llama": ("llama", {"rope_scaling": {**LONG, "original_max_position_embeddings": 64}}),
    "longrope with its factor": ("llama", {"rope_scaling": {**LONG, "attention_factor": 1.5, "factor": 2.0}, **SHORT}),
    "two bases": ("gemma3_text", {**WINDOW, "rope_theta": 1e6, "rope_local_base_freq": 12345.0}),
    "two bases, one linear": ("gemma3_text", {**WINDOW, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "windows of olmo3": ("olmo3", {**WINDOW, "rope_theta": 5e5, "rope_scaling": YARN}),
    "a part of a head": ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 777.0}),
    "a part of glm4's": ("glm4", {"partial_rotary_factor": 0.3334, "rope_theta": 777.0}),
    "a part of nemotron's": ("nemotron", {"partial_rotary_factor": 0.6667, "rope_theta": 777.0}),
    "a part by another name": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 777}),
    "layers without": ("smollm3", {"rope_theta": 777.0, "no_rope_layers": [1, 0, 1]}),
    "no yarn for gpt_oss": ("gpt_oss", {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    "linear of olmo2": ("olmo2", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "heads as wide as the model": ("qwen2_moe", {**LANGUAGE["qwen2_moe"], "head_dim": 10, "rope_theta": 1e6}),
}
"""Rotary embeddings of language models that transformers 4 can compute."""
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "a factor that is not of the lengths": (
        "llama", {"rope_scaling": {**LONG, "factor": 3.0, "original_max_position_embeddings": 64}}),
    "a kind that olmo2 did not have": ("olmo2", {"rope_scaling": YARN}),
    "scaled windows of gemma3": ("gemma3_text", {**WINDOW, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    "windows of olmo3 of another base": ("olmo3", {**WINDOW, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
}  # fmt: skip
"""Rotary embeddings that transformers 4 cannot compute."""
REFUSED = ("qwen2_moe", "gemma")
"""Language models of the table that transformers 4 refuses: it knows no `head_dim` of the one, and would multiply the
other's factor for embeddings into image features, too."""
REFUSED_TOWERS = ("internvl_vision",)
"""Vision towers of the table that the LLaVA of transformers 4 cannot call."""
PIXTRAL = {"rope_theta": 777.0, "head_dim": 12}


@pytest.mark.parametrize("name", [*ROTARY, *NEW, "gemma"])
def test_transformers_5_reads_what_it_had_written(name: str, tmp_path: Path) -> None:
    """The older fields change nothing for it, and what transformers 4 would compute differently it refuses."""
    kind, values = {**ROTARY, **NEW, "gemma": ("gemma", {})}[name]
    language = AutoConfig.for_model(kind, **copy.deepcopy(TEXT | values))
    vision = AutoConfig.for_model("pixtral", **(IMAGE | PIXTRAL))
    config = AutoConfig.for_model("llava", text_config=language, vision_config=vision, dtype="bfloat16")
    language.standardize_rope_params()  # as its model does
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    written = with_older_fields(fields, config)
    write_json(path, written)
    read = AutoConfig.from_pretrained(tmp_path)
    before, after = language.to_dict(), read.text_config.to_dict()
    for rope in (before["rope_parameters"], after["rope_parameters"]):
        rope.pop("type", None)  # an older name of rope_type, which stands beside it
    assert read.vision_config.rope_parameters == vision.rope_parameters
    assert str(read.dtype).removeprefix("torch.") == written["torch_dtype"] == "bfloat16"
    assert {key: after.get(key) for key in before} == before
    assert (written["text_config"]["rope_theta"] == NEEDS_5) == (name in NEW or name == "gemma")
    assert written["vision_config"]["rope_theta"] == 777.0


def test_a_tokenizer_s_configuration_has_only_what_both_read() -> None:
    saved = {"backend": "x", "is_local": True, "local_files_only": True, "tokenizer_class": "TokenizersBackend",
             "extra_special_tokens": ["<image>"], "eos_token": "</s>", "processor_class": "X"}  # fmt: skip
    assert older_tokenizer(saved, {"pre_tokenizer": None}) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<image>"], "eos_token": "</s>",
    }  # fmt: skip
    for space in (True, False):
        frozen = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": space}}
        assert older_tokenizer({"tokenizer_class": "A"}, frozen) == {"tokenizer_class": "A", "add_prefix_space": space}


@pytest.fixture(scope="session")
def older() -> Path:
    """A folder with an older transformers."""
    return unpacked(f"transformers-{VERSION}", PACKAGES)


def ask_both(older: Path, folders: Sequence[Path]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What this transformers and the older one make of the exports in these folders."""
    ours = [older_reader.read(folder) for folder in folders]
    run_with(older, older_reader.__file__, *map(str, folders))
    theirs = [torch.load(folder / "found.pt") for folder in folders]
    assert {found["version"] for found in theirs} == {VERSION}
    return list(zip(ours, theirs, strict=True))


class Recorder:
    """A model that keeps what it is called with."""

    dtype = torch.float32

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self.inputs: dict[str, Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        self.inputs = inputs
        raise InterruptedError


def source_with(
    language: PretrainedConfig, vision: PretrainedConfig, parts: Path, dataset: Path, folder: Path, *words: str
) -> SourceModel:
    own = folder / "parts"
    for name, config in (("language", language), ("vision", vision)):
        config.save_pretrained(own / name)
        for file in (parts / name).iterdir():
            if file.name != "config.json":
                (own / name / file.name).write_bytes(file.read_bytes())
    keys = ["model.select_feature=auto", "export.enabled=true", "data.template=v1", "pack=false"]
    cfg = make_config(own, dataset, folder / "run", *keys, *words)
    return source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)


def write_copy(source: SourceModel, folder: Path) -> Path:
    """An export of a small copy that passes the check before the first step, and the inputs of its model."""
    small, weights, inputs, expected = prepare_copy(source)
    folder.mkdir()
    write_hf(small, weights, folder)
    compare(folder, inputs, expected)
    generator = torch.Generator().manual_seed(1)
    asked = [{"input_ids": torch.randint(0, 60, (1, 200), generator=generator)}]
    for micro, sizes in inputs:
        recorder = Recorder(AutoConfig.from_pretrained(folder))
        with pytest.raises(InterruptedError):
            exported_logits(recorder, micro, micro.images["tiles"], sizes)
        asked.append(recorder.inputs)
    torch.save({"inputs": asked}, folder / "asked.pt")
    return folder


def check_all(older: Path, folders: dict[str, Path], refused: Sequence[str]) -> None:
    """Raise AssertionError unless transformers 4 computes the same logits, or fails for the cases that are named."""
    wrong: dict[str, Any] = {}
    for name, (ours, theirs) in zip(folders, ask_both(older, [*folders.values()]), strict=True):
        if "error" in theirs or name in refused:
            if name not in refused or "error" not in theirs:
                wrong[name] = theirs.get("error", "computes")
            continue
        pairs = zip(ours["logits"], theirs["logits"], strict=True)
        most = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        if most > CLOSE or theirs["dtype"] != "torch.float32" or theirs["amiss"]:
            wrong[name] = (most, theirs["dtype"], theirs["amiss"])
    assert not wrong


@pytest.mark.slow
def test_language_models_have_the_same_logits_in_transformers_4(
    older: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """All of the table that transformers can export; each kind of rotary embeddings, or an error."""
    own = {name: (name, values) for name, values in LANGUAGE.items() if name not in UNEXPORTED}
    vocabulary = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
    vision, folders = AutoConfig.for_model("clip_vision_model", **IMAGE), []
    cases = {**own, **ROTARY, **NEW}
    for number, (kind, values) in enumerate(cases.values()):
        language = AutoConfig.for_model(kind, **copy.deepcopy(TEXT | {"vocab_size": vocabulary} | values))
        source = source_with(language, vision, parts, dataset, tmp_path / f"of{number}")
        folders.append(write_copy(source, tmp_path / str(number)))
    check_all(older, dict(zip(cases, folders, strict=True)), [*NEW, *REFUSED])


TILED = ["model.patch_merge=spatial_unpad", "data.max_length=4096"]
FORMS = {
    "llava_next": ("clip_vision_model", [*TILED, "data.image_aspect_ratio=anyres"]),
    "llava_onevision": (
        "siglip_vision_model", [*TILED, "data.image_aspect_ratio=anyres_max", "model.select_layer=-1"]),
    "internvl": (
        "internvl_vision", ["model.projector_type=pixel_shuffle2x_mlp2x_gelu", "model.select_layer=-1"]),
}  # fmt: skip


@pytest.mark.slow
def test_vision_towers_and_forms_have_the_same_logits_in_transformers_4(
    older: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    vocabulary = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
    language = AutoConfig.for_model("qwen2", **(TEXT | {"vocab_size": vocabulary, "rope_theta": 1e6}))
    large = {"image_size": [56, 56], "patch_size": [14, 14]}
    cases = {kind: (kind, IMAGE | values, []) for kind, values in VISION.items()}
    cases["pixtral of another base"] = ("pixtral", IMAGE | PIXTRAL, [])
    for name, (kind, words) in FORMS.items():
        cases[name] = (kind, IMAGE | VISION[kind] | (large if name == "internvl" else {}), words)
    folders = []
    for number, (kind, values, words) in enumerate(cases.values()):
        vision = AutoConfig.for_model(kind, **values)
        source = source_with(language, vision, parts, dataset, tmp_path / f"of{number}", *words)
        folders.append(write_copy(source, tmp_path / str(number)))
    check_all(older, dict(zip(cases, folders, strict=True)), REFUSED_TOWERS)


@pytest.mark.slow
def test_tokenizers_and_chat_templates_give_the_same_ids_in_transformers_4(older: Path, tmp_path: Path) -> None:
    folders = []
    chats = [form(texts, system) for form in (as_text, as_parts) for texts in PROBES for system in (None, "be kind")]
    texts = [
        "a  b   c",
        " leading",
        "\n\tx  ",
        "größe 中文 🙂",
        "USER: a ASSISTANT: b</s>",
        "<image>\nwhat",
        "a<image>b",
    ]
    for kind in KINDS:
        folders.append(tmp_path / f"export of {kind}")
        exported(write_source(kind, tmp_path / kind), folders[-1])
        write_json(folders[-1] / "generation_config.json", {"eos_token_id": [2, 3]})
        torch.save({"texts": texts, "messages": chats}, folders[-1] / "asked.pt")
    for folder, (ours, theirs) in zip(folders, ask_both(older, folders), strict=True):
        assert "error" not in theirs, (folder.name, theirs)
        assert all(ours[key] == theirs[key] for key in ("ids", "chats", "ends")), folder.name


@pytest.mark.slow
@pytest.mark.parametrize("aspect", ["square", "pad", "anyres"])
def test_the_processor_gives_the_same_pixels_in_transformers_4(
    aspect: str, older: Path, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    words = [f"data.image_aspect_ratio={aspect}", *(TILED if aspect == "anyres" else [])]
    language, vision = (AutoConfig.from_pretrained(parts / name) for name in ("language", "vision"))
    source, folder = source_with(language, vision, parts, dataset, tmp_path, *words), tmp_path / "export"
    folder.mkdir()
    write_hf_except_weights(source, torch.float32, folder)
    Image.effect_noise((50, 31), 80).convert("RGB").save(folder / "asked.png")
    asked = {"texts": ["a"], "messages": [as_text(["<image>\nwhat", "red"])], "image": "asked.png"}
    torch.save(asked, folder / "asked.pt")
    [(ours, theirs)] = ask_both(older, [folder])
    assert "error" not in theirs, theirs
    assert torch.equal(ours["pixels"], theirs["pixels"])
    assert all(ours[key] == theirs[key] for key in ("image_ids", "ids", "chats", "ends"))
