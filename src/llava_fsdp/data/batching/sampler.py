"""Samplers: they choose the records that each training step uses.

Steps and epochs count from 0. A share is what a data source contributes to each epoch.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from llava_fsdp.config import Config, SamplerName, SourceConfig
from llava_fsdp.data.batching.llava_samplers import LlavaSampler
from llava_fsdp.data.batching.packing import Assignment
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.shared_columns import shared_column
from llava_fsdp.data.keyed_permutation import VERSION, permuted
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.seeds import derive

ORDERS = "orders"
"""Name of the index's folder with the order of the samples of large epochs."""
LARGE = 1 << 20
"""Number of samples from which the order of an epoch is written to a file. A smaller order takes at most 4 MiB a
process."""


class Sampler(Protocol):
    """Chooses the records of each training step."""

    @property
    def per_epoch(self) -> int:
        """Number of steps of an epoch."""
        ...

    @property
    def shape(self) -> str:
        """Text that must not change when a run is resumed: the settings (such as the number of ranks) that affect which
        records a step gets."""
        ...

    def samples(self, step: int) -> list[int]:
        """Return the numbers of a step's records on all ranks. The last step of an epoch may have fewer than the
        others."""
        ...

    def draw(self, steps: int) -> None:
        """Choose the records of the first `steps` steps now. This is called before data workers are forked, so that the
        workers share the result."""
        ...

    def assignment(self, step: int) -> Assignment | None:
        """Return the record numbers of a step as [rank][micro-batch][record]; None leaves their distribution to
        `packing.py`."""
        ...


@dataclass(frozen=True)
class SourceShare:
    """A data source, and the number of samples that it contributes to each epoch."""

    name: str
    first: int
    """Number of the source's first record."""
    count: int
    samples: int


