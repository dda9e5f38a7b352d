"""Draw charts of curves and bars for pages, as HTML figures with SVG. A script (assets/charts.js) adds zoom, pan,
smoothing and values on hover to the curves; without JavaScript the charts are shown all the same."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from llava_fsdp.report.charts.downsample import Point
from llava_fsdp.report.charts.html import DATA, inline_json, shorten_middle

WIDTH, HEIGHT = 640, 240
WIDE_WIDTH, WIDE_HEIGHT = 1296, 330
SMALL_WIDTH, SMALL_HEIGHT = 400, 220
"""Size of a bar chart in a narrow window. The script redraws curves in each window's size."""
LEFT, RIGHT, TOP, BELOW = 68, 10, 10, 24
COLOURS = 8
"""Number of line colours in the style sheet; further lines are dashed."""
DASH = 12
"""Pixels of the dashes of lines that lie on each other."""
DIGITS = 6
"""Significant digits of the values in a page."""
PAGE_POINTS = 40_000
"""Maximum number of points of all lines of a page; a point takes about 80 bytes."""
NAME_LENGTH = 80
FLAT = 1e-12
"""Relative difference below which a chart's values differ only by rounding, and are drawn as one value."""
RARE = 3
"""Percentage of a line's points whose band (least to greatest value) may lie outside of the chart. If none may, a spike
of one step would make the rest of the line flat."""
WIDEST_BAR = 90


@dataclass(frozen=True)
class Line:
    name: str
    points: list[Point]
    colour: int = 0
    dots: bool = False
    """Whether to draw points as dots, for values that are few and far apart."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line] = field(default_factory=list)
    unit: str = ""
    note: str = ""
    smooths: bool = False
    """Whether it has a slider for smoothing."""
    logs: bool = False
    """Whether it has a switch for a logarithmic axis."""
    marks: list[int] = field(default_factory=list)
    """Steps after which the run was restarted."""
    level: tuple[str, float] | None = None
    """(name, value) of a horizontal line to compare the curves with."""
    wide: bool = False
    share: bool = False
    """Whether values are fractions of 1, shown in percent."""
    along: str = "step"
    """Name of the horizontal axis."""


@dataclass(frozen=True)
class Bar:
    label: str
    values: Sequence[float]
    texts: Sequence[str]
    """Text of each value, shown on hover."""
    sum: str = ""
    """Text above the bar."""


def points_each(curves: int) -> int:
    """Return the maximum number of points of each curve on a page."""
    return max(20, min(1000, PAGE_POINTS // max(1, curves)))


def draw(chart: Chart) -> str:
    """Return a chart of curves as an HTML figure; empty if there is no value to draw."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return ""
    scale, groups = Scale.of(chart, lines), equal_lines(lines)
    # lines that lie on each other are dashed, each in the gaps of the others
    dash_of_line = {index: dash_style(n, len(group)) for group in groups for n, index in enumerate(group)}
    dashes = [dash_of_line.get(index, "") for index in range(len(lines))]
    body = [*grid(scale, chart.share), *ticks_along(scale), *level(scale, chart), *marks(scale, chart)]
    body += [shape for line, dash in zip(lines, dashes, strict=True) for shape in shapes(scale, line, dash)]
    names = [(line.name, colour_class(line.colour)) for line in lines]
    note = "".join(f"<p class=note>{escape(text)}</p>" for text in (chart.note, equal_note(lines, groups)) if text)
    kind = "chart wide" if chart.wide else "chart"
    pictures = [picture(scale, chart.title, body)]
    return figure(kind, chart.title, chart.unit, pictures, names, note + script_of_values(chart, lines, dashes))


