"""The inputs of a language model are divided among the ranks of a row by their shapes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llava_fsdp.config import ParallelConfig
from llava_fsdp.data.batching.batch import Segments
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.model.adapters.sample_dropout import TokenKeys
from llava_fsdp.model.packed_attention.row_mask import BoundaryMask, RowMask, has_boundaries
from llava_fsdp.parallel.context.divide_inputs import DivideInputs, divided
from llava_fsdp.parallel.context.share_rows import check_rows
from llava_fsdp.runtime.errors import ConfigError

TOKENS, CHANNELS = 12, 7
IMAGES = [1, 2, 3, 6, 7]
"""Positions of the image tokens."""


def inputs() -> dict[str, Any]:
    shown = torch.zeros((1, TOKENS), dtype=torch.bool)
    shown[0, IMAGES] = True
    return {
        "inputs_embeds": torch.randn(1, TOKENS, CHANNELS),
        "position_ids": torch.arange(3 * TOKENS).view(3, 1, TOKENS),
        "types": torch.arange(TOKENS)[None],
        "shown": shown,
        "features": [torch.randn(len(IMAGES), CHANNELS), torch.randn(len(IMAGES), TOKENS)],
        "by_layer": {2: torch.randn(len(IMAGES), CHANNELS)},
        "use_cache": False,
        "past_key_values": None,
    }


@pytest.mark.parametrize("by_channel", [False, True])
def test_each_rank_gets_what_belongs_to_its_tokens(by_channel: bool) -> None:
    whole = inputs()
    if by_channel:
        whole["shown"] = whole["shown"][..., None].expand(1, TOKENS, CHANNELS)
    for begin in (0, 4, 8):
        own = slice(begin, begin + 4)
        found = divided(whole, TOKENS, own)
        rows = [number for number, place in enumerate(IMAGES) if begin <= place < begin + 4]
        assert torch.equal(found["inputs_embeds"], whole["inputs_embeds"][:, own])
        assert torch.equal(found["position_ids"], whole["position_ids"][..., own])
        assert torch.equal(found["types"], whole["types"][:, own])
        assert torch.equal(found["shown"], whole["shown"][:, own])
        for part, every in zip(found["features"], whole["features"], strict=True):
            assert torch.equal(part, every[rows])
        assert torch.equal(found["by_layer"][2], whole["by_layer"][2][rows])
        assert found["use_cache"] is False and found["past_key_values"] is None


def test_an_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.context: .* gets strange of the shape \[4, 7\]"):
        divided({**inputs(), "strange": torch.randn(4, CHANNELS)}, TOKENS, slice(0, 6))


def test_the_mask_stays_that_of_the_whole_row() -> None:
    keys = TokenKeys(torch.arange(TOKENS)[None])
    hook = DivideInputs(ContextCut(3, 1, paired=False), keys)
    held = boundaries((5, 7))
    segments = Segments(**held)
    mask = BoundaryMask.of(torch.ones((1, TOKENS), dtype=torch.bool), segments)
    made = {"full": RowMask(mask.boundaries)}
    assert has_boundaries(mask) and has_boundaries(made)
    _, found = hook(torch.nn.Module(), (), {**inputs(), "attention_mask": made})
    assert found["attention_mask"] is made and found["inputs_embeds"].shape == (1, 4, CHANNELS)
    assert keys.language is not None and keys.language.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize(
    "mask", [None, torch.ones(1, TOKENS), BoundaryMask.of(torch.ones((2, TOKENS), dtype=torch.bool))]
)
def test_rows_of_one_sample_stay_whole(mask: torch.Tensor | None) -> None:
    given = {**inputs(), "attention_mask": mask}
    assert DivideInputs(ContextCut(3, 1, paired=False), TokenKeys())(torch.nn.Module(), (), given) == ((), given)


def test_ranks_of_a_row_must_share_its_heads() -> None:
    config = SimpleNamespace(num_attention_heads=6)
    for by_mask, context in ((True, 3), (False, 4)):
        model: Any = SimpleNamespace(attends_by_mask=by_mask, language_config=config, language=torch.nn.Module())
        check_rows(model, ParallelConfig(context=context))
    refused: Any = SimpleNamespace(attends_by_mask=True, language_config=config, language=torch.nn.Module())
    with pytest.raises(ConfigError, match=r"parallel\.context=4: .*ulysses"):
        check_rows(refused, ParallelConfig(context=4))
