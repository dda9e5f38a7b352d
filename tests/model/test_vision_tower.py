"""A tower runs to the layer that is asked for, and gives transformers' own hidden state."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPVisionConfig,
    PretrainedConfig,
    SiglipVisionConfig,
)
from transformers.utils import output_capturing

from llava_fsdp.config import Feature
from llava_fsdp.model.vision_tower import (
    build_vision_tower,
    first_of,
    hidden_state,
    image_size,
    patch_size,
    probe_vision_tower,
    selected_features,
)
from llava_fsdp.runtime.errors import ConfigError

SIZES = {
    "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TOWERS: dict[str, PretrainedConfig] = {"clip": CLIPVisionConfig(**SIZES), "siglip": SiglipVisionConfig(**SIZES)}
REGISTERS = {
    kind: AutoConfig.for_model(kind, **(SIZES | {"hidden_size": 24}), num_register_tokens=2)
    for kind in ("dinov2_with_registers", "dinov3_vit")
}
"""Towers with a CLS token and two more that belong to no patch."""


def built(config: PretrainedConfig, select_layer: int) -> tuple[nn.Module, str | None]:
    """A tower with random weights, and the layer at which it may stop."""
    with torch.device("meta"):
        found = AutoModel.from_config(config, attn_implementation="sdpa")
    last_layer = probe_vision_tower(found, config, select_layer, Feature.full).last_layer
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation="sdpa"), last_layer


@pytest.mark.parametrize("select_layer", [-4, -2, -1, 1, 3, 4])
@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states_of_transformers_from_the_layers_that_they_take(name: str, select_layer: int) -> None:
    tower, last_layer = built(TOWERS[name], select_layer)
    pixels = torch.rand((3, 3, 28, 28))
    expected = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[select_layer]
    expected.sum().backward()
    gradients = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
    tower.zero_grad(set_to_none=True)
    ran: list[str] = []
    for own, module in tower.named_modules():
        module.register_forward_pre_hook(lambda *_, own=own: ran.append(own))
    found = hidden_state(tower, pixels, select_layer, last_layer)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert {n for n, p in tower.named_parameters() if p.grad is not None} == set(gradients)
    assert all(torch.equal(gradients[n], p.grad) for n, p in tower.named_parameters() if p.grad is not None)
    layers = {int(own.rpartition(".")[2]) for own in ran if own.rpartition(".")[0].endswith("layers")}
    assert layers == set(range(select_layer % 5))
    assert not any("post_layernorm" in own or "head" in own for own in ran)


@pytest.mark.parametrize(("name", "feature", "drops", "tokens"), [
    ("clip", Feature.auto, True, 4), ("clip", Feature.patch, True, 4), ("clip", Feature.full, False, 5),
    ("siglip", Feature.auto, False, 4), ("siglip", Feature.full, False, 4),
])  # fmt: skip
def test_a_cls_token_is_dropped_where_there_is_one(name: str, feature: Feature, drops: bool, tokens: int) -> None:
    with torch.device("meta"):
        tower = AutoModel.from_config(TOWERS[name], attn_implementation="sdpa")
    probe = probe_vision_tower(tower, TOWERS[name], -2, feature)
    assert (probe.drops_cls, probe.features) == (drops, tokens)


def on_meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("name", REGISTERS)
def test_registers_stay_when_the_cls_token_is_dropped(name: str) -> None:
    """As in the original and in transformers, which drop the first token alone. `auto` does what `patch` does."""
    config = REGISTERS[name]
    tower = built(config, -2)[0].eval()
    pixels = torch.rand((2, 3, 28, 28))
    whole = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    assert whole.shape[1] == 7
    for feature, first in ((Feature.auto, 1), (Feature.patch, 1), (Feature.full, 0)):
        probe = probe_vision_tower(on_meta(config), config, -2, feature)
        assert (probe.drops_cls, probe.features, probe.tokens) == (bool(first), 7 - first, 7)
        assert torch.equal(selected_features(tower, pixels, -2, probe), whole[:, first:])


def test_no_token_is_dropped_of_a_tower_without_a_cls_token() -> None:
    config = TOWERS["siglip"]
    with pytest.raises(ConfigError, match=r"model\.select_feature=patch .* gives 4 tokens .* grid of 4"):
        probe_vision_tower(on_meta(config), config, -2, Feature.patch)


@pytest.mark.parametrize("select_layer", [0, 5, -5])
def test_a_layer_that_the_tower_lacks(select_layer: int) -> None:
    with pytest.raises(ConfigError, match=rf"model\.select_layer={select_layer}: clip_vision_model has 4 layers"):
        probe_vision_tower(on_meta(TOWERS["clip"]), TOWERS["clip"], select_layer, Feature.full)


def test_what_is_left_over_behind_the_layer() -> None:
    """The parameters that never get a gradient, and how many layers run; no hook stays."""
    tower = on_meta(TOWERS["clip"])
    probe = probe_vision_tower(tower, TOWERS["clip"], -2, Feature.full)
    behind = {name for name, _ in tower.named_parameters() if ".layers.3." in name or "post_layernorm" in name}
    assert set(probe.leftovers) == behind and len(behind) > 10
    assert (probe.layers, probe.tokens, probe.features) == (3, 5, 5)
    assert probe.last_layer is not None and probe.last_layer.endswith("layers.2")
    hooks = sum(len(module._forward_hooks) for module in tower.modules())  # transformers' own stay
    assert probe_vision_tower(tower, TOWERS["clip"], -1, Feature.full).layers == 4
    assert sum(len(module._forward_hooks) for module in tower.modules()) == hooks


def test_augmentations_of_a_pretraining_are_off_in_the_tower_alone() -> None:
    """The configuration is exported as it was given."""
    config = AutoConfig.for_model(
        "dinov3_vit", **SIZES, pos_embed_shift=0.1, pos_embed_jitter=1.1, pos_embed_rescale=2.0
    )
    with torch.device("meta"):
        own = build_vision_tower(config).config
    names = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
    assert [getattr(own, name) for name in names] == [None] * 3
    assert [getattr(config, name) for name in names] == [0.1, 1.1, 2.0]


def test_sizes_may_be_pairs() -> None:
    config = CLIPVisionConfig(**{**SIZES, "image_size": [56, 56], "patch_size": [28, 28]})
    assert (image_size(config), patch_size(config)) == (56, 28) and image_size(TOWERS["clip"]) == 28
    assert first_of((1, 2)) == 1 and first_of([3]) == [3]


def test_last_hidden_state_may_be_another_than_the_last_layers() -> None:
    """Where transformers ties the two, the norm behind the last layer is part of it: all of the tower runs."""
    if 'getattr(self.config, "tie_last_hidden_states"' not in open(output_capturing.__file__).read():
        pytest.skip("this transformers has no configuration that ties them")
    config = SiglipVisionConfig(**SIZES)
    config.tie_last_hidden_states = True
    tower, last_layer = built(config, -1)
    assert last_layer is None
    pixels = torch.rand((3, 3, 28, 28))
    output = tower(pixel_values=pixels)
    assert torch.equal(hidden_state(tower, pixels, -1, last_layer), output.last_hidden_state)
    assert built(config, -2)[1] is not None


def test_nothing_stays_in_memory_that_only_a_collection_would_find() -> None:
    tower, last_layer = built(TOWERS["clip"], -2)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            alive = weakref.ref(hidden_state(tower, torch.rand((3, 3, 28, 28)), -2, last_layer))
        assert alive() is None
    finally:
        gc.enable()
