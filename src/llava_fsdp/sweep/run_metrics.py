"""What a run's own records say of it: `metrics.jsonl`, and `validation.jsonl` where there is one. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_fsdp.config import SweepMetric
from llava_fsdp.report.downsample import number_of
from llava_fsdp.report.run_reader import METRICS_FILE, VALIDATION_FILE
from llava_fsdp.runtime.jsonl import read_rows


@dataclass(frozen=True)
class Numbers:
    """Of one run, over all its starts. None: it has none."""

    steps: int = 0
    loss: float | None = None
    """Mean over the label tokens of the last steps."""
    last_loss: float | None = None
    val_loss: float | None = None
    """The least of all validations."""
    val_score: float | None = None
    """The best of all validations."""
    tokens_per_second: float | None = None
    """Of all ranks, without the first step, which compiles."""
    peak_memory_bytes: int | None = None
    """Of rank 0."""
    train_seconds: float = 0.0
    """Of the steps alone."""


def numbers_of(folder: Path, last_steps: int) -> Numbers:
    """What a run's folder says, also of a run that has not finished."""
    steps = read_rows(folder / METRICS_FILE)
    validations = read_rows(folder / VALIDATION_FILE)
    timed = steps[1:] or steps
    seconds = total(timed, "seconds")
    return Numbers(
        steps=max((int(row.get("step") or 0) for row in steps), default=0),
        loss=mean_loss(steps[-last_steps:]),
        last_loss=number(steps[-1], "loss") if steps else None,
        val_loss=min(known(validations, "loss"), default=None),
        val_score=max(known(validations, "score"), default=None),
        tokens_per_second=total(timed, "tokens") / seconds if seconds else None,
        peak_memory_bytes=max((int(n) for n in known(steps, "peak_memory_bytes")), default=None),
        train_seconds=round(total(steps, "seconds"), 3),
    )


def value_of(numbers: Numbers, metric: SweepMetric) -> float | None:
    """What a sweeper is handed, for whom less is better; None: the run has no such number."""
    if metric is SweepMetric.val_score:
        return None if numbers.val_score is None else -numbers.val_score
    return numbers.loss if metric is SweepMetric.loss else numbers.val_loss


def mean_loss(steps: list[dict[str, Any]]) -> float | None:
    """Over label tokens, as the loss of a step is; of one step it is that step's to the last bit."""
    found = [(loss, number(row, "label_tokens") or 0.0) for row in steps if (loss := number(row, "loss")) is not None]
    if len({loss for loss, _ in found}) == 1:
        return found[0][0]
    tokens = sum(count for _, count in found)
    return math.fsum(loss * count for loss, count in found) / tokens if tokens else None


def number(row: dict[str, Any], key: str) -> float | None:
    try:
        return number_of(row, key)
    except (ValueError, OverflowError):  # an integer may be beyond every float
        return None


def known(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := number(row, key)) is not None]


def total(rows: list[dict[str, Any]], key: str) -> float:
    return math.fsum(known(rows, key))
