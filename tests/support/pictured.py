"""What a browser shows of a page's charts: by pixels, not by what stands in the page."""

import io
from typing import Any

from PIL import Image

FEW = 20
"""Pixels; a curve of two points is longer."""
NEXT = 52
"""Of 255, in each channel: a level line between two rows of pixels has three quarters of its colour. White, grey and
the other curves of a chart of a few are further away."""


def charts_seen(page: Any) -> list[str]:
    """The titles of the charts whose every curve is seen in a screenshot of the chart, in its own colour."""
    seen = []
    for chart in page.locator("figure.chart svg").all():
        chart.scroll_into_view_if_needed()
        shown = Image.open(io.BytesIO(chart.screenshot())).convert("RGB")
        pixels = {colour: count for count, colour in shown.getcolors(shown.width * shown.height)}
        paths = chart.locator("path.line").all()
        colours = [colour_of(path) for path in paths]
        if colours and all(drawn_in(colour, pixels) >= FEW for colour in colours):
            seen.append(chart.get_attribute("aria-label"))
    return seen


def drawn_in(colour: tuple[int, ...], pixels: dict[tuple[int, ...], int]) -> int:
    """The number of pixels of a colour, or of one next to it: a level line between two rows of pixels has only such."""
    return sum(n for found, n in pixels.items() if max(abs(a - b) for a, b in zip(found, colour, strict=True)) < NEXT)


def colour_of(path: Any) -> tuple[int, ...]:
    """Of its stroke, as the page's style makes it."""
    said = path.evaluate("line => getComputedStyle(line).stroke")
    return tuple(int(float(part)) for part in said[said.index("(") + 1 : said.index(")")].split(",")[:3])
