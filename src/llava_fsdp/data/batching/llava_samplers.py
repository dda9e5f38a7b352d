"""Sampler that chooses the same records for each step as LLaVA's training code does with the same seed.

`lengths` are numbers of words, negative for a record without image. `batch_size` is the number of records of a
micro-batch. An Assignment has record numbers as [rank][micro-batch][record].
"""

from __future__ import annotations

import heapq
import itertools

import torch

from llava_fsdp.data.batching.packing import Assignment
from llava_fsdp.runtime.errors import ConfigError

ACCELERATE_SEED = 67280421310721
"""Default seed of torch.Generator; accelerate never seeds the generator of its samplers."""


class LlavaSampler:
    """Sampler that gives each step the same records as LLaVA with transformers 4.37 and accelerate 0.21.

    An epoch has floor(micro-batches per rank / accumulation) steps. The micro-batches left at the end of an epoch, too
    few for a step, begin the first step of the next epoch; those left at the end of the last epoch are dropped.

    Args:
        lengths: number of words of each record (LLaVA train.py:684-690).
        seed: the seed that LLaVA's training was given.
        grouped: whether LLaVA's `group_by_modality_length` is on.

    Raises:
        ConfigError: an epoch has too few micro-batches for a step, or LLaVA's sampler fails at a record without words.
    """

    def __init__(
        self, lengths: list[int], batch_size: int, accumulation: int, world_size: int, seed: int, grouped: bool
    ):
        """Draw the order of the first epoch. A step of a rank has `accumulation` micro-batches of `batch_size` records.

        Args:
            lengths: number of words of each record, negative without an image.
            seed: the seed that LLaVA's training was given.
            grouped: LLaVA's `group_by_modality_length`: records of similar length together, those with images apart.

        Raises:
            ConfigError: LLaVA's sampler would fail, or an epoch would have no step.
        """
        self.lengths = lengths
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.world_size = world_size
        self.grouped = grouped
        # transformers' Trainer seeds torch's default generator, from which the process draws
        self.process_generator = torch.Generator().manual_seed(seed)
        self.sampler_generator = torch.Generator().manual_seed(ACCELERATE_SEED)
        self.epochs: list[Assignment] = []
        if grouped and 0 in lengths:
            raise ConfigError(
                f"sampler=llava_v1_5: record {lengths.index(0)} has no words, at which LLaVA's sampler fails; "
                "fix the record, or set sampler=shuffle"
            )
        self.batches_per_epoch = len(self.epoch(0)[0])
        self.per_epoch = self.batches_per_epoch // accumulation
        self.shape = f"{world_size} x {accumulation} x {batch_size}"
        if self.batches_per_epoch < accumulation:
            raise ConfigError(
                f"sampler=llava_v1_5: an epoch has {self.batches_per_epoch} micro-batches for each rank, fewer than "
                f"the {accumulation} of a step; lower global_batch_size, or set sampler=shuffle"
            )

    def samples(self, step: int) -> list[int]:
        """Return the numbers of a step's records, of all ranks."""
        return [index for rank in self.assignment(step) for batch in rank for index in batch]

    def draw(self, steps: int) -> None:
        """Draw the order of the records in all epochs that the first `steps` steps need."""
        self.epoch((steps * self.accumulation - 1) // self.batches_per_epoch)

    def assignment(self, step: int) -> Assignment:
        """Return the numbers of a step's records as [rank][micro-batch][record]."""
        numbers = range(step * self.accumulation, (step + 1) * self.accumulation)
        places = [divmod(n, self.batches_per_epoch) for n in numbers]
        return [[self.epoch(epoch)[rank][at] for epoch, at in places] for rank in range(self.world_size)]

    def epoch(self, number: int) -> Assignment:
        """Return the records of an epoch, from 0. Its order can only be drawn after those of all epochs before it."""
        while len(self.epochs) <= number:
            self.epochs.append(self.deal(self.flat_order()))
        return self.epochs[number]

    def flat_order(self) -> list[int]:
        """Draw the order of the records in the next epoch, with the random numbers that LLaVA draws.

        With several ranks, accelerate's generator (`sampler_generator`) draws the order or, with `grouped`, that of the
        megabatches (groups of records of similar length). The process's generator draws all else.
        """
        # torch's DataLoader draws the seed of its workers
        torch.empty((), dtype=torch.int64).random_(generator=self.process_generator)
        is_one_rank = self.world_size == 1
        if self.grouped:
            megabatches = self.process_generator if is_one_rank else self.sampler_generator
            chunks = self.world_size * self.accumulation
            return group_by_modality(self.lengths, self.batch_size, chunks, megabatches, self.process_generator)
        generator = self.sampler_generator
        if is_one_rank:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.process_generator)
            generator = torch.Generator().manual_seed(int(drawn))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        torch.randperm(len(self.lengths), generator=generator)  # RandomSampler draws a second order and drops it
        return order

    def deal(self, order: list[int]) -> Assignment:
        """Distribute the records of an epoch, in this order, over micro-batches and ranks. With one rank, the last
        micro-batch may be short; with several ranks, it is filled up."""
        if self.world_size == 1:
            return [split_into(order, self.batch_size)]
        return even_batches(order, self.batch_size, self.world_size)


