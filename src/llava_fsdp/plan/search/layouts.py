"""Search the ways to divide a training among ranks (`parallel.search`): all products of the kinds of parallelism, with
all sharding strategies, modes of activation checkpointing and sizes of micro-batches.

Seconds are cheap to predict, and memory is not. So the ways are taken in the order of the fewest seconds that each may
need, and memory is predicted only of those that may be among the fastest that fit. In the same way, the seconds of all
sizes of micro-batches are predicted only for the ways that a lower bound leaves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from llava_fsdp.config import Config, ParallelConfig, PipelineSchedule
from llava_fsdp.parallel.check_torch import check_torch
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.plan.memory.micro_batches import MicroBatches
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.search import largest_that_fits, place_of, ways_to_share_experts
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.progress import Advance, Watch, watch

C = TypeVar("C", bound=Config)
NEAR = 1.03
"""Ways that take at most so many times the seconds of the fastest one count as equally fast, as the time model is not
more exact. Among these, the one with the fewest kinds of parallelism is chosen."""


@dataclass(frozen=True)
class LayoutChoices:
    """The ways to train with one layout of ranks."""

    planner: Planner
    choices: Sequence[Choice]
    ranks: RankCounts
    splits: Sequence[MicroBatches]
    """Ways to split a step into micro-batches, those with the largest micro-batches first."""


@dataclass(frozen=True)
class Planned:
    """A way to train, with the planner of its layout of ranks."""

    planner: Planner
    ranks: RankCounts
    row: PlanRow

    @property
    def parallel(self) -> ParallelConfig:
        return self.planner.cfg.parallel

    @property
    def kinds(self) -> int:
        """Number of kinds of parallelism beside sharding."""
        parallel = self.parallel
        return sum(size > 1 for size in (parallel.num_context, parallel.tensor, parallel.expert, parallel.pipeline))


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    rows: list[Planned]
    """First the chosen way, for which memory was measured; then the fastest others that fit by interpolation; then ways
    that do not fit, beginning with the one that needs the fewest bytes."""
    layouts: int
    """Number of layouts of ranks."""
    ways: int
    """Number of combinations of layout, strategy, activation checkpointing, offload and size of micro-batches."""
    measured: int
    """Number of combinations of which memory was predicted, all sizes of micro-batches counted as one."""

    def __str__(self) -> str:
        return (
            f"compared the seconds of {self.ways:,} ways to train in {self.layouts} layouts of ranks, and predicted "
            f"the memory of {self.measured} combinations of layout, strategy, activation checkpointing and offload"
        )


@dataclass(frozen=True)
class Searcher(Generic[C]):
    """Makes the ways to train of each layout of ranks."""

    planner_of: Callable[[C], Planner]
    """Called until it succeeds once."""
    ways_of: Callable[[Planner, C], LayoutChoices]
    """Returns the ways to train with a planner's layout."""
    show: Watch = watch
    """Shows how many layouts, and how many of the fastest ways that fit, have been found."""

    def search(self, cfg: C, world_size: int, node_size: int, count: int = 1) -> Search:
        """Find `count` of the fastest ways to train that fit into memory; fewer if there are not so many. The result
        may have more, and also ways that do not fit. Kinds of parallelism whose number in `cfg` is above 1 are kept,
        the others are searched. Ranks that compute layers together are on one node. Raise ConfigError if no layout is
        possible with this configuration."""
        cfg.parallel.check_divides(world_size)
        first: Planner | None = None
        refused: ConfigError | None = None
        found: list[Candidate] = []
        possible = layouts(cfg, world_size, node_size)
        with self.show("layouts of ranks", len(possible)) as advance:
            for tried in possible:
                try:
                    planner = self.planner_of(tried) if first is None else first.with_layout(tried)
                    first = first or planner
                    found += candidates(self.ways_of(planner, tried))
                except ConfigError as error:  # this model cannot be divided in this way
                    refused = refused or error
                advance(1)
        if not found:
            raise refused or ConfigError(
                f"parallel=auto: no layout of {world_size} ranks is possible: each rank needs a sample of "
                f"global_batch_size={cfg.global_batch_size}, and a row room for a sample of data.max_length="
                f"{cfg.data.max_length}"
            )
        with self.show("memory of the fastest ways", count) as advance:
            return fastest(found, count, advance)


