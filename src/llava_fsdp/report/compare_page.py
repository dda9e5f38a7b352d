"""The page of several runs: their curves in common charts, their results, and the keys in which they differ."""

import time
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from llava_fsdp.config.tree import written
from llava_fsdp.report.downsample import Point
from llava_fsdp.report.html import heading, section, table, whole_page
from llava_fsdp.report.results import columns, results_of
from llava_fsdp.report.run_charts import charts_or_none, in_gib, values_of
from llava_fsdp.report.run_reader import Run
from llava_fsdp.report.svg import Chart, Line, points_each
from llava_fsdp.runtime.humanize import moment

MOST_DRAWN = 64
"""Runs with curves; the tables have all."""
IGNORED = ("output_dir", "track.name")
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
        heading(f"{len(runs):,} runs", f"As of {moment(time.time())}."),
        section("Results", results_table(runs)),
        charts_or_none(charts(runs[:MOST_DRAWN])) or "",
    ]
    if len(runs) > MOST_DRAWN:
        parts.append(f"<p class='note'>Drawn are the first {MOST_DRAWN} runs.</p>")
    return whole_page(f"{len(runs)} runs", "".join([*parts, *differences(runs)]))


def results_table(runs: list[Run]) -> str:
    """Results of all runs; the one with the lowest value of a sweep's metric is marked best."""
    least = min((run.value for run in runs if run.value is not None), default=None)
    best = next((run for run in runs if run.value == least), None) if least is not None else None
    shown = columns([results_of(run) for run in runs])
    rows = (
        [run.name, f"{run.state}, best" if run is best else run.state, *(texts[place] for texts in shown.values())]
        for place, run in enumerate(runs)
    )
    return table(["run", "status", *shown], rows)


def charts(runs: list[Run]) -> Iterator[Chart]:
    shown = [key for key in CURVES if any(len(run.history.curves.get(key, ())) for run in runs)]
    most = points_each(len(runs) * (len(shown) + 2))

    def overlaid(points: Callable[[Run], list[Point]], dots: bool = False) -> list[Line]:
        return [Line(run.name, points(run), number, dots) for number, run in enumerate(runs)]

    for key in shown:
        title, unit = CURVES[key]
        is_rate = key == "lr"
        lines = overlaid(lambda run, key=key: means(run, key, most))
        yield Chart(title, lines, unit, "", not is_rate, not is_rate, wide=key == "loss", share=key == "mfu")
    for key in ("loss", "score"):
        lines = overlaid(lambda run, key=key: values_of(run.validations, lambda row: row.get(key)), dots=True)
        yield Chart(f"Validation {key}", lines)


def means(run: Run, key: str, most: int) -> list[Point]:
    """A curve without its bands, which would cover other runs' curves."""
    curve = run.history.curves.get(key)
    points = curve.points(most) if curve is not None else []
    points = in_gib(points) if key == "peak_memory_bytes" else points
    return [Point(point.step, point.mean, point.mean, point.mean) for point in points]


def differences(runs: list[Run]) -> Iterator[str]:
    """Keys of the configuration that are not the same everywhere, then versions and machines."""
    keys = differing([run.config for run in runs], [run.overrides for run in runs], IGNORED)
    names = ["key", *(run.name for run in runs)]
    without = ", ".join(run.name for run in runs if not run.config)
    note = f"<p class='note'>No config.yaml, only overrides are shown: {escape(without)}</p>" if without else ""
    yield section("What differs", note, table(names, keys) if keys else "<p>No key of their configurations.</p>")
    if places := differing([surroundings(run) for run in runs]):
        yield section("Where they ran", table(names, places))
    if reasons := [[run.name, run.reason] for run in runs if run.reason]:
        yield section("Why they ended", table(["run", "reason"], reasons))


def differing(
    trees: list[dict[str, Any]], overrides: list[dict[str, Any]] | None = None, ignored: tuple[str, ...] = ()
) -> list[list[str]]:
    """Rows of a key and its value in each tree, of the keys that do not have one value in all.

    Args:
        overrides: the few values that are known of a run whose tree is empty; keys that it lacks are not compared.
    """
    overrides = overrides or [{} for _ in trees]
    found = []
    for key in dict.fromkeys(key for tree in trees for key in tree if key not in ignored):
        values = [
            written((tree or few)[key]) if key in (tree or few) else "" if tree else None
            for tree, few in zip(trees, overrides, strict=True)
        ]
        if len({value for value in values if value is not None}) > 1:
            found.append([key, *(value or "" for value in values)])
    return found


def surroundings(run: Run) -> dict[str, Any]:
    about = run.about
    plain = {key: about[key] for key in ("ranks", "nodes", "device", "commit") if key in about}
    return {**plain, **{f"version of {name}": value for name, value in (about.get("versions") or {}).items()}}
