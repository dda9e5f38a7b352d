"""What a result of peers.py looks like: on the terminal, as a plot, and as a table between README.md's markers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from bench import Report, show
from provenance import REPOSITORY

README = REPOSITORY / "README.md"
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
NO_RESULT = "No result is stored yet: `python benchmarks/peers.py` makes one. On a GPU it has never been run."
DATA = ("equal", "mixed")


def rates(report: Report) -> dict[str, dict[str, float]]:
    """Real tokens a CPU second, the median over the rounds, by peer and data set."""
    found: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        found.setdefault(row["peer"], {})[row["data"]] = row["real_tokens_per_cpu_second_median"]
    return found


def times_ours(report: Report) -> dict[str, dict[str, float]]:
    """CPU seconds of a step over those of this project's step in the same round, by peer and data set; the median over
    the rounds. This project runs in more rounds than its peers, so that their fastest rounds cannot be compared."""
    found: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        found.setdefault(row["peer"], {})[row["data"]] = median(row["times_ours"])
    return found


def show_rows(report: Report) -> None:
    heads = ("peer, data", "CPU s min", "median", "wall s min", "real tokens / CPU s", "ours packed is")
    lines = [
        (f"{row['peer']}, {row['data']}", f"{row['cpu_seconds']['min']:.3f}", f"{row['cpu_seconds']['median']:.3f}",
         f"{row['wall_seconds']['min']:.3f}", f"{row['real_tokens_per_cpu_second_median']:,.0f}",
         f"{median(row['times_ours']):.3f} x")
        for row in report["rows"]
    ]  # fmt: skip
    show("CPU seconds of a step, all ranks together", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    """Bars of real tokens a CPU second, all data sets side by side."""
    found, sets = rates(report), report["options"]["data"]
    width = 0.8 / len(sets)
    _, axes = pyplot.subplots(figsize=(10, 0.3 * len(sets) * len(found) + 1.5), layout="constrained")
    for number, data in enumerate(sets):
        places = [place + width * (number - (len(sets) - 1) / 2) for place in range(len(found))]
        bars = axes.barh(places, [own.get(data, 0) for own in found.values()], 0.95 * width, label=data)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize="small", padding=3)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.legend(loc="lower right", fontsize="small")
    axes.set_xlabel("real tokens a CPU second")
    axes.set_title(f"{report['ranks']} ranks, {report['precision']}")


def markdown(report: Report, result: str) -> str:
    """README's section of a result.

    Args:
        result: the JSON's path from the repository's root.
    """
    found, times = rates(report), times_ours(report)
    lines = [
        "| | equal lengths: real tokens a CPU second | ours packed is | mixed lengths | ours packed is |",
        "|---|---:|---:|---:|---:|",
    ]
    for peer, what in report["peers"].items():
        if peer in found:
            cells = [f"{found[peer][d]:,.0f} | {times[peer][d]:.2f} x" for d in DATA]
            lines.append(f"| {what} | {cells[0]} | {cells[1]} |")
        else:
            lines.append(f"| {what} | NOT RUN: {report['not_run'][peer]} | | | |")
    options, machine = report["options"], report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    plot = result.removesuffix(".json") + ".png"
    return "\n".join([
        *lines,
        "",
        f"![Real tokens a CPU second of this project and its peers]({plot})",
        "",
        f"Stage 2 in {report['precision']} of a model of width {options['hidden']} and {options['layers']} layers on "
        f"{report['ranks']} CPU ranks ({machine['device']}), {versions}; medians over {options['repeats']} rounds of "
        f"{options['steps']} steps. The padded peers' rows are "
        + (
            "those of LLaVA's own sampler"
            if options["padded"] == "grouped"
            else "sorted by length within a step"
        )
        + f". First losses agree within {report['equality']['first losses']:.0e}. "
        f"Made by `{report['command']}` at commit {report['commit'][:12]} ([result]({result})).",
        "",
        "All peers but our own loop pad. A CPU shows nothing of kernels, memory limits or overlap of communication.",
    ])  # fmt: skip


def replaced(text: str, block: str) -> str:
    """README with another block between its markers.

    Raises:
        SystemExit: it has no markers, or not one pair.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"README.md needs one {BEGIN} and behind it one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def rewrite_readme(result: Path, readme: Path = README) -> None:
    """Put a stored result's table between the markers.

    Raises:
        SystemExit: the result is no whole one of peers.py.
    """
    try:
        report = json.loads(result.read_text())
        block = markdown(report, Path(os.path.relpath(result.resolve(), readme.parent)).as_posix())
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{result} is no result of benchmarks/peers.py: {error!r}") from error
    readme.write_text(replaced(readme.read_text(), block))
    print(f"wrote the table of {result} into {readme}")
