"""What a run continues with is the base that it began with, to the last bit."""

import hashlib
from dataclasses import replace

import pytest
import torch
from small import Configure
from torch import nn

from llava_fsdp.model import load_weights
from llava_fsdp.model.load_weights import base_fingerprint, check_shape, digest_of, fingerprint, weight_digests
from llava_fsdp.model.weights.init_weights import Drawn, DrawRule, Rule
from llava_fsdp.model.weights.tensor_files import Stored
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train.final_export import MemoryTensor
from llava_fsdp.train.setup.preflight import open_model


def test_every_bit_of_a_frozen_weight_counts_and_ranks_do_not() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(2048, 4100), "head": nn.Linear(4, 4)})  # base: three stretches of rows
    model["base"].requires_grad_(False)
    sources: dict[str, Stored] = {name: MemoryTensor(p.detach().clone()) for name, p in model.named_parameters()}
    digests = weight_digests(model, sources)
    first = fingerprint(model, digests)
    shares: list[tuple[str, str]] = []
    for rank in range(3):
        weight_digests(model, sources, rank, 3, lambda own: shares.extend(own) or own)
    assert fingerprint(model, dict(shares)) == first
    trained = {**sources, "head.weight": MemoryTensor(torch.zeros(4, 4))}
    assert fingerprint(model, weight_digests(model, trained)) == first, "what trains is in the checkpoint"
    for name, place in (("base.weight", (4099, 2047)), ("base.weight", (2049, 0)), ("base.bias", (4099,))):
        other = sources[name].rows(0, 4100).clone()
        other.view(torch.int32)[place] ^= 1
        changed = weight_digests(model, {**sources, name: MemoryTensor(other)})
        assert fingerprint(model, changed) != first, (name, place)
        assert base_fingerprint(changed, []) != base_fingerprint(digests, []), (name, place)
        assert base_fingerprint(changed, [name]) == base_fingerprint(digests, [name]), "it comes with the adapter"


@pytest.mark.parametrize("shape", [(7,), (6, 3), (7, 3), (5, 2, 3)])
def test_a_weight_is_digested_in_pieces_as_in_one(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(shape).bfloat16()
    expected = hashlib.sha256(b"torch.bfloat16" + weight.view(torch.uint8).numpy().tobytes()).hexdigest()
    for size in (1, 7, 36, 1 << 24):
        monkeypatch.setattr(load_weights, "DIGESTED_BYTES", size)
        assert digest_of(MemoryTensor(weight), shape) == expected


def test_names_shapes_and_what_trains_count() -> None:
    """Of models without any frozen weight, so that nothing else tells them apart."""

    def of(model: nn.Module, trains: bool = True) -> str:
        return fingerprint(model.requires_grad_(trains), {})

    one = of(nn.ModuleDict({"a": nn.Linear(3, 5, bias=False)}))
    assert of(nn.ModuleDict({"a": nn.Linear(3, 5, bias=False)})) == one
    others = [
        of(nn.ModuleDict({"b": nn.Linear(3, 5, bias=False)})),
        of(nn.ModuleDict({"a": nn.Linear(5, 3, bias=False)})),
        of(nn.ModuleDict({"a": nn.Linear(3, 5)})),
        of(nn.ModuleDict({"a": nn.Linear(3, 5, bias=False)}), trains=False),
    ]
    assert len({one, *others}) == 5


def test_a_digest_is_of_bits_and_dtype_and_of_what_weights_are_drawn_by() -> None:
    bits = torch.arange(15, dtype=torch.int16).view(5, 3)
    half, brain = MemoryTensor(bits.view(torch.float16)), MemoryTensor(bits.view(torch.bfloat16))
    assert digest_of(half, (5, 3)) != digest_of(brain, (5, 3))
    assert digest_of(half, (5, 3)) == digest_of(MemoryTensor(half.tensor.t().contiguous().t()), (5, 3))
    drawn = Drawn("a", (5, 3), DrawRule(Rule.NORMAL, 0.5), 1)
    others = [replace(drawn, rule=DrawRule(Rule.UNIFORM, 0.5)), replace(drawn, rule=DrawRule(Rule.NORMAL, 0.25))]
    others.append(replace(drawn, seed=2))
    assert len({digest_of(own, (5, 3)) for own in (drawn, *others)}) == 4
    assert digest_of(replace(drawn), (5, 3)) == digest_of(drawn, (5, 3))


def test_a_base_is_told_by_names_without_adapters() -> None:
    digests = {"a.weight": "1", "b.weight": "2"}
    adapted = {"a.base_layer.weight": "1", "b.weight": "2"}
    assert base_fingerprint(digests, []) == base_fingerprint(adapted, [])
    assert base_fingerprint(digests, []) != base_fingerprint({"a.weight": "2", "b.weight": "1"}, [])
    assert base_fingerprint(adapted, ["a.weight"]) == base_fingerprint({"b.weight": "2"}, [])
    assert base_fingerprint(digests, ["a.base_layer.weight"]) == base_fingerprint({"b.weight": "2"}, [])


@pytest.mark.parametrize(
    ("name", "stored", "whole", "fits"),
    [
        ("lm_head.weight", (7, 5), False, True),
        ("lm_head.weight", (9, 5), True, True),
        ("language_model.embed_tokens.weight", (9, 5), True, True),
        ("lm_head.weight", (6, 5), True, False),
        ("lm_head.weight", (9, 6), True, False),
        ("lm_head.weight", (9, 5), False, False),
        ("language_model.layers.0.mlp.up_proj.weight", (9, 5), True, False),
    ],
)
def test_more_rows_are_those_of_a_whole_models_vocabulary(
    name: str, stored: tuple[int, ...], whole: bool, fits: bool, configure: Configure
) -> None:
    """Where seven rows of five are needed."""
    model, _ = open_model(configure(), torch.device("cpu"))
    extended = whole and name in model.with_vocabulary()
    source = MemoryTensor(torch.zeros(stored))
    if fits:
        check_shape(name, (7, 5), source, extended)
        return
    with pytest.raises(ModelError):
        check_shape(name, (7, 5), source, extended)
