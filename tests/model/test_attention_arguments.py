"""What attention kernels are called with, and what a model's configuration says of its attention."""

import importlib.util
import inspect
import sys
import types
from typing import Any

import pytest
import torch
from test_attention import SMALL
from torch import nn
from transformers import AutoConfig, AutoModel, DynamicCache
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from llava_fsdp.config import Attention
from llava_fsdp.model.packed_attention.attention import (
    NAMES,
    AttentionForm,
    Boundaries,
    CachedRows,
    Lengths,
    PackedRow,
    RowSegments,
    attention_of_transformers,
    each_alone,
    flash,
    grows_with_square,
    head_size,
    layers_with_window,
    make_varlen,
    not_for_flash,
)
from llava_fsdp.model.packed_attention.packs import padded_attention
from llava_fsdp.model.packed_attention.row_mask import BoundaryMask, attention_arguments, is_same_rule


def recorded(found: list[dict[str, Any]], parameters: str) -> Any:
    """A kernel with these parameters, which returns its queries."""

    def kernel(*given: Any, **options: Any) -> torch.Tensor:
        found.append({"given": given, **options})
        return given[0]

    kernel.__signature__ = inspect.signature(eval(f"lambda {parameters}: 0"))  # type: ignore[attr-defined]
    return kernel


def shared_row(form: AttentionForm) -> PackedRow:
    """Two samples, of which this rank has the last queries of the second."""
    queries = Boundaries(torch.tensor([0, 2, 5], dtype=torch.int32), Lengths((2, 3), 3))
    keys = Boundaries(torch.tensor([0, 2, 9], dtype=torch.int32), Lengths((2, 7), 7))
    return PackedRow(queries, form, keys)


OURS = NAMES[Attention.sdpa]
PARTS = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)


@pytest.mark.skipif(importlib.util.find_spec("torch.nn.attention.varlen") is None, reason="torch has no varlen_attn")
@pytest.mark.parametrize(
    ("parameters", "form", "options"),
    [
        ("window_size, scale, enable_gqa", AttentionForm(0.3, window=4),
         {"window_size": (3, 0), "scale": 0.3, "enable_gqa": True}),
        ("window_size, scale, enable_gqa", AttentionForm(),
         {"window_size": (-1, 0), "scale": None, "enable_gqa": True}),
        ("window_size", AttentionForm(0.3), {"window_size": (-1, 0)}),
        ("is_causal", AttentionForm(), {"is_causal": True}),
    ],
)  # fmt: skip
def test_what_torchs_kernel_is_called_with(
    parameters: str, form: AttentionForm, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each release of torch: a kernel without a scale gets scaled queries, one without groups gets all heads."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", recorded(found, parameters))
    query, key, value = PARTS
    make_varlen()(nn.Module(), query, key, value, shared_row(form))
    (call,) = found
    q, k, v, queries, keys, most_queries, most_keys = call.pop("given")
    assert call == options
    assert (queries.tolist(), keys.tolist(), most_queries, most_keys) == ([0, 2, 5], [0, 2, 9], 3, 7)
    scaled = query * 0.3 * 8**0.5 if form.scaling is not None and "scale" not in options else query
    torch.testing.assert_close(q, scaled[0].transpose(0, 1))
    every = [part if "enable_gqa" in options else part.repeat_interleave(2, dim=1) for part in (key, value)]
    assert torch.equal(k, every[0][0].transpose(0, 1)) and torch.equal(v, every[1][0].transpose(0, 1))


@pytest.mark.skipif(importlib.util.find_spec("torch.nn.attention.varlen") is None, reason="torch has no varlen_attn")
def test_a_window_that_torchs_kernel_lacks_is_computed_a_sample_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", recorded([], "is_causal"))
    row = shared_row(AttentionForm(window=2))
    assert torch.equal(make_varlen()(nn.Module(), *PARTS, row), each_alone(nn.Module(), *PARTS, row))


@pytest.mark.parametrize(("window", "expected"), [(None, (-1, -1)), (4, (3, 0))])
def test_what_flash_attn_is_called_with(
    window: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = recorded(found, "")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    flash(nn.Module(), *PARTS, shared_row(AttentionForm(0.3, 0.2, window)))
    (call,) = found
    given = call.pop("given")
    assert [part.shape for part in given[:3]] == [(5, 4, 8), (9, 2, 8), (9, 2, 8)]
    assert (given[3].tolist(), given[4].tolist(), *given[5:]) == ([0, 2, 5], [0, 2, 9], 3, 7)
    assert call == {"dropout_p": 0.2, "softmax_scale": 0.3, "causal": True, "window_size": expected,
                    "deterministic": torch.are_deterministic_algorithms_enabled()}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "windows", "padded"),
    [
        ("llama", {}, 0, OURS),
        ("mistral", {"sliding_window": 3}, 2, OURS),
        ("mistral", {"sliding_window": None}, 0, OURS),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, 1, OURS),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 3}, 0, OURS),
        ("gemma2", {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 0.5}, 1, OURS),
        ("stablelm", {}, 0, "sdpa"),
    ],
)
def test_attention_of_padded_rows(kind: str, values: dict[str, Any], windows: int, padded: str) -> None:
    """Ours for whatever can be packed."""
    language = AutoConfig.for_model(kind, **{**SMALL, **values})
    assert (layers_with_window(language), padded_attention(language)) == (windows, padded)


def test_keys_that_decide_of_attention() -> None:
    """A window that is switched off is none; transformers' SDPA has no soft cap."""
    language = AutoConfig.for_model("llama", **SMALL)
    assert attention_of_transformers(language) == "sdpa" and layers_with_window(language) == 0
    language.sliding_window = 9
    assert layers_with_window(language) == 2
    language.use_sliding_window = False
    assert layers_with_window(language) == 0
    language.attn_logit_softcapping = 0.5
    assert attention_of_transformers(language) == "eager"


@pytest.mark.parametrize(
    ("kind", "values", "attention", "grows"),
    [
        ("llama", {}, Attention.sdpa, False),
        ("mistral", {"sliding_window": 3}, Attention.sdpa, True),
        ("mistral", {"sliding_window": 3}, Attention.varlen, False),
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 0.5}, Attention.varlen, True),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, Attention.varlen, True),
    ],
)
def test_whose_masks_grow_with_the_square(kind: str, values: dict[str, Any], attention: Attention, grows: bool) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **{**SMALL, **values}))
    assert grows_with_square(attention, model) is grows


def test_arguments_of_a_row() -> None:
    """The longest sample is not the first one; transformers' own attention gets nothing for padded rows."""
    positions, bounds = torch.zeros(1, 12, dtype=torch.int64), torch.tensor([0, 4, 11, 12], dtype=torch.int32)
    embeds = torch.zeros(1, 12, 3)
    found = attention_arguments(embeds, RowSegments(positions, bounds, (4, 7, 1)), OURS)
    mask = found.pop("attention_mask")
    assert found == {"position_ids": positions} and mask.shape == (1, 12) and mask.boundaries.cu_seqlens is bounds
    assert mask.boundaries.lengths == Lengths((4, 7, 1), 7) and bool(mask.all())
    (padded,) = attention_arguments(embeds, None, OURS).values()
    assert isinstance(padded, BoundaryMask) and padded.boundaries is None and not padded.is_cached
    assert attention_arguments(embeds, None, "sdpa") == {}
    kept = CachedRows(positions[:, :1], torch.tensor([[False, True, True]]), DynamicCache())
    for name in (*NAMES.values(), "sdpa"):
        found = attention_arguments(embeds, kept, name)
        assert found.keys() == {"position_ids", "past_key_values", "use_cache", "attention_mask"}
        mask = found["attention_mask"]
        assert mask.tolist() == [[0, 1, 1]]
        assert mask.dtype is torch.int64 if name == "sdpa" else isinstance(mask, BoundaryMask) and mask.is_cached


def test_rules_of_attention_are_the_same_by_code_and_numbers() -> None:
    """A window among other rules, or of another size, is another rule."""
    window = sliding_window_causal_mask_function
    assert is_same_rule(window(3), window(3)) and is_same_rule(causal_mask_function, causal_mask_function)
    images = blockwise_overlay(torch.zeros((1, 4), dtype=torch.int64))
    others = (
        window(4),
        causal_mask_function,
        or_masks(window(3), images),
        chunked_causal_mask_function(3, torch.zeros(1)),
    )
    for other in others:
        assert not is_same_rule(window(3), other)
    assert not is_same_rule(images, images.__closure__) and not is_same_rule(torch.ones(1), torch.ones(1))


def test_widths_of_heads() -> None:
    """Of a model that names none, and of one whose keys and values have two."""
    assert head_size(AutoConfig.for_model("gpt_neox", hidden_size=48, num_attention_heads=4)) == 12
    assert head_size(AutoConfig.for_model("llama", **SMALL, head_dim=24)) == 24
    two = AutoConfig.for_model("llama", **SMALL)
    two.v_head_dim = 16
    assert "two" in str(not_for_flash(two, torch.bfloat16, "flash-attn"))
