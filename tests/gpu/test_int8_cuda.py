"""Products in int8 on a CUDA GPU, by torchao's Triton kernel."""

from pathlib import Path

import pytest
import torch
from small import make_config, write_wide_parts
from test_int8_mixed import assert_products_are_of_rounded_rows
from test_working_copy import BF16, assert_close_losses, train_alone, train_sharded


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [2, 7, 33, 1029])
def test_the_three_products_are_of_rounded_rows(tokens: int, biased: bool, int8_device: torch.device) -> None:
    assert_products_are_of_rounded_rows(tokens, biased, int8_device)


@pytest.mark.parametrize("compiles", ["false", "auto"])
def test_losses_are_near_those_of_bf16(compiles: str, int8_device: torch.device, dataset: Path, tmp_path: Path) -> None:
    """Alone and through `fully_shard`, with activation checkpointing too."""
    wide = write_wide_parts(tmp_path / "wide")
    values = [*BF16, f"compile={compiles}", "optim.lr=1e-3"]
    bf16, int8, recomputed = (
        make_config(wide, dataset, tmp_path / "run", *values, *own)
        for own in (
            ["precision=bf16"],
            ["precision=int8_mixed", "activation_checkpointing=none"],
            ["precision=int8_mixed", "activation_checkpointing=full"],
        )
    )
    exact = train_alone(bf16, int8_device)
    alone = train_alone(int8, int8_device)
    assert alone.losses != exact.losses
    assert_close_losses(alone, exact, 0.05)
    assert_close_losses(train_alone(recomputed, int8_device), exact, 0.05)
    assert_close_losses(train_sharded(int8, int8_device), exact, 0.05)
