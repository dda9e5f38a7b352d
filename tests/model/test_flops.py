"""The formulas against what torch counts in a real forward and backward pass."""

from pathlib import Path

import pytest
import torch
from harness import CPU
from packed import build
from small import make_config
from torch.utils.flop_counter import FlopCounterMode

from llava_fsdp.data.collate import boundaries
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava import Llava

CASES = [("[projector]", "none"), ("[projector,language]", "none"), ("[projector,language]", "full"),
         ("[projector,language,vision]", "none")]  # fmt: skip


def counted(model: Llava, length: int, labels: int, tiles: int) -> int:
    """FLOPs of matrix products for one sample; torch does not count attention on the CPU."""
    held = boundaries((length,))
    segments = held["position_ids"], held["cu_seqlens"], held["lengths"]
    shown = min(1, tiles)
    with FlopCounterMode(display=False) as counter:
        model(
            torch.ones((1, length), dtype=torch.int64), segments, torch.arange(4 * shown), torch.arange(4 * shown),
            torch.rand((tiles, 3, 28, 28)), torch.arange(labels), torch.ones(labels, dtype=torch.int64),
        ).backward()  # fmt: skip
    counts = counter.get_flop_counts()["Global"]
    assert not any("attention" in str(op) for op in counts), "count `pair` here too"
    return counter.get_total_flops()


@pytest.mark.parametrize(("train_parts", "recompute"), CASES)
def test_positions_labels_and_tiles(
    train_parts: str, recompute: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    overrides = f"model.train={train_parts}", f"recompute={recompute}"
    model = build(make_config(parts, dataset, tmp_path, *overrides)).model
    assert isinstance(model, Llava) and next(model.parameters()).device == CPU
    flops = count_flops(model, recompute == "full")
    base = counted(model, 40, 10, 1)
    position = (counted(model, 60, 10, 1) - base) / 20
    if recompute == "full":  # it stops before the last product of a block, whose result nothing needs again
        assert 0.9 * flops.position < position < flops.position
    else:
        assert position == flops.position
    assert counted(model, 40, 30, 1) - base == 20 * flops.label
    # Here every fifth position is a CLS token, which no patch is projected to; and of a trained tower of three layers
    # the last has no gradient, and the first, half of the work, none of its input.
    tile = counted(model, 40, 10, 2) - base
    assert (0.6 if "vision" in train_parts else 0.9) * flops.tile < tile < flops.tile
