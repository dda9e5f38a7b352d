"""Exports for llama.cpp: what is written, what is refused, and that the proof sees a mistake. tests/consumers has what
llama.cpp answers with them."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import KINDS, SIDE, write_clip, write_model
from small import conversion
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from llava_fsdp.config import KeptDType
from llava_fsdp.export.gguf import language_file, vision_file, vocabulary
from llava_fsdp.export.gguf.gguf_folder import write_gguf_folder
from llava_fsdp.export.gguf.gguf_writer import GgufTensor, check_values, type_of
from llava_fsdp.export.gguf.model_folder import ModelFolder
from llava_fsdp.export.gguf.modelfile import find_texts, go_template
from llava_fsdp.export.gguf.read_back import keys_of, prove_files
from llava_fsdp.export.gguf.vocabulary import splitting_rule
from llava_fsdp.export.main import export
from llava_fsdp.export.write.chat_template import as_text, render_messages
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Writes the parts of a model once, and returns what an export of them is given."""
    made: dict[str, tuple[Path, list[str]]] = {}

    def write(kind: str) -> tuple[Path, list[str]]:
        if kind not in made:
            made[kind] = write_model(tmp_path_factory.mktemp(kind) / "parts", kind)
        return made[kind]

    return write


@pytest.fixture(scope="module")
def folders(
    sources: Callable[[str], tuple[Path, list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Exports a model for transformers once."""
    made: dict[str, Path] = {}

    def write(kind: str) -> Path:
        if kind not in made:
            source, keys = sources(kind)
            made[kind] = export(conversion(source, tmp_path_factory.mktemp(kind) / "hf", "verify=false", *keys))
        return made[kind]

    return write


def write(folder: Path, made: Path, asked: str = "keep") -> None:
    made.mkdir()
    write_gguf_folder(folder, made, KeptDType(asked), "mine")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, made = folders(kind), tmp_path / "made"
    write(folder, made)
    prove_files(ModelFolder(folder), made)
    if kind in ("mistral", "qwen2"):  # transformers reads no biases, scaling and head size of the others
        theirs: Any = AutoModelForCausalLM.from_pretrained(made, gguf_file="model.gguf", dtype=torch.float32).eval()
        ours: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.randint(3, 300, (1, 33), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", ["fp16", "bf16", "q8_0"])
def test_every_type_is_written(asked: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows that are no whole blocks of q8_0 are F16, and vectors and the tower's first matrices F32."""
    folder, made = folders("qwen3"), tmp_path / "made"
    write(folder, made, asked)
    prove_files(ModelFolder(folder), made)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made / "mmproj.gguf").tensors}
    assert kinds["v.patch_embd.weight"] == kinds["v.position_embd.weight"] == kinds["mm.0.bias"] == "F32"
    assert kinds["mm.0.weight"] == {"fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}[asked]
    assert kinds["v.blk.0.attn_q.weight"] == kinds["mm.0.weight"]
    assert type_of((3, 40), torch.float32, KeptDType.q8_0) == "F16"
    assert type_of((3, 40), torch.bfloat16, KeptDType.keep) == "BF16"
    assert type_of((40,), torch.bfloat16, KeptDType.keep) == "F32"


def test_command_writes_proves_and_leaves_nothing_else(
    sources: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    source, keys = sources("qwen2")
    made = export(conversion(source, tmp_path / "made", "format=gguf", "dtype=bf16", *keys))
    assert sorted(path.name for path in made.iterdir()) == [
        "Modelfile", "README.md", "llava_fsdp.json", "mmproj.gguf", "model.gguf",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert sorted(json.loads((made / "llava_fsdp.json").read_text())["files"]) == [
        "Modelfile", "mmproj.gguf", "model.gguf",
    ]  # fmt: skip
    assert json.loads((made / "llava_fsdp.json").read_text())["dtype"] == "bf16"
    assert (
        str(tmp_path) not in (made / "README.md").read_text() and f"{SIDE} x {SIDE}" in (made / "README.md").read_text()
    )
    assert keys_of(made / "model.gguf")["general.name"] == "made"
    with pytest.raises(ConfigError, match="overwrite=true"):
        export(conversion(source, made, "format=gguf", *keys))
    assert export(conversion(source, made, "format=gguf", "overwrite=true", "verify=false", *keys)) == made


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "rows of q are not permuted": lambda patch: patch.setitem(
        language_file.KINDS, "llama", language_file.LanguageKind("llama")
    ),
    "key heads are counted as query heads": lambda patch: patch.setattr(
        language_file, "with_rotated_rows", lambda read, heads: ROTATED(read, 4)
    ),
    "a layer is lost": lambda patch: lose(patch, language_file, "blk.1."),
    "the output layer is lost": lambda patch: lose(patch, language_file, "output.weight"),
    "a bias is lost": lambda patch: lose(patch, language_file, "blk.0.attn_q.bias"),
    "another rotary base": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_rope_freq_base", lambda self, value: BASE(self, 1e4)
    ),
    "another epsilon": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_layer_norm_rms_eps", lambda self, value: EPSILON(self, 1e-5)
    ),
    "llama.cpp adds a BOS token": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_add_bos_token", lambda self, value: BOS(self, True)
    ),
    "llama.cpp adds a space": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_add_space_prefix", lambda self, value: SPACE(self, True)
    ),
    "the template has no line break after an image": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_chat_template", lambda self, code: TEMPLATE(self, code.replace("\\n", " "))
    ),
    "scores of pieces are turned round": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_token_scores", lambda self, scores: SCORES(self, [-value for value in scores])
    ),
    "two tokens change places": lambda patch: patch.setattr(
        gguf.GGUFWriter,
        "add_token_list",
        lambda self, tokens: TOKENS(self, [*tokens[:300], tokens[301], tokens[300], *tokens[302:]]),
    ),
    "one layer of the tower too few": lambda patch: patch.setattr(vision_file, "last_layer", lambda folder: 1),
    "the tower's last layer is lost": lambda patch: lose(patch, vision_file, "v.blk.1."),
    "the projector's layers are named as Pixtral's": lambda patch: patch.setattr(
        vision_file,
        "OF_PROJECTOR",
        {key: value.replace("mm.0", "mm.1") for key, value in vision_file.OF_PROJECTOR.items()},
    ),
    "another answer's end": lambda patch: patch.setattr(vocabulary, "ENDS", ("eot", "eom", "eos")),
}
ROTATED, BASE, EPSILON = (
    language_file.with_rotated_rows, gguf.GGUFWriter.add_rope_freq_base, gguf.GGUFWriter.add_layer_norm_rms_eps,
)  # fmt: skip
BOS, SPACE, TEMPLATE = (
    gguf.GGUFWriter.add_add_bos_token, gguf.GGUFWriter.add_add_space_prefix, gguf.GGUFWriter.add_chat_template,
)  # fmt: skip
SCORES, TOKENS = gguf.GGUFWriter.add_token_scores, gguf.GGUFWriter.add_token_list


