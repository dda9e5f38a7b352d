"""Curves as pictures in a page: drawn here as SVG, which assets/charts.js makes zoom, pan, smooth and tell values.

Whoever has no JavaScript sees the same pictures, still.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from llava_fsdp.report.downsample import Point
from llava_fsdp.report.html import inline_json, shortened, ticks

ASSETS = Path(__file__).parent / "assets"
WIDTH, HEIGHT = 640, 240
WIDE_WIDTH, WIDE_HEIGHT = 1296, 330
LEFT, RIGHT, TOP, BELOW = 58, 10, 10, 24
COLOURS = 8
"""Of the style sheet; lines beyond them are dashed."""
DIGITS = 6
"""Of a value in a page."""
PAGE_POINTS = 40_000
"""Points of all lines of a page together, some 80 bytes each."""
NAME_LENGTH = 80
FLAT = 1e-12
"""A range that is so small a part of its values is rounding, and is drawn as one value."""
RARE = 3
"""Percent of the ranges that may lie outside of a chart: a spike of one step would flatten everything else."""


@dataclass(frozen=True)
class Line:
    name: str
    points: list[Point]
    colour: int = 0
    dots: bool = False
    """Values that are few and far apart."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line]
    unit: str = ""
    note: str = ""
    smooths: bool = False
    """Has a slider that smooths."""
    logs: bool = False
    """Has a switch to a logarithmic axis."""
    marks: list[int] = field(default_factory=list)
    """Steps behind which the run was started again."""
    level: tuple[str, float] | None = None
    """A value that the lines are to be compared with, and its name."""
    wide: bool = False
    share: bool = False
    """Values are parts of 1, shown in percent."""