@dataclass(frozen=True)
class EpochSampler(ABC):
    """Base class of samplers that shuffle the records anew in each epoch. The order depends only on the seed, the
    epoch, and the number of samples of each data source."""

    count: int
    seed: int
    global_batch_size: int
    shares: tuple[SourceShare, ...] = ()
    """Empty: each record is used once per epoch."""

    @property
    def samples_per_epoch(self) -> int:
        return sum(share.samples for share in self.shares) if self.shares else self.count

    @property
    def per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch_size)

    def samples(self, step: int) -> list[int]:
        epoch, within = divmod(step, self.per_epoch)
        begin = within * self.global_batch_size
        return self.part(epoch, begin, min(begin + self.global_batch_size, self.samples_per_epoch)).tolist()

    @abstractmethod
    def part(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Return the records from position `begin` to `end` - 1 of an epoch's order, int64 or int32 [end - begin]."""

    def draw(self, steps: int) -> None:  # noqa: B027  not abstract: right for all subclasses
        """Do nothing: this sampler chooses the records of a step when it is needed."""

    def assignment(self, step: int) -> None:
        return None


@dataclass(frozen=True)
class Shuffle(EpochSampler):
    """Shuffles the records of each epoch with `torch.randperm`."""

    folder: Path | None = None
    """Folder to which the order of a large epoch is written, so that all processes of a machine share it; None: each
    process has a copy."""
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """{epoch used last: its record numbers in order}."""

    shape = ""

    def part(self, epoch: int, begin: int, end: int) -> np.ndarray:
        return self.epoch(epoch)[begin:end]

    def epoch(self, number: int) -> np.ndarray:
        """Return the record numbers of an epoch in its random order, int32 or int64 [samples_per_epoch]."""
        if number not in self._drawn:
            self._drawn.clear()
            self._drawn[number] = self.shared(number)  # for a large epoch: from a file that one process writes
        return self._drawn[number]

    def shared(self, number: int) -> np.ndarray:
        """Return the records of epoch `number` in order, as `drawn` computes them. For a large epoch, one process of a
        machine does so and writes a file, which the others memory-map."""
        samples = self.samples_per_epoch
        if self.folder is None or samples < LARGE:
            return self.drawn(number)
        # other versions of torch may draw another order
        key = derive("order file", torch.__version__, self.seed, self.count, repr(self.shares), number)
        return shared_column(
            self.folder / f"{key:x}.npy", samples, smallest_dtype(self.count), lambda: [self.drawn(number)]
        )

    def drawn(self, number: int) -> np.ndarray:
        """Compute the records of epoch `number` in a random order, int32 or int64 [samples_per_epoch]: all records or,
        with `data.sources`, those that `members` takes from each source."""
        order = permutation(self.samples_per_epoch, "order", self.seed, number)
        if not self.shares:
            return order
        return np.concatenate([self.members(share, number) for share in self.shares])[order]

    def members(self, share: SourceShare, epoch: int) -> np.ndarray:
        """Return the records that an epoch takes from a data source, int32 or int64 [share.samples], ascending.

        Epochs take `share.samples` records each from an endless sequence of permutations of the source's records. So
        each record is used once before any record is used again, however few an epoch takes.
        """
        begin, end = epoch * share.samples, (epoch + 1) * share.samples
        passes = range(begin // share.count, -(-end // share.count))
        drawn = [permutation(share.count, "pass", self.seed, share.name, n) for n in passes]
        taken = np.concatenate(drawn)[begin - passes.start * share.count :][: share.samples]
        return np.sort(taken.astype(smallest_dtype(self.count), copy=False)) + share.first


@dataclass(frozen=True)
class ComputedShuffle(EpochSampler):
    """Computes the records of a step from (seed, epoch, step), without computing the order of the whole epoch. Its
    memory does not grow with the number of records. Its order differs from that of `Shuffle`."""

    shape = f"computed_shuffle, version {VERSION}"

    def part(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Return the records [begin, end) of an epoch's order of all data sources together, int64 [end - begin]."""
        samples = permuted(np.arange(begin, end), self.samples_per_epoch, "computed order", self.seed, epoch)
        if not self.shares:  # each record is one sample
            return samples
        # the samples of an epoch are numbered source by source; replace each number by a record of its source
        ends = np.cumsum([share.samples for share in self.shares])
        owners = np.searchsorted(ends, samples, side="right")
        for owner in np.unique(owners).tolist():
            share, here = self.shares[owner], np.flatnonzero(owners == owner)
            positions = samples[here] - (ends[owner] - share.samples) + epoch * share.samples
            samples[here] = share.first + self.members(share, positions)
        return samples

    def members(self, share: SourceShare, positions: np.ndarray) -> np.ndarray:
        """Return record numbers within a data source (`count` records, `samples` per epoch), int64 [positions]: the
        values at these positions of an endless sequence of permutations of its records, used up epoch by epoch."""
        if share.samples % share.count == 0:  # an epoch uses each record equally often, and its samples are permuted
            return positions % share.count
        passes, members = np.divmod(positions, share.count)
        for number in np.unique(passes).tolist():
            here = np.flatnonzero(passes == number)
            members[here] = permuted(members[here], share.count, "computed pass", self.seed, share.name, number)
        return members


def permutation(count: int, *purpose: str | int) -> np.ndarray:
    """Return a random permutation of range(count), int32 or int64 [count], seeded by `purpose`. torch draws the same
    values in both dtypes."""
    dtype = torch.int32 if smallest_dtype(count) == np.int32 else torch.int64
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive(*purpose)), dtype=dtype).numpy()


def smallest_dtype(count: int) -> np.dtype:
    """Return int32 if numbers below `count` fit, because it takes half of the memory of int64."""
    return np.dtype(np.int32 if count < 1 << 31 else np.int64)


def shares_of(sources: dict[str, SourceConfig], counts: Sequence[int]) -> tuple[SourceShare, ...]:
    """Return how many samples each data source, with `counts` records, contributes to an epoch, in the order of
    `sources`; empty without `data.sources`. Raise ConfigError if a source has no record, or would contribute no
    sample."""
    if not sources:
        return ()
    begins = itertools.accumulate(counts, initial=0)
    shares = []
    columns = zip(sources.items(), counts, begins, amounts(sources, counts), strict=False)  # `begins` has one more
    for (name, source), count, first, samples in columns:
        if not count:
            raise ConfigError(f"data.sources.{name}: no record of {source.path} is left to train on; take it out")
        if not samples:
            raise ConfigError(
                f"data.sources.{name}: {source.path} would give less than one sample to an epoch; raise its weight "
                "or epochs"
            )
        shares.append(SourceShare(name, first, count, samples))
    return tuple(shares)


def amounts(sources: dict[str, SourceConfig], counts: Sequence[int]) -> list[int]:
    """Return the number of samples that each data source contributes to an epoch.

    With `epochs`, a source contributes its number of records times `epochs`, rounded. With `weight`, an epoch has as
    many samples as all sources have records, divided in proportion to the weights; the parts are rounded to whole
    numbers by the method of the largest remainder. Fractions keep decimal numbers of the configuration exact.
    """
    if any(source.weight is None for source in sources.values()):
        wanted = (
            Fraction(str(source.epochs or 1)) * count for source, count in zip(sources.values(), counts, strict=True)
        )
        return [math.floor(amount + Fraction(1, 2)) for amount in wanted]
    weights = [Fraction(str(source.weight)) for source in sources.values()]
    parts = [sum(counts) * weight / sum(weights) for weight in weights]
    whole = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda s: (whole[s] - parts[s], s))
    for source in by_remainder[: sum(counts) - sum(whole)]:
        whole[source] += 1
    return whole


def open_sampler(records: Records, cfg: Config, world_size: int) -> Sampler:
    """Make the sampler that the setting `sampler` selects. Raise ConfigError if LLaVA's sampler cannot handle this
    number of ranks or these records, or a source would contribute no sample to an epoch."""
    if cfg.sampler.name is not SamplerName.llava_v1_5:
        count, size = len(records), cfg.global_batch_size
        shares = shares_of(cfg.data.sources, records.source_counts)
        if cfg.sampler.name is SamplerName.computed_shuffle:
            return ComputedShuffle(count, cfg.seed, size, shares)
        return Shuffle(count, cfg.seed, size, shares, records.index.folder / ORDERS)
    accumulation, rest = divmod(cfg.global_batch_size, cfg.micro_batch_size * world_size)
    if rest or not accumulation:
        raise ConfigError(
            f"sampler=llava_v1_5 needs global_batch_size to be micro_batch_size x ranks x accumulation, and "
            f"{cfg.global_batch_size} is not a multiple of {cfg.micro_batch_size} x {world_size}"
        )
    words, grouped = list(map(int, records.words)), cfg.sampler.group_by_modality_length
    return LlavaSampler(words, cfg.micro_batch_size, accumulation, world_size, cfg.seed, grouped)
