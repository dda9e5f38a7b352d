"""What is written beside a model's weights, key by key."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import config_of, write_json
from transformers import AutoConfig, LlamaConfig

from llava_fsdp.config import AspectRatio, PatchMerge, Pixels, SpecialTokens
from llava_fsdp.data.images.preprocess import read_preprocessor
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.export.card.model_card import FolderKind
from llava_fsdp.export.write import formats, weights_writer
from llava_fsdp.export.write.formats import (
    SourceModel,
    begin_projector,
    check_hf,
    config_of_original,
    copy_or_convert_tokenizer,
    hf_config,
    source_of_run,
    write_configs,
    write_generation_of_original,
    write_notes,
)
from llava_fsdp.export.write.processor import as_older_release, write_preprocessor, write_tokenizer
from llava_fsdp.export.write.weights_writer import Weights, plan_renamed, write_shards
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.parts import Parts
from llava_fsdp.runtime.errors import ConfigError, ModelError


def source(whole: Path | None = None) -> SourceModel:
    """Of a model that came from a folder of the original's; no value is the default of its key."""
    parts = SimpleNamespace(
        whole=whole,
        language=SimpleNamespace(vocab_size=77),
        image_size=28,
        language_folder=whole or Path("nowhere"),
    )
    cfg = SimpleNamespace(patch_merge=PatchMerge.spatial, image_start_end=True)
    model: Any = SimpleNamespace(parts=parts, cfg=cfg, image_tokens=4)
    return SourceModel(
        model=model,
        template="plain",
        aspect=AspectRatio.anyres,
        grid_pinpoints=[[28, 56]],
        max_tiles=5,
        pixels=Pixels.llava_v1_5,
        special_tokens=SpecialTokens.parse,
        max_length=55,
        language="a/language",
        vision="b/vision",
        renamed_tower=None,
        history={"run": "r", "stage": "s", "step": 3, "train": ["projector"]},
    )


def test_notes_say_all_of_it(tmp_path: Path) -> None:
    write_notes(source(), tmp_path, FolderKind.projector, {"dtype": "bf16"})
    found = json.loads((tmp_path / "llava_fsdp.json").read_text())
    assert {key: value for key, value in found.items() if key not in ("files", "digest")} == {
        "run": "r", "stage": "s", "step": 3, "train": ["projector"], "dtype": "bf16", "template": "plain",
        "image_aspect_ratio": "anyres", "grid_pinpoints": [[28, 56]], "max_tiles": 5, "pixels": "llava_v1_5",
        "special_tokens": "parse", "max_length": 55, "vocab_size": 77, "image_start_end": True,
        "language": "a/language", "vision": "b/vision", "kind": "projector",
    }  # fmt: skip


def model_of(whole: Path | None, tower: Path) -> Llava:
    model, nothing = object.__new__(Llava), AutoConfig.for_model("llama")
    object.__setattr__(model, "parts", Parts(Path("language"), tower, nothing, nothing, whole))
    return model


