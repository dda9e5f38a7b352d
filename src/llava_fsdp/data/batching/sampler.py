"""Samplers, which choose the records that each step of a run trains on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch

from llava_fsdp.config import Config, SamplerName, SourceConfig
from llava_fsdp.data.batching.llava_samplers import LlavaSampler
from llava_fsdp.data.batching.packing import Assignment
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.seeds import derive


class Sampler(Protocol):
    """Interface of the classes that choose the records of each step."""

    @property
    def per_epoch(self) -> int:
        """Number of steps of an epoch."""
        ...

    @property
    def shape(self) -> str:
        """Text that must not change when a run is resumed. It has those of number of ranks, accumulation and
        micro-batch size that affect which records a step gets; empty if none does."""
        ...

    def samples(self, step: int) -> list[int]:
        """Return the numbers of the records that all ranks together train on in a step. The last step of an epoch may
        have fewer records than the others."""
        ...

    def draw(self, steps: int) -> None:
        """Choose the records of the first `steps` steps now. Called before data workers are forked, so that the workers
        share the result."""
        ...

    def assignment(self, step: int) -> Assignment | None:
        """Return the record numbers of a step by rank and micro-batch; None if the records are distributed by
        `packing.py`."""
        ...


@dataclass(frozen=True)
class Share:
    """One of several data sources, and how many samples it contributes to each epoch (`samples`)."""

    name: str
    first: int
    """Number of the source's first record in the dataset."""
    count: int
    """Number of records of the source."""
    samples: int


@dataclass(frozen=True)
class Shuffle:
    """Sampler that shuffles the records anew in each epoch; the order depends only on the seed, the epoch and
    `shares`."""

    count: int
    """Number of records of the dataset."""
    seed: int
    global_batch_size: int
    shares: tuple[Share, ...] = ()
    """How many samples each data source contributes to an epoch; empty: each record is used once per epoch."""
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache with one entry: the number of the epoch used last, and its record numbers in order."""

    shape = ""

    @property
    def samples_per_epoch(self) -> int:
        return sum(share.samples for share in self.shares) if self.shares else self.count

    @property
    def per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch_size)

    def samples(self, step: int) -> list[int]:
        epoch, within = divmod(step, self.per_epoch)
        return self.epoch(epoch)[within * self.global_batch_size : (within + 1) * self.global_batch_size].tolist()

    def epoch(self, number: int) -> np.ndarray:
        """Return the record numbers of an epoch in order, int64 [samples_per_epoch]."""
        if number not in self._drawn:
            order = permutation(self.samples_per_epoch, "order", self.seed, number)
            if self.shares:
                order = np.concatenate([self.members(share, number) for share in self.shares])[order]
            self._drawn.clear()
            self._drawn[number] = order
        return self._drawn[number]

    def members(self, share: Share, epoch: int) -> np.ndarray:
        """Return the numbers of the records that an epoch takes from a data source, int64 [share.samples].

        Epochs take `share.samples` records each from an endless sequence of permutations of the source. So each record
        is used once before any record is used again, however small the share.
        """
        begin, end = epoch * share.samples, (epoch + 1) * share.samples
        passes = range(begin // share.count, -(-end // share.count))
        drawn = [permutation(share.count, "pass", self.seed, share.name, n) for n in passes]
        taken = np.concatenate(drawn)[begin - passes.start * share.count :][: share.samples]
        return np.sort(taken) + share.first

    def draw(self, steps: int) -> None:
        """Do nothing, because an epoch is drawn when one of its steps is needed."""

    def assignment(self, step: int) -> None:
        return None


def permutation(count: int, *purpose: str | int) -> np.ndarray:
    """Return a random permutation of range(count) that depends on `purpose` (words and numbers) alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive(*purpose))).numpy()


def shares_of(sources: dict[str, SourceConfig], counts: Sequence[int]) -> tuple[Share, ...]:
    """Return how many samples each data source contributes to an epoch; empty without `data.sources`.

    Args:
        counts: number of records of each source, in the order of `sources`.

    Raises:
        ConfigError: a source has no record, or would contribute no sample to an epoch.
    """
    if not sources:
        return ()
    firsts = itertools.accumulate(counts, initial=0)
    shares = []
    columns = zip(sources.items(), counts, firsts, amounts(sources, counts), strict=False)
    for (name, source), count, first, samples in columns:
        if not count:
            raise ConfigError(f"data.sources.{name}: no record of {source.path} is left to train on; take it out")
        if not samples:
            raise ConfigError(
                f"data.sources.{name}: {source.path} would give less than one sample to an epoch; raise its weight "
                "or epochs"
            )
        shares.append(Share(name, first, count, samples))
    return tuple(shares)


def amounts(sources: dict[str, SourceConfig], counts: Sequence[int]) -> list[int]:
    """Return the number of samples that each data source contributes to an epoch.

    With `epochs`, a source contributes its number of records times `epochs`, rounded. With `weight`, an epoch has as
    many samples as all sources have records, divided in proportion to the weights; the parts are rounded to whole
    numbers by the method of the largest remainder. Fractions keep decimal numbers of the configuration exact.
    """
    if any(source.weight is None for source in sources.values()):
        wanted = (Fraction(str(own.epochs or 1)) * count for own, count in zip(sources.values(), counts, strict=True))
        return [math.floor(amount + Fraction(1, 2)) for amount in wanted]
    weights = [Fraction(str(source.weight)) for source in sources.values()]
    parts = [sum(counts) * weight / sum(weights) for weight in weights]
    whole = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda s: (whole[s] - parts[s], s))
    for source in by_remainder[: sum(counts) - sum(whole)]:
        whole[source] += 1
    return whole


def open_sampler(
    words: Sequence[int] | np.ndarray, cfg: Config, world_size: int, counts: Sequence[int] = ()
) -> Sampler:
    """Make the sampler that the setting `sampler` selects.

    Args:
        words: number of words of every record, negative for a record without image.
        counts: number of records of each source, in the order of `data.sources`; empty with a single source.

    Raises:
        ConfigError: LLaVA's sampler cannot handle this number of ranks or these records, or a source would contribute
            no sample to an epoch.
    """
    if cfg.sampler.name is SamplerName.shuffle:
        return Shuffle(len(words), cfg.seed, cfg.global_batch_size, shares_of(cfg.data.sources, counts))
    accumulation, rest = divmod(cfg.global_batch_size, cfg.micro_batch_size * world_size)
    if rest or not accumulation:
        raise ConfigError(
            f"sampler=llava_v1_5 needs global_batch_size to be micro_batch_size x ranks x accumulation, and "
            f"{cfg.global_batch_size} is not a multiple of {cfg.micro_batch_size} x {world_size}"
        )
    grouped = cfg.sampler.group_by_modality_length
    return LlavaSampler(list(map(int, words)), cfg.micro_batch_size, accumulation, world_size, cfg.seed, grouped)
