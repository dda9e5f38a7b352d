"""HTML parts that all report pages use: the page around a body, tables, headings. Text from data, models and users is
escaped."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
DATA = "<script type='application/json'>"
"""HTML tag before a chart's values, from which assets/charts.js draws the chart."""
LONGEST_CELL = 2000
"""Characters of a table cell; longer text is cut."""


def whole_page(title: str, body: str) -> str:
    """A complete HTML page that loads no other file."""
    script = f"<script>\n{(ASSETS / 'charts.js').read_text()}</script>" if DATA in body else ""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>\n{(ASSETS / 'page.css').read_text()}</style></head>\n"
        f"<body>\n{body}{script}</body></html>\n"
    )


def heading(title: str, *lines: str) -> str:
    return f"<header><h1>{escape(title)}</h1>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</header>\n"


def section(title: str, *body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(body)}</section>\n"


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


def inline_json(value: Any) -> str:
    """JSON for use inside an HTML script element: no text in it can end that element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