def test_a_run_names_the_tower_that_it_has(tmp_path: Path) -> None:
    """A whole model brings its own, and may say which; the original's only names it."""
    cfg = config_of(["model.checkpoint=x", "model.language=their/language", "model.vision=their/vision"])
    for notes, names in (({}, ("", "")), ({"language": "a", "vision": "b"}, ("a", "b"))):
        write_json(tmp_path / "llava_fsdp.json", notes)
        own = source_of_run(model_of(tmp_path, tmp_path), cfg, "r", 3)
        assert (own.language, own.vision) == names
    assert source_of_run(model_of(tmp_path, Path("tower")), cfg, "r", 3).vision == "their/vision"
    assert source_of_run(model_of(None, Path("tower")), cfg, "r", 3).language == "their/language"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.template=v0", "data.pixels=fast"], "v0 anyres text exact"),
        (["data.template=v0", "labels=llava_v1_5"], "v1 anyres parse exact"),
        (["data.template=plain", "data.special_tokens=parse"], "plain anyres parse exact"),
        (["data.template=v1", "data.pixels=llava_v1_5"], "v1 square text llava_v1_5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_exports_what_it_trained_with(keys: list[str], said: str) -> None:
    """That is not always what its keys say: some mean another value beside the original's."""
    cfg = config_of(["export.enabled=false", "data.image_aspect_ratio=anyres", "data.max_length=99", *keys])
    found = source_of_run(model_of(None, Path("tower")), cfg, "r", 3)
    values = found.template, found.aspect.value, found.special_tokens.value, found.pixels.value
    assert (" ".join(values), found.max_length) == (said, 99)


def test_an_originals_configuration_is_kept_but_for_what_has_changed(tmp_path: Path) -> None:
    """And no key is added that says what is the case without it."""
    plain = {"model_type": "llava_llama", "mm_vision_tower": "first", "of_their_own": 3}
    write_json(tmp_path / "config.json", plain)
    own = source(tmp_path)
    said = config_of_original(own, torch.float16)
    assert said == plain | {
        "mm_patch_merge_type": "spatial",
        "mm_use_im_start_end": True,
        "tokenizer_model_max_length": 55,
        "image_aspect_ratio": "anyres",
        "image_grid_pinpoints": [[28, 56]],
        "torch_dtype": "float16",
    }
    own.model.cfg.patch_merge, own.model.cfg.image_start_end = PatchMerge.flat, False  # type: ignore[misc]
    trained = replace(own, aspect=AspectRatio.pad, renamed_tower="second", history={"train": ["projector", "vision"]})
    assert config_of_original(trained, torch.bfloat16) == plain | {
        "mm_vision_tower": "second",
        "tokenizer_model_max_length": 55,
        "unfreeze_mm_vision_tower": True,
        "image_aspect_ratio": "pad",
        "torch_dtype": "bfloat16",
    }


@pytest.mark.parametrize(("vocabulary", "rows"), [(62, 64), (63, 128), (64, 128), (100, 128)])
def test_rows_of_a_model_without_a_tokenizer(vocabulary: int, rows: int, tmp_path: Path) -> None:
    """Two ids follow the trained ones, and rows are a multiple of 64."""
    language: Any = SimpleNamespace(vocab_size=vocabulary)
    assert write_tokenizer(tmp_path, tmp_path, language, "v1", False) == ((vocabulary, vocabulary + 1, None), rows)


def test_a_tokenizer_for_an_older_release() -> None:
    """Merges are text, tokens beyond the vocabulary are gone, and each Metaspace says whether it adds a space."""
    space = {"type": "Metaspace", "replacement": "▁"}

    def frozen(merges: list[Any]) -> dict[str, Any]:
        return {
            "added_tokens": [{"id": number} for number in (0, 6, 7, 8)],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**space, "prepend_scheme": "never"}, dict(space)]},
            "decoder": {**space, "prepend_scheme": "first"},
            "model": {"vocab": {"type": "Metaspace"}, "merges": merges},
        }

    made = as_older_release(frozen([["a", "b"], ["ab", "c"]]), 7)
    assert made["added_tokens"] == [{"id": 0}, {"id": 6}]
    assert made["model"] == {"vocab": {"type": "Metaspace"}, "merges": ["a b", "ab c"]}
    added = [part["add_prefix_space"] for part in (*made["pre_tokenizer"]["pretokenizers"], made["decoder"])]
    assert added == [False, True, True]
    for kept in ([["a ", "b"]], ["a b"], []):  # a space of its own would not be told from the one between
        assert as_older_release(frozen(kept), 7)["model"]["merges"] == kept


def test_files_of_weights_are_listed_with_all_that_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_writer, "SHARD_BYTES", 24)
    held = {name: torch.full((2, 3), float(number)) for number, name in enumerate("abc")}
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.bfloat16}
    weights = Weights({name: (2, 3) for name in held}, dtypes, held.__getitem__)
    write_shards(weights, tmp_path, partial(plan_renamed, weights.shapes, lambda name: f"x.{name}"), (), 9, 9)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    weight_map = {"x.a": first, "x.b": second, "x.c": second}
    assert index == {"metadata": {"total_size": 24 + 12 + 12}, "weight_map": weight_map}
    for name, file in weight_map.items():
        found, expected = load_file(tmp_path / file)[name], held[name[2:]].to(dtypes[name[2:]])
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert len(load_file(tmp_path / second)) == 2


