"""All floating-point memory that a training step computes on begins at a multiple of 64 bytes.

Kernels may give other last bits elsewhere: MKL's product of a matrix and a vector does, at most offsets. The address of
a NumPy array or of a mapped file may change from start to start, and the same run would then differ. Where a view
begins within its memory is the same in every start, so the address of the memory is what counts.
"""

from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool, World, single_world
from small import Configure
from steps import begin, run_steps
from tiers import slow_after
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llava_fsdp.config import Config

ALIGNMENT = 64


class Unaligned(TorchDispatchMode):
    """Notes every operation that reads floating-point memory which does not begin at a multiple of 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        for value in tree_leaves((args, kwargs or {})):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and is_unaligned(value):
                self.found.add(f"{func} {value.dtype} {tuple(value.shape)}")
        return func(*args, **(kwargs or {}))


def is_unaligned(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.untyped_storage().data_ptr() % ALIGNMENT != 0


def unaligned(world: World, cfg: Config) -> tuple[list[str], list[str], int]:
    """Operations of two steps that read unaligned memory; unaligned weights and buffers; how many operations ran."""
    state = begin(world, cfg)
    with Unaligned() as seen:
        run_steps(state, cfg)
    kept = [*state.model.named_parameters(), *state.model.named_buffers(), *state.masters.named.items()]
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in kept}
    return sorted(seen.found), sorted(n for n, v in local.items() if v.numel() and is_unaligned(v)), seen.operations


CASES = {
    "fp32": (),
    "bf16": ("precision=bf16", "activation_checkpointing=full"),
    "workers": ("data.workers=1", "data.prefetch=1"),
    "micro-batches": ("tokens_per_micro_batch=257", "data.max_length=251", "loss.chunk_tokens=7"),
    "int8": ("precision.moment_dtype=int8",),
    "offload": ("offload=optimizer",),
}


@pytest.mark.parametrize("case", slow_after(1, CASES))
def test_a_step_computes_on_aligned_memory(case: str, configure: Configure) -> None:
    operations, kept, count = unaligned(single_world(), configure("max_steps=2", *CASES[case]))
    assert (operations, kept) == ([], [])
    assert count > 500


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", slow_after(1, ["zero3", "zero2"]))
def test_ranks_compute_on_aligned_memory(strategy: str, configure: Configure, pools: dict[int, RankPool]) -> None:
    stage = "pretrain" if strategy == "zero2" else "finetune"
    cfg = configure("max_steps=2", f"sharding={strategy}", "precision=bf16", stage=stage)
    for found in pools[2].run(unaligned, cfg):
        assert found[:2] == ([], [])


def test_what_is_unaligned_is_seen() -> None:
    memory = np.zeros(256, dtype=np.uint8)
    begin = (16 - memory.ctypes.data) % ALIGNMENT
    values = torch.from_numpy(memory[begin : begin + 128].view(np.float32))
    with Unaligned() as seen:
        values + 1
        torch.zeros(3)[1:] + 1  # a view: its memory begins where it should
    assert seen.found == {"aten.add.Tensor torch.float32 (32,)"}
