"""Write a page with a chart of the longest sample against the number of GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_fsdp.plan.show.scaling_page import ChartPage, shown, write_chart
from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.svg import Chart, Line


def write_page(points: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """Write an HTML page with a chart and a table of `points`: for each number of GPUs (`gpus`) and of ranks that
    process a row together (`context`), the `tokens` of the longest sample that fits into memory, 0 if none does. Raise
    ConfigError if the file cannot be written."""
    lines = []
    for colour, context in enumerate(sorted({point["context"] for point in points})):
        fitting = [point for point in points if point["context"] == context and point["tokens"]]
        values = [Point.exact(point["gpus"], float(point["tokens"])) for point in fitting]
        lines.append(Line(f"{context} rank{'s' * (context > 1)} per row", values, colour, dots=True))
    chart = Chart("Longest sample in tokens against GPUs", lines, "predicted", logs=True, wide=True, along="GPUs")
    names = list(points[0])
    rows = [[shown(point[name]) for name in names] for point in points]
    return write_chart(path, ChartPage(title, chart, "Longest sample on each", names, rows))
