"""The original's order of samples: LLaVA's samplers behind transformers' Trainer and accelerate, from the same seed."""

from __future__ import annotations

import heapq
import itertools

import torch

from llava_fsdp.data.batching.packing import Cuts
from llava_fsdp.runtime.errors import ConfigError

ACCELERATE_SEED = 67280421310721
"""torch.Generator's own first seed: accelerate gives its samplers a generator that nobody seeds."""


class OriginalOrder:
    """LLaVA's samplers behind transformers 4.37's Trainer and accelerate 0.21, from the same seed.

    One stream of micro-batches runs through all epochs: what an epoch has left over begins the next one's first
    step. An epoch has floor(micro-batches / accumulation) steps; what is left at the very end is dropped.
    """

    def __init__(
        self, lengths: list[int], batch_size: int, accumulation: int, world_size: int, seed: int, grouped: bool
    ):
        """
        Args:
            lengths: words of every record, negative where it has no picture (train.py:684-690).
            batch_size: rows of a micro-batch.
            accumulation: micro-batches of a rank in a step.
        """
        self.lengths = lengths
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.world_size = world_size
        self.grouped = grouped
        self.process = torch.Generator().manual_seed(seed)  # the process's own, which Trainer seeds
        self.sampler = torch.Generator().manual_seed(ACCELERATE_SEED)
        self.epochs: list[Cuts] = []
        if grouped and 0 in lengths:
            raise ConfigError(
                f"sampler=llava_v1_5: record {lengths.index(0)} has no words, and the original's sampler stops at it; "
                "mend the record, or set sampler=shuffle"
            )
        self.batches_per_epoch = len(self.epoch(0)[0])
        if self.batches_per_epoch < accumulation:
            raise ConfigError(
                f"sampler=llava_v1_5: an epoch has {self.batches_per_epoch} micro-batches for each rank, fewer than "
                f"the "
                f"{accumulation} of a step; lower global_batch_size, or set sampler=shuffle"
            )

    @property
    def per_epoch(self) -> int:
        return self.batches_per_epoch // self.accumulation

    @property
    def shape(self) -> str:
        return f"{self.world_size} x {self.accumulation} x {self.batch_size}"

    def samples(self, step: int) -> list[int]:
        return [index for rank in self.cuts(step) for batch in rank for index in batch]

    def draw(self, steps: int) -> None:
        self.epoch((steps * self.accumulation - 1) // self.batches_per_epoch)

    def cuts(self, step: int) -> Cuts:
        numbers = range(step * self.accumulation, (step + 1) * self.accumulation)
        places = [divmod(n, self.batches_per_epoch) for n in numbers]
        return [[self.epoch(epoch)[rank][at] for epoch, at in places] for rank in range(self.world_size)]

    def epoch(self, number: int) -> Cuts:
        """[rank][batch] -> record numbers; epochs are drawn one after the other, and kept."""
        while len(self.epochs) <= number:
            self.epochs.append(self.deal(self.flat_order()))
        return self.epochs[number]

    def flat_order(self) -> list[int]:
        """One epoch's record numbers, drawing random numbers exactly as the original does."""
        torch.empty((), dtype=torch.int64).random_(generator=self.process)  # the DataLoader's seed for its workers
        alone = self.world_size == 1
        if self.grouped:
            megabatches = self.process if alone else self.sampler
            chunks = self.world_size * self.accumulation
            return modality_grouped(self.lengths, self.batch_size, chunks, megabatches, self.process)
        generator = self.sampler
        if alone:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.process)
            generator = torch.Generator().manual_seed(int(drawn))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        torch.randperm(len(self.lengths), generator=generator)  # RandomSampler ends with one that it does not use
        return order

    def deal(self, order: list[int]) -> Cuts:
        """One process takes the batches as they are, the last one short; several are given even ones."""
        if self.world_size == 1:
            return [stretches(order, self.batch_size)]
        return even_batches(order, self.batch_size, self.world_size)


def even_batches(order: list[int], batch_size: int, world_size: int) -> Cuts:
    """Batch j goes to rank j % ranks; the last ones are filled up from the beginning (accelerate BatchSamplerShard)."""
    batches = stretches(order, batch_size)
    again = itertools.cycle(order)
    batches[-1] = batches[-1] + list(itertools.islice(again, batch_size - len(batches[-1])))
    while len(batches) % world_size:
        batches.append(list(itertools.islice(again, batch_size)))
    return [batches[rank::world_size] for rank in range(world_size)]


def modality_grouped(
    lengths: list[int], batch_size: int, chunks: int, megabatches: torch.Generator, process: torch.Generator
) -> list[int]:
    """Pictures and text apart, like lengths together (llava_trainer.py:61-88).

    The last megabatch of each, even a full one, is set aside; both come last, mixed and in the file's order.
    """
    with_picture = [i for i, length in enumerate(lengths) if length > 0]
    text_only = [i for i, length in enumerate(lengths) if length < 0]
    if not with_picture or not text_only:
        return length_grouped(lengths, batch_size, chunks, megabatches)
    cut: list[list[list[int]]] = []
    for own in (with_picture, text_only):
        order = length_grouped([abs(lengths[i]) for i in own], batch_size, chunks, process)
        cut.append(stretches([own[i] for i in order], chunks * batch_size))
    kept = cut[0][:-1] + cut[1][:-1]
    shuffled = [kept[i] for i in torch.randperm(len(kept), generator=megabatches).tolist()]
    return [i for megabatch in [*shuffled, sorted(cut[0][-1] + cut[1][-1])] for i in megabatch]


def length_grouped(lengths: list[int], batch_size: int, chunks: int, generator: torch.Generator) -> list[int]:
    """Random megabatches, each sorted by length and dealt into even chunks (llava_trainer.py:91-100)."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return [
        index
        for megabatch in stretches(order, chunks * batch_size)
        for chunk in even_chunks(sorted(megabatch, key=lambda i: lengths[i], reverse=True), lengths, chunks)
        for index in chunk
    ]


def even_chunks(indices: list[int], lengths: list[int], chunks: int) -> list[list[int]]:
    """Chunks of equal number and nearly equal sum of lengths: the shortest takes the next (llava_trainer.py:38-58)."""
    if len(indices) % chunks:
        return [indices[i::chunks] for i in range(chunks)]
    filled: list[list[int]] = [[] for _ in range(chunks)]
    open_chunks = [(0, chunk) for chunk in range(chunks)]  # a heap by (sum, number): of equal ones the first
    for index in indices:
        total, shortest = heapq.heappop(open_chunks)
        filled[shortest].append(index)
        if len(filled[shortest]) < len(indices) // chunks:
            heapq.heappush(open_chunks, (total + lengths[index], shortest))
    return filled


def stretches(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
