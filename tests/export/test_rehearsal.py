"""The export of a small copy of a model, before the first step: what passes, and what is refused."""

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankPool, RanksFailed
from reference import run_ranks
from safetensors.torch import load_file, save_file
from small import Configure, make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel, PretrainedConfig

from llava_fsdp.export.prove import rehearsal
from llava_fsdp.export.prove.rehearsal import (
    CannotBeExported,
    check_names,
    compare,
    prepare_copy,
    rehearse_hf,
    write_hf,
)
from llava_fsdp.export.prove.small_copy import count_layers, shrink, shrink_image, shrink_layer, small_copy
from llava_fsdp.export.write.formats import (
    SourceModel,
    WrittenExceptWeights,
    hf_config,
    source_of_run,
    write_hf_except_weights,
)
from llava_fsdp.export.write.processor import check_image_tokens
from llava_fsdp.export.write.weights_writer import Weights
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.vision_tower import build_vision_tower
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train import main as train

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]
TILED = ["model.patch_merge=spatial_unpad", "data.max_length=4096", "data.image_aspect_ratio=anyres"]
LORA = ["model.train=[projector,language]", "model.lora.enabled=true", "model.lora.r=3"]
SHUFFLE = "model.projector_type=pixel_shuffle2x_mlp2x_gelu"
PASS: dict[str, tuple[str, str, list[str]]] = {
    "qwen3, siglip": ("qwen3", "siglip_vision_model", []),
    "mistral, clip, tiles": ("mistral", "clip_vision_model", TILED),
    "experts": ("mixtral", "clip_vision_model", ["data.image_aspect_ratio=pad"]),
    "adapters": ("gpt_oss", "clip_vision_model", [*LORA, "model.lora.use_dora=true"]),
    "pixel shuffle": ("qwen2", "internvl_vision", [SHUFFLE, "model.select_layer=-1"]),
    "videos": ("qwen2", "siglip_vision_model", [*TILED, "data.image_aspect_ratio=anyres_max", "model.select_layer=-1"]),
    "registers": ("gemma3_text", "dinov3_vit", ["model.select_feature=full"]),
    "4 bits": ("llama", "aimv2_vision_model", [*LORA, "model.quantize.mode=nf4", "model.random_weights=false"]),
    "one layer": ("olmo2", "dinov2", ["model.select_layer=3"]),
    "a window": ("cohere2", "clip_vision_model", []),
    "tied tiles": ("gemma", "vit", TILED),
}  # fmt: skip


@pytest.fixture
def source(parts: Path, dataset: Path, tmp_path: Path) -> Callable[..., SourceModel]:
    """Descriptions of models of named types, as wide as real models."""

    def make(language: str, vision: str, *values: str, **sizes: Any) -> SourceModel:
        folder = write(parts, tmp_path / "parts", language, vision, **sizes)
        keys = ["model.select_feature=auto", "export.enabled=true", "data.template=v1", "pack=false"]
        cfg = make_config(folder, dataset, tmp_path / "run", *keys, *values)
        return source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)

    return make


def write(parts: Path, folder: Path, language: str, vision: str, **sizes: Any) -> Path:
    """Parts with configurations of these types, with few layers and otherwise in transformers' default sizes."""
    shutil.copytree(parts, folder)
    sizes = {"pad_token_id": 0, "num_hidden_layers": 7, **sizes}
    AutoConfig.for_model(language, **sizes).save_pretrained(folder / "language")
    AutoConfig.for_model(vision, num_hidden_layers=5).save_pretrained(folder / "vision")
    (folder / "vision" / "preprocessor_config.json").unlink()  # of images of another size
    return folder


@pytest.mark.parametrize("name", slow_after(2, PASS))
def test_what_passes(name: str, source: Callable[..., SourceModel], caplog: pytest.LogCaptureFixture) -> None:
    """With values: nothing says that the copy could not be made. Random numbers stay those of the other ranks."""
    language, vision, values = PASS[name]
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        rehearse_hf(source(language, vision, *values), torch.bfloat16)
    assert "without values" not in caplog.text
    assert torch.equal(torch.get_rng_state(), state)


