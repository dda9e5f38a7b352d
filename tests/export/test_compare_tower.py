"""Before the first step, a small copy of the vision tower runs in transformers' own class and in ours."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, RanksFailed
from reference import run_ranks
from small import make_config
from tiers import slow_after
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from llava_fsdp.export.prove import compare_tower as compared
from llava_fsdp.export.prove.compare_tower import compare_tower
from llava_fsdp.export.prove.small_copy import NoSmallCopy
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.vision_tower import build_vision_tower, selected_features
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train import main as train

TOWERS: dict[str, dict[str, Any]] = {
    "clip": {}, "siglip_vision_model": {}, "clip_vision_model": {}, "dinov3_vit": {"pos_embed_rescale": 2.0},
    "siglip": {}, "dinov2": {"use_swiglu_ffn": True}, "aimv2_vision_model": {}, "dinov2_with_registers": {},
    "internvl_vision": {}, "vit": {}, "pixtral": {}, "llava": {}, "aimv2": {}, "gemma3": {},
}  # fmt: skip
"""Vision towers alone, and larger models with one in them, in transformers' default sizes."""


@pytest.fixture
def model(parts: Path, dataset: Path, tmp_path: Path) -> Callable[..., Llava]:
    """A model on the meta device with a vision tower of the named kind."""

    def make(kind: str, *keys: str, **values: Any) -> Llava:
        AutoConfig.for_model(kind, **values).save_pretrained(tmp_path / "vision")
        own = [f"model.vision={tmp_path / 'vision'}", "model.select_feature=auto"]
        cfg = make_config(parts, dataset, tmp_path / "run", *own, *keys)
        return build_llava(find_parts(cfg.model), cfg.model, torch.float32)

    return make


@pytest.mark.parametrize("kind", slow_after(2, TOWERS))
def test_every_vision_tower_gives_the_features_of_transformers(
    kind: str, model: Callable[..., Llava], caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        for layer in (-2, -1, 1):
            compare_tower(model(kind, f"model.select_layer={layer}", **TOWERS[kind]))
    assert "not compared" not in caplog.text
    assert torch.equal(torch.get_rng_state(), state)


def test_it_takes_a_moment(model: Callable[..., Llava]) -> None:
    own = model("clip_vision_model")
    compare_tower(own)
    compared.compare_features.cache_clear()
    begun = time.process_time()
    compare_tower(own)
    assert time.process_time() - begun < 1


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    compared.compare_features.cache_clear()
    yield
    compared.compare_features.cache_clear()


def other_value(field: str, value: Any) -> Callable[[PretrainedConfig], nn.Module]:
    """A function that builds a vision tower of which a field of the configuration is misread."""

    def build(vision: PretrainedConfig) -> nn.Module:
        return build_vision_tower(type(vision).from_dict(vision.to_dict() | {field: value}))

    return build


MISREAD = {
    "an activation": ("build_vision_tower", other_value("hidden_act", "relu")),
    "the epsilon of norms": ("build_vision_tower", other_value("layer_norm_eps", 1e-2)),
    "the number of heads": ("build_vision_tower", other_value("num_attention_heads", 1)),
    "the layer": ("selected_features", lambda tower, pixels, layer, probe: selected_features(
        tower, pixels, layer, probe._replace(last_layer="encoder.layers.0"))),
    "the tokens": ("selected_features", lambda tower, pixels, layer, probe: selected_features(
        tower, pixels, layer, probe._replace(drops_cls=False))),
    "which token": ("selected_features", lambda *given: selected_features(*given).roll(1, dims=1)),
    "numbers": ("selected_features", lambda *given: selected_features(*given) * torch.nan),
    "weights": ("build_vision_tower", other_value("num_hidden_layers", 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(2, MISREAD))
def test_a_difference_ends_the_run_before_its_first_step(
    name: str, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, instead = MISREAD[name]
    monkeypatch.setattr(compared, where, instead)
    expected = "has the weight" if name == "weights" else r"model\.vision=.*model\.select_layer=-2"
    with pytest.raises(ModelError, match=expected):
        train.train(make_config(parts, dataset, tmp_path / "run", "max_steps=1"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_cannot_be_shrunk_is_said(
    model: Callable[..., Llava], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise NoSmallCopy("layer 20 of 24 is the first of its kind")

    monkeypatch.setattr(compared, "shrink_tower", refuse)
    with caplog.at_level(logging.WARNING):
        compare_tower(model("clip_vision_model"))
    assert "not compared" in caplog.text and "layer 20" in caplog.text


@pytest.mark.ranks
@pytest.mark.slow
def test_all_ranks_end(parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """The difference is found on rank 0 alone."""
    cfg = make_config(parts, dataset, tmp_path / "run", "max_steps=1")
    with pytest.raises(RanksFailed) as caught:
        pools[2].run(misread_on_every_rank, cfg)
    assert [kinds[0] for kinds in caught.value.kinds] == ["ModelError"] * 2


def misread_on_every_rank(*given: Any) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(compared, "build_vision_tower", other_value("hidden_act", "relu"))
    try:
        return run_ranks(*given)
    finally:
        patch.undo()
