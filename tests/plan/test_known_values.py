"""A whole model on the meta device needs the bytes of a real one, which computes with all values."""

import contextlib
from typing import Any

import pytest
import torch
from families import make_family, make_model
from PIL import Image
from tiers import slow_after
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText

from llava_fsdp.model.packed_attention.packs import NothingPacked
from llava_fsdp.plan.memory.known_values import KnownValues
from llava_fsdp.plan.memory.meta_trace import FusedKernels, LiveBytes, Trace

FAMILIES = ["gemma3", "idefics3", "aya_vision", "llava_next", "granite4_vision", "deepseek_vl", "janus", "paligemma"]


def inputs_of(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A family's configuration, and its processor's inputs for a text with two images."""
    config, processor = make_family(name)
    placeholder = getattr(processor, "boi_token", None) or processor.image_token
    images = [Image.effect_noise((80, 60), 90).convert("RGB"), Image.effect_noise((31, 70), 90).convert("RGB")]
    made = processor(text=[f"{placeholder} and {placeholder}, which?"], images=[images], return_tensors="pt")
    return config, {k: v.float() if v.is_floating_point() else v for k, v in made.items() if torch.is_tensor(v)}


def most_alive(model: Any, inputs: dict[str, torch.Tensor], *modes: Any) -> int:
    """The most bytes alive in a forward and backward pass, without weights and inputs."""
    trace = Trace()
    known = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    with contextlib.ExitStack() as stack:
        for mode in (*modes, LiveBytes(trace, iter(known))):
            stack.enter_context(mode)
        loss = model(**inputs, use_cache=False).logits.sum()
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    now = most = 0
    for event in trace.events:
        now += event.change
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", slow_after(3, FAMILIES))
def test_a_model_without_values_needs_the_bytes_of_a_real_one(name: str) -> None:
    config, inputs = inputs_of(name)
    real = most_alive(make_model(config), inputs)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    planned = most_alive(model, inputs, KnownValues(), FusedKernels(), NothingPacked())
    assert planned == real > 100_000


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
