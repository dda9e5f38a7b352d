"""Attention for packed rows that several ranks share. Each rank holds some positions of the row, but a token attends to
earlier tokens on any rank.

There are two ways, both exact. `ulysses` (arXiv 2309.14509): an all-to-all gives each rank all positions of some heads;
after attention, a second one gives them back. `gather` (arXiv 2407.21783 section 3.3.2): each rank collects the keys
and values of all positions and computes its own queries. Both are put around the kernels of
model/packed_attention/attention.py, which do not know that several ranks share a row.

The collectives are given as functions (`parallel/context/context.py`), so that this module knows nothing of process
groups.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from llava_fsdp.config import ContextHow
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.model.packed_attention.attention import (
    Attend,
    Boundaries,
    Kernel,
    Lengths,
    PackedRow,
    kernel_of,
)
from llava_fsdp.model.packed_attention.row_mask import attend_with, make_row_mask
from llava_fsdp.runtime.errors import ConfigError

Collective = Callable[[torch.Tensor], torch.Tensor]
"""A differentiable collective operation."""


@dataclass(frozen=True)
class ContextPlan:
    """How several ranks share the attention of each packed row."""

    how: ContextHow
    """`ulysses` or `gather`."""
    cut: ContextCut
    reason: str
    """Why this way was chosen, for the log."""


def plan_context(how: ContextHow, language: PretrainedConfig, size: int, index: int, tensor: int = 1) -> ContextPlan:
    """Choose how the `size` ranks that share a row compute attention. `ulysses`: each rank computes all positions of
    the row for some of the heads. `gather`: each rank computes its own positions with the keys of all. `auto` is
    `ulysses` if the ranks can divide the heads evenly, else `gather`.

    Args:
        how: the setting `parallel.context_how`.
        language: configuration of the language model.
        index: number of this rank among those that share a row.
        tensor: number of ranks that each have some of the heads already (`parallel.tensor`).

    Returns:
        The plan, with the positions of a row that this rank has (`ContextCut`). With `gather` they are two chunks, an
            early and a late one (`paired`), so that all ranks have about the same work.

    Raises:
        ConfigError: `ulysses` is asked for, and `size` does not divide the number of heads.
    """
    heads = language.num_attention_heads // tensor
    divides = heads % size == 0
    if how is ContextHow.ulysses and not divides:
        raise ConfigError(
            f"parallel.context_how=ulysses gives each rank some of the {heads} attention heads, and "
            f"parallel.context={size} does not divide them; choose a divisor, or parallel.context_how=gather"
        )
    reason = "as configured"
    if how is ContextHow.auto:
        how = ContextHow.ulysses if divides else ContextHow.gather
        reason = f"{size} ranks {'share' if divides else 'cannot share'} {heads} heads evenly"
    return ContextPlan(how, ContextCut(size, index, paired=how is ContextHow.gather), reason)


def share_attention(
    language_model: nn.Module,
    kernel: Kernel,
    plan: ContextPlan,
    exchange: Collective,
    gather: Collective,
    name: str = "llava_fsdp_context",
) -> None:
    """Make a language model's attention work on rows that several ranks share. Rows without sample boundaries (answers
    in validation) are still computed by one rank.

    Args:
        kernel: the attention implementation for packed rows, which runs on what a rank computes.
        plan: how the ranks share attention, `ulysses` or `gather`, and which positions of a row this rank has.
        exchange: all-to-all on [ranks, ...], as `exchange_in` returns it; used by `ulysses`.
        gather: [n, ...] -> [ranks * n, ...], the tensors of all ranks in order; used by `gather`.
        name: name in transformers' AttentionInterface and AttentionMaskInterface, where it stays registered until the
            process ends.
    """
    config: Any = language_model.config
    attend = kernel_of(kernel.attention)
    assert attend is not None, "the kernel was chosen because it can run"
    mask = make_row_mask
    if plan.how is ContextHow.ulysses:
        function = attend_with(attend, lambda chosen, _: Ulysses(chosen, plan.cut, exchange))
    else:
        function = attend_with(attend, lambda chosen, row: GatheredKeys(chosen, gather, plan.cut.size, row.chunks))
        mask = partial(make_row_mask, chunks_of=partial(row_chunks_of, cut=plan.cut))
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    config._attn_implementation = name


class Ulysses:
    """Attention for packed rows in which each rank computes all positions of the row for some of the heads."""

    def __init__(self, attend: Attend, cut: ContextCut, exchange: Collective):
        self.attend = attend
        self.size, self.index = cut.size, cut.index
        self.exchange = exchange

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
    ) -> torch.Tensor:
        """Compute attention of all positions for some of the heads, between two all-to-alls: query, key, value [1,
        heads, own positions, width] -> [1, own positions, heads, width]."""
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:  # the ranks cannot divide the key heads evenly: repeat them until they can
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        form = row.form
        if form.sinks is not None:
            # the sinks of the heads that this rank computes
            form = replace(form, sinks=form.sinks.chunk(self.size)[self.index])
        query, key, value = (self.to_heads(part) for part in (query, key, value))
        return self.to_positions(self.attend(module, query, key, value, replace(row, form=form)))

    def to_heads(self, part: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's positions of all heads for all positions of its own heads, by an all-to-all: [1, heads,
        own positions, width] -> [1, own heads, positions, width]."""
        _, heads, tokens, width = part.shape
        sent = part.reshape(self.size, heads // self.size, tokens, width)
        got = self.exchange(sent.contiguous())  # from each rank its positions
        return got.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def to_positions(self, part: torch.Tensor) -> torch.Tensor:
        """Exchange all positions of this rank's heads for its own positions of all heads, by an all-to-all: [1,
        positions, own heads, width] -> [1, own positions, heads, width]."""
        _, tokens, heads, width = part.shape
        sent = part.reshape(self.size, tokens // self.size, heads, width)
        got = self.exchange(sent.contiguous())  # from each rank its heads
        return got.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)


@dataclass(frozen=True, eq=False)
class RowChunk:
    """A chunk of a row's queries, and the keys that they attend to, which begin at its first sample and end with it."""

    keys: slice
    """Positions of the keys in the row."""
    tokens: int
    """Number of queries."""
    queries_at: Boundaries
    keys_at: Boundaries


@dataclass(frozen=True, eq=False)
class RowChunks:
    """This rank's chunks of a row, as one object: torch.compile would compile again for each new list of numbers."""

    each: tuple[RowChunk, ...]


def row_chunks_of(row: Boundaries, cut: ContextCut) -> RowChunks:
    """Return the chunks of a row that this rank computes."""
    chunks = cut.chunks(sum(row.lengths.each))
    return RowChunks(tuple(row_chunk_of(row, begin, end) for begin, end in chunks))


def row_chunk_of(row: Boundaries, begin: int, end: int) -> RowChunk:
    """Return the chunk [begin, end) of a row's queries, with the keys that they attend to: those from the beginning of
    the chunk's first sample to the end of the chunk. The host does not wait for the device."""
    lengths = row.lengths.each
    ends = list(itertools.accumulate(lengths))
    i, j = bisect_right(ends, begin), bisect_left(ends, end) + 1  # the chunk has tokens of the samples i to j - 1
    first = ends[i] - lengths[i]
    edges = [first, *ends[i:j]]
    queries, keys = [min(max(edge, begin), end) for edge in edges], [min(edge, end) for edge in edges]
    on_device = row.cu_seqlens[i : j + 1]
    return RowChunk(
        keys=slice(first, end),
        tokens=end - begin,
        queries_at=Boundaries(on_device.clamp(begin, end) - begin, lengths_between(queries)),
        keys_at=Boundaries(on_device.clamp(max=end) - first, lengths_between(keys)),
    )


def lengths_between(edges: Sequence[int]) -> Lengths:
    """Return the lengths of samples, given where the first one begins and where each ends."""
    each = tuple(end - begin for begin, end in itertools.pairwise(edges))
    return Lengths(each, max(each))


class GatheredKeys:
    """Attention for packed rows in which each rank computes the queries of its own positions, with the keys and values
    of all positions of the row."""

    def __init__(self, attend: Attend, gather: Collective, size: int, row_chunks: RowChunks):
        """Take the kernel, an all-gather of the `size` ranks, and this rank's chunks of the row."""
        self.attend = attend
        self.gather = gather
        self.size = size
        self.row_chunks = row_chunks

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
    ) -> torch.Tensor:
        """Compute attention of this rank's queries with the gathered keys and values of the row: query, key, value [1,
        heads, own positions, width] -> [1, own positions, heads, width]."""
        key, value = self.gathered(key), self.gathered(value)
        # each chunk of the row that this rank has: number of queries, slice of their keys, sample boundaries of both
        queries = query.split([part.tokens for part in self.row_chunks.each], dim=2)
        found = []
        for chunk_query, part in zip(queries, self.row_chunks.each, strict=True):
            keys, values = key[:, :, part.keys], value[:, :, part.keys]
            found.append(
                self.attend(module, chunk_query, keys, values, PackedRow(part.queries_at, row.form, part.keys_at))
            )
        return torch.cat(found, dim=1)

    def gathered(self, states: torch.Tensor) -> torch.Tensor:
        """Gather the keys or values of all positions, in their order in the row: [1, heads, own positions, width] ->
        [1, heads, positions, width]."""
        every = self.gather(states[0].transpose(0, 1).contiguous())  # [positions, heads, width], rank after rank
        halves = every.unflatten(0, (self.size, 2, -1))  # rank i has sent chunks i and 2 * size - 1 - i
        return torch.cat([halves[:, 0], halves[:, 1].flip(0)]).flatten(0, 1).transpose(0, 1)[None]
