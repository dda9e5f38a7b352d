"""Which modules get adapters, what of them trains, and dropout that depends on the sample alone."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_config, write_json
from torch import nn

from llava_fsdp.config import LoraConfig
from llava_fsdp.data.batching.batch import Segments
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.model import load_weights
from llava_fsdp.model.adapters.lora import check_gradients
from llava_fsdp.model.adapters.lora_files import AdapterFolder, check_meaning, initial_values_from
from llava_fsdp.model.adapters.lora_merge import Merged
from llava_fsdp.model.adapters.lora_names import ADAPTER, LORA_A, LORA_B, MAGNITUDE, is_adapter, module_of
from llava_fsdp.model.adapters.sample_dropout import SampleDropout, TokenKeys
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train.final_export import MemoryTensor

LORA = ("model.lora.enabled=true", "model.lora.r=4")
IN_LANGUAGE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
TOWER = "model.train=[projector,language,vision]"


def built(parts: Path, dataset: Path, folder: Path, *overrides: str) -> Llava:
    cfg = make_config(parts, dataset, folder, *LORA, *overrides)
    return build_llava(find_parts(cfg.model), cfg.model, torch.float32)


def trained(model: Llava) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_language_models_blocks_alone_have_adapters(parts: Path, dataset: Path, tmp_path: Path) -> None:
    model = built(parts, dataset, tmp_path)
    assert {name.rpartition(".")[2] for name in model.adapted} == IN_LANGUAGE
    assert all(name.startswith("language_model.layers.") for name in model.adapted) and len(model.adapted) == 3 * 7
    projector = {n for n in trained(model) if n.startswith("multi_modal_projector.")}
    assert trained(model) - projector == {n for n, _ in model.named_parameters() if is_adapter(n)} and projector


def test_a_tower_that_is_asked_for_has_them_where_a_gradient_comes(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """`model.select_layer=-2` leaves the last of its three layers unused."""
    model = built(parts, dataset, tmp_path, TOWER)
    layers = {name.split(".layers.")[1].split(".")[0] for name in model.adapted if name.startswith("vision_tower.")}
    assert layers == {"0", "1"}
    assert not any(".layers.2." in name for name in trained(model) if name.startswith("vision_tower."))


@pytest.mark.parametrize(("bias", "count"), [("none", 0), ("lora_only", 2 * 6), ("all", 2 * 6 + 2 * 2 + 1)])
def test_biases_that_train(bias: str, count: int, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """The small Llama has none; its tower has one in each linear layer and norm, of which two layers run."""
    model = built(parts, dataset, tmp_path, TOWER, f"model.lora.bias={bias}")
    biases = {n for n in trained(model) if n.endswith("bias") and not n.startswith("multi_modal_projector.")}
    assert len(biases) == count
    if bias == "lora_only":
        assert {n.removesuffix(".base_layer.bias") for n in biases} <= set(model.adapted)


def test_what_can_never_learn_is_refused(parts: Path, dataset: Path, tmp_path: Path) -> None:
    model = built(parts, dataset, tmp_path, TOWER)
    lost = next(n for n, _ in model.vision_tower.named_parameters() if n in model.probe.leftovers)
    model.vision_tower.get_parameter(lost).requires_grad_(True)
    with pytest.raises(ConfigError, match=f"vision_tower.{lost} and 0 other parameters .* never receive a gradient"):
        check_gradients(model)


def test_a_check_of_gradients_leaves_the_model_as_it_was(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Dropout is turned off for the check alone."""
    model = built(parts, dataset, tmp_path, "model.lora.dropout=0.5")
    dropouts = [module for module in model.modules() if isinstance(module, SampleDropout)]
    assert model.training and len(dropouts) == len(model.adapted)
    for trains in (False, True):
        model.train(trains)
        check_gradients(model)
        assert {model.training, *(module.training for module in dropouts)} == {trains}


