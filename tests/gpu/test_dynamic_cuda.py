"""Activation checkpointing chosen from measurements, on a CUDA GPU: bytes of its allocator, seconds of its kernels."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small import make_config
from steps import Calls
from test_activation_checkpointing_cuda import BLOCKS, ROWS, WIDTH, Block
from test_working_copy import build_run
from torch import nn

from llava_fsdp.parallel.memory import dynamic_checkpoint
from llava_fsdp.parallel.memory.dynamic_checkpoint import DynamicBlock, Limit
from llava_fsdp.train.loop import fit
from llava_fsdp.train.state import StepResult


def test_measured_bytes_are_those_that_the_allocator_holds(cuda: torch.device) -> None:
    stack = nn.ModuleList(DynamicBlock(Block(), cuda) for _ in range(BLOCKS)).to(cuda)
    blocks = cast("list[DynamicBlock]", list(stack))

    def held() -> int:
        shown = torch.randn(ROWS, WIDTH, device=cuda).requires_grad_()
        before = torch.cuda.memory_allocated(cuda)
        for block in blocks:
            shown = block(shown)
        held = torch.cuda.memory_allocated(cuda) - before
        shown.sum().backward()
        return held

    for block in blocks:
        block.measures = True
    recomputed = [held(), held()][1]  # the first pass allocates cuBLAS's workspace
    runs = [len(block.runs) for block in blocks]
    found = [block.measured() for block in blocks]
    assert runs == [2] * BLOCKS and {one.num_elements for one in found} == {ROWS * WIDTH}
    # A product on a GPU takes microseconds at the least, and these far less than a second.
    assert all(1e-6 < one.seconds * one.num_elements < 1 for one in found)
    for block, one in zip(blocks, found, strict=True):
        block.measures, block.limit = False, Limit(one.num_elements, one.length)
    kept = held() - recomputed
    assert kept == sum(one.nbytes * one.num_elements for one in found) > 0


@pytest.mark.parametrize("compiles", ["false", "auto"])
def test_training_is_that_of_none(
    compiles: str, device: torch.device, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit where blocks are not compiled: with all blocks kept, with some, and with none."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    own = dynamic_checkpoint.memory_left

    def fitted(mode: str, left: float | None) -> Any:
        monkeypatch.setattr(dynamic_checkpoint, "memory_left", own if left is None else lambda world: left)
        cfg = make_config(
            parts, dataset, tmp_path / "run", "precision=bf16", "pack=false", "micro_batch_size=6", "max_steps=5",
            f"compile={compiles}", f"activation_checkpointing={mode}",
        )  # fmt: skip
        state = build_run(cfg, device, None)
        results: list[StepResult] = []
        fit(state, cfg, Calls(results.append))
        kept = state.dynamic.kept if state.dynamic is not None else None
        return [r.loss for r in results], [r.grad_norm for r in results], kept and len(kept.limits)

    torch.use_deterministic_algorithms(True)
    try:
        none = fitted("none", None)
        found = [fitted("dynamic", left) for left in (None, 1e6, 0.0)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0][2] > found[1][2] >= found[2][2] == 0
    for one in found:
        if compiles == "false":
            assert one[:2] == none[:2]
        assert one[0] == pytest.approx(none[0], rel=0.03) and one[1] == pytest.approx(none[1], rel=0.05)
