"""Make the charts of a run's metrics, for its own page and for comparisons."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.svg import Chart, Line, draw, points_each
from llava_fsdp.report.run_reader import RunRecord

GIB = 1 << 30
MOST_MARKS = 100
MOST_SOURCES = 12
"""Maximum number of data sources whose loss curves are drawn."""
HELP = "Drag over a chart to zoom all of them, with Shift to pan; a double click shows everything again."
CURVES = (
    (Chart("Loss", unit="a label token", smooths=True, logs=True, wide=True), {"loss": "loss"}),
    (Chart("Learning rate"), {"lr": "learning rate"}),
    (Chart("Gradient norm", smooths=True, logs=True), {"grad_norm": "gradient norm"}),
    (Chart("Tokens a second", unit="all ranks", smooths=True), {"tokens_per_second": "tokens a second"}),
    (Chart("Utilization", unit="of the peak", smooths=True, share=True), {"mfu": "MFU", "hfu": "HFU"}),
    (
        Chart("Time of a step", unit="seconds, rank 0", smooths=True, logs=True),
        {"seconds": "step", "data_seconds": "waiting for data"},
    ),
    (Chart("Peak memory", unit="GiB, rank 0"), {"peak_memory_bytes": "peak memory"}),
    (Chart("Loss scale", unit="fp16", logs=True), {"loss_scale": "loss scale"}),
    (
        Chart("Load of experts", unit="1 if equal", smooths=True),
        {"expert_load_max": "greatest load", "balance_loss": "load-balance loss"},
    ),
    (Chart("Idle experts", unit="of all experts", smooths=True, share=True), {"experts_idle": "idle experts"}),
    (Chart("Pairs the right way round", unit="of all pairs", smooths=True, share=True), {"accuracy": "accuracy"}),
    (
        Chart("Rewards of answers", unit="mean", smooths=True),
        {"margin": "margin", "reward_chosen": "chosen", "reward_rejected": "rejected"},
    ),
    (
        Chart("Log-probability of answers", unit="mean", smooths=True),
        {"logp_chosen": "chosen", "logp_rejected": "rejected"},
    ),
)
"""For each chart of a run: (chart without lines, {key in metrics.jsonl: name of the line})."""


def figures(charts: Iterable[Chart]) -> str:
    """Return the HTML of those of the charts that have values to draw; an empty text if no chart has any."""
    drawn = "".join(map(draw, charts))
    return f"<p class='help'>{HELP}</p><div class='charts'>{drawn}</div>\n" if drawn else ""


def charts_of(run: RunRecord) -> Iterator[Chart]:
    """Yield the charts of a run, the loss first. `marks` of a chart: steps at which the run was started again."""
    history = run.history
    sources = dict(history.largest_sources(MOST_SOURCES))
    most_points = points_each(len(history.curves) + len(sources))
    marks = sorted({start["step"] for start in run.starts if start["step"] > 0})[-MOST_MARKS:]
    loss, *others = (
        replace(
            chart, marks=marks, lines=[Line(names[k], points_of(run, k, most_points), n) for n, k in enumerate(names)]
        )
        for chart, names in CURVES
    )
    of_pairs = "accuracy" in history.curves
    loss = replace(loss, unit="a pair") if of_pairs else loss
    yield replace(loss, note=width_note(run))
    if len(history.sources) > 1:
        num_hidden = len(history.sources) - len(sources)
        lines = [Line(name, curve.points(most_points), colour) for colour, (name, curve) in enumerate(sources.items())]
        note = (
            f"The {MOST_SOURCES} with most label tokens; {num_hidden} more are in metrics.jsonl." if num_hidden else ""
        )
        yield replace(loss, title="Loss by source", lines=lines, note=note, wide=False)
    yield from validation_charts(run.validations, marks, loss.unit)
    planned = run.about.get("planned_peak")
    level = ("planned", planned / GIB) if isinstance(planned, int) else None
    yield from (replace(chart, level=level) if chart.title == "Peak memory" else chart for chart in others)


def points_of(run: RunRecord, key: str, most_points: int) -> list[Point]:
    """Return the curve of the key `key` in a run's metrics.jsonl, as at most `most_points` points. Each has the mean,
    least and greatest value of some consecutive steps; memory is in GiB."""
    curve = run.history.curves.get(key)
    points = curve.points(most_points) if curve is not None else []
    size = GIB if key == "peak_memory_bytes" else 1
    return [Point(point.step, point.mean / size, point.least / size, point.most / size) for point in points]


def width_note(run: RunRecord) -> str:
    """Return a sentence about how many steps a point of the run's curves stands for; empty if that is one step."""
    curve = run.history.curves.get("loss")
    if curve is None or curve.width == 1:
        return ""
    return f"A point is the mean of {curve.width:,} or more steps; the band shows their least and greatest value."


def validation_charts(rows: list[dict[str, Any]], marks: list[int], unit: str) -> Iterator[Chart]:
    """Yield the charts of a run's validation loss and score, with a line for each data source if there are several.
    `rows`: rows of validation.jsonl; `marks`: steps after which the run was restarted; `unit`: the loss's."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("sources") or {}))[:MOST_SOURCES]
    lines = [Line("all", values_of(rows, lambda row: row.get("loss")), 0, True)]
    scores = [Line("score", values_of(rows, lambda row: row.get("score")), 0, True)]
    if len(names) > 1:
        for n, name in enumerate(names, start=1):
            lines.append(Line(name, values_of(rows, of_source(name, "loss")), n, True))
            scores.append(Line(name, values_of(rows, of_source(name, "score")), n, True))
    guesses = values_of(rows, lambda row: row.get("blind_guess"))
    if guesses:
        scores.append(Line("best guess without images", guesses, len(names) + 1, True))
    yield Chart("Validation loss", lines, unit, logs=True, marks=marks)
    metric = next((str(row["metric"]) for row in rows if row.get("metric")), "")
    yield Chart("Validation score", scores, metric, marks=marks)


def of_source(name: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    """Return a function that takes a value of a data source from a row of validation.jsonl."""
    return lambda row: (row.get("sources") or {}).get(name, {}).get(key)


def values_of(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> list[Point]:
    """Return a point for each row of validation.jsonl that has the value which the function `value` returns."""
    pairs = ((row["step"], value(row)) for row in rows)
    return [Point.exact(step, number) for step, number in pairs if number is not None]