def lose(patch: pytest.MonkeyPatch, module: Any, beginning: str) -> None:
    """Leaves out the tensors whose names begin so."""
    whole = module.tensors_of

    def without(*args: Any) -> dict[str, GgufTensor]:
        return {name: tensor for name, tensor in whole(*args).items() if not name.startswith(beginning)}

    patch.setattr(module, "tensors_of", without)


SCALED = {
    "the divisors of rotary frequencies are lost": lambda patch: lose(patch, language_file, "rope_freqs"),
    "other divisors": lambda patch: patch.setattr(
        language_file, "frequency_divisors", lambda rope, size: DIVISORS(rope | {"factor": 4.0}, size)
    ),
    "another epsilon of the tower": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_vision_attention_layernorm_eps", lambda self, value: TOWER_EPSILON(self, 1e-5)
    ),
    "another mean": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_vision_image_mean", lambda self, values: MEAN(self, [0.5, 0.5, 0.4])
    ),
    "another activation of the tower": lambda patch: patch.setattr(
        gguf.GGUFWriter, "add_vision_use_gelu", lambda self, value: GELU(self, not value)
    ),
}
DIVISORS, TOWER_EPSILON = language_file.frequency_divisors, gguf.GGUFWriter.add_vision_attention_layernorm_eps
MEAN, GELU = gguf.GGUFWriter.add_vision_image_mean, gguf.GGUFWriter.add_vision_use_gelu