def swap(one: str, other: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        first, second = next(n for n in tensors if n.endswith(one)), next(n for n in tensors if n.endswith(other))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        found = next(n for n in tensors if name in n)
        tensors[found] = change(tensors[found]).contiguous()

    return apply


WRONG: dict[str, tuple[Change, str]] = {
    "a transposed projector": (edit("projector.linear_2.weight", torch.t), "differ by"),
    "another name for a weight": (swap("0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"), "differ by"),
    "a bias of the vision tower": (edit("0.self_attn.q_proj.bias", torch.zeros_like), "differ by"),
    "a key that is missing": (lambda own: {n: own[n] for n in own if "q_norm" not in n}, "missing_keys"),
    "the end of a line": (edit("image_newline", torch.neg), "differ by"),
    "a key too much": (lambda own: own | {"language_model.model.layers.0.extra": torch.ones(3)}, "unexpected_keys"),
    "another order of layers": (swap("layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"), "differ by"),
    "another shape": (edit("linear_1.bias", lambda own: own[1:]), "cannot compute logits of the export"),
}  # fmt: skip


def writing(change: Change) -> Callable[[SourceModel, Weights, Path], None]:
    """A writer of exports that changes the weights that it has written."""

    def write(source: SourceModel, weights: Weights, staged: Path) -> None:
        write_hf(source, weights, staged)
        tensors = load_file(staged / "model.safetensors")
        before = {name: own.clone() for name, own in tensors.items()}
        tensors = change(tensors) or tensors
        assert tensors.keys() != before.keys() or any(not torch.equal(tensors[n], before[n]) for n in tensors)
        save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})

    return write


@pytest.mark.parametrize("name", slow_after(1, WRONG))
def test_what_is_refused(
    name: str, source: Callable[..., SourceModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the parts and a cure, and the temporary folders are gone."""
    change, reason = WRONG[name]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    own = source("qwen3", "clip_vision_model", *TILED)
    with pytest.raises(CannotBeExported, match=reason) as caught:
        rehearse_hf(own, torch.float32, writing(change))
    said = ("qwen3", "clip_vision_model", "mlp2x_gelu", "spatial_unpad", "export.enabled=false")
    assert all(word in str(caught.value) for word in said)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_value_of_the_configuration_that_is_written_wrongly(source: Callable[..., SourceModel]) -> None:
    def write(own: SourceModel, weights: Weights, staged: Path) -> None:
        write_hf(own, weights, staged)
        config = json.loads((staged / "config.json").read_text())
        config["text_config"]["rope_parameters"]["rope_theta"] *= 2
        (staged / "config.json").write_text(json.dumps(config))

    own = source("mixtral", "siglip_vision_model", *LORA)
    with pytest.raises(CannotBeExported, match=r"differ by.*export\.merge=false"):
        rehearse_hf(own, torch.float32, write)


@pytest.mark.slow
def test_without_a_small_copy_the_export_is_planned_without_values(
    source: Callable[..., SourceModel], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning. Here the only layer without experts is too far from the first."""
    own = source("qwen3_moe", "clip_vision_model", num_hidden_layers=19, mlp_only_layers=[17])
    with caplog.at_level(logging.WARNING):
        rehearse_hf(own, torch.float32)
    assert caplog.text.count("without values") == 1


def test_a_parameter_that_transformers_has_no_place_for_is_named(source: Callable[..., SourceModel]) -> None:
    own, values = small_copy(source("llama", "clip_vision_model"))
    config = hf_config(own, torch.float32, own.vocabulary)
    check_names(config, values)
    with pytest.raises(ModelError, match=r"language_model\.norm\.weight"):
        check_names(config, {name for name in values if name != "language_model.norm.weight"})
    with pytest.raises(ModelError, match=r"language_model\.norm\.bias"):
        check_names(config, {*values, "language_model.norm.bias"})


def test_an_image_of_another_length_is_refused(source: Callable[..., SourceModel], parts: Path, tmp_path: Path) -> None:
    own = source("llama", "clip_vision_model", f"model.vision={parts / 'vision'}")
    write_hf_except_weights(own, torch.float32, tmp_path)
    check_image_tokens(tmp_path, (31, 50), own.model.image_tokens)
    with pytest.raises(ModelError, match=f"{own.model.image_tokens} tokens"):
        check_image_tokens(tmp_path, (31, 50), own.model.image_tokens + 1)


SIZES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "fewer keys than queries": (
        AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=8),
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    ),
    "one key": (
        AutoConfig.for_model("gemma", num_attention_heads=8, num_key_value_heads=1, head_dim=256),
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 72},
    ),
    "sections of positions": (
        AutoConfig.for_model("qwen3", rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 3]}},
    ),
    "a number for each frequency": (
        AutoConfig.for_model("phi3", pad_token_id=0, original_max_position_embeddings=4096, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}),
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                             "long_factor": [2.0] * 8}},
    ),
    "tokens": (
        AutoConfig.for_model("llama", eos_token_id=[128001, 128009], vocab_size=128256, pad_token_id=None),
        {"eos_token_id": [66, 66], "vocab_size": 67, "pad_token_id": None},
    ),
    "experts": (
        AutoConfig.for_model("qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40},
    ),
    "kinds of layers": (
        AutoConfig.for_model("gemma3_text", num_hidden_layers=26),
        {"layer_types": ["sliding_attention", "sliding_attention"], "num_hidden_layers": 2, "sliding_window": 9},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_a_small_copy(name: str) -> None:
    config, expected = SIZES[name]
    small: Any = shrink(config, 2)
    for own in (small, shrink(small, 2)):
        for key, value in expected.items():
            found = getattr(own, key)
            if isinstance(value, dict):
                found = {name: found[name] for name in value}
            assert found == value, key


@pytest.mark.parametrize(("kind", "values", "layers"), [
    ("llama", {}, 2), ("llama", {"num_hidden_layers": 1}, 1), ("gemma3_text", {"num_hidden_layers": 26}, 6),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, 3), ("qwen3_moe", {"decoder_sparse_step": 3}, 3),
    ("deepseek_v3", {"first_k_dense_replace": 3}, 4), ("smollm3", {}, 4), ("llama4_text", {}, 4),
])  # fmt: skip
def test_every_kind_of_layer_is_copied(kind: str, values: dict[str, Any], layers: int) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, pad_token_id=0, **values))
    assert count_layers(model) == layers