def layouts(cfg: C, world_size: int, node_size: int) -> list[C]:
    """Return a configuration for each layout of ranks that the configuration's checks accept. A layout gives each kind
    of parallelism (pipeline, tensor, expert, context) a number of ranks. A number above 1 in `cfg` is kept."""
    configured = cfg.parallel

    # numbers of ranks to try for a kind of parallelism: the configured one, or all that divide `most`
    def sizes(key: str, size: int, most: int) -> list[int]:
        if size > 1:
            return [size]
        found = [n for n in range(1, most + 1) if most % n == 0]
        try:
            check_torch(f"parallel.{key}")
        except ConfigError:  # this torch is too old for it
            return found[:1]
        return found

    found = []
    for pipeline, tensor, expert, shared, schedule in itertools.product(
        sizes("pipeline", configured.pipeline, world_size),
        sizes("tensor", configured.tensor, node_size),
        sizes("expert", configured.expert, world_size),
        sizes("context", configured.num_context, world_size) if cfg.can_share_rows else [configured.num_context],
        dict.fromkeys((configured.schedule, *PipelineSchedule)) if configured.pipeline == 1 else (configured.schedule,),
    ):
        if pipeline == 1 and schedule is PipelineSchedule.interleaved:
            continue
        try:
            parallel = replace(
                configured,
                pipeline=pipeline,
                tensor=tensor,
                expert=expert,
                context=shared,
                schedule=schedule,
                search=False,
            )
            parallel.check_divides(world_size)
            tried = replace(cfg, parallel=parallel)
        except ConfigError:
            continue
        if RankLayout(parallel, world_size).num_row_groups <= cfg.global_batch_size:  # no group without samples
            found.append(tried)
    return found


@dataclass(frozen=True)
class Candidate:
    """A layout of ranks with a strategy, mode of activation checkpointing and offload, for any size of micro-batches.
    Its memory is not known yet."""

    ways: LayoutChoices
    choice: Choice
    bound: float
    """Seconds of a step at least: with the fewest tokens and micro-batches of all sizes, and with the idle time of a
    pipeline that has the most micro-batches."""

    @property
    def least(self) -> float:
        """Seconds of a step with the fastest size of micro-batches."""
        return quickest(self.ways, self.choice, self.ways.splits)[0]


def candidates(ways: LayoutChoices) -> list[Candidate]:
    """Return a candidate for each combination (`ways.choices`) of strategy, activation checkpointing and offload with
    a layout of ranks (`ways.ranks`). It has a lower bound of the seconds of a step, over all ways to split a step into
    micro-batches (`ways.splits`); its memory is not predicted yet. Raise ConfigError if no combination is possible, or
    the ranks cannot be arranged in this layout."""
    planner = ways.planner
    possible = ways_to_share_experts(planner.cfg, ways.choices, planner.ranks_of_same_part(ways.ranks))
    fewest, most = least_work(ways.splits), max(map(len, ways.splits))
    return [Candidate(ways, choice, planner.seconds(choice, ways.ranks, fewest, most)) for choice in possible]


