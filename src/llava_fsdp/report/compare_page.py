"""Compare several runs on a page: their curves in common charts, their results, and the keys in which they differ."""

import time
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any

from llava_fsdp.config.command_line.tree import written
from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.html import heading, section, table, whole_page
from llava_fsdp.report.charts.svg import Chart, Line, points_each
from llava_fsdp.report.results import columns, metric_name, results_of
from llava_fsdp.report.run_charts import CURVES, figures, points_of, values_of
from llava_fsdp.report.run_reader import RunRecord
from llava_fsdp.runtime.text.humanize import format_time

MOST_DRAWN = 64
"""Maximum number of runs whose curves are drawn; the tables list all."""
IGNORED = ("output_dir", "track.name")
"""Keys that are not compared, because they differ between any two runs."""


def comparison_page(runs: list[RunRecord]) -> str:
    """Return the page that compares several runs, as HTML: their results, curves and different settings. It is named a
    sweep if all runs have a `metric`, which only jobs of a sweep have."""
    kind = "comparison" if any(run.metric is None for run in runs) else "sweep"
    parts = [
        heading(kind, f"{len(runs):,} runs", f"As of {format_time(time.time())}."),
        section("Results", results_table(runs)),
        figures(charts(runs[:MOST_DRAWN])),
    ]
    if len(runs) > MOST_DRAWN:
        parts.append(f"<p class='note'>Only the first {MOST_DRAWN} runs are drawn.</p>")
    return whole_page(f"{len(runs)} runs", "".join([*parts, *differences(runs)]))


def results_table(runs: list[RunRecord]) -> str:
    """Return the table of the runs' results as HTML, with a note that says by which metric one is the best."""
    # numbers of last steps over which the runs' losses are averaged
    windows = [run.history.window for run in runs if run.history.loss is not None]
    texts = columns([results_of(run) for run in runs], windows)
    best, metric = best_of(runs)
    states = [f"{run.state}, best" if number == best else run.state for number, run in enumerate(runs)]
    rows = zip([run.name for run in runs], states, *texts.values(), strict=True)
    note = f"<p class='note'>Best by {metric_name(metric, windows)}.</p>" if best is not None else ""
    return table(["run", "status", *texts], rows, best) + note


def best_of(runs: list[RunRecord]) -> tuple[int | None, str]:
    """Return the index of the best run, which has the lowest value, and the name of the metric that is compared.

    The metric is that of the runs' sweep, and the index None if no run has a value. Runs that are not all of one sweep
    are compared by the loss of the last validation, or by the loss of their last steps if a run has no validation. The
    index is then also None if only one run has a loss, or if the two lowest losses are equal in the four decimals that
    the page shows: they may differ only by rounding.
    """
    metric, values = runs[0].metric or "", [run.value for run in runs]
    if not metric or any(run.metric != metric for run in runs):
        results = [one for run in runs if (one := results_of(run)).loss is not None]
        metric = "loss" if any(one.last_val_loss is None for one in results) else "last_val_loss"
        values = [getattr(results_of(run), metric) for run in runs]
        shown = sorted((value, f"{value:.4f}") for value in values if value is not None)
        if len(shown) < 2 or shown[0][1] == shown[1][1]:
            return None, metric
    measured = [(value, place) for place, value in enumerate(values) if value is not None]
    return (min(measured)[1] if measured else None), metric


def charts(runs: list[RunRecord]) -> Iterator[Chart]:
    """Yield a chart for each metric, with one line for each run. Bands from least to greatest value would cover other
    runs, and are left out."""
    curves = [(chart, names, key) for chart, names in CURVES for key in names]
    # most points of a curve, so that the page does not become too large; 2: the curves of validations below
    most = points_each(len(runs) * (len(curves) + 2))
    for chart, names, key in curves:
        lines = []
        for number, run in enumerate(runs):
            points = [Point.exact(p.step, p.mean) for p in points_of(run, key, most)]
            lines.append(Line(run.name, points, number))
        title = chart.title if len(names) == 1 else f"{chart.title}: {names[key]}"
        yield replace(chart, title=title, lines=lines)
    for key in ("loss", "score"):
        points = [values_of(run.validations, lambda row, key=key: row.get(key)) for run in runs]
        lines = [Line(run.name, values, n, True) for n, (run, values) in enumerate(zip(runs, points, strict=True))]
        yield Chart(f"Validation {key}", lines)


def differences(runs: list[RunRecord]) -> Iterator[str]:
    """Yield HTML sections: the keys and the environments in which the runs differ, and why each run ended."""
    keys = differing([run.config for run in runs], [run.overrides for run in runs], IGNORED)
    names = ["key", *(run.name for run in runs)]
    without = ", ".join(run.name for run in runs if not run.config)
    note = f"<p class='note'>No config.yaml, only overrides are shown: {escape(without)}</p>" if without else ""
    yield section("What differs", note, table(names, keys) if keys else "<p>No key of their configurations.</p>")
    if environments := differing([environment(run) for run in runs]):
        yield section("Where they ran", table(names, environments))
    if reasons := [[run.name, run.reason] for run in runs if run.reason]:
        yield section("Why they ended", table(["run", "reason"], reasons))


def differing(
    trees: list[dict[str, Any]], overrides: list[dict[str, Any]] | None = None, ignored: tuple[str, ...] = ()
) -> list[list[str]]:
    """Return a row (key, its value in each run as text) for each key, except those `ignored`, that differs in value.

    Args:
        trees: for each run, its values by key; empty if they are unknown.
        overrides: for each run, the values that its sweep sets. They are compared if the run's values are unknown.
    """
    overrides = overrides or [{} for _ in trees]
    rows = []
    for key in dict.fromkeys(key for tree in trees for key in tree if key not in ignored):
        # None: unknown, which is no difference; empty: the run does not have this key
        values = [
            written((tree or few)[key]) if key in (tree or few) else "" if tree else None
            for tree, few in zip(trees, overrides, strict=True)
        ]
        if len({value for value in values if value is not None}) > 1:
            rows.append([key, *(value or "" for value in values)])
    return rows


def environment(run: RunRecord) -> dict[str, Any]:
    about = run.about
    plain = {key: about[key] for key in ("ranks", "nodes", "device", "commit") if key in about}
    return {**plain, **{f"version of {name}": value for name, value in (about.get("versions") or {}).items()}}
