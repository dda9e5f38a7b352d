"""What a run continues with is the base that it began with, to the last bit."""

import torch
from torch import nn

from llava_fsdp.adapters import Held
from llava_fsdp.model.weights import Stored, base_fingerprint, fingerprint, frozen_digests


def test_every_bit_of_a_frozen_weight_counts_and_ranks_do_not() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(2048, 4100), "head": nn.Linear(4, 4)})  # base: three stretches of rows
    model["base"].requires_grad_(False)
    sources: dict[str, Stored] = {name: Held(p.detach().clone()) for name, p in model.named_parameters()}
    digests = frozen_digests(model, sources)
    first = fingerprint(model, digests)
    shares: list[tuple[str, str]] = []
    for rank in range(3):
        frozen_digests(model, sources, rank, 3, lambda own: shares.extend(own) or own)
    assert fingerprint(model, dict(shares)) == first
    trained = {**sources, "head.weight": Held(torch.zeros(4, 4))}
    assert fingerprint(model, frozen_digests(model, trained)) == first, "what trains is in the checkpoint"
    for name, place in (("base.weight", (4099, 2047)), ("base.weight", (2049, 0)), ("base.bias", (4099,))):
        other = sources[name].rows(0, 4100).clone()
        other.view(torch.int32)[place] ^= 1
        changed = frozen_digests(model, {**sources, name: Held(other)})
        assert fingerprint(model, changed) != first, (name, place)
        assert base_fingerprint(changed, []) != base_fingerprint(digests, []), (name, place)
        assert base_fingerprint(changed, [name]) == base_fingerprint(digests, [name]), "it comes with the adapter"
