"""Operations on weights compute only shapes, and all others real values."""

import pytest
import torch

from llava_fsdp.plan.memory.known_values import KnownValues


def test_what_depends_on_no_weight_has_its_values() -> None:
    weight = torch.zeros(3, 4, device="meta")
    with KnownValues():
        places = torch.arange(5, device=weight.device)
        filled = torch.zeros(2, 3, device=weight.device)
        rows = torch.full((4,), 2, device=weight.device).to(weight.device)
        chosen = weight[torch.tensor([True, False, True])]
        cast = places.to(weight.device, torch.float32)
        product = cast[:3] @ weight
    assert places.tolist() == [0, 1, 2, 3, 4] and rows.tolist() == [2] * 4 and cast.tolist() == [0, 1, 2, 3, 4]
    assert filled.is_meta, "a model may write what depends on weights into it"
    assert (chosen.shape, product.shape) == ((2, 4), (4,)) and chosen.is_meta and product.is_meta


def test_values_that_depend_on_weights_are_not_made_up() -> None:
    weight = torch.zeros(3, device="meta")
    buffer = torch.ones(3)
    with KnownValues(), pytest.raises(NotImplementedError, match="known values"):
        buffer.copy_(weight)
    assert buffer.tolist() == [1, 1, 1]
    with KnownValues(), pytest.raises((NotImplementedError, RuntimeError)):
        weight.nonzero()


def test_a_mask_chooses_as_many_values_as_it_has_places() -> None:
    weight = torch.zeros(3, 4, device="meta", requires_grad=True)
    mask = torch.tensor([[True], [False], [True]])
    with KnownValues():
        assert weight.masked_select(mask).shape == (8,)
        written = torch.zeros_like(weight)
        written[mask[:, 0]] = weight[mask[:, 0]]
        written.sum().backward()
    assert weight.grad is not None and weight.grad.shape == (3, 4)
