"""Weights of transformers' models are found where `from_pretrained` finds them, and named as `save_pretrained` does."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from llava_fsdp.model.load_weights import language_model, part_of
from llava_fsdp.model.weights.conversions import (
    ConvertedTensor,
    LoadPlan,
    language_model_of,
    names_of_parts,
    plan_load,
    plan_save,
    vision_tower_of,
    whole_model_of,
)
from llava_fsdp.model.weights.lazy_tensor import LazyTensor, whole
from llava_fsdp.model.weights.tensor_files import StoredTensor, open_tensors
from llava_fsdp.parallel.local_shards import LocalShard
from llava_fsdp.runtime.errors import ModelError

TEXT: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
IMAGE: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen3": {"tie_word_embeddings": True}, "gemma3_text": {}, "gpt_oss": EXPERTS,
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]}, "mixtral": EXPERTS,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "clip_vision_model": {}, "siglip_vision_model": {}, "dinov2": {"use_swiglu_ffn": True}, "dinov3_vit": {},
    "aimv2_vision_model": {}, "internvl_vision": {"image_size": [28, 28], "patch_size": [14, 14]},
}  # fmt: skip
WHOLE = {
    "llava": ("qwen3_moe", "dinov2"),
    "llava_next": ("mistral", "clip_vision_model"),
    "llava_onevision": ("qwen3", "siglip_vision_model"),
}


def text(kind: str) -> Any:
    return AutoConfig.for_model(kind, **TEXT, **LANGUAGE[kind])


def vision(kind: str) -> Any:
    return AutoConfig.for_model(kind, **{**IMAGE, **VISION[kind]})


def composite(kind: str) -> Any:
    language, tower = WHOLE[kind]
    parts = {"text_config": text(language).to_dict(), "vision_config": vision(tower).to_dict()}
    return AutoConfig.for_model(kind, **parts, image_token_index=36)


def filled(model: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape))
    return model


def save(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder, max_shard_size="20KB")
    return read_files(folder)


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


CASES = [
    *[pytest.param(AutoModelForCausalLM, text, language_model_of, kind, id=kind) for kind in LANGUAGE],
    *[pytest.param(AutoModel, vision, vision_tower_of, kind, id=kind) for kind in VISION],
    *[pytest.param(AutoModelForImageTextToText, composite, whole_model_of, kind, id=kind) for kind in WHOLE],
]


@pytest.mark.parametrize(("auto", "config", "build", "kind"), CASES)
def test_any_rows_are_those_of_from_pretrained(
    auto: Any, config: Callable[[str], Any], build: Callable[[Any], Any], kind: str, tmp_path: Path
) -> None:
    """Bit for bit, and a range of rows reads no number that it does not need."""
    made = filled(auto.from_config(config(kind), dtype=torch.bfloat16))
    save(made, tmp_path)
    expected = auto.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    plan = plan_load(lambda: build(config(kind)), open_tensors(tmp_path), tmp_path)
    assert not plan.unused and not plan.misshapen and plan.sources.keys() == expected.keys()
    dice = random.Random(5)
    for name, value in expected.items():
        source = plan.sources[name]
        assert source.shape == tuple(value.shape) and source.dtype == torch.bfloat16
        for _ in range(3):
            begin, end = sorted(dice.sample(range(len(value) + 1), 2))
            assert torch.equal(source.rows(begin, end), value[begin:end]), name
        assert source.rows(1, 1).shape == value[1:1].shape


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_model_is_written_as_save_pretrained_writes_it(kind: str, tmp_path: Path) -> None:
    """With `vision_model.` in the names of CLIP's and SigLIP's towers, which a model that was put together in memory
    lacks; such a file is read back."""
    made = filled(AutoModelForImageTextToText.from_config(composite(kind), dtype=torch.float32))
    expected = save(made, tmp_path / "theirs")
    held = {name.removeprefix("model."): value for name, value in made.state_dict().items()}
    outputs = plan_save(composite(kind), lambda name, box: held[name][tuple(slice(*span) for span in box)])
    written = {name: output.read(whole(output.shape)).contiguous() for name, output in outputs.items()}
    bare = {name.replace("vision_tower.vision_model.", "vision_tower."): value for name, value in written.items()}
    assert bare.keys() == expected.keys() and all(torch.equal(bare[name], expected[name]) for name in bare)
    (tmp_path / "ours").mkdir()
    save_file(written, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    composite(kind).save_pretrained(tmp_path / "ours")
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_language_model_without_its_output_layer_and_one_inside_a_whole_model(kind: str, tmp_path: Path) -> None:
    made = filled(AutoModelForCausalLM.from_config(text(kind), dtype=torch.float32))
    save(made.model, tmp_path)
    plan = plan_load(lambda: language_model_of(text(kind)), open_tensors(tmp_path), tmp_path)
    assert made.state_dict().keys() - plan.sources.keys() == {"lm_head.weight"}
    assert names_of_parts(plan.model) == {"lm_head.": "lm_head.", "model.": "language_model."}
    inside = names_of_parts(language_model_of(composite("llava")))
    assert inside == {"lm_head.": "lm_head.", "model.language_model.": "language_model."}


@pytest.mark.parametrize("kind", ["clip_vision_model", "aimv2_vision_model"])
def test_the_vision_tower_of_a_whole_model(kind: str, tmp_path: Path) -> None:
    """Its names begin with `vision_model.`; for AIMv2 transformers has no rule for that."""
    made = filled(AutoModel.from_config(vision(kind), dtype=torch.float32))
    tensors = {f"vision_model.{name.removeprefix('vision_model.')}": v for name, v in save(made, tmp_path).items()}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file({**tensors, "text_model.weight": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    plan = plan_load(lambda: vision_tower_of(vision(kind)), open_tensors(tmp_path), tmp_path)
    assert plan.unused == ["text_model.weight"]
    assert plan.sources.keys() == made.state_dict().keys()
    assert all(torch.equal(plan.sources[n].rows(0, len(v)), v) for n, v in made.state_dict().items())


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    tensors = save(filled(AutoModelForCausalLM.from_config(text("qwen3_moe"), dtype=torch.float32)), tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    tensors["model.norm.weight"] = torch.ones(19)
    tensors["extra.weight"] = torch.ones(2)

    def plan() -> LoadPlan:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return plan_load(lambda: language_model_of(text("qwen3_moe")), open_tensors(tmp_path), tmp_path)

    found = plan()
    assert found.misshapen == {"model.norm.weight": ((19,), (20,))} and found.unused == ["extra.weight"]
    expert = "model.layers.1.mlp.experts.3"
    del tensors[f"{expert}.down_proj.weight"]
    assert plan().misshapen["model.layers.1.mlp.experts.down_proj"] == ((4, 20, 12), (5, 20, 12))
    del tensors[f"{expert}.up_proj.weight"]
    with pytest.raises(ModelError, match=str(tmp_path)):
        plan()


@pytest.mark.parametrize("held", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_found_under_either_of_its_names(held: str, tmp_path: Path) -> None:
    """Files may have it under one name; the source is the same for both."""
    config = text("llama")
    config.tie_word_embeddings = True
    made = filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    tensors = {n: v.clone() for n, v in made.state_dict().items() if n == held or n not in names}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    plan = plan_load(lambda: language_model_of(config), open_tensors(tmp_path), tmp_path)
    assert plan.sources.keys() == made.state_dict().keys() and not plan.unused
    for name in names:
        source = plan.sources[name]
        assert torch.equal(source.rows(0, source.shape[0]), tensors[held])


def test_weights_that_a_language_model_has_no_place_for_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But for buffers that are computed. What our model lacks, or has in another shape, is refused."""
    made = filled(AutoModelForCausalLM.from_config(text("llama"), dtype=torch.float32))
    ours = nn.ModuleDict({"language_model": made.model, "lm_head": made.lm_head})
    tensors = {name: value.clone() for name, value in made.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)

    def found(model: nn.Module = ours) -> dict[str, Any]:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return language_model(open_tensors(tmp_path), text("llama"), tmp_path, model)

    names = {name for name, _ in ours.named_parameters()}
    assert found().keys() == names and caplog.records == []
    tensors["extra.weight"] = torch.ones(2)
    assert found().keys() == names and len(caplog.records) == 1
    assert "extra.weight" in caplog.text and "1 weights" in caplog.text
    with pytest.raises(ModelError, match="lm_head"):
        found(nn.ModuleDict({"language_model": made.model}))
    tensors["model.norm.weight"] = torch.ones(19)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[19\]"):
        found()


