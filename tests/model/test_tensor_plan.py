"""What ranks that compute layers together have of a model."""

from pathlib import Path

import pytest
import torch
from small import changed_parts, make_config

from llava_fsdp.data.batching.batch import Segments
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.model.adapters.sample_dropout import SampleDropout
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_plan import between_layers, divide_dropout, tensor_plan
from llava_fsdp.runtime.errors import ConfigError

LORA = "model.lora.enabled=true", "model.lora.r=4", "model.lora.dropout=0.4"


def test_dropout_of_parts_is_that_of_the_whole(parts: Path, dataset: Path, tmp_path: Path) -> None:
    even = changed_parts(parts, tmp_path / "parts", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6})
    cfg = make_config(even, dataset, tmp_path / "run", *LORA)
    masks: dict[int | None, torch.Tensor] = {}
    for index in (None, 0, 1):
        model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
        plan = tensor_plan(model, 2)
        if index is not None:
            divide_dropout(model, plan, 2, index)
        edges = boundaries((5, 3))
        segments = Segments(**edges)
        model.token_keys.set(torch.arange(8)[None], torch.zeros(0, dtype=torch.int64), torch.Size((1, 8)), segments, 4)
        dropout = model.get_submodule("language_model.layers.1.self_attn.o_proj.lora_dropout.default")
        assert isinstance(dropout, SampleDropout)
        masks[index] = dropout.train()(torch.ones(1, 8, 36 if index is None else 18))
    assert torch.equal(torch.cat([masks[0], masks[1]], -1), masks[None])
    whole = model.get_submodule("language_model.layers.1.self_attn.q_proj.lora_dropout.default")
    assert isinstance(whole, SampleDropout) and whole.first_channel == 0


def test_an_adapter_is_divided_on_the_side_on_which_its_layer_is(parts: Path, dataset: Path, tmp_path: Path) -> None:
    even = changed_parts(parts, tmp_path / "parts", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6})
    cfg = make_config(even, dataset, tmp_path / "run", *LORA)
    plan = tensor_plan(build_llava(find_parts(cfg.model), cfg.model, torch.float32), 2)
    layer = "language_model.layers.0.self_attn"
    found = {name.removeprefix(f"{layer}."): cut for name, cut in plan.items() if name.startswith(layer)}
    assert found == {
        **{f"{n}_proj.{part}": Cut.COLWISE for n in "qkv" for part in ("base_layer", "lora_B.default")},
        **{f"o_proj.{part}": Cut.ROWWISE for part in ("base_layer", "lora_A.default")},
        "o_proj.lora_B.default": Cut.SUMMED,
    }


def test_weights_between_layers_are_summed_and_matrices_there_are_refused(
    parts: Path, dataset: Path, tmp_path: Path
) -> None:
    even = changed_parts(parts, tmp_path / "parts", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6})
    cfg = make_config(even, dataset, tmp_path / "run")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    plan = tensor_plan(model, 2)
    names = {name for name, cut in plan.items() if cut is Cut.SUMMED}
    norms = ("input_layernorm", "post_attention_layernorm")
    assert names == {f"language_model.layers.{n}.{norm}" for n in range(len(model.blocks()[0])) for norm in norms}
    without_mlp = {name: cut for name, cut in plan.items() if ".mlp." not in name}
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.gate_proj"):
        between_layers(model.language_model, "language_model.", without_mlp, 2, [])
