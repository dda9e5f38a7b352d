"""What only a CUDA GPU can show.

One GPU is enough for all of them; several ranks over NCCL need several.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import CPU
from loaders import agreed_steps
from small import make_config, write_wide_parts
from test_working_copy import (
    ACCUMULATION,
    BF16,
    OTHER_PRECISIONS,
    SAME_BITS_CASES,
    STEPS,
    assert_close_losses,
    assert_same_bits,
    assert_transfers_whole,
    build_run,
    export_and_reload,
    run_steps,
    same_bits_values,
    train_alone,
    train_sharded,
)
from transformers import AttentionInterface, AutoConfig

from llava_fsdp.config import Attention
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.model.packed_attention.attention import Boundaries, Kernel, Lengths, choose_kernel
from llava_fsdp.model.packed_attention.row_mask import RowMask, register_attention, shared_tokens
from llava_fsdp.parallel.precision.fp8 import check_fp8
from llava_fsdp.runtime.errors import ConfigError


@pytest.mark.parametrize(("stage", "sharding", "activation_checkpointing"), SAME_BITS_CASES)
def test_one_rank_equals_fully_shard_bit_for_bit(
    stage: str,
    sharding: str,
    activation_checkpointing: str,
    device: torch.device,
    parts: Path,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With kernels that repeat themselves: scattered additions on CUDA otherwise differ from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stage, values = same_bits_values(stage, sharding, activation_checkpointing)
    cfg = make_config(parts, dataset, tmp_path / "run", *values, stage=stage)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(train_alone(cfg, device), train_sharded(cfg, device))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_bf16_on_cuda_is_near_fp32_on_the_cpu(
    stage: str, device: torch.device, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    exact = make_config(parts, dataset, tmp_path / "run", *BF16, "precision=fp32", stage=stage)
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, stage=stage)
    assert_close_losses(train_alone(cfg, device), train_alone(exact, CPU), 0.03)


def test_fp32_on_cuda_is_fp32_on_the_cpu(device: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, "precision=fp32")
    assert_close_losses(train_alone(cfg, device), train_alone(cfg, CPU), 1e-4)


def test_peak_memory_is_reported(
    cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The peak covers masters, gradients and both moments in fp32, and the working copies; it goes into the report."""
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16)
    state = build_run(cfg, cuda, None)
    run_steps(state, cfg)
    peak = torch.cuda.max_memory_allocated(cuda) - before
    trained = sum(p.numel() for p in state.masters.named.values())
    record_property("peak_memory_bytes", peak)
    record_property("trained_parameters", trained)
    assert peak >= (4 + 4 + 8 + 2) * trained


