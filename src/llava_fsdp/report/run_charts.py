"""The charts of one run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from llava_fsdp.report.downsample import Point
from llava_fsdp.report.run_reader import Run
from llava_fsdp.report.svg import Chart, Line, draw, points_each

GIB = 1 << 30
MOST_MARKS = 100
MOST_SOURCES = 12
"""Sources whose curves are drawn."""
HELP = "Drag over a chart to zoom all of them, with Shift to pan; a double click shows everything again."


def charts_or_none(charts: Iterable[Chart]) -> str | None:
    """The charts that have something to draw; None where no chart has."""
    drawn = "".join(map(draw, charts))
    return f"<p class='help'>{HELP}</p><div class='charts'>{drawn}</div>\n" if drawn else None


def charts_of(run: Run) -> Iterator[Chart]:
    history = run.history
    sources = dict(history.largest_sources(MOST_SOURCES))
    most = points_each(len(history.curves) + len(sources))
    marks = sorted({start["step"] for start in run.starts if start["step"] > 0})[-MOST_MARKS:]

    def lines(names: dict[str, str]) -> list[Line]:
        found = [(name, history.curves[key].points(most)) for key, name in names.items() if key in history.curves]
        return [Line(name, points, colour) for colour, (name, points) in enumerate(found)]

    yield Chart("Loss", lines({"loss": "loss"}), "a label token", width_note(run), True, True, marks, wide=True)
    if len(history.sources) > 1:
        hidden = len(history.sources) - len(sources)
        yield Chart(
            "Loss by source",
            [Line(name, curve.points(most), colour) for colour, (name, curve) in enumerate(sources.items())],
            "a label token",
            f"The {MOST_SOURCES} with most label tokens; {hidden} more are in metrics.jsonl." if hidden else "",
            smooths=True,
            logs=True,
            marks=marks,
        )
    yield from validation_charts(run.validations, marks)
    yield Chart("Learning rate", lines({"lr": "learning rate"}), marks=marks)
    yield Chart("Gradient norm", lines({"grad_norm": "gradient norm"}), "", "", True, True, marks)
    yield Chart("Tokens a second", lines({"tokens_per_second": "tokens a second"}), "all ranks", "", True, False, marks)
    yield Chart("Utilization", lines({"mfu": "MFU", "hfu": "HFU"}), "of the peak", "", True, marks=marks, share=True)
    yield Chart(
        "Time of a step", lines({"seconds": "step", "data_seconds": "waiting for data"}), "seconds, rank 0",
        smooths=True, logs=True, marks=marks,
    )  # fmt: skip
    planned = run.about.get("planned_peak")
    memory = [replace(line, points=in_gib(line.points)) for line in lines({"peak_memory_bytes": "peak memory"})]
    level = ("planned", planned / GIB) if isinstance(planned, int) else None
    yield Chart("Peak memory", memory, "GiB, rank 0", marks=marks, level=level)
    yield Chart("Loss scale", lines({"loss_scale": "loss scale"}), "fp16", logs=True, marks=marks)


def in_gib(points: list[Point]) -> list[Point]:
    return [Point(point.step, *(value / GIB for value in point[1:])) for point in points]


def width_note(run: Run) -> str:
    curve = run.history.curves.get("loss")
    if curve is None or curve.width == 1:
        return ""
    return f"A point is the mean of {curve.width:,} steps or more, the band their least and their greatest value."


def validation_charts(rows: list[dict[str, Any]], marks: list[int]) -> Iterator[Chart]:
    names = list(dict.fromkeys(name for row in rows for name in row.get("sources") or {}))[:MOST_SOURCES]
    lines = [Line("all", values_of(rows, lambda row: row.get("loss")), 0, True)]
    if len(names) > 1:
        lines += [Line(name, values_of(rows, loss_of(name)), n, True) for n, name in enumerate(names, start=1)]
    yield Chart("Validation loss", lines, "a label token", logs=True, marks=marks)
    metric = next((str(row["metric"]) for row in rows if row.get("metric")), "")
    yield Chart("Validation score", [Line("score", values_of(rows, lambda row: row.get("score")), 0, True)], metric)


def loss_of(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: (row.get("sources") or {}).get(name, {}).get("loss")


def values_of(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> list[Point]:
    found = ((row["step"], value(row)) for row in rows)
    return [Point(step, one, one, one) for step, one in found if one is not None]
