"""The formulas against what torch counts in a real forward and backward pass."""

from pathlib import Path

import pytest
import torch
from harness import CPU
from packed import build
from small import make_config
from tiers import slow_after
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from llava_fsdp.config import Part
from llava_fsdp.data.batching.batch import Segments
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.flops import (
    Flops,
    count_flops,
    last_products,
    matrix_weights,
    pairs_in_windows,
    trained_weights,
)
from llava_fsdp.model.llava.llava import Llava

STAGE_1, STAGE_2 = "[projector]", "[projector,language]"
TOWER = "[projector,language,vision]"
LORA = ("model.lora.enabled=true", "model.lora.r=4")
CASES = [
    (STAGE_1, "none", -2), (STAGE_2, "none", -2), (TOWER, "none", -2), ("[vision]", "none", -2),
    ("[language]", "none", -2), (STAGE_2, "none", -1), (TOWER, "none", 1),
    (STAGE_1, "full", -2), (STAGE_2, "full", -2), (TOWER, "full", -2),
    *((train, mode, layer) for mode in ("none", "full") for train, layer in (
        ("[language:-1]", -2), ("[projector,language:1:2]", -2), ("[vision:-1]", -2), ("[vision:1:2,language:2]", -1),
    )),
]  # fmt: skip
LENGTH, LABELS, TILES = 40, 10, 2


def counted(model: Llava, samples: int, length: int, labels: int, tiles: int, pack: bool) -> int:
    """FLOPs of matrix products for so many samples of one length; attention is products too, of whole squares."""
    total = samples * length
    held = boundaries((length,) * samples)
    segments = Segments(**held) if pack else None
    shape = (1, total) if pack else (samples, length)
    shown = 4 * min(1, tiles)
    seeds = torch.zeros(shape if pack else (samples, 1), dtype=torch.int64)
    images = {"tiles": torch.rand((tiles, 3, 28, 28)), "seeds": torch.arange(tiles)}
    images |= {name: torch.arange(shown) for name in ("positions", "rows")}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(
            torch.ones(shape, dtype=torch.int64), segments, images, seeds, torch.arange(labels),
            torch.ones(labels, dtype=torch.int64),
        ).backward()  # fmt: skip
    model.zero_grad()
    return counter.get_total_flops()


def causal_half(flops: Flops, samples: int, length: int) -> float:
    """What torch counts of attention and a causal mask leaves out: as much again as the formula has."""
    return flops.pair * samples * length**2


@pytest.mark.parametrize("pack", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("train_parts", "activation_checkpointing", "select_layer"), slow_after(4, CASES))
def test_every_product_is_counted_and_no_other(
    train_parts: str,
    activation_checkpointing: str,
    select_layer: int,
    pack: bool,
    parts: Path,
    dataset: Path,
    tmp_path: Path,
) -> None:
    """To the last one: samples of one length, packed and padded, in which nothing is padding."""
    overrides = (
        f"model.train={train_parts}",
        f"activation_checkpointing={activation_checkpointing}",
        f"model.select_layer={select_layer}",
    )
    model = build(make_config(parts, dataset, tmp_path, *overrides, f"pack={str(pack).lower()}")).model
    assert isinstance(model, Llava) and next(model.parameters()).device == CPU
    check_counts(model, activation_checkpointing == "full", pack)