@pytest.mark.parametrize(("size", "patch", "factor", "expected"), [
    (336, 14, 1, 56), (384, 14, 1, 48), (224, 32, 1, 96), ([448, 448], [14, 14], 2, [56, 56]), (28, 14, 1, 28),
    (896, 14, 8, 224),
])  # fmt: skip
def test_few_patches(size: Any, patch: Any, factor: int, expected: Any) -> None:
    """An odd or an even number of them, and as many pixels left over."""
    kind = "siglip_vision_model" if isinstance(size, int) else "internvl_vision"
    small = shrink_image(AutoConfig.for_model(kind, image_size=size, patch_size=patch), factor)
    assert small.image_size == expected
    with torch.device("meta"):
        build_vision_tower(small)


def test_the_selected_layer(configure: Configure) -> None:
    cfg = configure().model
    expected = {-1: -1, -2: -2, -3: -3, -20: -3, 24: 3, 23: 2, 1: 1, 7: 1}
    assert {layer: shrink_layer(replace(cfg, select_layer=layer), 24, 3) for layer in expected} == expected


UNEQUAL = [*TILED, "model.select_feature=full", "export.enabled=true", "max_steps=1"]
"""Llama with a pixtral and tiles: transformers' LLaVA-NeXT calls the vision tower without the images' sizes, which
pixtral needs. Text alone passes."""