def equal_lines(lines: Sequence[Line]) -> list[list[int]]:
    """Return groups of lines whose points are equal, as indices in `lines`."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, line in enumerate(lines):
        groups.setdefault(tuple((p.step, round_digits(p.mean)) for p in line.points), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def dash_style(number: int, lines: int) -> str:
    """Return the CSS of curve `number` of `lines` equal curves: its dashes lie in the gaps of the others."""
    size = min(lines, COLOURS)
    return f"stroke-dasharray:{DASH} {DASH * (size - 1)};stroke-dashoffset:{-DASH * (number % size)}"


def equal_note(lines: Sequence[Line], groups: list[list[int]]) -> str:
    """Return a sentence that names the curves which are equal (`equal_lines`); empty if none are."""
    if [len(lines)] == [len(group) for group in groups]:
        return "These curves are equal."
    named = "; ".join(" = ".join(shorten_middle(lines[index].name, NAME_LENGTH) for index in group) for group in groups)
    return f"Equal curves: {shorten_middle(named)}" if groups else ""


def draw_bars(title: str, unit: str, bars: Sequence[Bar], names: Sequence[str] = (), stacked: bool = False) -> str:
    """Return a chart of vertical bars as an HTML figure; empty if all values are 0. `names`: those of the values of
    each bar, for a legend. `stacked`: whether the values of a bar are drawn on top of each other; False: side by side.
    """
    longest = max((sum(bar.values) if stacked else max(bar.values) for bar in bars), default=0)
    if longest <= 0:
        return ""
    sizes = {"large": (WIDE_WIDTH, WIDE_HEIGHT), "small": (SMALL_WIDTH, SMALL_HEIGHT)}
    scales = {kind: Scale(0, len(bars), 0, longest * 1.1, width, height) for kind, (width, height) in sizes.items()}
    pictures = [picture(scale, title, bar_shapes(scale, bars, stacked), kind) for kind, scale in scales.items()]
    return figure("wide", title, unit, pictures, [(name, colour_class(n)) for n, name in enumerate(names)])


def bar_shapes(scale: "Scale", bars: Sequence[Bar], stacked: bool) -> list[str]:
    """Return the SVG elements of a bar chart. Labels are left out where they would overlap."""
    # share of the longest text, at 8 pixels a character, that fits between two bars
    room = (scale.x(1) - scale.x(0)) / (8 * max(len(text) for bar in bars for text in (bar.label, bar.sum, "00000")))
    body, label_interval = grid(scale), math.ceil(1 / room)
    for index, bar in enumerate(bars):
        middle, num_beside = scale.x(index + 0.5), 1 if stacked else len(bar.values)
        width = min(WIDEST_BAR, (scale.x(1) - scale.x(0)) * 0.9 / num_beside)
        bottom_value = 0.0
        for number, (value, text) in enumerate(zip(bar.values, bar.texts, strict=True)):
            x = middle + width * ((0 if stacked else number) - num_beside / 2)
            y, bottom = scale.y(bottom_value + value), scale.y(bottom_value)
            bottom_value += value if stacked else 0
            body.append(
                f"<rect class='bar {colour_class(number)}' x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' "
                f"height='{bottom - y:.1f}'><title>{escape(text)}</title></rect>"
            )
        if index % label_interval == 0:
            body.append(text_at(middle, scale.height - 6, bar.label, "middle"))
            body += [text_at(middle, scale.y(sum(bar.values)) - 4, bar.sum, "middle")] if bar.sum else []
    return body


def picture(scale: "Scale", title: str, body: Iterable[str], kind: str = "") -> str:
    """Return an SVG picture as text. `title`: its name for screen readers; `body`: its elements; `kind`: CSS class."""
    return (
        f"<svg{f' class={kind}' if kind else ''} viewBox='0 0 {scale.width} {scale.height}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(body)}</svg>"
    )


def figure(kind: str, title: str, unit: str, drawn: Iterable[str], names: list[tuple[str, str]], more: str = "") -> str:
    """Return an HTML <figure> around a chart.

    Args:
        kind: its CSS classes.
        drawn: SVG pictures of the chart, such as one for wide windows and one for narrow ones.
        names: (name, CSS class of the color) of each curve, for a legend, which is left out if there is only one.
        more: HTML to put below the chart.
    """
    items = "".join(f"<li class='{colour}'>{escape(shorten_middle(name, NAME_LENGTH))}</li>" for name, colour in names)
    return (
        f"<figure class='{kind}'>"
        f"<figcaption>{escape(title)}{f' <small>{escape(unit)}</small>' if unit else ''}</figcaption>"
        f"{''.join(drawn)}{f'<ul class=legend>{items}</ul>' if len(names) > 1 else ''}{more}</figure>\n"
    )


@dataclass(frozen=True)
class Scale:
    """Converts steps and values to pixel coordinates."""

    first: float
    last: float
    low: float
    high: float
    width: int
    height: int

    @classmethod
    def of(cls, chart: Chart, lines: list[Line]) -> "Scale":
        """Return the scale that shows all points, with some room around them; a flat curve gets room, too."""
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
            0.0 if low >= 0 > floor else floor,  # without negative values, the axis begins at 0 or above
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
    """Return the least and greatest value that a chart must show: all means, and all bands (least to greatest value of
    a stretch of steps) except the few percent that reach farthest."""
    means = [point.mean for point in line.points]
    spare = len(means) * RARE // 100
    low, high = sorted(p.least for p in line.points)[spare], sorted(p.most for p in line.points)[-1 - spare]
    return min(*means, low, high), max(*means, low, high)


def grid(scale: Scale, share: bool = False) -> list[str]:
    """Return the SVG elements of a chart's horizontal grid lines and their values, in percent with `share`."""
    values, parts = ticks(scale.low, scale.high, 5), []
    for value in values:
        y = scale.y(value)
        parts.append(f"<path class='grid' d='M{LEFT} {y:.1f}H{scale.width - RIGHT}'/>")
        parts.append(text_at(LEFT - 6, y + 4, short_text(value, share, digits(values)), "end"))
    return parts


