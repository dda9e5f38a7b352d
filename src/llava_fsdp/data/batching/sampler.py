"""Which samples a step has: our own order, and the original's."""

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
from llava_fsdp.data.batching.llava_samplers import OriginalOrder
from llava_fsdp.data.batching.packing import Cuts
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.seeds import derive


class Order(Protocol):
    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        ...

    def samples(self, step: int) -> list[int]:
        """Record numbers of a step, on all ranks together; the last step of an epoch may hold fewer."""
        ...

    @property
    def shape(self) -> str:
        """What of a run's physical shape the order depends on."""
        ...

    def draw(self, steps: int) -> None:
        """Draw what these many steps need, so that no worker has to."""
        ...

    def cuts(self, step: int) -> Cuts | None:
        """How the step's record numbers lie on ranks and in micro-batches; None leaves it to `packing.py`."""
        ...


@dataclass(frozen=True)
class Share:
    """One source of several in an epoch."""

    name: str
    first: int
    """The number of its first record."""
    count: int
    samples: int
    """Of an epoch; the same in every epoch."""


@dataclass(frozen=True)
class Shuffle:
    """A permutation for each epoch that depends on nothing but (seed, epoch), and on the sources' shares."""

    count: int
    """Records."""
    seed: int
    global_batch_size: int
    shares: tuple[Share, ...] = ()
    """None: every record once an epoch."""
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The last epoch that was asked for."""

    @property
    def shape(self) -> str:
        return ""

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
        """int64 [samples_per_epoch]: record numbers in their order."""
        if number not in self._drawn:
            order = permutation(self.samples_per_epoch, "order", self.seed, number)
            if self.shares:
                order = np.concatenate([self.members(share, number) for share in self.shares])[order]
            self._drawn.clear()
            self._drawn[number] = order
        return self._drawn[number]

    def members(self, share: Share, epoch: int) -> np.ndarray:
        """int64 [share.samples]: which of a source's records an epoch has.

        The source's passes, each a permutation, are one stream, of which every epoch takes the next stretch: however
        small its share, all of its records come before one of them comes again.
        """
        begin, end = epoch * share.samples, (epoch + 1) * share.samples
        passes = range(begin // share.count, -(-end // share.count))
        drawn = [permutation(share.count, "pass", self.seed, share.name, n) for n in passes]
        stretch = np.concatenate(drawn)[begin - passes.start * share.count :][: share.samples]
        return np.sort(stretch) + share.first

    def draw(self, steps: int) -> None:
        """Nothing: an epoch is drawn in a moment."""

    def cuts(self, step: int) -> None:
        return None


def permutation(count: int, *purpose: str | int) -> np.ndarray:
    return torch.randperm(count, generator=torch.Generator().manual_seed(derive(*purpose))).numpy()


def shares_of(sources: dict[str, SourceConfig], counts: Sequence[int]) -> tuple[Share, ...]:
    """What every source gives to an epoch.

    Args:
        counts: records of each source, in the same order.

    Raises:
        ConfigError: a source would give nothing, or has no record.
    """
    if not sources:
        return ()
    firsts = itertools.accumulate(counts, initial=0)
    shares = []
    for (name, own), count, first, samples in zip(
        sources.items(), counts, firsts, amounts(sources, counts), strict=False
    ):
        if not count:
            raise ConfigError(f"data.sources.{name}: no record of {own.path} is left to train on; take it out")
        if not samples:
            raise ConfigError(
                f"data.sources.{name}: {own.path} would give less than one sample to an epoch; raise its weight "
                "or epochs"
            )
        shares.append(Share(name, first, count, samples))
    return tuple(shares)


def amounts(sources: dict[str, SourceConfig], counts: Sequence[int]) -> list[int]:
    """Samples of an epoch, by source: its records times `epochs`, rounded; or its part of as many samples as there are
    records, by `weight`, the largest remainders rounded up. Exact: floats are taken as they are written."""
    if any(own.weight is None for own in sources.values()):
        wanted = (Fraction(str(own.epochs or 1)) * count for own, count in zip(sources.values(), counts, strict=True))
        return [math.floor(amount + Fraction(1, 2)) for amount in wanted]
    weights = [Fraction(str(own.weight)) for own in sources.values()]
    parts = [sum(counts) * weight / sum(weights) for weight in weights]
    whole = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda s: (whole[s] - parts[s], s))
    for source in by_remainder[: sum(counts) - sum(whole)]:
        whole[source] += 1
    return whole


def open_order(words: Sequence[int] | np.ndarray, cfg: Config, world_size: int, counts: Sequence[int] = ()) -> Order:
    """The order that `sampler=` names.

    Args:
        words: of every record, negative where it has no picture.
        counts: records of each source, in the order of `data.sources`; none: there is one source.

    Raises:
        ConfigError: the original's order cannot be had with this many ranks or records.
    """
    if cfg.sampler.name is SamplerName.shuffle:
        shares = shares_of(cfg.data.sources, counts)
        return Shuffle(len(words), cfg.seed, cfg.global_batch_size, shares)
    accumulation, rest = divmod(cfg.global_batch_size, cfg.micro_batch_size * world_size)
    if rest or not accumulation:
        raise ConfigError(
            f"sampler=llava_v1_5 needs global_batch_size to be micro_batch_size x ranks x accumulation, and "
            f"{cfg.global_batch_size} is not a multiple of {cfg.micro_batch_size} x {world_size}"
        )
    grouped = cfg.sampler.group_by_modality_length
    return OriginalOrder(list(map(int, words)), cfg.micro_batch_size, accumulation, world_size, cfg.seed, grouped)