@pytest.mark.parametrize("mistake", [*MISTAKES, *SCALED])
def test_proof_sees_a_mistake(
    mistake: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("llama" if mistake in MISTAKES else "llama3")
    with monkeypatch.context() as patch:
        (MISTAKES | SCALED)[mistake](patch)
        write(folder, tmp_path / "made")
    with pytest.raises((ModelError, KeyError)):
        prove_files(ModelFolder(folder), tmp_path / "made")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_template_of_ollama_says_the_same(kind: str, folders: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders(kind))
    texts = find_texts(tokenizer)
    assert texts is not None
    for system in (None, "be brief"):
        for said in (["a"], ["what?", "this", "and {{ that }}?"]):
            assert texts.render(system, said) == render_messages(tokenizer, as_text(said, system), True)
    written = go_template(texts)
    assert written.count("{{ end }}") == written.count("{{ if") + written.count("{{ range")
    assert go_template(replace(texts, begin="{{x")).find('{{ "{{" }}x') >= 0


def test_template_without_such_a_form_is_said(folders: Callable[[str], Path]) -> None:
    """A conversation whose earlier answers are written otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(folders("qwen3"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ ': ' if loop.last else '; ' }}{{ m.content }}{% endfor %}"
    )
    assert find_texts(tokenizer) is None


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "phi3": ({"model_type": "phi3"}, {}, "phi3"),
    "another activation": ({"hidden_act": "gelu"}, {}, "hidden_act=gelu"),
    "a part of a head": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {}, "partial_rotary"),
    "windows": ({"use_sliding_window": True}, {}, "use_sliding_window"),
    "yarn": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, {}, "rope_type=yarn"),
    "tiles": ({}, {"model_type": "llava_next"}, "llava_next"),
    "CLIP": ({}, {"vision": {"model_type": "clip_vision_model"}}, "gguf_clip=true"),
    "another tower": ({}, {"vision": {"model_type": "dinov2"}}, "dinov2"),
    "first patch dropped": ({}, {"vision_feature_select_strategy": "default"}, "class token"),
    "several layers": ({}, {"vision_feature_layer": [-2, -1]}, "several layers"),
    "the tower's activation": ({}, {"vision": {"hidden_act": "gelu"}}, "hidden_act=gelu"),
    "the projector's activation": ({}, {"projector_hidden_act": "relu"}, "relu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(name: str, folders: Callable[[str], Path]) -> None:
    language, whole, message = REFUSED[name]
    config = dict(ModelFolder(folders("qwen2")).config)
    language_file.kind_of(config["text_config"])
    vision_file.check_vision(config, with_clip=False)
    vision = config["vision_config"] | whole.pop("vision", {})
    with pytest.raises(ModelError, match=re.escape(message)):
        language_file.kind_of(config["text_config"] | language)
        vision_file.check_vision(config | {"vision_config": vision} | whole, with_clip=False)


def test_clip_is_written_with_one_key_and_a_warning(
    sources: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    source, keys = sources("qwen2")
    keys = [*keys[:1], f"vision={write_clip(tmp_path / 'clip')}", *keys[2:]]
    config = json.loads((source / "config.json").read_text()) | {"mm_vision_select_feature": "patch"}
    changed = shutil.copytree(source, tmp_path / "projector")
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="gguf_clip=true"):
        export(conversion(changed, tmp_path / "made", "format=gguf", *keys))
    assert not (tmp_path / "made.tmp").exists()
    made = export(conversion(changed, tmp_path / "made", "format=gguf", "gguf_clip=true", *keys))
    assert "wrong" in (made / "README.md").read_text()
    names = [tensor.name for tensor in gguf.GGUFReader(made / "mmproj.gguf").tensors]
    assert {"v.class_embd", "v.pre_ln.weight", "v.pre_ln.bias"} <= {*names}


@pytest.mark.parametrize("keys", [["dtype=q8_0"], ["dtype=fp16"], ["gguf_clip=true"]])
def test_keys_of_another_format_are_refused(keys: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format=gguf"):
        conversion(tmp_path, tmp_path / "made", *keys)


def test_values_that_a_type_cannot_hold_are_refused() -> None:
    check_values("x", torch.tensor([65504.0]), "F16")
    check_values("x", torch.tensor([70000.0]), "BF16")
    for values in ([70000.0], [float("nan")], [float("inf")]):
        with pytest.raises(ModelError, match="x has"):
            check_values("x", torch.tensor(values), "F16")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another expression": lambda content: content["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"),
    "another behaviour": lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "a space before the text": lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(
        add_prefix_space=True
    ),
    "small letters": lambda content: content.update(normalizer={"type": "Lowercase"}),
    "whole words first": lambda content: content["model"].update(ignore_merges=True),
    "no step": lambda content: content.update(pre_tokenizer=None),
}


def test_tokens_with_white_space_of_their_own_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("qwen2"), tmp_path / "changed")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][1]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="rstrip"):
        write(folder, tmp_path / "made")


def test_the_tokenizer_s_own_end_comes_first(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """A chat template may write it; the others end an answer, too."""
    folder = shutil.copytree(folders("qwen2"), tmp_path / "changed")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 2, 5]}))
    write(folder, tmp_path / "made")
    keys = keys_of(tmp_path / "made" / "model.gguf")
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [2, 0, 5]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 2, 5, 6]}))
    with pytest.raises(ModelError, match="4 tokens end"):
        write(folder, tmp_path / "again")


def test_a_failed_export_leaves_nothing_or_says_what(
    sources: Callable[[str], tuple[Path, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves nothing. Files that are not equal stay, and the next export replaces them."""
    source, keys = sources("qwen2")
    cfg = conversion(source, tmp_path / "made", "format=gguf", *keys)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(CheckpointError, match="cannot write"):
            export(cfg)
    assert [*tmp_path.iterdir()] == []
    with monkeypatch.context() as patch:
        patch.setattr(vision_file, "last_layer", lambda folder: 1)
        with pytest.raises(ModelError, match=r"made was not made; .*made\.tmp has what was written"):
            export(cfg)
    assert (tmp_path / "made.tmp" / "model.gguf").is_file()
    made = export(cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and not (made / "transformers").exists()


def test_a_folder_with_a_file_of_that_name_is_not_replaced(
    sources: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    source, keys = sources("qwen2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.gguf").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="not a model folder"):
        export(conversion(source, tmp_path / "mine", "format=gguf", "overwrite=true", *keys))


@pytest.mark.parametrize("change", CHANGES)
def test_unknown_splitting_rules_are_refused(change: str, folders: Callable[[str], Path]) -> None:
    path = folders("qwen2") / "tokenizer.json"
    content = json.loads(path.read_text())
    assert splitting_rule(content, path) == "qwen2"
    CHANGES[change](content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        splitting_rule(content, path)


def test_a_wrong_rule_is_seen(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bracket and the word behind it are one word by one rule and two by the other."""
    folder = folders("qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "splitting_rule", lambda *_: "gpt-2")
        write(folder, tmp_path / "made")
    with pytest.raises(ModelError, match="token ids"):
        prove_files(ModelFolder(folder), tmp_path / "made")


def test_damage_of_one_value_is_seen(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, made = folders("qwen3"), tmp_path / "made"
    write(folder, made, "q8_0")
    path = made / "model.gguf"
    tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.1.ffn_up.weight")
    np.asarray(tensor.data).reshape(-1)[-1] ^= 0x40
    with pytest.raises(ModelError, match=r"up_proj"):
        prove_files(ModelFolder(folder), made)
