"""Files of a processor, values of a small copy and keys of an adapter, without a model."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import write_json
from torch import nn
from transformers import (
    AutoConfig,
    InternVLConfig,
    InternVLVisionConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
)

from llava_fsdp.config import LoraBias, LoraConfig, ModelConfig
from llava_fsdp.export.prove.small_copy import (
    check_same_structure,
    comparable,
    random_values,
    shrink,
    shrink_rope,
    shrink_value,
)
from llava_fsdp.export.write import processor
from llava_fsdp.export.write.adapter_folder import (
    ROOM,
    AdapterWriter,
    Base,
    adapter_tensors,
    check_fingerprint,
    whole_rows,
)
from llava_fsdp.export.write.processor import (
    TokenIds,
    check_same_ids,
    convert_tokenizer_to_original,
    keep_llama,
    leave_bos_out,
    metaspaces,
    rows_for,
    write_llama,
    write_preprocessor,
    write_processor,
)
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule
from llava_fsdp.model.weights.tensor_files import StoredTensor
from llava_fsdp.runtime.errors import ModelError

VISION = {"image_size": 42, "patch_size": 14, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = AutoConfig.for_model("llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A vision tower's folder, and beside it one to write into."""
    values = {"resample": 2, "image_mean": MEAN, "image_std": STD, "size": {"height": 42, "width": 42}}
    write_json(
        tmp_path / "vision" / "preprocessor_config.json", {"image_processor_type": "SiglipImageProcessor", **values}
    )
    (tmp_path / "export").mkdir()
    return tmp_path / "vision"


def written(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder.parent / "export" / name).read_text())


@pytest.mark.parametrize("pads", [True, False])
def test_whose_pixels_are_padded(pads: bool, folder: Path) -> None:
    write_preprocessor(folder, folder.parent / "export", pads)
    found = written(folder, "preprocessor_config.json")
    assert found["image_processor_type"] == ("LlavaImageProcessor" if pads else "SiglipImageProcessor")
    assert (found["do_pad"], found["do_center_crop"], found["rescale_factor"]) == (pads, False, 1 / 255)
    assert found["size"] == found["crop_size"] == {"height": 42, "width": 42}


@pytest.mark.parametrize("keep_ratio", [True, False])
def test_processors_that_pad_by_default_are_not_named(keep_ratio: bool, folder: Path) -> None:
    sizes = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}, "do_center_crop": True}
    given = {"image_processor_type": "LlavaNextImageProcessor", "image_mean": MEAN, "image_std": STD, "resample": 2}
    write_json(folder / "preprocessor_config.json", given | (sizes if keep_ratio else {"size": sizes["crop_size"]}))
    write_preprocessor(folder, folder.parent / "export", pads=False)
    kind = "CLIPImageProcessor" if keep_ratio else "SiglipImageProcessor"
    assert written(folder, "preprocessor_config.json")["image_processor_type"] == kind


