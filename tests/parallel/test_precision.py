"""Norms compute in fp32 beside a bf16 model, on one rank and on several."""

from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from reference import EXPORTED, outcome, run_ranks
from small import Configure
from steps import begin
from torch import nn

from llava_fsdp.train.loop import train_step

BF16 = ["precision=bf16", "micro_batch_size=4", "global_batch_size=16"]


def test_norms_are_fp32_and_what_goes_between_layers_is_bf16(configure: Configure) -> None:
    """Of both kinds: the language model's, without a bias, and the frozen tower's, with one."""
    model = begin(single_world(), configure(*BF16)).model
    found = {n: m for n, m in model.named_modules() if "Norm" in type(m).__name__}
    kept = {p for norm in found.values() for p in norm.parameters()}
    assert {n.partition(".")[0] for n in found} == {"language_model", "vision_tower"}
    assert {p.dtype for p in kept} == {torch.float32}
    assert {p.dtype for p in model.parameters() if p not in kept} == {torch.bfloat16}
    for name, norm in found.items():
        with torch.no_grad():
            weight, bias = norm.get_parameter("weight"), getattr(norm, "bias", torch.zeros(()))
            weight.mul_(1.001)  # which bf16 has not: its next number above 1 is 1.0078
            shown = torch.randn(9, len(weight), dtype=torch.bfloat16)
            wide = shown.double()
            if not name.startswith("language_model"):
                wide = wide - wide.mean(1, keepdim=True)
            eps = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
            exact = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt() * weight + bias
            got = norm(shown)
            assert got.dtype == torch.bfloat16
            # rounded once: fp32's own rounding turns a few in ten thousand, a weight of 1 would turn one in six
            assert (got != exact.bfloat16()).float().mean() < 0.01, name


def test_an_update_below_a_step_of_bf16_is_seen(configure: Configure) -> None:
    """Of norms that start at 1; in bf16 they compute with 1 until they have moved by 1/512."""
    moved = {}
    for dtype in ("fp32", "bf16"):
        values = [f"precision.norm_dtype={dtype}", "max_steps=1", "optim.lr=1e-4", "optim.schedule=constant"]
        cfg = configure(*BF16, *values, "optim.warmup_ratio=0", to=dtype)
        state = begin(single_world(), cfg)
        for step in agreed_steps(state.loader):
            train_step(state, step, cfg, 0.0)
        assert (state.masters.named["language_model.norm.weight"] != 1).all()
        moved[dtype] = (state.model.get_parameter("language_model.norm.weight") != 1).float().mean()
    assert moved == {"fp32": 1, "bf16": 0}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tower", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_are_equal_to_the_bit_in_bf16(
    tower: bool, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Rows that differ only in when weights are gathered, with and without checkpointing, on two ranks.

    Norms are a unit of their own across all blocks, so that a block's recomputation meets them in the middle of it.
    """
    for activation_checkpointing in ("none", "full"):
        found = []
        for sharding in ("zero2", "zero3"):
            folder = tmp_path / f"{sharding}-{activation_checkpointing}"
            values = [*BF16, f"sharding={sharding}", f"activation_checkpointing={activation_checkpointing}", *EXPORTED]
            values.append("max_steps=2")
            if tower:
                values.append("model.train=[projector,language,vision]")
            pools[2].run(run_ranks, configure(*values, to=folder))
            found.append(outcome(folder))
        zero2, zero3 = found
        assert len(zero2.losses) > 1
        assert (zero2.losses, zero2.grad_norms) == (zero3.losses, zero3.grad_norms)
        assert all(torch.equal(zero2.weights[n], zero3.weights[n]) for n in zero2.weights)
