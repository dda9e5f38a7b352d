"""Compute the results of a training (final loss, speed, memory ...), and format them as text."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.report.charts.downsample import RunHistory
from llava_fsdp.report.charts.svg import short_text
from llava_fsdp.report.run_reader import RunRecord, read_metrics, read_validations
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.text.humanize import duration, readable


@dataclass(frozen=True)
class Results:
    """Results of a training over all its starts. What was not measured is None."""

    steps: int = 0
    loss: float | None = None
    """Mean loss over the label tokens of the last steps (20 by default)."""
    lowest_loss: float | None = None
    """Lowest mean loss of consecutive steps, as many as `loss` is averaged over."""
    val_loss: float | None = None
    """Lowest loss of all validations."""
    last_val_loss: float | None = None
    val_score: float | None = None
    """Best score of all validations."""
    tokens_per_second: float | None = None
    """All ranks together, mean over the second half of the run."""
    mfu: float | None = None
    """Share of the GPU's peak FLOPs, mean over the second half of the run."""
    peak_memory_bytes: int | None = None
    """Peak memory of rank 0."""
    data_share: float | None = None
    """Share of the time in steps that rank 0 waited for data."""
    skipped_steps: int = 0
    train_seconds: float = 0.0
    """Seconds spent in training steps."""


TEXTS: dict[str, Callable[[Results], str | None]] = {
    "steps": lambda r: f"{r.steps:,}" if r.steps else None,
    "loss": lambda r: format_number(r.loss, ".4f"),
    "lowest loss": lambda r: format_number(r.lowest_loss, ".4f"),
    "last val loss": lambda r: format_number(r.last_val_loss, ".4f"),
    "lowest val loss": lambda r: format_number(r.val_loss, ".4f"),
    "best val score": lambda r: format_number(r.val_score, ".4f"),
    "tokens/s": lambda r: None if r.tokens_per_second is None else short_text(r.tokens_per_second),
    "MFU": lambda r: format_number(r.mfu, ".1%"),
    "memory": lambda r: None if r.peak_memory_bytes is None else readable(r.peak_memory_bytes),
    "waits for data": lambda r: format_number(r.data_share, ".1%"),
    "skipped steps": lambda r: str(r.skipped_steps) if r.skipped_steps else None,
    "training": lambda r: duration(r.train_seconds) if r.steps else None,
}
"""Name of each result on pages and in the terminal -> its text. The name of `loss` comes from `loss_name`."""
METRICS = {"val_loss": "lowest val loss", "val_score": "best val score", "last_val_loss": "last val loss"}
"""Metrics other than the loss by which runs can be compared -> their names on pages."""


def loss_name(windows: Collection[int]) -> str:
    """Return the name of the last steps' mean loss, with the number of steps if all `windows` are equal."""
    return f"loss of last {min(windows)} steps" if len(set(windows)) == 1 else "loss of last steps"


def metric_name(metric: str, windows: Collection[int]) -> str:
    """Return the name on pages of a metric by which runs are compared. `windows` are as for `loss_name`."""
    return METRICS.get(metric) or loss_name(windows)


def format_number(value: float | None, form: str) -> str | None:
    """Format a number; None if it was not measured."""
    return None if value is None else format(value, form)


def columns(results: list[Results], windows: Collection[int], wanted: Collection[str] = TEXTS) -> dict[str, list[str]]:
    """Return a table's columns: name of a result -> its text for each run. Columns without any value are left out.
    `windows`: numbers of last steps over which the losses are averaged; `wanted`: names of results (`TEXTS`)."""
    texts_by_column = {name: [TEXTS[name](one) or "" for one in results] for name in wanted}
    names = {"loss": loss_name(windows)}
    return {names.get(name, name): texts for name, texts in texts_by_column.items() if any(texts)}


def results_of(run: RunRecord) -> Results:
    """Compute the results of a training, such as loss, speed and memory, from what was read of its output folder."""
    history = run.history
    seconds, lowest, memory = history.sums["seconds"], history.lowest_loss, history.most("peak_memory_bytes")
    losses, scores = ([row[key] for row in run.validations if row.get(key) is not None] for key in ("loss", "score"))
    return Results(
        steps=history.last_step,
        loss=history.loss,
        lowest_loss=None if lowest is None else lowest[0],
        val_loss=min(losses, default=None),
        last_val_loss=losses[-1] if losses else None,
        val_score=max(scores, default=None),
        tokens_per_second=history.mean("tokens_per_second"),
        mfu=history.mean("mfu"),
        peak_memory_bytes=None if memory is None else int(memory),
        data_share=history.sums["data_seconds"] / seconds if seconds > 0 else None,
        skipped_steps=history.skipped_steps,
        train_seconds=round(seconds, 3),
    )


def read_results(folder: Path, window: int) -> Results:
    """Read the results of a training, which may be unfinished, from its output folder; empty if it has no readable
    metrics. `window`: number of steps over which the last and the lowest loss are averaged."""
    run = RunRecord(folder, "", RunHistory(window))
    try:
        read_metrics(run)
        run.validations = read_validations(run)
    except DataError:
        return Results()
    return results_of(run)