def test_adapters_without_linear_layers_are_refused(parts: Path, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names neither"):
        built(parts, dataset, tmp_path, "model.train=[projector]")


def masks(p: float, name: str, seeds: list[int], length: int, channels: int) -> torch.Tensor:
    """bool [samples, length, channels]: what stays."""
    keys = TokenKeys()
    keys.set(torch.tensor(seeds)[:, None], torch.zeros(0, dtype=torch.int64), torch.Size((len(seeds), length)), None, 1)
    dropout = SampleDropout(p, name, keys)
    out = dropout(torch.ones(len(seeds), length, channels))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    return out != 0


def test_dropout_drops_its_share_everywhere() -> None:
    """Within five deviations of a fair draw, over all, by channel, by position and by sample."""
    p, kept = 0.05, masks(0.05, "language_model.layers.0.self_attn.q_proj", list(range(64)), 128, 256)
    for axes in [(0, 1, 2), (0, 1), (0, 2), (1, 2)]:
        share = kept.double().mean(dim=axes)
        deviation = (p * (1 - p) / (kept.numel() / share.numel())) ** 0.5
        assert float((share - (1 - p)).abs().max()) < 5 * deviation, axes


def test_masks_have_nothing_to_do_with_each_other() -> None:
    """Of two layers, two samples, and neighbouring positions and channels: both drop as often as chance says."""
    p = 0.25
    one = ~masks(p, "language_model.layers.0.mlp.up_proj", [5, 6], 256, 512)
    two = ~masks(p, "language_model.layers.1.mlp.up_proj", [5, 6], 256, 512)
    pairs = {
        "layers": (one, two),
        "samples": (one[:1], one[1:]),
        "positions": (one[:, 1:], one[:, :-1]),
        "channels": (one[..., 1:], one[..., :-1]),
    }
    for what, (a, b) in pairs.items():
        both = float((a & b).double().mean())
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / a.numel()) ** 0.5, what


def test_a_model_that_does_not_train_drops_nothing() -> None:
    dropout = SampleDropout(0.5, "language_model.layers.0.mlp.up_proj", TokenKeys()).eval()
    x = torch.randn(2, 3, 4)
    assert dropout(x) is x


def test_modules_are_found_by_their_parameters() -> None:
    names = [f"a.b.q_proj.{end}" for end in ("lora_A.default.weight", "lora_magnitude_vector.default.weight")]
    assert {module_of(name) for name in names} == {"a.b.q_proj"} and not is_adapter("a.b.q_proj.base_layer.weight")
    assert isinstance(SampleDropout(0.1, "x", TokenKeys()), nn.Module)