def test_copies_that_nothing_waits_for_do_not_race(
    device: torch.device, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, "max_steps=12")
    assert assert_transfers_whole(cfg, device) == 12 * ACCUMULATION


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_arrive_pinned(workers: int, cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Copies out of pageable memory make the host wait, whatever `non_blocking` says."""
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, f"data.workers={workers}", "max_steps=1")
    state = build_run(cfg, cuda, None)
    for step in agreed_steps(state.loader):
        for micro in step.micro_batches:
            assert all(t.is_pinned() for t in micro.tensors.values() if t.numel())


def test_workers__steps_do_not_race(device: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, "data.workers=2", f"max_steps={STEPS}")
    assert assert_transfers_whole(cfg, device) == STEPS * ACCUMULATION


def test_export_reloads_on_cuda(device: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(
        parts, dataset, tmp_path / "run", f"max_steps={STEPS}", "export.enabled=true", "export.dtype=fp32"
    )
    assert export_and_reload(cfg, device) < 1e-4


HEADS = [pytest.param(8, 8, 64, id="heads of their own"), pytest.param(8, 2, 128, id="grouped heads")]


@pytest.mark.parametrize(("heads", "key_heads", "size"), HEADS)
@pytest.mark.parametrize("kernel", [Attention.varlen, Attention.flash])
@pytest.mark.parametrize("shared", [0, 100], ids=["", "a shared prompt"])
def test_attention_kernels_equal_sdpa_a_sample_at_a_time(
    shared: int, kernel: Attention, heads: int, key_heads: int, size: int, cuda: torch.device
) -> None:
    """Forward and backward, bf16 against fp32, with samples of one position and of many; and nothing crosses over, but
    from the second sample to the third, which may share its first tokens."""
    if kernel is Attention.flash and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    register_attention()
    lengths = (1, 300, 17, 64, 129)
    edges = boundaries(lengths, (0, 0, shared, 0, 0))
    row = RowMask(
        Boundaries(edges["cu_seqlens"].to(cuda), Lengths(lengths, max(lengths))),
        shared_prompt_tokens=shared_tokens(lengths, edges["shared"], edges["key_offsets"].to(cuda)) if shared else None,
    )
    dice = torch.Generator(cuda).manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads  # type: ignore[assignment]

    def drawn(count: int) -> torch.Tensor:
        return torch.randn((1, count, sum(lengths), size), device=cuda, generator=dice)

    inputs, wanted = [drawn(heads), drawn(key_heads), drawn(key_heads)], drawn(heads).transpose(1, 2)

    def attended(attention: Attention, dtype: torch.dtype, shown: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [part.to(dtype).requires_grad_() for part in shown]
        attend = AttentionInterface()[Kernel(attention, "").name]
        output, _ = attend(module, *parts, row, scaling=size**-0.5, dropout=0.0)
        gradients = torch.autograd.grad((output * wanted.to(dtype)).sum(), parts)
        return [output.float(), *(g.float() for g in gradients)]

    expected = attended(Attention.sdpa, torch.float32, inputs)
    got = attended(kernel, torch.bfloat16, inputs)
    for ours, exact in zip(got, expected, strict=True):
        assert (ours - exact).norm() < 0.01 * exact.norm()
    changed = [part.clone() for part in inputs]
    for part in changed:
        part[:, :, 1:301] += 1
    after = attended(kernel, torch.bfloat16, changed)[0]
    end = 318 if shared else 301
    assert torch.equal(after[:, end:], got[0][:, end:]) and torch.equal(after[:, :1], got[0][:, :1])
    assert not torch.equal(after[:, 1:301], got[0][:, 1:301])


def test_packed_training_on_cuda_is_near_fp32(device: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """bf16 with what `attention=auto` chooses, and fp32 with SDPA a sample at a time."""
    packed = ("precision=bf16", f"max_steps={STEPS}", "tokens_per_micro_batch=300")
    traces = []
    for overrides, place in (((), device), (("precision=fp32",), device), (("precision=fp32", "pack=false"), CPU)):
        kept = [v for v in packed if "pack=false" not in overrides or not v.startswith("tokens")]
        cfg = make_config(parts, dataset, tmp_path / "run", *kept, *overrides)
        traces.append(run_steps(build_run(cfg, place, None), cfg))
    assert_close_losses(traces[0], traces[2], 0.03)
    assert_close_losses(traces[1], traces[2], 1e-3)


def test_wide_heads_choose_torchs_kernel(cuda: torch.device) -> None:
    config = AutoConfig.for_model("llama", hidden_size=512, num_attention_heads=8)
    assert choose_kernel(Attention.auto, config, cuda, torch.bfloat16).attention is Attention.varlen


@pytest.mark.parametrize("name", OTHER_PRECISIONS)
def test_other_precisions_on_one_rank_equal_fully_shard(
    name: str, device: torch.device, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come near to fp32."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, *OTHER_PRECISIONS[name])
    exact = make_config(parts, dataset, tmp_path / "run", *BF16, "precision=fp32")
    torch.use_deterministic_algorithms(True)
    try:
        alone = train_alone(cfg, device)
        assert_same_bits(alone, train_sharded(cfg, device))
        assert_same_bits(alone, train_alone(cfg, device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close_losses(alone, train_alone(exact, CPU), 0.05)


def test_fp16_overflows_are_skipped(device: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    values = [
        "precision=fp16",
        f"max_steps={STEPS}",
        "precision.scaler.initial_power=40",
        "precision.scaler.hysteresis=1",
    ]
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, *values)
    state = build_run(cfg, device, None)
    before = {name: p.detach().clone() for name, p in state.masters.named.items()}
    run_steps(state, cfg)
    assert state.scaler is not None and (state.skipped, state.scaler.scale) == (STEPS, 2.0 ** (40 - STEPS))
    assert all(torch.equal(before[name], p) for name, p in state.masters.named.items())


def test_fp8_is_near_bf16(fp8_device: torch.device, dataset: Path, tmp_path: Path) -> None:
    """In products of any number of tokens, alone and with fp8 all-gather; by fp8 kernels, not in emulation."""
    wide = write_wide_parts(tmp_path / "wide")
    values = [*BF16, "precision=fp8", "optim.lr=1e-3"]
    cfg = make_config(wide, dataset, tmp_path / "run", *values)
    bf16 = train_alone(make_config(wide, dataset, tmp_path / "run", *values, "precision=bf16"), fp8_device)
    with torch.profiler.profile() as profile:
        alone = train_alone(cfg, fp8_device)
    assert any("scaled_mm" in event.key for event in profile.key_averages())
    assert alone.losses != bf16.losses
    assert_close_losses(alone, bf16, 0.05)
    assert_close_losses(train_sharded(cfg, fp8_device), bf16, 0.05)


def test_stage_1_in_fp8_is_near_bf16(fp8_device: torch.device, dataset: Path, tmp_path: Path) -> None:
    """Frozen layers, whose scales are rowwise; alone and sharded."""
    wide = write_wide_parts(tmp_path / "wide")
    values = [*BF16, "precision=fp8", "optim.lr=1e-3", "model.train=[projector]"]
    bf16 = train_alone(make_config(wide, dataset, tmp_path / "run", *values, "precision=bf16"), fp8_device)
    cfg = make_config(wide, dataset, tmp_path / "run", *values)
    alone = train_alone(cfg, fp8_device)
    assert alone.losses != bf16.losses
    assert_close_losses(alone, bf16, 0.05)
    assert_close_losses(train_sharded(cfg, fp8_device), bf16, 0.05)


def test_fp8_is_refused_on_older_gpus(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        check_fp8(cuda)