@pytest.mark.parametrize(
    ("activation_checkpointing", "base"),
    slow_after(1, [("full", "none"), ("none", "nf4"), ("none", "none"), ("full", "int8")]),
)
def test_adapters_are_counted_and_no_gradient_of_what_is_frozen(
    activation_checkpointing: str, base: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """A packed weight counts as what it is unpacked to."""
    keys = *LORA, f"activation_checkpointing={activation_checkpointing}", f"model.quantize.mode={base}"
    model = build(make_config(parts, dataset, tmp_path, *keys)).model
    assert isinstance(model, Llava) and model.adapted
    check_counts(model, activation_checkpointing == "full", pack=True)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        # attention: 40 x 24 for queries and the output, 40 x 12 for keys and values; MLPs of three matrices
        ("llama", {}, 3 * (2880 + 3 * 40 * 56)),
        # each token goes to 2 of 5 experts; the router has a row for each
        ("mixtral", {}, 3 * (2880 + 5 * 40 + 2 * 3 * 40 * 56)),
        # its first layer is dense, and its experts are narrower
        ("qwen3_moe", {"mlp_only_layers": [0]}, 3 * 2880 + 3 * 40 * 56 + 2 * (5 * 40 + 2 * 3 * 40 * 24)),
        # biases of experts are no matrices
        ("gpt_oss", {}, 3 * (2880 + 5 * 40 + 2 * 3 * 40 * 56)),
    ],
)
def test_the_experts_that_a_token_is_sent_to(kind: str, values: dict[str, object], expected: int) -> None:
    sizes: dict[str, object] = {
        "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
        "num_key_value_heads": 2, "vocab_size": 77, "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "decoder_sparse_step": 1, "pad_token_id": 0,
    }  # fmt: skip
    with torch.device("meta"):
        stack = find_blocks(AutoModel.from_config(AutoConfig.for_model(kind, **(sizes | values))))
    assert matrix_weights(stack, active=2) == trained_weights(stack, active=2) == expected
    has_experts = kind != "llama"
    assert (matrix_weights(stack) > expected) is has_experts
    assert last_products(stack) == (0 if kind in ("mixtral", "gpt_oss") else 3 * 40 * 56 if kind == "llama" else 2240)


@pytest.mark.parametrize(
    ("kind", "values", "lengths", "expected"),
    [
        ("mistral", {"sliding_window": None}, [30, 30], 1800),
        ("mistral", {"sliding_window": 7}, [30, 30], 2 * 7 * 60),  # in every layer
        ("mistral", {"sliding_window": 7}, [9], 81),  # shorter than two windows: all pairs are the bound
        ("gemma2", {"sliding_window": 7}, [30, 30], (1800 + 2 * 7 * 60) / 2),  # in one of the two layers
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False}, [30, 30], 1800),
    ],
)
def test_pairs_that_a_sliding_window_leaves_out(
    kind: str, values: dict[str, object], lengths: list[int], expected: float
) -> None:
    """The bound is never below what each token of each sample attends to, counted one by one."""
    language = AutoConfig.for_model(kind, num_hidden_layers=2, **values)
    pairs = pairs_in_windows(language, sum(lengths), sum(n * n for n in lengths))
    assert pairs == expected
    window = values["sliding_window"] if kind == "mistral" else None
    if isinstance(window, int):
        attended = sum(min(place, window) - 0.5 for n in lengths for place in range(1, n + 1))  # the diagonal is half
        assert 2 * attended <= pairs < 1.3 * 2 * attended


def check_counts(model: Llava, activation_checkpointing: bool, pack: bool) -> None:
    flops = count_flops(model, activation_checkpointing)
    for samples, length, labels, tiles in ((1, LENGTH, LABELS, TILES), (3, LENGTH, LABELS, TILES), (2, 64, 31, 3)):
        found = counted(model, samples, length, labels, tiles, pack) - causal_half(flops, samples, length)
        assert found == flops.of(samples * length, samples * length**2, labels, tiles)


def test_a_step_without_pictures_has_no_tower(parts: Path, dataset: Path, tmp_path: Path) -> None:
    model = build(make_config(parts, dataset, tmp_path)).model
    assert isinstance(model, Llava) and Part.vision not in model.cfg.trained
    flops = count_flops(model, activation_checkpointing=False)
    found = counted(model, 2, LENGTH, LABELS, 0, True) - causal_half(flops, 2, LENGTH)
    assert found == flops.of(2 * LENGTH, 2 * LENGTH**2, LABELS, 0)