def test_one_graph_serves_more_blocks_than_the_compiler_would_compile(tmp_path: Path) -> None:
    """Layers whose masks differ are one code; a number in each of them would be a constant, and a graph for each."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    class Block(nn.Module):
        def __init__(self, name: str, keys: TokenKeys):
            super().__init__()
            self.dropout = SampleDropout(0.1, name, keys)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(x)

    keys = TokenKeys()
    keys.set(torch.tensor([7]), torch.zeros(0, dtype=torch.int64), torch.Size((1, 16)), None, 1)
    blocks = [Block(f"language_model.layers.{n}.mlp.up_proj", keys) for n in range(12)]
    compiled = torch.compile(Block.forward, backend=count, dynamic=True)
    x = torch.ones(1, 16, 8)
    outputs = [compiled(block, x) for block in blocks]
    assert all(torch.equal(out, block(x)) for out, block in zip(outputs, blocks, strict=True))
    assert len(graphs) == 1
    assert len({out.numpy().tobytes() for out in outputs}) == len(blocks)


@pytest.mark.parametrize(("rslora", "scaling"), [("false", 12 / 4), ("true", 12 / 4**0.5)])
def test_what_an_adapter_adds_is_scaled(
    rslora: str, scaling: float, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    model = built(parts, dataset, tmp_path, "model.lora.alpha=12", f"model.lora.use_rslora={rslora}")
    assert {model.get_submodule(name).scaling[ADAPTER] for name in model.adapted} == {scaling}


def test_masks_are_those_of_the_sample_wherever_it_is_packed() -> None:
    seeds, lengths, none = torch.tensor([5, 6, 7]), (4, 1, 6), torch.zeros(0, dtype=torch.int64)
    alone, together = TokenKeys(), TokenKeys()
    held = boundaries(lengths)
    segments = Segments(**held)
    together.set(seeds.repeat_interleave(torch.tensor(lengths))[None], none, torch.Size((1, 11)), segments, 1)
    alone.set(seeds[:, None], none, torch.Size((3, 6)), None, 1)
    assert together.language is not None and alone.language is not None
    for own, row, length in zip(together.language[0].split(lengths), alone.language, lengths, strict=True):
        assert torch.equal(own, row[:length])


def test_merged_weights_are_base_and_scaled_product() -> None:
    """W + scaling * B A in whole numbers, of any rows; with magnitudes each row has its own length."""
    dice = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randint(-4, 5, size, generator=dice).float() for size in ((7, 5), (2, 5), (7, 2)))
    own = Merged(MemoryTensor(weight), MemoryTensor(a), MemoryTensor(b), None, 3.0)
    summed = weight + 3 * (b @ a)
    assert torch.equal(own.rows(0, 7), summed) and torch.equal(own.rows(2, 5), summed[2:5])
    lengths = torch.arange(1.0, 8.0)
    found = Merged(MemoryTensor(weight), MemoryTensor(a), MemoryTensor(b), MemoryTensor(lengths), 3.0).rows(2, 7)
    torch.testing.assert_close(found.norm(dim=1), lengths[2:])
    torch.testing.assert_close(found / lengths[2:, None], summed[2:] / summed[2:].norm(dim=1, keepdim=True))


@pytest.mark.parametrize(("base", "a", "b"), itertools.product((torch.bfloat16, torch.float32), repeat=3))
def test_a_merged_weight_has_the_widest_dtype_of_its_parts(base: torch.dtype, a: torch.dtype, b: torch.dtype) -> None:
    own = Merged(
        MemoryTensor(torch.ones(3, 5, dtype=base)),
        MemoryTensor(torch.ones(2, 5, dtype=a)),
        MemoryTensor(torch.ones(3, 2, dtype=b)),
        None,
        1,
    )
    assert own.dtype == (torch.float32 if torch.float32 in (base, a, b) else torch.bfloat16)


OTHERWISE = {"r": 5, "alpha": 3.0, "use_dora": True, "use_rslora": True}


@pytest.mark.parametrize("key", OTHERWISE)
def test_an_adapter_of_another_meaning_is_refused(key: str, tmp_path: Path) -> None:
    """By a training that goes on from it, and where its own configuration differs from how it was trained."""
    trained = LoraConfig(enabled=True)
    assert getattr(trained, key) != OTHERWISE[key]
    other = replace(trained, **{key: OTHERWISE[key]})
    found = AdapterFolder(tmp_path, {}, other, {})
    assert initial_values_from(found, nn.Module(), other) == {}
    with pytest.raises(ConfigError, match=key):
        initial_values_from(found, nn.Module(), trained)
    if key != "r":  # the shapes of the weights tell of it
        write_json(tmp_path / "llava_fsdp.json", {"lora": {key: OTHERWISE[key]}})
        check_meaning(tmp_path, other)
        with pytest.raises(ModelError, match=key):
            check_meaning(tmp_path, trained)


@pytest.mark.parametrize("use_dora", [False, True])
def test_every_parameter_of_an_adapter_has_a_first_value(
    use_dora: bool, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Those of peft: a layer begins as its base, and DoRA's magnitudes as the lengths of its rows."""
    cfg = make_config(parts, dataset, tmp_path, *LORA, f"model.lora.use_dora={use_dora}")
    found = find_parts(cfg.model)
    model = build_llava(found, cfg.model, torch.float32)
    sources = find_weights(model, found, cfg.model, seed=cfg.seed)
    names = {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert names <= sources.keys()
    values = {name: sources[name].rows(0, sources[name].shape[0]) for name in names}
    assert len(values) == len(model.adapted) * (3 if use_dora else 2)
    for name in model.adapted:
        assert not values[f"{name}{LORA_B}"].any() and values[f"{name}{LORA_A}"].any()
        if use_dora:
            base = sources[f"{name}.base_layer.weight"]
            expected = torch.linalg.vector_norm(base.rows(0, base.shape[0]).float(), dim=1)
            torch.testing.assert_close(values[f"{name}{MAGNITUDE}"], expected)


MASKS = {
    "language_model.layers.0.mlp.up_proj": ["100010111111000", "000011000110011"],
    "vision_tower.encoder.layers.1.mlp.fc1": ["00010101000001110010", "10001001100010101010", "10011111100010101111"],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_every_version(name: str) -> None:
    """A run that another version began draws on as it would have. Of three positions of two samples, and of four
    positions of three tiles, five channels each; the largest seeds are among them."""
    keys = TokenKeys()
    keys.set(torch.tensor([[5], [2**31 - 1]]), torch.tensor([9, 8, 2**31 - 2]), torch.Size((2, 3)), None, 4)
    shape = (3, 4, 5) if name.startswith("vision") else (2, 3, 5)
    stays = SampleDropout(0.5, name, keys)(torch.ones(shape)) != 0
    assert ["".join(map(str, row)) for row in stays.int().flatten(1).tolist()] == MASKS[name]


def test_a_tower_without_a_picture_has_one_blank_tile() -> None:
    keys = TokenKeys()
    keys.set(torch.tensor([5]), torch.zeros(0, dtype=torch.int64), torch.Size((1, 3)), None, 4)
    assert keys.vision is not None and keys.vision.shape == (1, 4)
    blank = keys.vision
    keys.set(torch.tensor([6]), torch.zeros(1, dtype=torch.int64), torch.Size((1, 3)), None, 4)
    assert torch.equal(blank, keys.vision)


def test_a_projector_beside_an_adapter_is_read_unless_another_is_given(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues an adapter; biases beside the adapter are read in any case."""
    cfg = make_config(parts, dataset, tmp_path, *LORA, f"model.lora.checkpoint={tmp_path}").model
    found = find_parts(cfg)
    model = build_llava(found, cfg, torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    projector = {name for name in shapes if name.startswith("multi_modal_projector.")}
    stored: dict[str, Any] = {
        name: MemoryTensor(torch.zeros(shape))
        for name, shape in shapes.items()
        if name in projector or is_adapter(name) or name == "language_model.norm.weight"
    }
    own = MemoryTensor(torch.ones(1))
    monkeypatch.setattr(load_weights, "find_adapter", lambda *_: tmp_path)
    monkeypatch.setattr(load_weights, "open_adapter", lambda *_, **__: None)
    monkeypatch.setattr(load_weights, "initial_values_from", lambda *_: dict(stored))
    monkeypatch.setattr(
        load_weights, "projector_alone", lambda _: {n: MemoryTensor(torch.ones(shapes[n])) for n in projector}
    )

    def sources(kind: str, path: Path | None = None) -> dict[str, Any]:
        return find_weights(model, found, replace(cfg, projector=kind), path)

    def kinds(sources: dict[str, Any]) -> set[str]:
        return {"beside" if sources[n] is stored.get(n) else type(sources[n]).__name__ for n in projector}

    beside, drawn, given = sources("auto"), sources("random"), sources("auto", tmp_path)
    assert (kinds(beside), kinds(drawn), kinds(given)) == ({"beside"}, {"Drawn"}, {type(own).__name__})
    for one in (beside, drawn, given):
        assert all(one[n] is stored[n] for n in stored if n not in projector)
    for name in projector:
        del stored[name]
    with pytest.raises(ModelError, match="has no projector"):
        sources("auto")
    assert kinds(sources("random")) == {"Drawn"} and kinds(sources("auto", tmp_path)) == {type(own).__name__}
