"""The tiny models that stand for families: their folders are read by transformers, and hold what they say."""

from collections.abc import Callable

import pytest
from tiers import any_but
from whole_models import CHAT, WholeModel, example_of, peer_loss


@pytest.mark.parametrize("name", any_but(["gemma3", "idefics3"], CHAT))
def test_transformers_trains_each_family(name: str, whole: Callable[[str], WholeModel]) -> None:
    model = whole(name)
    peer = model.peer()
    for record in model.records("few"):
        example = example_of(model, record)
        assert (example.labels != -100).sum() > 0
        peer_loss(peer, example).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in peer.parameters())
