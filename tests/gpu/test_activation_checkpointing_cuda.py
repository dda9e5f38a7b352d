"""Activation checkpointing and the loss on a CUDA GPU: streams, pinned memory, Triton, bytes of the device."""

from pathlib import Path
from typing import cast

import pytest
import torch
from loss_bytes import loss_bytes
from small import make_config
from test_working_copy import BF16, assert_same_bits, build_run, run_steps, train_alone
from torch import nn

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.loss import Labels, chunked_loss, whole_loss
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.activation_offload import OffloadedTensor

BLOCKS, ROWS, WIDTH = 8, 4096, 1024
INPUT = 4 * ROWS * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        return shown + nn.functional.gelu(self.inner(shown))


def stack_of(mode: ActivationCheckpointing, device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    stack = nn.ModuleList(Block() for _ in range(BLOCKS)).to(device)
    apply_activation_checkpointing([stack], ActivationCheckpointingConfig(mode=mode, budget=None), device)
    return stack


def through(stack: nn.ModuleList, shown: torch.Tensor, busy: bool) -> torch.Tensor:
    for block in stack:
        if busy:
            torch.cuda._sleep(2_000_000)
        shown = block(shown)
    return shown


@pytest.mark.parametrize("busy", [False, True])
def test_inputs_on_the_host_give_the_same_bits(busy: bool, device: torch.device) -> None:
    """Also where the computation is behind, so that copies wait for it and memory is asked for again early."""
    found = []
    for mode in (ActivationCheckpointing.full, ActivationCheckpointing.offload):
        stack = stack_of(mode, device)
        for _ in range(3):
            shown = torch.randn(ROWS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(1))
            through(stack, shown.requires_grad_(), busy).square().sum().backward()
        found.append([shown.grad, *(p.grad for p in stack.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_inputs_on_the_host_are_not_on_the_device(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the forward pass only the last input is still held, whose copy may be under way, and the output."""
    pinned = []
    copy = OffloadedTensor.copy
    monkeypatch.setattr(
        OffloadedTensor, "copy", lambda self, *a: (pinned.append(self.host.is_pinned()), copy(self, *a))[1]
    )
    held = {}
    through(stack_of(ActivationCheckpointing.full, cuda), torch.randn(ROWS, WIDTH, device=cuda), busy=False)  # cuBLAS
    for mode in (ActivationCheckpointing.full, ActivationCheckpointing.offload):
        stack = stack_of(mode, cuda)
        shown = torch.randn(ROWS, WIDTH, device=cuda).requires_grad_()
        before = torch.cuda.memory_allocated(cuda)
        output = through(stack, shown, busy=False)
        held[mode] = torch.cuda.memory_allocated(cuda) - before
        output.sum().backward()
    assert held[ActivationCheckpointing.full] == BLOCKS * INPUT
    assert held[ActivationCheckpointing.offload] <= 2 * INPUT
    assert pinned and all(pinned)


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_training_gives_the_bits_of_none(
    mode: str, device: torch.device, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        traces = [
            train_alone(
                make_config(parts, dataset, tmp_path / "run", *BF16, f"activation_checkpointing={name}"), device
            )
            for name in ("none", mode)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(*traces)


@pytest.mark.parametrize("pack", [True, False])
def test_a_budget_is_near_none(pack: bool, cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With Triton, and packed with the kernel that `attention=auto` chooses."""
    traces = []
    for mode in ("none", "budget"):
        cfg = make_config(
            parts, dataset, tmp_path / "run", "precision=bf16", f"pack={str(pack).lower()}",
            f"activation_checkpointing={mode}",
            "micro_batch_size=3", "max_steps=3", "compile=auto" if mode == "budget" else "compile=false",
        )  # fmt: skip
        traces.append(run_steps(build_run(cfg, cuda, None), cfg))
    assert traces[1].losses == pytest.approx(traces[0].losses, rel=0.03)
    assert traces[1].norms == pytest.approx(traces[0].norms, rel=0.05)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_are_near_uncompiled_ones(
    mode: str, pack: bool, device: torch.device, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """With Triton, and compiled once for the lengths of all steps."""
    traces = []
    for compiles in ("false", "auto"):
        cfg = make_config(
            parts, dataset, tmp_path / "run", "precision=bf16", f"pack={str(pack).lower()}",
            f"activation_checkpointing={mode}",
            "micro_batch_size=3", "max_steps=3", f"compile={compiles}",
        )  # fmt: skip
        torch._dynamo.reset()
        state = build_run(cfg, device, None)
        kernel = cast(Llava, state.model).kernel
        found = choose_compiling(cfg, device, kernel and kernel.attention)
        assert (state.compilations is not None) is found.on
        traces.append(run_steps(state, cfg))
    assert traces[1].losses == pytest.approx(traces[0].losses, rel=0.03)
    assert traces[1].norms == pytest.approx(traces[0].norms, rel=0.05)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("chunk", [512, 4096])
def test_the_loss_takes_what_its_formula_says(chunk: int, trains: bool, cuda: torch.device) -> None:
    """Beside vectors and cuBLAS's workspace, which is there once."""
    labels, vocabulary, width = 2048, 32000, 1024
    dice = torch.Generator(cuda).manual_seed(0)
    hidden = torch.randn((labels, width), device=cuda, generator=dice).bfloat16().requires_grad_()
    weight = (torch.randn((vocabulary, width), device=cuda, generator=dice) / 50).bfloat16().requires_grad_(trains)
    ids = torch.randint(vocabulary, (labels,), device=cuda, generator=dice)
    chunked_loss(hidden[:8], weight, Labels(ids[:8]), 8).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    found = chunked_loss(hidden, weight, Labels(ids), chunk)
    peak, held = loss_bytes(labels, vocabulary, width, 2, trains, chunk)
    slack = 3 << 20  # the allocator rounds large blocks up to 2 MiB
    assert abs(torch.cuda.max_memory_allocated(cuda) - before - peak) < slack
    assert abs(torch.cuda.memory_allocated(cuda) - before - held) < slack
    assert found.item() == pytest.approx(whole_loss(hidden, weight, Labels(ids)).item(), rel=1e-5)
