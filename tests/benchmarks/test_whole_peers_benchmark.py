"""What benchmarks/whole_peers.py computes from its rounds, and what its peers make of the samples."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rank() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("whole_peers_rank")


@pytest.fixture(scope="module")
def bench(rank: ModuleType) -> ModuleType:
    return importlib.import_module("whole_peers")


def sample(ids: list[int], labelled: int, patches: int = 0) -> dict[str, torch.Tensor]:
    """A sample whose last tokens are labels."""
    made = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "mm_token_type_ids": torch.zeros(1, len(ids), dtype=torch.int64),
        "labels": torch.tensor([[-100] * (len(ids) - labelled) + ids[len(ids) - labelled :]]),
    }
    images = {"pixel_values": torch.ones(patches, 6), "image_grid_thw": torch.tensor([[1, 2, patches // 2]])}
    return made | (images if patches else {})


SAMPLES = [sample([5, 6, 7], 1, patches=4), sample([8, 9, 4, 3, 2], 2), sample([5, 1], 1, patches=8)]


def test_padded_rows_are_as_long_as_the_longest_sample_and_have_all_patches(rank: ModuleType) -> None:
    made = rank.in_rows(SAMPLES)
    assert made["input_ids"].tolist() == [[5, 6, 7, 0, 0], [8, 9, 4, 3, 2], [5, 1, 0, 0, 0]]
    assert made["attention_mask"].sum(1).tolist() == [3, 5, 2]
    assert made["labels"][0].tolist() == [-100, -100, 7, -100, -100]
    assert made["pixel_values"].shape == (12, 6)
    assert made["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]


def test_a_packed_row_predicts_each_label_at_the_token_before_it(rank: ModuleType) -> None:
    def positions(ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.arange(ids.shape[1]).expand(3, 1, -1), None

    row = rank.in_one_row(SimpleNamespace(model=SimpleNamespace(get_rope_index=positions)), SAMPLES)
    assert row["boundaries"] == [0, 3, 8, 10]
    assert row["labels"].tolist() == [7, 3, 2, 1]
    assert row["input_ids"][0, row["places"] + 1].tolist() == row["labels"].tolist()
    assert row["position_ids"][0, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]


def test_attention_of_the_packed_row_is_causal_within_each_sample(rank: ModuleType) -> None:
    from transformers import AttentionInterface

    rank.register_each_sample()
    attend = AttentionInterface()[rank.EACH_SAMPLE]
    query, key, value = (torch.randn(1, heads, 10, 8) for heads in (4, 2, 2))
    found, _ = attend(None, query, key, value, None, boundaries=[0, 3, 8, 10])
    number = torch.tensor([0] * 3 + [1] * 5 + [2] * 2)
    mask = (number[:, None] == number) & torch.ones(10, 10, dtype=torch.bool).tril()
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_a_goal_is_met_by_the_median_of_the_rounds(bench: ModuleType) -> None:
    rows = [
        {"data": data, "peer": peer, "times_ours": times}
        for peer, times in (("ours packed", [1.0] * 3), ("hf", [1.7, 1.5, 1.65]), ("row", [0.98, 1.2, 0.99]))
        for data in ("mixed", "text")
    ]
    assert [(g["data"], g["peer"], g["value"], g["met"]) for g in bench.goals_of(rows)] == [
        ("mixed", "hf", 1.65, True),
        ("mixed", "row", 0.99, False),
    ]


def test_sizes_count_padding_and_patches(bench: ModuleType) -> None:
    assert bench.sizes_of([SAMPLES, SAMPLES[:1]]) == {
        "tokens": 6.5, "padded_positions": 9.0, "label_tokens": 2.5, "patches": 8.0
    }  # fmt: skip


def test_what_padding_alone_can_lose(bench: ModuleType) -> None:
    """Ten tokens in twenty positions, of which one has a label; eight patches are two tokens."""
    sizes = {"tokens": 10.0, "padded_positions": 20.0, "label_tokens": 1.0, "patches": 8.0}
    found = bench.ideal_of(sizes, {"tokens": 5, "labels": 3, "patches": 3, "image_tokens": 4})
    assert found["all parts train"] == {"padded_over_packed": (32 + 160) / (32 + 53), "share_of_vision": 32 / 85}
    assert found["vision part frozen"]["padded_over_packed"] == pytest.approx((16 + 160) / (16 + 53))


def test_the_cost_of_a_blank_image_is_compared_round_by_round(bench: ModuleType) -> None:
    rows = [
        {"data": data, "peer": "ours packed", "cpu_seconds": {"all": seconds}}
        for data, seconds in ((bench.BLANK, [2.0, 3.0]), ("text", [1.0, 2.0]))
    ]
    assert bench.blank_cost(rows) == {"times": [2.0, 1.5], "median": 1.75}
    assert bench.blank_cost([]) is None
