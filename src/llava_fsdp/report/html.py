"""What the pages of HTML have in common: tables, and round numbers for axes. Whatever is shown is escaped."""

import json
import math
from collections.abc import Iterable
from html import escape
from typing import Any

LONGEST_CELL = 2000
"""Characters of a cell of a table."""


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(shortened(name))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>\n"


def cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"<td class='n'>{value:,}</td>"
    return f"<td class='r'>{'' if value is None else escape(shortened(str(value)))}</td>"


def shortened(text: str, most: int = LONGEST_CELL) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def spaced(names: Iterable[str]) -> list[str]:
    """Names of fields as words; what a user has named stays as it is."""
    return [name.replace("_", " ") for name in names]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them at most."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def inline_json(value: Any) -> str:
    """JSON that stands within a script element: nothing in it can end that element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