@pytest.mark.parametrize("keep_ratio", [True, False])
def test_all_of_the_preprocessing_is_written(keep_ratio: bool, tmp_path: Path) -> None:
    """No value is the default of its key in transformers."""
    sizes: dict[str, Any] = {"size": {"height": 42, "width": 42}}
    if keep_ratio:
        sizes = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}, "do_center_crop": True}
    values = {"resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], **sizes}
    kind = "CLIPImageProcessor" if keep_ratio else "SiglipImageProcessor"
    write_json(tmp_path / "vision" / "preprocessor_config.json", {"image_processor_type": kind, **values})
    (tmp_path / "export").mkdir()
    write_preprocessor(tmp_path / "vision", tmp_path / "export", pads=False)
    assert read_preprocessor(tmp_path / "export") == read_preprocessor(tmp_path / "vision")
    written = json.loads((tmp_path / "export" / "preprocessor_config.json").read_text())
    assert {key: written[key] for key in values} == values


def test_what_transformers_has_no_class_for_is_refused() -> None:
    """Tiles that are not joined as its classes do, a tower of other sizes, another projector."""

    def check(aspect: AspectRatio, merge: PatchMerge, **change: Any) -> None:
        values = {"projector_type": "mlp2x_gelu", "shuffle_factor": 1, "patch": 14, "size": 28, "tokens": 4} | change
        vision = SimpleNamespace(image_size=values["size"], patch_size=values["patch"], model_type="clip_vision_model")
        cfg = SimpleNamespace(
            projector_type=values["projector_type"], shuffle_factor=values["shuffle_factor"], patch_merge=merge
        )
        language = LlamaConfig(hidden_size=36, num_attention_heads=6)
        parts = SimpleNamespace(vision=vision, language=language, whole=None, image_size=28, logit_change=LogitChange())
        model: Any = SimpleNamespace(cfg=cfg, parts=parts, image_tokens=values["tokens"])
        check_hf(model, aspect)

    for aspect in AspectRatio:
        tiled = aspect in (AspectRatio.anyres, AspectRatio.anyres_max)
        right, wrong = PatchMerge.spatial_unpad if tiled else PatchMerge.flat, PatchMerge.spatial
        check(aspect, right)
        for refused, change in ((wrong, {}), (right, {"projector_type": "linear"}), (right, {"shuffle_factor": 2})):
            with pytest.raises(ConfigError):
                check(aspect, refused, **change)
        with pytest.raises(ConfigError):
            check(aspect, PatchMerge.flat if tiled else PatchMerge.spatial_unpad)
        for change in ({"tokens": 5}, {"size": 30}):
            if tiled:
                with pytest.raises(ConfigError, match="features for each side of a tile"):
                    check(aspect, right, **change)
            else:
                check(aspect, right, **change)


def test_limits_of_tiles_and_projectors_in_the_originals_configuration(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llava_llama", "mm_vision_tower": "first"})
    own = replace(source(tmp_path), aspect=AspectRatio.anyres_max)
    assert config_of_original(own, torch.float16)["image_aspect_ratio"] == "anyres_max_5"
    weights: Any = SimpleNamespace(dtypes={"multi_modal_projector.a": torch.bfloat16, "b": torch.float32})
    for depth, kind in ((2, "mlp2x_gelu"), (2, "pixel_shuffle2x_mlp2x_gelu"), (2, "mlp2x_silu"), (0, "identity")):
        model: Any = own.model
        model.multi_modal_projector, model.cfg.projector_type = SimpleNamespace(depth=depth), kind
        staged = tmp_path / kind
        staged.mkdir()
        if not depth:
            with pytest.raises(ConfigError, match="identity projector has no weights"):
                begin_projector(own, weights, staged)
            continue
        begin_projector(own, weights, staged)
        assert (staged / "config.json").is_file() == (kind == "mlp2x_gelu"), "the original has no such projector"
    written = json.loads((tmp_path / "mlp2x_gelu" / "config.json").read_text())
    assert (written["torch_dtype"], written["tune_mm_mlp_adapter"]) == ("bfloat16", True)


def test_an_error_of_one_file_is_raised_with_it_and_no_value_is_lost(tmp_path: Path) -> None:
    """After all ranks have given their weights: else they would wait for each other."""
    given: list[str] = []
    tensors = {name: torch.ones(2, 2) for name in ("a", "b")}

    def read(name: str) -> torch.Tensor:
        given.append(name)
        return tensors[name]

    own = Weights({n: (2, 2) for n in tensors}, dict.fromkeys(tensors, torch.float32), read)
    first_row = partial(plan_renamed, {"a": (1, 2), "b": (2, 2)}, str.upper)
    with pytest.raises(ModelError, match="a have 4 values, and transformers' model takes 2"):
        write_shards(own, tmp_path, first_row, (), 2, 2)
    assert given == ["a", "b"] and not list(tmp_path.glob("*.safetensors"))


TOKENIZER = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


@pytest.mark.parametrize("inside", ["", "original"])
def test_an_originals_tokenizer_is_copied_with_all_of_its_files(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was kept in a folder for transformers; without one the language model's is converted."""
    converted: list[Path] = []
    monkeypatch.setattr(formats, "convert_tokenizer_to_original", lambda folder, *_: converted.append(folder))
    whole, staged = tmp_path / "whole", tmp_path / "staged"
    staged.mkdir()
    write_json(whole / inside / "config.json", {"model_type": "llava_llama", "mm_vision_tower": "first"})
    copy_or_convert_tokenizer(source(whole), staged)
    assert converted == [whole] and not list(staged.iterdir())
    for name in (*TOKENIZER, "other.json"):
        (whole / inside / name).write_text(name)
    copy_or_convert_tokenizer(source(whole), staged)
    assert {path.name for path in staged.iterdir()} == {*TOKENIZER} and converted == [whole]


def test_generation_is_configured_as_in_the_originals_folder(tmp_path: Path) -> None:
    """With the ends that the language model names; without that file, with its tokens. The tower's folder is beside."""
    whole = tmp_path / "whole"
    write_json(whole / "config.json", {"model_type": "llava_llama", "mm_vision_tower": "first"})
    found = []
    for number in range(2):
        own = source(whole)
        own.model.parts.vision = AutoConfig.for_model("clip_vision_model", image_size=28)  # type: ignore[misc]
        own.model.parts.vision_folder = tmp_path  # type: ignore[misc]
        own.model.parts.language = SimpleNamespace(  # type: ignore[misc]
            vocab_size=77, bos_token_id=3, eos_token_id=4, pad_token_id=5
        )
        staged = tmp_path / str(number)
        staged.mkdir()
        write_configs(own, torch.float16, staged)
        write_generation_of_original(own, staged)
        found.append(json.loads((staged / "generation_config.json").read_text()))
        assert json.loads((staged / "vision_tower" / "config.json").read_text())["image_size"] == 28
        assert not (staged / "vision_tower" / "preprocessor_config.json").exists()
        write_json(whole / "generation_config.json", {"eos_token_id": 9, "max_length": 8, "_from_model_config": True})
    ends = {"bos_token_id": 3, "pad_token_id": 5, "transformers_version": "4.37.2"}
    assert found == [{"eos_token_id": 4, **ends}, {"eos_token_id": [4, 9], "max_length": 8, **ends}]


def test_notes_say_how_frames_of_videos_are_chosen(tmp_path: Path) -> None:
    """Of a model that takes videos alone."""
    for aspect, video in ((AspectRatio.anyres_max, {"video_fps": 2.5, "video_frames": 11}), (AspectRatio.pad, {})):
        changed = replace(source(), aspect=aspect, video_sampling=VideoSampling(2.5, 11))
        write_notes(changed, tmp_path, FolderKind.projector, {})
        found = json.loads((tmp_path / "llava_fsdp.json").read_text())
        assert {key: value for key, value in found.items() if key.startswith("video")} == video


def described(aspect: AspectRatio, vision: str, shuffle: int = 1, layer: int = -2, drops: bool = True) -> SourceModel:
    """A model whose tower has three layers and whose vocabulary has 77 tokens."""
    parts = SimpleNamespace(
        vision=AutoConfig.for_model(vision, num_hidden_layers=3), image_size=28, logit_change=LogitChange(),
        language=AutoConfig.for_model("llama", vocab_size=77, use_cache=False, tie_word_embeddings=drops),
    )  # fmt: skip
    cfg = SimpleNamespace(select_layer=layer, shuffle_factor=shuffle, patch_merge=PatchMerge.spatial_unpad)
    probe = SimpleNamespace(drops_cls=drops, layers=3)
    model: Any = SimpleNamespace(parts=parts, cfg=cfg, probe=probe, image_tokens=4)
    return replace(source(), model=model, aspect=aspect)


@pytest.mark.parametrize(
    ("aspect", "kind"),
    [(AspectRatio.pad, "llava"), (AspectRatio.anyres, "llava_next"), (AspectRatio.anyres_max, "llava_onevision")],
)
@pytest.mark.parametrize("drops", [True, False])
def test_transformers_configuration_of_a_model(aspect: AspectRatio, kind: str, drops: bool) -> None:
    """Its class is by how images are cut into tiles; grids are heights before widths."""
    config: Any = hf_config(described(aspect, "clip_vision_model", drops=drops), torch.bfloat16, 128)
    text = config.text_config
    assert (config.model_type, text.vocab_size, text.use_cache) == (kind, 128, True)
    assert config.vision_feature_select_strategy == ("default" if drops else "full")
    assert (config.vision_feature_layer, config.tie_word_embeddings) == (-2, drops)
    assert str(config.dtype).removeprefix("torch.") == "bfloat16"
    if kind != "llava":
        assert [list(size) for size in config.image_grid_pinpoints] == [[56, 28]]
    if kind == "llava_onevision":
        assert config.vision_aspect_ratio == "anyres_max_5"


@pytest.mark.parametrize(
    ("layer", "pools", "expected"), [(-1, False, 3), (-1, True, -1), (-2, False, -2), (3, False, 3)]
)
def test_transformers_configuration_of_a_pixel_shuffle(layer: int, pools: bool, expected: int) -> None:
    """Its InternVL applies the tower's last norm to layer -1, which training does not."""
    own = described(AspectRatio.square, "internvl_vision", shuffle=2, layer=layer)
    own.model.parts.vision.use_mean_pooling = pools
    config: Any = hf_config(own, torch.float32, 128)
    assert (config.model_type, config.vision_feature_layer, config.downsample_ratio) == ("internvl", expected, 0.5)
    assert config.image_seq_length == 4