def ticks_along(scale: Scale) -> list[str]:
    """Return the texts of the horizontal axis: numbers of steps."""
    steps = [step for step in ticks(scale.first, scale.last, scale.width // 80) if step == int(step)]
    return [text_at(scale.x(step), scale.height - 6, short_text(step), "middle") for step in steps]


def level(scale: Scale, chart: Chart) -> list[str]:
    """Return the SVG elements of the horizontal line to compare the curves with, if the chart has one."""
    if chart.level is None:
        return []
    y, end = scale.y(chart.level[1]), scale.width - RIGHT
    line = f"<path class='level' d='M{LEFT} {y:.1f}H{end}'/>"
    return [line, text_at(end, y - 4, chart.level[0], "end", " class='levelname'")]


def marks(scale: Scale, chart: Chart) -> list[str]:
    """Return the SVG elements of a chart's vertical lines at the steps after which the run was restarted."""
    bottom = scale.height - BELOW
    return [
        f"<path class='mark' d='M{scale.x(step):.1f} {TOP}V{bottom}'><title>started after step {step:,}</title></path>"
        for step in chart.marks
        if scale.first <= step <= scale.last
    ]


def text_at(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f"<text{more} x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def shapes(scale: Scale, line: Line, dash: str = "") -> list[str]:
    """Return the SVG elements of a line of a chart: the curve of its means, and the band from least to greatest value.
    `dash`: CSS of its dashes; empty for a solid line."""
    at = [(f"{scale.x(p.step):.1f}", p) for p in line.points]
    colour, parts = colour_class(line.colour), []
    if any(p.least < p.most for p in line.points):
        above = "L".join(f"{x} {scale.y(p.most):.1f}" for x, p in at)
        below = "L".join(f"{x} {scale.y(p.least):.1f}" for x, p in reversed(at))
        parts.append(f"<path class='band {colour}' d='M{above}L{below}Z'/>")
    if line.dots or len(at) == 1:
        parts += [f"<circle class='{colour}' r='3' cx='{x}' cy='{scale.y(p.mean):.1f}'/>" for x, p in at]
    style = f" style='{dash}'" if dash else ""
    parts.append(f"<path class='line {colour}'{style} d='M{'L'.join(f'{x} {scale.y(p.mean):.1f}' for x, p in at)}'/>")
    return parts


def colour_class(number: int) -> str:
    return f"c{number % COLOURS}{' dashed' if number >= COLOURS else ''}"


def script_of_values(chart: Chart, lines: Sequence[Line], dashes: Sequence[str]) -> str:
    """Return an HTML script element with a chart's values as JSON, from which the page's script redraws the chart.
    `dashes`: for each line the CSS of its dashes; empty for a solid line."""
    values = {
        "share": chart.share,
        "smooths": chart.smooths,
        "logs": chart.logs,
        "marks": chart.marks,
        "level": chart.level,
        "along": chart.along,
        "lines": [line_data(line) | {"dash": dash} for line, dash in zip(lines, dashes, strict=True)],
    }
    return f"{DATA}{inline_json(values)}</script>"


def line_data(line: Line) -> dict[str, Any]:
    """Return a line of a chart as JSON values for the page's script. `low` and `high`, the bounds of the band around
    the means, are left out if every point is a single value."""
    step, mean, low, high = ([round_digits(value) for value in values] for values in zip(*line.points, strict=True))
    values = {
        "name": shorten_middle(line.name, NAME_LENGTH),
        "colour": line.colour,
        "dots": line.dots,
        "x": step,
        "y": mean,
    }
    has_band = any(point.least < point.most for point in line.points)
    return {**values, "low": low, "high": high} if has_band else values


def round_digits(value: float) -> float | int:
    """Round a value, so that it takes few characters in JSON."""
    if value == int(value) and abs(value) < 1e7:
        return int(value)
    return float(f"{value:.{DIGITS}g}") if abs(value) < 1e6 else round(value, 1)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def digits(values: list[float]) -> int:
    """Return the number of significant digits, at least 4, with which evenly spaced values still differ as text."""
    if len(values) < 2 or not values[1] > values[0]:
        return 4
    return max(4, 1 + math.ceil(math.log10(max(map(abs, values)) / (values[1] - values[0]))))


def short_text(value: float, share: bool = False, digits: int = 4) -> str:
    """Return a value as short text, such as 20k, 61G, 2e-5; a `share`, a fraction of 1, in percent."""
    if share:
        return f"{100 * value:.{digits}g} %"
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    if abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{digits}g}" if not math.isclose(value, round(value)) else f"{round(value)}"
