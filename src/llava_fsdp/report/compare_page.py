"""Several trainings side by side as one page: their curves in common charts, and the keys in which they differ."""

import time
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from llava_fsdp.config.tree import written
from llava_fsdp.report.downsample import Point
from llava_fsdp.report.html import table
from llava_fsdp.report.run_charts import HELP, in_gib, values_of
from llava_fsdp.report.run_page import measured, whole_page
from llava_fsdp.report.run_reader import Run
from llava_fsdp.report.svg import Chart, Line, draw, points_each
from llava_fsdp.runtime.humanize import duration, moment

MOST_DRAWN = 64
"""Runs with curves; the tables have them all."""
UNINTERESTING = ("output_dir", "track.name")
"""Keys that no two runs share."""
CURVES = {
    "loss": ("Loss", "a label token"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "tokens_per_second": ("Tokens a second", "all ranks"),
    "mfu": ("MFU", "of the peak"),
    "seconds": ("Time of a step", "seconds, rank 0"),
    "data_seconds": ("Waiting for data", "seconds a step, rank 0"),
    "peak_memory_bytes": ("Peak memory", "GiB, rank 0"),
}


def comparison_page(runs: list[Run]) -> str:
    parts = [
        f"<header><h1>{len(runs):,} runs</h1><p class='note'>As of {moment(time.time())}.</p></header>",
        summary(runs),
        charts(runs[:MOST_DRAWN]),
    ]
    if len(runs) > MOST_DRAWN:
        parts.append(f"<p class='note'>Drawn are the first {MOST_DRAWN} runs.</p>")
    return whole_page(f"{len(runs)} runs", "".join([*parts, *differences(runs)]))


def summary(runs: list[Run]) -> str:
    names = [
        "run", "status", "steps", "last loss", "lowest loss", "validation loss", "score", "tokens/s", "MFU",
        "peak memory", "waits for data", "skipped", "time in steps",
    ]  # fmt: skip
    return "<h2>Results</h2>" + table(names, (results(run) for run in runs))


def results(run: Run) -> list[object]:
    history, found = run.history, measured(run)
    lowest = history.lowest_loss
    quick = {key: found[key][0] if key in found else "" for key in ("speed", "mfu", "memory", "waits")}
    return [
        run.name,
        run.state,
        history.step,
        "" if history.loss is None else f"{history.loss:.4f}",
        "" if lowest is None else f"{lowest[0]:.4f} (step {lowest[1]:,})",
        last_of(run, "loss"),
        last_of(run, "score"),
        quick["speed"],
        quick["mfu"],
        quick["memory"],
        quick["waits"],
        history.skipped_steps,
        duration(history.sums["seconds"]),
    ]


def last_of(run: Run, key: str) -> str:
    """Of the last validation that has it, and what kind of score it is."""
    row = next((row for row in reversed(run.validations) if row.get(key) is not None), None)
    if row is None:
        return ""
    return f"{row[key]:.4g}" + (f" {row['metric']}" if key == "score" and row.get("metric") else "")


def charts(runs: list[Run]) -> str:
    shown = [key for key in CURVES if any(len(run.history.curves.get(key, ())) for run in runs)]
    most = points_each(len(runs) * (len(shown) + 2))

    def overlaid(points: Callable[[Run], list[Point]], dots: bool = False) -> list[Line]:
        return [Line(run.name, points(run), number, dots) for number, run in enumerate(runs)]

    found = []
    for key in shown:
        title, unit = CURVES[key]
        lines = overlaid(lambda run, key=key: means(run, key, most))
        found.append(
            Chart(title, lines, unit, smooths=key != "lr", logs=key != "lr", wide=key == "loss", share=key == "mfu")
        )
    for key, title in (("loss", "Validation loss"), ("score", "Validation score")):
        lines = overlaid(lambda run, key=key: values_of(run.validations, lambda row: row.get(key)), dots=True)
        found.append(Chart(title, lines))
    drawn = [draw(chart) for chart in found]
    return f"<p class='help'>{HELP}</p><div class='charts'>{''.join(drawn)}</div>\n" if any(drawn) else ""


def means(run: Run, key: str, most: int) -> list[Point]:
    """A curve without the ranges of its stretches, which would cover other runs' curves."""
    curve = run.history.curves.get(key)
    points = curve.points(most) if curve is not None else []
    points = in_gib(points) if key == "peak_memory_bytes" else points
    return [Point(point.step, point.mean, point.mean, point.mean) for point in points]


def differences(runs: list[Run]) -> Iterator[str]:
    """What is not the same everywhere: keys of the configuration, then versions and machines."""
    of_config = differing([run.config for run in runs], [run.asked for run in runs], UNINTERESTING)
    yield "<h2>What differs</h2>"
    names = ["key", *(run.name for run in runs)]
    if any(not run.config for run in runs):
        without = ", ".join(run.name for run in runs if not run.config)
        yield f"<p class='note'>Without a config.yaml, so that only what was typed is shown: {escape(without)}</p>"
    yield table(names, of_config) if of_config else "<p>No key of their configurations.</p>"
    of_place = differing([surroundings(run) for run in runs])
    if of_place:
        yield "<h2>Where they ran</h2>" + table(names, of_place)
    reasons = [[run.name, run.reason] for run in runs if run.reason]
    if reasons:
        yield "<h2>Why they ended</h2>" + table(["run", "reason"], reasons)


def differing(
    trees: list[dict[str, Any]], asked: list[dict[str, Any]] | None = None, without: tuple[str, ...] = ()
) -> list[list[str]]:
    """Rows of a key and its value in each, of keys that have not one value in all.

    Args:
        asked: the few values that are known of one whose tree is empty; the keys that it lacks tell nothing.
    """
    asked = asked or [{} for _ in trees]
    found = []
    for key in dict.fromkeys(key for tree in trees for key in tree if key not in without):
        values = [
            written((tree or few)[key]) if key in (tree or few) else "" if tree else None
            for tree, few in zip(trees, asked, strict=True)
        ]
        if len({value for value in values if value is not None}) > 1:
            found.append([key, *(value or "" for value in values)])
    return found


def surroundings(run: Run) -> dict[str, Any]:
    about = run.about
    plain = {key: about[key] for key in ("ranks", "nodes", "device", "commit") if key in about}
    return {**plain, **{f"version of {name}": value for name, value in (about.get("versions") or {}).items()}}