def test_a_training_is_refused_before_its_first_step(parts: Path, dataset: Path, tmp_path: Path) -> None:
    folder = write(parts, tmp_path / "parts", "llama", "pixtral")
    with pytest.raises(CannotBeExported, match="llama with a pixtral"):
        train.train(make_config(folder, dataset, tmp_path / "run", *UNEQUAL))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_all_ranks_refuse_it(parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    folder = write(parts, tmp_path / "parts", "llama", "pixtral")
    with pytest.raises(RanksFailed) as caught:
        pools[2].run(run_ranks, make_config(folder, dataset, tmp_path / "run", *UNEQUAL))
    assert [kinds[0] for kinds in caught.value.kinds] == ["CannotBeExported"] * 2


@pytest.mark.parametrize("takes_videos", [True, False])
def test_a_model_of_videos_is_tried_with_one(takes_videos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with an image, as every model; logits that are not finite show nothing."""
    values = [torch.ones(2), torch.ones(3)]
    rule = SimpleNamespace(of_video=lambda frames: f"tokens of {frames} frames")
    small = SimpleNamespace(
        model=SimpleNamespace(adapted=[]), image_tokens=rule, sampling=object() if takes_videos else None
    )
    monkeypatch.setattr(rehearsal, "small_copy", lambda _: (small, {}))
    monkeypatch.setattr(rehearsal, "load_copy", lambda *_: None)
    monkeypatch.setattr(rehearsal, "random_rows", lambda *_: ("an image", [(1, 2)]))
    monkeypatch.setattr(rehearsal, "random_micro_batch", lambda model, rule, tokens, frames: (tokens, frames))
    monkeypatch.setattr(rehearsal, "logits", lambda _, micro: values[0] if micro == "an image" else values[1])
    own: Any = None
    _, _, inputs, expected = prepare_copy(own)
    video = ((f"tokens of {rehearsal.FRAMES} frames", rehearsal.FRAMES), None)
    assert inputs == [("an image", [(1, 2)]), video][: 1 + takes_videos]
    assert all(found is wanted for found, wanted in zip(expected, values[: 1 + takes_videos], strict=True))
    values[takes_videos] = torch.tensor([1.0, float("inf")])
    with pytest.raises(ModelError):
        prepare_copy(own)


@pytest.mark.parametrize(("wrong", "is_close"), [(0.0, True), (0.9e-4, True), (1.1e-4, False), (float("nan"), False)])
def test_logits_of_a_small_copy_are_compared_for_each_input(
    wrong: float, is_close: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a share of the largest; tokens that the export has added have no equal."""
    ours = torch.tensor([[2.0, -4.0], [1.0, 0.0]])
    theirs = torch.cat([ours, torch.full((2, 3), 9.0)], dim=1)
    theirs[1, 1] += 4 * wrong
    found = iter([torch.cat([ours, ours], dim=1), theirs])
    monkeypatch.setattr(rehearsal, "open_export", lambda *_: None)
    monkeypatch.setattr(rehearsal, "exported_logits", lambda *_: next(found))
    micro: Any = SimpleNamespace(images={"tiles": None})
    with contextlib.nullcontext() if is_close else pytest.raises(ModelError):
        compare(tmp_path, [(micro, []), (micro, None)], [ours, ours])


def test_what_cannot_be_tried_with_values_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no small copy; and where its export cannot be read, since a plan may say more clearly why."""
    planned: list[int] = []
    monkeypatch.setattr(rehearsal, "rehearse_on_meta", lambda model, dtype, rows: planned.append(rows))
    monkeypatch.setattr(rehearsal, "write_hf_except_weights", lambda *_: WrittenExceptWeights(70, []))
    monkeypatch.setattr(rehearsal, "has_tokenizer", lambda _: False)
    monkeypatch.setattr(rehearsal, "hf_config", lambda *_: None)
    monkeypatch.setattr(rehearsal, "check_names", lambda *_: None)
    part = SimpleNamespace(model_type="mistral")
    model = SimpleNamespace(
        state_dict=dict,
        named_modules=list,
        named_buffers=list,
        parts=SimpleNamespace(
            language=part, vision=part, language_folder=None, whole=None, class_config=None, logit_change=LogitChange()
        ),
        cfg=SimpleNamespace(
            projector_type="linear",
            patch_merge=SimpleNamespace(value="flat"),
            shuffle_factor=1,
            lora=SimpleNamespace(enabled=False),
        ),
    )
    own: Any = SimpleNamespace(model=model, vocabulary=67)

    def fails(*_: object) -> Any:
        raise ModelError("too deep")

    monkeypatch.setattr(rehearsal, "prepare_copy", fails)
    rehearse_hf(own, torch.bfloat16)
    assert planned == [70]
    monkeypatch.setattr(rehearsal, "prepare_copy", lambda _: (own, SimpleNamespace(shapes={}), [], []))
    with pytest.raises(CannotBeExported):
        rehearse_hf(own, torch.bfloat16, fails)
    assert planned == [70, 70]