def even_batches(order: list[int], batch_size: int, world_size: int) -> Assignment:
    """Split records into micro-batches and give micro-batch j to rank j % world_size. The last micro-batches are filled
    up with records from the beginning of `order`, as accelerate's BatchSamplerShard does."""
    batches = split_into(order, batch_size)
    again = itertools.cycle(order)
    batches[-1] = batches[-1] + list(itertools.islice(again, batch_size - len(batches[-1])))
    while len(batches) % world_size:
        batches.append(list(itertools.islice(again, batch_size)))
    return [batches[rank::world_size] for rank in range(world_size)]


def group_by_modality(
    lengths: list[int], batch_size: int, chunks: int, megabatches: torch.Generator, process: torch.Generator
) -> list[int]:
    """Return record numbers in the order of LLaVA's option `group_by_modality_length` (LLaVA llava_trainer.py:61-88).

    The order consists of megabatches of chunks * batch_size records of similar length. All records of a megabatch have
    an image, or none has. The megabatches are shuffled, except the last one of each kind: these two are merged, sorted
    by record number and put at the end.

    Args:
        lengths: number of words of each record, negative without an image.
        chunks: number of micro-batches in a megabatch.
        megabatches: generator that draws the order of the megabatches.
        process: generator that draws the order of the records of each kind.
    """
    with_image = [i for i, length in enumerate(lengths) if length > 0]
    text_only = [i for i, length in enumerate(lengths) if length < 0]
    if not with_image or not text_only:
        return group_by_length(lengths, batch_size, chunks, megabatches)
    groups: list[list[list[int]]] = []
    for members in (with_image, text_only):
        order = group_by_length([abs(lengths[i]) for i in members], batch_size, chunks, process)
        groups.append(split_into([members[i] for i in order], chunks * batch_size))
    kept = groups[0][:-1] + groups[1][:-1]
    shuffled = [kept[i] for i in torch.randperm(len(kept), generator=megabatches).tolist()]
    return [i for megabatch in [*shuffled, sorted(groups[0][-1] + groups[1][-1])] for i in megabatch]


def group_by_length(lengths: list[int], batch_size: int, chunks: int, generator: torch.Generator) -> list[int]:
    """Return record numbers in an order that groups records of similar length (LLaVA llava_trainer.py:91-100).

    The records are shuffled and cut into megabatches of chunks * batch_size records. Each megabatch is sorted by length
    and divided into micro-batches of nearly equal total length.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return [
        index
        for megabatch in split_into(order, chunks * batch_size)
        for chunk in even_chunks(sorted(megabatch, key=lambda i: lengths[i], reverse=True), lengths, chunks)
        for index in chunk
    ]


def even_chunks(indices: list[int], lengths: list[int], chunks: int) -> list[list[int]]:
    """Split records into chunks of equal size and nearly equal sum of lengths (LLaVA llava_trainer.py:38-58). If the
    sizes cannot be equal, chunk i gets the records i, i + chunks, i + 2 * chunks and so on of `indices`. `lengths` has
    those of all records."""
    if len(indices) % chunks:
        return [indices[i::chunks] for i in range(chunks)]
    result: list[list[int]] = [[] for _ in range(chunks)]
    open_chunks = [(0, chunk) for chunk in range(chunks)]  # heap of (sum of lengths, chunk)
    for index in indices:
        total, shortest = heapq.heappop(open_chunks)
        result[shortest].append(index)
        if len(result[shortest]) < len(indices) // chunks:
            heapq.heappush(open_chunks, (total + lengths[index], shortest))
    return result


def split_into(items: list[int], size: int) -> list[list[int]]:
    """Split a list into pieces of `size` items; the last one may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]