def points_each(curves: int) -> int:
    """How many points each of so many curves of a page may have."""
    return max(20, min(1000, PAGE_POINTS // max(1, curves)))


def draw(chart: Chart) -> str:
    """A figure; nothing where there is no value to draw."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return ""
    scale = Scale.of(chart, lines)
    width, height = scale.width, scale.height
    body = [*axes(scale, chart), *marks(scale, chart), *(shape for line in lines for shape in shapes(scale, line))]
    title = escape(chart.title)
    return (
        f"<figure class='chart{' wide' if chart.wide else ''}'>"
        f"<figcaption>{title}{f' <small>{escape(chart.unit)}</small>' if chart.unit else ''}</figcaption>"
        f"<svg viewBox='0 0 {width} {height}' role='img' aria-label='{title}'>{''.join(body)}</svg>"
        f"{legend(chart, lines)}"
        f"{f'<p class=note>{escape(chart.note)}</p>' if chart.note else ''}"
        f"<script type='application/json'>{inline_json(told(chart, lines))}</script></figure>\n"
    )


@dataclass(frozen=True)
class Scale:
    """Values to pixels."""

    first: float
    last: float
    low: float
    high: float
    width: int
    height: int

    @classmethod
    def of(cls, chart: Chart, lines: list[Line]) -> "Scale":
        steps = [point.step for line in lines for point in (line.points[0], line.points[-1])]
        values = [value for line in lines for value in extent(line)]
        if chart.level is not None:
            values.append(chart.level[1])
        low, high = min(values), max(values)
        is_flat = high - low <= FLAT * max(abs(low), abs(high))
        room = (0.0 if is_flat else 0.05 * (high - low)) or abs(high) * 0.1 or 1.0
        floor = low - room
        first, last = min(steps), max(steps)
        return cls(
            first,
            last if last > first else first + 1,
            0.0 if low >= 0 > floor else floor,
            high + room,
            WIDE_WIDTH if chart.wide else WIDTH,
            WIDE_HEIGHT if chart.wide else HEIGHT,
        )

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inner = self.height - TOP - BELOW
        return TOP + inner - max(-0.02, min(1.02, (value - self.low) / (self.high - self.low))) * inner


def extent(line: Line) -> tuple[float, float]:
    """All of its means, and of the ranges around them all but a few."""
    means = [point.mean for point in line.points]
    spare = len(means) * RARE // 100
    low, high = sorted(p.least for p in line.points)[spare], sorted(p.most for p in line.points)[-1 - spare]
    return min(*means, low, high), max(*means, low, high)


def axes(scale: Scale, chart: Chart) -> list[str]:
    parts = []
    values = ticks(scale.low, scale.high, 5)
    for value in values:
        y = scale.y(value)
        parts.append(f"<path class='grid' d='M{LEFT} {y:.1f}H{scale.width - RIGHT}'/>")
        parts.append(
            f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{shown(value, chart.share, digits(values))}</text>"
        )
    for step in ticks(scale.first, scale.last, scale.width // 80):
        if step == int(step):
            x = scale.x(step)
            parts.append(f"<text x='{x:.1f}' y='{scale.height - 6}' text-anchor='middle'>{shown(step)}</text>")
    if chart.level is not None:
        name, value = chart.level
        y, end = scale.y(value), scale.width - RIGHT
        parts.append(f"<path class='level' d='M{LEFT} {y:.1f}H{end}'/>")
        parts.append(f"<text class='levelname' x='{end}' y='{y - 4:.1f}' text-anchor='end'>{escape(name)}</text>")
    return parts


def marks(scale: Scale, chart: Chart) -> list[str]:
    """A line where the run was started again."""
    bottom = scale.height - BELOW
    return [
        f"<path class='mark' d='M{scale.x(step):.1f} {TOP}V{bottom}'><title>started after step {step:,}</title></path>"
        for step in chart.marks
        if scale.first <= step <= scale.last
    ]


def shapes(scale: Scale, line: Line) -> list[str]:
    """The range of each stretch, and the means as a line."""
    at = [(f"{scale.x(p.step):.1f}", p) for p in line.points]
    colour = f"c{line.colour % COLOURS}{' dashed' if line.colour >= COLOURS else ''}"
    parts = []
    if any(p.least < p.most for p in line.points):
        above = "L".join(f"{x} {scale.y(p.most):.1f}" for x, p in at)
        below = "L".join(f"{x} {scale.y(p.least):.1f}" for x, p in reversed(at))
        parts.append(f"<path class='band {colour}' d='M{above}L{below}Z'/>")
    if line.dots or len(at) == 1:
        parts += [f"<circle class='{colour}' r='3' cx='{x}' cy='{scale.y(p.mean):.1f}'/>" for x, p in at]
    parts.append(f"<path class='line {colour}' d='M{'L'.join(f'{x} {scale.y(p.mean):.1f}' for x, p in at)}'/>")
    return parts


def legend(chart: Chart, lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    items = "".join(
        f"<li class='c{line.colour % COLOURS}{' dashed' if line.colour >= COLOURS else ''}'>"
        f"{escape(shortened(line.name, NAME_LENGTH))}</li>"
        for line in lines
    )
    return f"<ul class='legend'>{items}</ul>"


def told(chart: Chart, lines: Sequence[Line]) -> dict[str, object]:
    """What the script draws from."""
    return {
        "share": chart.share,
        "smooths": chart.smooths,
        "logs": chart.logs,
        "marks": chart.marks,
        "level": chart.level,
        "lines": [
            {
                "name": shortened(line.name, NAME_LENGTH),
                "colour": line.colour,
                "dots": line.dots,
                "x": [short(p.step) for p in line.points],
                "y": [short(p.mean) for p in line.points],
                **(
                    {"low": [short(p.least) for p in line.points], "high": [short(p.most) for p in line.points]}
                    if any(p.least < p.most for p in line.points)
                    else {}
                ),
            }
            for line in lines
        ],
    }


def short(value: float) -> float | int:
    """A value in few characters."""
    if value == int(value) and abs(value) < 1e7:
        return int(value)
    return float(f"{value:.{DIGITS}g}") if abs(value) < 1e6 else round(value, 1)


def digits(values: list[float]) -> int:
    """So many tell neighbours on an axis apart."""
    if len(values) < 2 or not values[1] > values[0]:
        return 4
    return max(4, 1 + math.ceil(math.log10(max(map(abs, values)) / (values[1] - values[0]))))


def shown(value: float, share: bool = False, digits: int = 4) -> str:
    """A value on an axis, or in a table."""
    if share:
        return f"{100 * value:.{digits}g} %"
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3g}".partition("e")[::2]
        return f"{mantissa}e{int(exponent)}" if exponent else f"{value:.1e}"
    return f"{value:.{digits}g}" if not math.isclose(value, round(value)) else f"{round(value)}"
