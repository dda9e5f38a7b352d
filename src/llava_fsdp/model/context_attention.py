"""Attention under context parallelism: each rank has some positions of a packed row, and attends over all of them.

Two ways are exact for any samples in a row. `ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all exchanges
positions for heads, the usual kernel runs on all positions of some heads, and another all-to-all goes back. `gather`
(Llama 3, arXiv 2407.21783 section 3.3.2): keys and values of all positions are gathered, and the kernel runs on this
rank's queries. Both are put around the kernels of model/attention.py, which do not know that several ranks share a row.

The collectives are given as functions (`distributed/context.py`), so that this module knows nothing of process groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from llava_fsdp.config import ContextHow
from llava_fsdp.model.attention import (
    Attend,
    Boundaries,
    Kernel,
    Lengths,
    PackedRow,
    attend_with,
    kernel_of,
)
from llava_fsdp.runtime.context_cut import ContextCut
from llava_fsdp.runtime.errors import ConfigError

Collective = Callable[[torch.Tensor], torch.Tensor]
"""Type of a differentiable collective operation."""


@dataclass(frozen=True)
class ContextPlan:
    """How several ranks share the attention of each packed row."""

    how: ContextHow
    """`ulysses` or `gather`."""
    cut: ContextCut
    reason: str
    """Why this way was chosen, for the log."""


def plan_context(how: ContextHow, language: PretrainedConfig, size: int, index: int) -> ContextPlan:
    """Choose how the `size` ranks that share a row attend; `auto` is `ulysses` if it can share out the heads.

    Args:
        language: configuration of the language model.
        index: number of this rank among those that share a row.

    Raises:
        ConfigError: `ulysses` is asked for, and `size` does not divide the number of heads.
    """
    heads = language.num_attention_heads
    divides = heads % size == 0
    if how is ContextHow.ulysses and not divides:
        raise ConfigError(
            f"parallel.context_how=ulysses gives each rank some of the {heads} attention heads, and "
            f"parallel.context={size} does not divide them; set parallel.context_how=gather"
        )
    if how is ContextHow.gather or not divides:
        reason = "as configured" if how is ContextHow.gather else f"{size} ranks cannot share {heads} heads evenly"
        return ContextPlan(ContextHow.gather, ContextCut(size, index, head_tail=True), reason)
    reason = "as configured" if how is ContextHow.ulysses else f"{size} ranks share {heads} heads evenly"
    return ContextPlan(ContextHow.ulysses, ContextCut(size, index, head_tail=False), reason)


def share_attention(
    language_model: nn.Module,
    kernel: Kernel,
    plan: ContextPlan,
    exchange: Collective,
    gather: Collective,
    name: str = "llava_fsdp_context",
) -> None:
    """Make a language model attend over rows that several ranks process together. Rows that are not packed (those of
    answers to validation questions) are computed by each rank alone, as before.

    Args:
        exchange: sends part i of a tensor [ranks, ...] to rank i, and returns what all ranks have sent here, in order.
        gather: [n, ...] -> [ranks * n, ...], the tensors of all ranks in order.
        name: name of the attention implementation in transformers' AttentionInterface.
    """
    config: Any = language_model.config
    attend = kernel_of(kernel.attention)
    assert attend is not None, "the kernel was chosen because it can run"
    if plan.how is ContextHow.ulysses:
        function = attend_with(attend, lambda chosen, _: Ulysses(chosen, plan.cut, exchange))
    else:
        function = attend_with(attend, lambda chosen, row_chunks: GatheredKeys(chosen, gather, row_chunks))
        language_model.register_forward_pre_hook(GiveRowChunks(plan.cut), with_kwargs=True)
    AttentionInterface.register(name, function)
    config._attn_implementation = name


class Ulysses:
    """Attention function for packed rows (several samples end to end) whose positions are divided among ranks. Each
    rank computes all positions of the row for some of the heads."""

    def __init__(self, attend: Attend, cut: ContextCut, exchange: Collective):
        self.attend = attend
        self.size, self.index = cut.size, cut.index
        self.exchange = exchange

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
    ) -> torch.Tensor:
        """Compute attention; query, key and value are [1, heads, own positions, size], the result is [1, own positions,
        heads, size]."""
        repeats = self.size // math.gcd(key.shape[1], self.size)
        if repeats > 1:  # fewer heads of keys than ranks, or a number that the ranks cannot share out
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        form = row.form
        if form.sinks is not None:
            form = replace(form, sinks=form.sinks.chunk(self.size)[self.index])
        query, key, value = (self.to_heads(part) for part in (query, key, value))
        return self.to_positions(self.attend(module, query, key, value, PackedRow(row.queries, form)))

    def to_heads(self, part: torch.Tensor) -> torch.Tensor:
        """[1, heads, own positions, size] -> [1, own heads, positions, size]"""
        _, heads, tokens, width = part.shape
        sent = part.reshape(self.size, heads // self.size, tokens, width)
        got = self.exchange(sent.contiguous())  # from each rank its positions
        return got.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def to_positions(self, part: torch.Tensor) -> torch.Tensor:
        """[1, positions, own heads, size] -> [1, own positions, heads, size]"""
        _, tokens, heads, width = part.shape
        sent = part.reshape(self.size, tokens // self.size, heads, width)
        got = self.exchange(sent.contiguous())  # from each rank its heads
        return got.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)


@dataclass(frozen=True, eq=False)
class RowChunk:
    """One chunk of a row's queries, and the keys that they attend to: those from the beginning of the chunk's first
    sample to the end of the chunk."""

    keys: slice
    """Positions of the keys in the row."""
    tokens: int
    """Number of queries."""
    queries_at: Boundaries
    keys_at: Boundaries


@dataclass(frozen=True, eq=False)
class RowChunks:
    """This rank's chunks of a row. This is a class and not a list, because torch.compile would compile a layer again
    for each new list of numbers."""

    each: tuple[RowChunk, ...]
    order: torch.Tensor
    """For each position of the row, its index in the positions of all ranks, concatenated in rank order, int64
    [tokens]."""


class GiveRowChunks:
    """Forward pre-hook of a language model that adds the argument `row_chunks`, once for all layers."""

    def __init__(self, cut: ContextCut):
        self.cut = cut

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        lengths: Lengths | None = kwargs.get("segment_lengths")
        if lengths is None:
            return args, kwargs
        return args, {**kwargs, "row_chunks": row_chunks_of(lengths.each, self.cut, kwargs["cu_seqlens"].device)}


def row_chunks_of(lengths: Sequence[int], cut: ContextCut, device: torch.device) -> RowChunks:
    """Return the chunks of a row that this rank computes.

    Args:
        lengths: lengths of the row's samples.
    """
    tokens = sum(lengths)
    every = [ContextCut(cut.size, rank, cut.head_tail).positions(tokens) for rank in range(cut.size)]
    order = torch.cat([torch.from_numpy(positions) for positions in every]).argsort()
    return RowChunks(tuple(row_chunk_of(lengths, *chunk, device) for chunk in cut.chunks(tokens)), order.to(device))


def row_chunk_of(lengths: Sequence[int], begin: int, end: int, device: torch.device) -> RowChunk:
    """Return the chunk [begin, end) of a row whose samples have the given lengths."""
    queries, keys, first, start = [], [], begin, 0
    for length in lengths:
        low, high = max(begin, start), min(end, start + length)
        if low < high:
            queries.append(high - low)
            keys.append(high - start)
            first = min(first, start)
        start += length
    return RowChunk(slice(first, end), end - begin, boundaries(queries, device), boundaries(keys, device))


def boundaries(lengths: list[int], device: torch.device) -> Boundaries:
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Boundaries(offsets.to(device, non_blocking=True), Lengths(tuple(lengths), max(lengths)))


class GatheredKeys:
    """Attention function for packed rows (several samples end to end) whose positions are divided among ranks. Each
    rank computes the queries of its own positions, with the keys and values of all positions of the row."""

    def __init__(self, attend: Attend, gather: Collective, row_chunks: RowChunks):
        self.attend = attend
        self.gather = gather
        self.row_chunks = row_chunks

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow
    ) -> torch.Tensor:
        """Compute attention; query, key and value are [1, heads, own positions, size], the result is [1, own positions,
        heads, size]."""
        key, value = self.gathered(key), self.gathered(value)
        queries = query.split([part.tokens for part in self.row_chunks.each], dim=2)
        found = []
        for own, part in zip(queries, self.row_chunks.each, strict=True):
            keys, values = key[:, :, part.keys], value[:, :, part.keys]
            found.append(self.attend(module, own, keys, values, PackedRow(part.queries_at, row.form, part.keys_at)))
        return torch.cat(found, dim=1)

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """[1, heads, own positions, size] -> [1, heads, positions, size]"""
        every = self.gather(own[0].transpose(0, 1).contiguous())  # [positions, heads, size]
        return every.index_select(0, self.row_chunks.order).transpose(0, 1)[None]
