"""CUDA's own word for it: nothing between a step's first micro-batch and its end makes the host wait."""

import warnings
from pathlib import Path

import pytest
import torch
from loaders import agreed_steps
from small import make_config
from test_working_copy import build_run

from llava_fsdp.train.gradients import clip_gradients
from llava_fsdp.train.loop import train_step


@pytest.mark.parametrize("activation_checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("pack", ["true", "false"])
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_no_wait_but_the_planned_one(
    stage: str, pack: str, activation_checkpointing: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cuda = torch.device("cuda", 0)
    torch.cuda.set_device(cuda)
    cfg = make_config(
        parts, dataset, tmp_path, "precision=bf16", f"pack={pack}", "micro_batch_size=6", "optim.clip=0.5",
        f"activation_checkpointing={activation_checkpointing}", "max_steps=3", stage=stage,
    )  # fmt: skip
    state = build_run(cfg, cuda, None)
    first, second, third = list(agreed_steps(state.loader))
    train_step(state, first, cfg, 0.0)  # makes the optimizer's states, and what kernels need
    try:
        torch.cuda.set_sync_debug_mode("error")
        for micro in second.micro_batches:
            micro = state.loader.to_device(micro)
            (micro.scale * state.model(**micro.inputs)).backward()
        clip_gradients(state.masters, cfg.optim.clip)
        state.optimizer.step()
        state.masters.refresh()
        state.optimizer.zero_grad(set_to_none=True)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train_step(state, third, cfg, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits
