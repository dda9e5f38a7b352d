"""Attention of rows that several ranks process together, with the kernels of CUDA."""

import itertools

import pytest
import torch

from llava_fsdp.config import Attention
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.model.packed_attention.attention import (
    Attend,
    AttentionForm,
    Boundaries,
    Lengths,
    PackedRow,
    each_alone,
    kernel_of,
)
from llava_fsdp.parallel.context.context_attention import GatheredKeys, Ulysses, row_chunks_of

pytestmark = pytest.mark.gpu
LENGTHS = (1, 3000, 1, 67, 900, 127)
FORMS = [AttentionForm(), AttentionForm(window=300), AttentionForm(scaling=0.2)]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def kernel(attention: Attention) -> Attend:
    if attention is Attention.flash:
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    found = kernel_of(attention)
    if found is None:
        pytest.skip("this torch has no varlen_attn")
    return found


def one_after_the_other(attend: Attend, size: int, how: str, row: PackedRow, *heads: torch.Tensor) -> torch.Tensor:
    """What the ranks of a row compute, put together; each runs alone, and gets what the others would send."""
    cuts = [ContextCut(size, index, paired=how == "gather") for index in range(size)]
    here = [torch.from_numpy(cut.positions(sum(LENGTHS))).to(heads[0].device) for cut in cuts]
    out = torch.empty_like(heads[0]).transpose(1, 2)
    for cut, own in zip(cuts, here, strict=True):
        parts = row_chunks_of(row.queries, cut)
        key, value = (torch.cat([part[0, :, other].transpose(0, 1) for other in here]) for part in heads[1:])
        every = iter([key, value])
        gathered = GatheredKeys(attend, lambda _, every=every: next(every), size, parts)
        query, *pair = (part[:, :, own] for part in heads)
        out[:, own] = gathered(torch.nn.Module(), query, pair[0], pair[1], row)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "scaling"])
@pytest.mark.parametrize("attention", [Attention.varlen, Attention.flash])
def test_queries_are_the_last_tokens_of_their_keys(
    attention: Attention, form: AttentionForm, dtype: torch.dtype, cuda: torch.device
) -> None:
    """Unequal lengths of queries and keys, several samples, fewer heads of keys; against SDPA a sample in fp32."""
    attend = kernel(attention)
    torch.manual_seed(0)
    heads = [torch.randn(1, n, sum(LENGTHS), 64, device=cuda, dtype=dtype) for n in (8, 2, 2)]
    begins = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=cuda)
    row = PackedRow(Boundaries(begins, Lengths(LENGTHS, max(LENGTHS))), form)
    query, key, value = (part.float() for part in heads)
    whole = each_alone(torch.nn.Module(), query, key, value, row)
    for size in (2, 4):
        found = one_after_the_other(attend, size, "gather", row, *heads)
        assert (found.float() - whole).abs().max() < 0.03


@pytest.mark.parametrize("compiled", [False, True])
def test_heads_are_exchanged_under_compile(compiled: bool, cuda: torch.device) -> None:
    """One rank whose exchange returns what it sends: the row is its own part, in bf16."""
    attend = kernel(Attention.varlen)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, sum(LENGTHS), 64, device=cuda, dtype=torch.bfloat16) for n in (8, 2, 2))
    begins = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=cuda)
    row = PackedRow(Boundaries(begins, Lengths(LENGTHS, max(LENGTHS))), AttentionForm())
    shared = Ulysses(attend, ContextCut(1, 0, paired=False), torch.clone)
    run = torch.compile(shared) if compiled else shared
    expected = attend(torch.nn.Module(), q, k, v, row)
    assert torch.equal(run(torch.nn.Module(), q, k, v, row), expected)
