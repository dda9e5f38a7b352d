"""Downsample the curves of a training's metrics step by step, in limited memory. Imports only the standard library.

A curve is divided into stretches of equally many steps. For each stretch it keeps the mean, the least and the greatest
value, so that a spike of one step is still seen among a hundred thousand. Only the numbers of the steps decide where
stretches begin, so a curve that is read from metrics.jsonl equals the one that was kept during the training.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple, Self

MOST_POINTS = 1000
WINDOW = 20
"""Number of steps over which the last loss and the lowest loss are averaged, because a single step's loss is noisy."""
MOST_SKIPS = 100
MOST_SOURCES = 200


class Point(NamedTuple):
    """A stretch of consecutive steps of a curve."""

    step: float
    """Mean of the step numbers in this stretch."""
    mean: float
    least: float
    most: float

    @classmethod
    def exact(cls, step: float, value: float) -> Self:
        """Return a point of a single value."""
        return cls(step, value, value, value)


@dataclass
class Stretch:
    """The values of a metric in some consecutive steps."""

    count: int
    step_sum: float
    """Sum of the numbers of the steps."""
    value_sum: float
    least: float
    most: float


class Curve:
    """A metric over training steps, downsampled to a limited number of points."""

    def __init__(self, most: int = MOST_POINTS):
        """Begin an empty curve of at most `most` stretches: points that each stand for `width` consecutive steps."""
        self.most_points = most
        self.width = 1
        self.stretches: dict[int, Stretch] = {}
        """`step // width` -> the values of these steps."""

    def __len__(self) -> int:
        return len(self.stretches)

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step to its stretch of `width` steps, and double `width` if there are too many stretches.
        Ignore a value that is missing or not finite."""
        if value is None or not math.isfinite(value):
            return
        merge_into(self.stretches, step // self.width, Stretch(1, float(step), value, value, value))
        while len(self.stretches) > self.most_points:
            self.width *= 2
            self.stretches = merge_pairs(self.stretches)

    def points(self, most: int | None = None) -> list[Point]:
        """Return the points of the curve in the order of steps. If there are more than `most`, neighbors are merged."""
        stretches = self.stretches
        while most is not None and len(stretches) > max(1, most):
            stretches = merge_pairs(stretches)
        return [
            Point(s.step_sum / s.count, s.value_sum / s.count, s.least, s.most)
            for _, s in sorted(stretches.items(), key=itemgetter(0))
        ]


def merge_into(stretches: dict[int, Stretch], number: int, added: Stretch) -> None:
    """Merge `added` into stretch `number` of a curve; if that is missing, `added` becomes it."""
    present = stretches.get(number)
    if present is None:
        stretches[number] = added
        return
    present.count += added.count
    present.step_sum += added.step_sum
    present.value_sum += added.value_sum
    present.least, present.most = min(present.least, added.least), max(present.most, added.most)


def merge_pairs(stretches: dict[int, Stretch]) -> dict[int, Stretch]:
    """Merge each two neighboring stretches of a curve into one: stretches 2n and 2n + 1 become stretch n."""
    pairs: dict[int, Stretch] = {}
    for number, stretch in stretches.items():
        merge_into(pairs, number // 2, replace(stretch))
    return pairs


VALUES = (
    "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "hfu", "peak_memory_bytes", "seconds", "data_seconds",
    "loss_scale", "balance_loss", "expert_load_max", "experts_idle", "accuracy", "margin", "reward_chosen",
    "reward_rejected", "logp_chosen", "logp_rejected",
)  # fmt: skip
"""Keys of a row of metrics.jsonl that become curves."""
SUMS = (
    "samples", "tokens", "label_tokens", "images", "seconds", "data_seconds", "truncated", "skipped_records",
    "unlabelled",
)  # fmt: skip
"""Keys of a row of metrics.jsonl that are added up over the run."""


@dataclass
class RunHistory:
    """The metrics of a run: curves over its steps, and sums."""

    window: int = WINDOW
    """Number of steps over which the last loss and the lowest loss are averaged."""
    curves: dict[str, Curve] = field(default_factory=dict)
    sources: dict[str, Curve] = field(default_factory=dict)
    """Loss curve of each data source."""
    source_labels: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    num_rows: int = 0
    """Number of rows added."""
    last: dict[str, Any] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    """The first steps that were skipped, at most `MOST_SKIPS`."""
    skipped_steps: int = 0
    lowest: tuple[float, int] | None = None
    """(loss, step): the lowest mean loss of `window` consecutive steps, and the last of these steps."""
    recent: deque[tuple[float, float]] = field(default_factory=deque)
    """(loss, label tokens) of the last `window` steps that have a loss."""
    recent_sources: deque[dict[str, tuple[float | None, int]]] = field(default_factory=deque)
    """For each step in `recent`: data source -> (loss, label tokens)."""

    def add(self, row: dict[str, Any]) -> None:
        """Add a parsed row of metrics.jsonl: its values to the curves, its counts (`SUMS`) to the sums of the run, and
        its loss to the mean of the last `window` steps. Of new data sources beyond MOST_SOURCES, no curves are kept.
        Raise ValueError if the row is not valid; then nothing is added."""
        step, values = parse_row(row)
        sources = sources_of(row)
        numbers = {name: number_of(row, name) or 0 for name in SUMS}
        for name, value in values.items():
            self.curves.setdefault(name, Curve()).add(step, value)
        for name, (loss, labels) in sources.items():
            if name in self.sources or len(self.sources) < MOST_SOURCES:
                self.sources.setdefault(name, Curve()).add(step, loss)
                self.source_labels[name] = self.source_labels.get(name, 0) + labels
        for name in SUMS:
            self.sums[name] += numbers[name]
        self.num_rows += 1
        self.last = row
        if row.get("skipped") is True:
            self.skipped_steps += 1
            self.skipped += [step] if len(self.skipped) < MOST_SKIPS else []
        if (loss := values["loss"]) is not None:
            # (loss, label tokens) of the last `window` steps; their mean is the loss that pages show
            self.recent.append((loss, numbers["label_tokens"]))
            self.recent_sources.append(sources)
            if len(self.recent) > self.window:
                self.recent.popleft()
                self.recent_sources.popleft()
            mean = mean_loss(self.recent)
            is_full = len(self.recent) == self.window
            if is_full and (self.lowest is None or mean < self.lowest[0]):
                self.lowest = mean, step

    @property
    def last_step(self) -> int:
        """Number of the last step that was added."""
        return int(self.last.get("step", 0))

    @property
    def loss(self) -> float | None:
        """Mean loss of the last `window` steps; None if no step has a loss."""
        return mean_loss(self.recent) if self.recent else None

    def source_loss(self, name: str) -> float | None:
        """Return the mean loss of a data source in the last `window` steps; None if it has none there."""
        losses = [steps[name] for steps in self.recent_sources if name in steps]
        values = [(loss, labels) for loss, labels in losses if loss is not None]
        return mean_loss(values) if values else None

    @property
    def lowest_loss(self) -> tuple[float, int] | None:
        """(loss, step): the lowest mean loss of `window` consecutive steps, and the last of these steps. With fewer
        than `window` steps, the mean of all; None without a loss."""
        if self.lowest is None and self.loss is not None:
            return self.loss, self.last_step
        return self.lowest

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the second half of the run, as the first includes loading and compiling."""
        points = self.curves[name].points() if name in self.curves else []
        second_half = points[len(points) // 2 :]
        return sum(point.mean for point in second_half) / len(second_half) if second_half else None

    def most(self, name: str) -> float | None:
        """Return the greatest value of a metric; None if it has none."""
        points = self.curves[name].points() if name in self.curves else []
        return max((point.most for point in points), default=None)

    def largest_sources(self, most: int) -> Iterator[tuple[str, Curve]]:
        """Return (name, loss curve) of each of the `most` data sources with the most label tokens."""
        chosen = sorted(self.source_labels, key=lambda name: -self.source_labels[name])[:most]
        return ((name, self.sources[name]) for name in self.sources if name in chosen)


def mean_loss(steps: Iterable[tuple[float, float]]) -> float:
    """Return the mean of losses, given as (loss, number of label tokens), weighted by label tokens; unweighted if no
    step has any. If all losses are equal, the result is exactly that loss."""
    losses, tokens = zip(*steps, strict=True)
    if len(set(losses)) == 1:
        return losses[0]
    weights = tokens if sum(tokens) > 0 else [1] * len(losses)
    return math.fsum(loss * count for loss, count in zip(losses, weights, strict=True)) / sum(weights)


def parse_row(row: object) -> tuple[int, dict[str, float | None]]:
    """Return the step of a row of metrics.jsonl and its values (`VALUES`); raise ValueError if the row is not valid."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        raise ValueError("it has no step")
    return row["step"], {name: number_of(row, name) for name in VALUES}


def number_of(row: dict[str, Any], name: str) -> float | None:
    """Return a number in a row; None if it is missing or not finite. Raise ValueError if the value is not a number."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return float(value) if math.isfinite(value) else None


def sources_of(row: dict[str, Any]) -> dict[str, tuple[float | None, int]]:
    """Return {data source: (loss, number of label tokens)} of a row; raise ValueError if they are malformed."""
    sources = row.get("sources") or {}
    if not isinstance(sources, dict) or not all(isinstance(source, dict) for source in sources.values()):
        raise ValueError("sources is not an object of objects")
    return {
        str(name): (number_of(source, "loss"), int(number_of(source, "label_tokens") or 0))
        for name, source in sources.items()
    }