def config_of(kind: type, **values: Any) -> Any:
    vision = AutoConfig.for_model("clip_vision_model", **VISION)
    return kind(text_config=TEXT, **{"vision_config": vision, "vision_feature_select_strategy": "full"} | values)


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        (config_of(LlavaConfig, vision_feature_select_strategy="default"), 9, ("LlavaProcessor", 14, "default", 1)),
        (config_of(LlavaConfig, vision_feature_select_strategy="default"), 11, ("LlavaProcessor", 14, "default", 3)),
        (config_of(LlavaConfig), 10, ("LlavaProcessor", 14, "full", 1)),
        (config_of(LlavaConfig), 9, ("LlavaProcessor", 14, "full", 0)),
        (config_of(LlavaNextConfig, image_grid_pinpoints=[[42, 84]]), 9, ("LlavaNextProcessor", 14, "full", 0)),
        (config_of(InternVLConfig, downsample_ratio=0.5, vision_config=InternVLVisionConfig(
            image_size=[56, 56], patch_size=[14, 14])), 4, ("LlavaProcessor", 28, "full", 0)),
    ],
    ids=["no CLS token", "registers", "all tokens", "all without a CLS token", "tiles", "squares of patches"],
)  # fmt: skip
def test_how_many_tokens_a_processor_counts(config: Any, tokens: int, expected: tuple, folder: Path) -> None:
    write_processor(folder, folder.parent / "export", config, False, tokens)
    found = written(folder, "processor_config.json")
    keys = ("processor_class", "patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
    assert tuple(found[key] for key in keys) == expected and found["image_token"] == "<image>"
    images = written(folder, "preprocessor_config.json")
    is_tiled = isinstance(config, LlavaNextConfig)
    assert images.get("image_grid_pinpoints") == ([[42, 84]] if is_tiled else None)
    assert images["processor_class"] == expected[0] and images["resample"] == (3 if is_tiled else 2)


def test_files_for_videos(folder: Path) -> None:
    config = config_of(LlavaOnevisionConfig, image_grid_pinpoints=[[42, 84]], vision_aspect_ratio="anyres_max_5")
    write_processor(folder, folder.parent / "export", config, False, 9)
    own = written(folder, "processor_config.json")
    assert (own["num_image_tokens"], own["vision_aspect_ratio"], own["video_token"]) == (9, "anyres_max_5", "<video>")
    images, videos = (written(folder, name) for name in ("preprocessor_config.json", processor.VIDEO_FILE))
    for found in (images, videos):
        assert (found["image_mean"], found["image_std"], found["rescale_factor"]) == (MEAN, STD, 1 / 255)
        assert found["size"] == {"height": 42, "width": 42} and found["resample"] == 3
    assert images["image_grid_pinpoints"] == [[42, 84]] and images["do_pad"]
    assert not videos["do_sample_frames"] and "image_processor_type" not in videos


def test_a_tower_without_preprocessing_gets_no_processor(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        write_processor(folder, folder.parent / "export", config_of(LlavaConfig), False, 9)
    assert "has no preprocessor_config.json" in caplog.text and not list((folder.parent / "export").iterdir())


@pytest.mark.parametrize(
    ("ids", "vocabulary", "rows"),
    [
        ((62, 63, None), 64, 64), ((63, 64, None), 64, 128), ((62, 61, 64), 64, 128), ((126, 127, None), 126, 128),
        ((127, 128, None), 126, 192), ((3, 4, 5), 77, 77), ((68, 69, None), 70, 70),
    ],
)  # fmt: skip
def test_rows_for_the_tokens_of_an_export(ids: tuple[int, int, int | None], vocabulary: int, rows: int) -> None:
    """A model that has enough keeps its size; others get a multiple of 64."""
    assert rows_for(TokenIds(*ids), vocabulary) == rows


@pytest.mark.parametrize("kind", ["TemplateProcessing", "ByteLevel", None])
def test_a_tokenizer_that_adds_no_bos(kind: str | None, tmp_path: Path) -> None:
    """Other post-processors stay."""
    post = None if kind is None else {"type": kind}
    write_json(tmp_path / "tokenizer.json", {"post_processor": post, "model": "ö"})
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": True, "other": 3})
    leave_bos_out(tmp_path)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    assert found == {"post_processor": {"type": kind} if kind == "ByteLevel" else None, "model": "ö"}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"add_bos_token": False, "other": 3}


@pytest.mark.parametrize("legacy", [True, False])
def test_where_a_llama_tokenizer_puts_its_space(legacy: bool, tmp_path: Path) -> None:
    """Before every piece of text, or before the whole."""
    added = [{"id": 1, "normalized": True}, {"id": 2, "normalized": False}]
    write_json(tmp_path / "tokenizer.json", {"added_tokens": added, "normalizer": 1, "pre_tokenizer": 2})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": legacy})
    write_llama(tmp_path, legacy)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [token["normalized"] for token in found["added_tokens"]] == [False, False]
    kept, gone = ("normalizer", "pre_tokenizer") if legacy else ("pre_tokenizer", "normalizer")
    assert found[gone] is None
    assert legacy == ([part["type"] for part in found[kept].get("normalizers", [])] == ["Prepend", "Replace"])
    assert legacy or (found[kept]["prepend_scheme"], found[kept]["split"]) == ("first", False)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": legacy}


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({}, {"legacy": True, "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}),
        ({"legacy": False, "add_bos_token": False, "tokenizer_class": "CodeLlamaTokenizer"},
         {"legacy": False, "add_bos_token": False, "tokenizer_class": "CodeLlamaTokenizer"}),
    ],
)  # fmt: skip
def test_values_that_a_newer_release_does_not_write(
    old: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    write_json(tmp_path / "old" / "tokenizer_config.json", {**old, "added_tokens_decoder": {}})
    (tmp_path / "old" / "tokenizer.model").write_bytes(b"pieces")
    write_json(tmp_path / "new" / "tokenizer_config.json", {"tokenizer_class": "X", "kept": 1})
    keep_llama(tmp_path / "old", tmp_path / "new")
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == {"kept": 1} | expected
    assert (tmp_path / "new" / "tokenizer.model").read_bytes() == b"pieces"


@pytest.mark.parametrize(
    ("old", "is_llama", "expected"),
    [
        ({"eos_token": "<e>"}, True, ("<s>", "<e>", "<unk>", "<unk>", "LlamaTokenizer")),
        ({"eos_token": "<e>", "unk_token": "<u>"}, True, ("<s>", "<e>", "<u>", "<u>", "LlamaTokenizer")),
        ({"eos_token": "<e>"}, False, (None, "<e>", None, "<e>", "PreTrainedTokenizerFast")),
        ({"eos_token": "<e>", "unk_token": "<u>"}, False, (None, "<e>", "<u>", "<u>", "PreTrainedTokenizerFast")),
    ],
)
def test_a_tokenizer_for_the_original(
    old: dict[str, Any], is_llama: bool, expected: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pads with the token for unknown text; tokens beyond the vocabulary are left out."""
    checked: list[Any] = []
    monkeypatch.setattr(processor, "check_same_ids", lambda *given: checked.append(given))
    monkeypatch.setattr(processor, "added_tokens", lambda *_: {"<a>": 6, "<b>": 7})
    write_json(tmp_path / "old" / "tokenizer_config.json", {**old, "add_bos_token": False, "chat_template": "x"})
    if is_llama:
        (tmp_path / "old" / "tokenizer.model").write_bytes(b"pieces")
    else:
        write_json(tmp_path / "old" / "tokenizer.json", {"added_tokens": [{"id": 6}, {"id": 7}], "model": {}})
    (tmp_path / "new").mkdir()
    convert_tokenizer_to_original(tmp_path / "old", tmp_path / "new", 7, 99)
    found = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    keys = ("bos_token", "eos_token", "unk_token", "pad_token", "tokenizer_class")
    assert tuple(found.get(key) for key in keys) == expected
    assert (found["model_max_length"], found["padding_side"], found["add_bos_token"]) == (99, "right", False)
    assert found["legacy"] is True and "chat_template" not in found
    assert checked == [(tmp_path / "old", tmp_path / "new", 7)]
    if is_llama:
        assert json.loads((tmp_path / "new" / "added_tokens.json").read_text()) == {"<a>": 6}
    else:
        assert json.loads((tmp_path / "new" / "tokenizer.json").read_text())["added_tokens"] == [{"id": 6}]


@pytest.mark.parametrize(
    ("change", "same_bos", "differs"),
    [({}, True, False), ({"bos": 2}, True, True), ({"bos": 2}, False, False), ({"shift": 1}, False, True)],
)
def test_an_export_s_tokenizer_is_the_one_of_training(
    change: dict[str, int], same_bos: bool, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(folder: Path, vocab_size: int) -> Any:
        own = change if folder == Path("new") else {}
        encode = lambda text: [SimpleNamespace(id=len(text) + own.get("shift", 0))]  # noqa: E731
        return SimpleNamespace(bos=own.get("bos", 1), special=lambda text: 1 if "s" in text else None, encode=encode)

    monkeypatch.setattr(processor, "open_tokenizer", opened)
    if differs:
        with pytest.raises(ModelError, match="new was written, but its tokenizer makes"):
            check_same_ids(Path("old"), Path("new"), 7, same_bos)
    else:
        check_same_ids(Path("old"), Path("new"), 7, same_bos)


def test_spaces_are_found_wherever_they_are() -> None:
    inner, outer = {"type": "Metaspace", "a": 1}, {"type": "Metaspace", "b": [{"type": "Metaspace", "a": 1}]}
    assert metaspaces({"model": {"vocab": inner, "merges": [inner]}, "x": [outer, 3]}) == [outer, inner]


MAXIMA = {"hidden_size": 8, "window": 9}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_size", 99, 8), ("hidden_size", 7, 7), ("other", 99, 99), ("window", None, None),
        ("intermediate_size", 99, 40), ("moe_intermediate_size", 99, 24), ("eos_token_id", 66, 66),
        ("eos_token_id", 67, 66), ("eos_token_id", [3, 99], [3, 66]), ("eos_token_id", None, None),
        ("window", True, True),
        ("names", [99], [99]), ("hidden_size", 99.5, 99.5), ("intermediate_size", [99, 7], [40, 7]),
    ],
)  # fmt: skip
def test_which_values_of_a_small_copy_are_small(name: str, value: Any, expected: Any) -> None:
    assert shrink_value(name, value, MAXIMA, 67) == expected


def test_rotary_embeddings_of_narrower_heads() -> None:
    values = {"rope_type": "x", "short_factor": [1.0] * 32, "inner": {"mrope_section": [16, 24, 24], "theta": 1e4}}
    assert shrink_rope(values, 0.25) == {
        "rope_type": "x", "short_factor": [1.0] * 8, "inner": {"mrope_section": [4, 6, 6], "theta": 1e4},
    }  # fmt: skip
    assert shrink_rope({"mrope_section": [5, 6, 5]}, 0.5) == {"mrope_section": [2, 3, 3]}, "they add up to a half"


def test_what_makes_two_layers_of_one_kind() -> None:
    """Numbers are alike unless one of them is 0."""
    assert comparable(3) == comparable(5) != comparable(0) and comparable(1.5) != comparable(1)
    assert comparable("a") != comparable("b") and comparable(True) != comparable(False)
    assert comparable([1]) is comparable([2]) is list and comparable(None) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256}, (4, 4, 16, 64)),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}, (4, 2, 16, 64)),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}, (4, 2, 16, 64)),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256, "head_dim": 64}, (4, 4, 16, 72)),
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}, (2, 1, 8, 16)),
    ],
)
def test_heads_of_a_small_copy(values: dict[str, int], expected: tuple[int, ...]) -> None:
    """As many groups of heads as before are one or several, and a width that is no product of them stays one."""
    config = AutoConfig.for_model("llama", num_hidden_layers=9, pad_token_id=0, **values)
    small = shrink(config, 3)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim, small.hidden_size) == expected
    assert (small.num_hidden_layers, small.vocab_size, config.num_hidden_layers) == (3, 67, 9)
    odd: Any = SimpleNamespace(num_hidden_layers=3, num_attention_heads=[1, 2], hidden_size=4, model_type="odd")
    with pytest.raises(ModelError, match="odd has no num_attention_heads"):
        shrink(odd, 3)


def module_with(*names: str, drops_cls: bool = False, size: int = 2) -> Any:
    module: Any = nn.Module()
    for name in names:
        module.register_parameter(name.replace(".", "/"), nn.Parameter(torch.zeros(size, 1, device="meta")))
    parameters = [(name, module.get_parameter(name.replace(".", "/"))) for name in names]
    module.named_parameters = lambda **_: iter(parameters)
    module.probe = SimpleNamespace(drops_cls=drops_cls)
    return module


def test_a_small_copy_has_the_parameters_of_its_model() -> None:
    model = module_with("a.0.w", "a.1.w", "b.base_layer.w")
    check_same_structure(model, module_with("a.0.w", "b.w"))
    for small, said in (
        (module_with("a.0.w"), "only one of both has b.w"),
        (module_with("a.0.w", "b.w", "c"), "only one of both has c"),
        (module_with("a.0.w", "b.w", drops_cls=True), "another number of tokens"),
        (module_with("a.0.w", "b.w", size=8_000_001), "it would have 16,000,002 parameters"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=said):
            check_same_structure(model, small)


def test_random_values_of_a_small_copy() -> None:
    """Products are about as large as their inputs, those of adapters too; vectors are random and no matrices."""
    shapes = {
        "w": (3, 16),
        "norm": (5,),
        "patch": (7, 3, 2, 2),
        "lora_A.default.weight": (2, 9),
        "x.lora_B.default.weight": (4, 4),
    }
    model: Any = SimpleNamespace(
        named_parameters=lambda: [(name, torch.zeros(shape)) for name, shape in shapes.items()],
        cfg=SimpleNamespace(lora=SimpleNamespace(scaling=2.0)), adapted=["x"],
    )  # fmt: skip
    found = random_values(model)
    scales = {name: drawn.rule.scale for name, drawn in found.items()}
    assert scales == pytest.approx({"w": 1 / 4, "norm": 0.5, "patch": 12**-0.5, "lora_A.default.weight": 1 / 3,
                                    "x.lora_B.default.weight": 1 / 4})  # fmt: skip
    assert all(drawn.rule.kind is Rule.NORMAL and drawn.shape == shapes[name] for name, drawn in found.items())
    model.adapted = []
    assert random_values(model)["x.lora_B.default.weight"].rule.scale == 1 / 2


LORA = LoraConfig(enabled=True, r=3, alpha=6.0, dropout=0.2, bias=LoraBias.all)


def model_config(**values: Any) -> ModelConfig:
    cfg: Any = object.__new__(ModelConfig)
    for name in ModelConfig.__dataclass_fields__:
        setattr(cfg, name, values.get(name))
    return cfg


def writer(lora: LoraConfig = LORA, **values: Any) -> AdapterWriter:
    source: Any = SimpleNamespace(model=SimpleNamespace(cfg=SimpleNamespace(projector_type="mlp2x_gelu")))
    base = Base(model_config(language="their/language", **values), 7, "print")
    return AdapterWriter(source, lora, ["language_model.layers.0.mlp.up_proj"], base, {"config.json": b"12345"})


def test_keys_of_an_adapter() -> None:
    """Those that an older peft does not know are there only where they say something."""
    found = writer().settings
    assert (found["r"], found["lora_alpha"], found["lora_dropout"], found["bias"]) == (3, 6, 0.2, "all")
    assert type(found["lora_alpha"]) is int and found["base_model_name_or_path"] == "their/language"
    assert not {"use_dora", "use_rslora"} & found.keys()
    assert found["target_modules"] == ["model.layers.0.mlp.up_proj"] and found["inference_mode"]
    other = writer(replace(LORA, alpha=6.5, use_dora=True), checkpoint="their/model").settings
    assert other["lora_alpha"] == 6.5 and other.get("use_dora") is True and "use_rslora" not in other
    assert other["base_model_name_or_path"] == "their/model"
    assert writer(replace(LORA, use_rslora=True)).settings.get("use_rslora") is True


def drawn(name: str, *shape: int) -> Drawn:
    return Drawn(name, shape, DrawRule(Rule.NORMAL, 1.0), seed=0)


def test_room_for_an_adapter() -> None:
    """The projector is written twice, and files of text once."""
    tensors = {"a.lora_A.weight": drawn("a", 2, 3), "multi_modal_projector.linear_1.weight": drawn("p", 4, 5)}
    size = {name: tensor.dtype.itemsize for name, tensor in tensors.items()}
    assert {*size.values()} == {4}
    assert writer().nbytes(tensors) == (24 + ROOM) + 2 * (80 + ROOM) + 5
    assert whole_rows(drawn("a", 2, 3)).shape == (2, 3)


def test_which_tensors_go_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains, what the adapter before had, and a projector that the base does not have."""

    def stored(folder: Path) -> Any:
        tensor: Any = object.__new__(StoredTensor)
        object.__setattr__(tensor, "file", folder / "x.safetensors")
        return tensor

    monkeypatch.setattr("llava_fsdp.export.write.adapter_folder.adapter_folders", lambda name: (tmp_path / name,))
    projector = "multi_modal_projector.linear_1.weight"
    sources = {
        "a": stored(tmp_path / "base"), "b": stored(tmp_path / "before"), "c": drawn("c", 1),
        projector: stored(tmp_path / "base"), "image_newline": drawn("n", 1),
    }  # fmt: skip
    lora = replace(LORA, checkpoint="before")
    assert adapter_tensors(model_config(lora=lora, checkpoint="x"), {"a"}, sources) == ["a", "b", "image_newline"]
    assert adapter_tensors(model_config(lora=lora), {"c"}, sources) == ["b", "c", projector, "image_newline"]
    assert adapter_tensors(model_config(lora=LORA, checkpoint="x"), (), sources) == ["image_newline"]


@pytest.mark.parametrize(("recorded", "fits"), [(None, True), ("right", True), ("wrong", False), ("rightly", False)])
def test_an_adapter_is_for_its_base(recorded: str | None, fits: bool, tmp_path: Path) -> None:
    write_json(tmp_path / "llava_fsdp.json", {} if recorded is None else {"base": recorded})
    adapter: Any = SimpleNamespace(folder=tmp_path)
    if fits:
        check_fingerprint(adapter, "right", "there", "key")
    else:
        with pytest.raises(
            ModelError, match=f"weights of there have the fingerprint right, and .* has {recorded}; .*key"
        ):
            check_fingerprint(adapter, "right", "there", "key")