def least_work(splits: Sequence[MicroBatches]) -> MicroBatches:
    """Return micro-batches as few, and together as small, as any of these splits, for a lower bound of a step's
    time."""
    count = min(map(len, splits))
    tokens = min(split.tokens for split in splits)
    labels = min(sum(micro.labels for micro in split) for split in splits)
    return MicroBatches([replace(splits[0][0], rows=1, length=tokens // count, labels=labels // count)] * count)


def fastest(found: Sequence[Candidate], count: int, advance: Advance = lambda count: None) -> Search:
    """Return the `count` fastest ways that fit into memory, and those found not to fit. The chosen one comes first: of
    those that take at most `NEAR` times as long as the fastest, the one with the fewest kinds of parallelism, if it
    still fits when its memory is measured. `advance` is called with 1 for each that fits."""
    # A queue by seconds. If the first entry has only a lower bound, its seconds are computed more exactly, and it is
    # put back. So nothing that is still in the queue is faster than what has left it.
    order, measured = itertools.count(), 0
    # (seconds, order of insertion, candidate, whether the seconds are those of its fastest size of micro-batches and
    # not only a lower bound, its plan if its memory is known)
    waiting: list[tuple[float, int, Candidate, bool, PlanRow | None]] = [
        (one.bound, next(order), one, False, None) for one in found
    ]
    heapq.heapify(waiting)
    fitting: list[tuple[Candidate, Planned]] = []
    others: list[Planned] = []
    while True:
        while waiting and (len(fitting) < count or waiting[0][0] <= NEAR * fitting[0][1].row.step.seconds):
            _, _, one, is_exact, row = heapq.heappop(waiting)
            ways = one.ways
            if row is not None:
                fitting.append((one, Planned(ways.planner, ways.ranks, row)))
                advance(1)
            elif not is_exact:
                heapq.heappush(waiting, (one.least, next(order), one, True, None))
            else:
                measured += 1
                row = fastest_that_fits(ways, one.choice)
                if row.fits:
                    heapq.heappush(waiting, (row.step.seconds, next(order), one, True, row))
                else:
                    others.append(Planned(ways.planner, ways.ranks, row))
        if not fitting:
            break
        near = [pair for pair in fitting if pair[1].row.step.seconds <= NEAR * fitting[0][1].row.step.seconds]
        one, chosen = min(near, key=lambda pair: pair[1].kinds)
        fitting.remove((one, chosen))
        ways, micros = one.ways, chosen.row.micro_batches
        # until here its memory was interpolated; now that of each micro-batch is measured
        chosen = replace(chosen, row=ways.planner.row(one.choice, ways.ranks, micros))
        if chosen.row.fits:
            fitting.insert(0, (one, chosen))
            break
        # it does not fit after all: smaller micro-batches are tried
        if rest := ways.splits[place_of(ways.splits, chosen.row) + 1 :]:
            one = replace(one, ways=replace(ways, splits=rest))
            heapq.heappush(waiting, (one.least, next(order), one, True, None))
        else:
            others.append(chosen)
    others.sort(key=lambda one: one.row.bytes["total"])
    layouts = len({id(one.ways.planner) for one in found})
    return Search(
        [*(planned for _, planned in fitting), *others], layouts, sum(len(one.ways.splits) for one in found), measured
    )


def fastest_that_fits(ways: LayoutChoices, choice: Choice) -> PlanRow:
    """Predict memory and time of a choice of strategy, activation checkpointing and offload with the fastest size of
    micro-batches that fits. Without a pipeline this is the largest one; a pipeline waits less with more micro-batches.
    """
    planner, ranks = ways.planner, ways.ranks
    sizes = planner.sizes_to_measure(ways.splits)
    row = largest_that_fits(planner, choice, ranks, ways.splits, sizes)
    if planner.cfg.parallel.pipeline == 1 or not row.fits:
        return row
    _, split = quickest(ways, choice, ways.splits[place_of(ways.splits, row) :])
    return planner.row(choice, ranks, split, sizes)


def quickest(ways: LayoutChoices, choice: Choice, splits: Sequence[MicroBatches]) -> tuple[float, MicroBatches]:
    """Return (seconds of a step, micro-batches) with the fastest of some sizes of micro-batches (`splits`). Without a
    pipeline it is the first one, with the largest micro-batches."""
    tried = splits if ways.planner.cfg.parallel.pipeline > 1 else splits[:1]
    return min(((ways.planner.seconds(choice, ways.ranks, split), split) for split in tried), key=lambda one: one[0])


def why_not(one: Planned, chosen: Planned) -> str:
    """Return why one way to train was not chosen: how much memory it needs, or what takes longer than in `chosen`."""
    row, best = one.row, chosen.row
    if not row.fits:
        return f"needs {row.bytes['total'] / 1e9:.1f} of {row.usable / 1e9:.1f} GB"
    more = row.step.seconds / best.step.seconds - 1
    if more <= NEAR - 1 and one.kinds > chosen.kinds:
        return "about as fast, with more kinds of parallelism"
    if more < 0.005:
        return "as fast"
    parts = {
        "computation and waiting for other stages": row.step.compute - best.step.compute,
        "communication that nothing hides": row.step.exposed - best.step.exposed,
        "communication beside computation": row.step.contention - best.step.contention,
        "copies of weights": row.step.copies - best.step.copies,
        "the update": row.step.update - best.step.update,
    }
    return f"{more:.0%} slower: {max(parts, key=lambda part: parts[part])}"
