"""Curves over steps as one SVG that needs nothing else; what came from users is escaped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from llava_fsdp.report.html import ticks

WIDTH, HEIGHT = 760, 380
LEFT, TOP, BELOW = 70, 34, 48
ROW = 20
NAME_LENGTH = 110
"""Characters of a name in the legend."""
MOST_POINTS = 400
"""Of a curve; more steps are drawn as means of neighbours."""
COLOURS = (
    "#3565a8", "#c8742b", "#4a8f4a", "#a03a3a", "#7a5ba6", "#8a6d3b", "#c25a97", "#6b6b6b", "#8f9a1f", "#2a98a3",
)  # fmt: skip
DASHES = ("", "6 3", "2 3", "9 3 2 3")
"""Of the first ten curves, the next ten, and so on."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]
    """Step and value."""
    marks: Sequence[tuple[float, float]] = ()
    """Single points beside the line."""
    failed: str = ""
    """What to say of a run that did not end well; its curve ends with a cross."""


@dataclass(frozen=True)
class Scale:
    """Values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def draw(curves: Sequence[Curve], title: str) -> str:
    """All curves on one pair of axes, with a legend below."""
    xs = [x for curve in curves for x, _ in (*curve.points, *curve.marks)]
    ys = [y for curve in curves for _, y in (*curve.points, *curve.marks)]
    high = TOP + HEIGHT + BELOW + ROW * len(curves) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {high}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="20">{escape(title)}</text>',
    ]
    if xs:
        x = Scale(*apart(min(xs), max(xs)), LEFT, LEFT + WIDTH)
        y = Scale(*apart(min(ys), max(ys)), TOP + HEIGHT, TOP)
        parts += axes(x, y)
        parts += [part for number, curve in enumerate(curves) for part in line(curve, number, x, y)]
    else:
        parts.append(f'<text x="{LEFT}" y="{TOP + 20}">no step was finished</text>')
    for number, curve in enumerate(curves):
        at = TOP + HEIGHT + BELOW + ROW * number
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 30}" y1="{at}" y2="{at}" {stroke(number)}/>')
        if curve.failed:
            parts.append(cross(LEFT + 15, at, number))
        name = curve.name if len(curve.name) <= NAME_LENGTH else curve.name[: NAME_LENGTH - 3] + "..."
        name += f" - {curve.failed}" if curve.failed else ""
        parts.append(f'<text x="{LEFT + 40}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def axes(x: Scale, y: Scale) -> list[str]:
    bottom, parts = TOP + HEIGHT, []
    for value in ticks(y.low, y.high):
        at = f"{y(value):.1f}"
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{at}" y2="{at}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end">{value:.6g}</text>')
    for value in ticks(x.low, x.high):
        if value == int(value):
            at = f"{x(value):.1f}"
            parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#888"/>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{bottom + 32}" text-anchor="end">step</text>')
    return parts


def line(curve: Curve, number: int, x: Scale, y: Scale) -> list[str]:
    points = [(x(step), y(value)) for step, value in thinned(curve.points)]
    parts = []
    if points:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" {stroke(number)}><title>{escape(curve.name)}</title>')
        parts.append("</polyline>")
    if len(points) == 1:  # a line of one point is none
        parts.append(dot(*points[0], number))
    parts += [dot(x(step), y(value), number) for step, value in curve.marks]
    if points and curve.failed:
        parts.append(cross(*points[-1], number))
    return parts


def stroke(number: int) -> str:
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return f'stroke="{colour(number)}" stroke-width="1.6"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dot(x: float, y: float, number: int) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour(number)}"/>'


def cross(x: float, y: float, number: int) -> str:
    a, b, c, d = x - 5, x + 5, y - 5, y + 5
    return (
        f'<path d="M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}M{a:.1f} {d:.1f}L{b:.1f} {c:.1f}" stroke="#c00" stroke-width="2"/>'
    )


def apart(low: float, high: float) -> tuple[float, float]:
    """Two ends that differ."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`, each the mean of neighbours; the last one is that of the end."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[max(0, end - size) : end] for end in range(len(points), 0, -size)][::-1]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]