def test_of_a_whole_model_s_weights_the_language_model_takes_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a warning of the tower's, whose shapes do not matter."""
    made = filled(AutoModelForImageTextToText.from_config(composite("llava_next"), dtype=torch.float32))
    tensors = save(made, tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = nn.ModuleDict({"language_model": made.model.language_model, "lm_head": made.lm_head})
    found = language_model(open_tensors(tmp_path), composite("llava_next"), tmp_path, ours)
    assert found.keys() == {name for name, _ in ours.named_parameters()} and caplog.records == []


def test_files_of_two_dtypes_and_pickled_ones(tmp_path: Path) -> None:
    tensors = save(filled(AutoModelForCausalLM.from_config(text("mixtral"), dtype=torch.float32)), tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    tensors = {name: value.bfloat16() if "w1" in name else value for name, value in tensors.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    plan = plan_load(lambda: language_model_of(text("mixtral")), open_tensors(tmp_path), tmp_path)
    source = plan.sources["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(source, ConvertedTensor) and source.dtype == torch.float32
    prefix = "model.layers.0.block_sparse_moe.experts.2"
    expected = torch.cat([tensors[f"{prefix}.w1.weight"].float(), tensors[f"{prefix}.w3.weight"]])
    assert torch.equal(source.rows(2, 3)[0], expected)
    assert isinstance(plan.sources["model.norm.weight"], StoredTensor)


def test_only_a_rank_s_columns_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an expert's weight that is put together from two tensors in files, and of one that is in a file as it is."""
    save(filled(AutoModelForCausalLM.from_config(text("mixtral"), dtype=torch.float32)), tmp_path)
    read = [0]
    part = StoredTensor.part

    def counted(stored: StoredTensor, box: Any) -> torch.Tensor:
        values = part(stored, box)
        read[0] += values.numel()
        return values

    monkeypatch.setattr(StoredTensor, "part", counted)
    plan = plan_load(lambda: language_model_of(text("mixtral")), open_tensors(tmp_path), tmp_path)
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.q_proj.weight"):
        source = plan.sources[name]
        assert isinstance(source, ConvertedTensor) == name.endswith("gate_up_proj")
        columns = source.shape[1] // 2 - 3, source.shape[1] // 2 + 1  # of both tensors
        expected = source.rows(1, 3)[:, slice(*columns)]
        read[0] = 0
        found = part_of(source, LocalShard(1, 3, [], columns))
        assert torch.equal(found, expected) and read[0] == found.numel() > 0


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk": lambda x: torch.chunk(x, 2, dim=1),
    "split": lambda x: x.split([1, 2, 3], dim=0),
    "stack": lambda x: torch.stack([x, x[:]], dim=1),
    "cat": lambda x: torch.cat([x, x[1:3]], dim=0),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "t": lambda x: x[0].t(),
    "merge of leading dimensions": lambda x: x.reshape(24, 5),
    "split of the first dimension": lambda x: x.view(2, 3, 4, 5),
    "all in one row": lambda x: x.reshape(-1),
    "squeezed": lambda x: x[:1].squeeze(0).unsqueeze(-1),
    "select": lambda x: x.select(1, -1),
    "unbind": lambda x: x.unbind(1),
    "every second": lambda x: x[::2],
    "computed": lambda x: x * 2 + 1,
    "one computed of several": lambda x: x.sort(dim=1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_tensors_that_are_not_read(name: str) -> None:
    """Any part of any result equals that of the operation on values in memory."""
    values = torch.randn((6, 4, 5), generator=torch.Generator().manual_seed(1))
    lazy = LazyTensor(values.shape, ["x"], lambda box: values[tuple(slice(*span) for span in box)])
    expected, found = OPERATIONS[name](values), OPERATIONS[name](lazy)
    pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else list(zip(expected, found, strict=True))
    dice = random.Random(2)
    for wanted, got in pairs:
        assert isinstance(got, LazyTensor) and got.shape == wanted.shape and got.sources == ("x",)
        boxes = [[sorted(dice.sample(range(n + 1), 2)) for n in wanted.shape] for _ in range(8)]
        for box in [*boxes, [[0, n] for n in wanted.shape], [[0, 0] for _ in wanted.shape]]:
            part = tuple(slice(*span) for span in box)
            assert torch.equal(got.read(tuple((b, e) for b, e in box)), wanted[part])


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "assigned": lambda x: x.__setitem__(0, 5),
    "sizes that do not add up": lambda x: x.split([2, 3], dim=0),
    "no such row": lambda x: x.select(0, 9),
    "no such dimension": lambda x: torch.cat([x, x], dim=5),
    "shapes that do not fit": lambda x: torch.cat([x, x[:, :2]], dim=0),
    "another number of values": lambda x: x.reshape(7, 5),
}


@pytest.mark.parametrize("name", WRONG)
def test_operations_that_torch_refuses_or_that_change_a_tensor(name: str) -> None:
    lazy = LazyTensor((6, 4, 5), ["x"], lambda box: torch.zeros([end - begin for begin, end in box]))
    with pytest.raises((RuntimeError, IndexError)):
        WRONG[name](lazy)


def test_a_parameter_of_a_module_keeps_its_way_to_the_values() -> None:
    lazy = LazyTensor((2, 3), ["x"], lambda box: torch.ones([e - b for b, e in box]))
    assert torch.equal(nn.Parameter(lazy).rows(0, 1), torch.ones((1, 3)))
