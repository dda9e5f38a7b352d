"""Build the HTML that all pages share: the page around it, headings and tables. Text from outside is escaped."""

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[1] / "assets"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
DATA = "<script type='application/json'>"
"""Opening tag of the element with a chart's values, from which assets/charts.js draws it."""
LONGEST_CELL = 2000
"""Maximum number of characters of a table cell."""
LONG_CELL = 24
"""Number of characters above which a cell's text is wrapped."""
NUMBER = re.compile(r"-?[\d.,]+(e-?\d+)?( ?%|[kMGT]| ([KMG]i)?B)?|(\d+h)?\d+m(\d+s)?")
"""Pattern of a number, with or without a unit. A column of numbers is aligned to the right."""


def whole_page(title: str, body: str) -> str:
    """Return a complete HTML page, which loads no other file. `body`: HTML of its content. If it contains charts with
    their values (elements that begin with the tag DATA), the script that redraws them is added."""
    script = f"<script>\n{(ASSETS / 'charts.js').read_text()}</script>" if DATA in body else ""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>\n{(ASSETS / 'page.css').read_text()}</style></head>\n"
        f"<body>\n{body}{script}</body></html>\n"
    )


def heading(kind: str, title: str, *lines: str | tuple[str, str], state: str = "") -> str:
    """Return the top of a page as HTML, with its title. `kind`: of the page, such as run or sweep. `lines`: lines below
    the title: a text, or (CSS class, text). `state`: that of the training, shown beside the title."""
    pairs = [("", line) if isinstance(line, str) else line for line in lines]
    body = "".join(f"<p class='{name}'>{escape(shorten_middle(text))}</p>" for name, text in pairs if text)
    mark = f"<span class='state {escape(state)}'>{escape(state)}</span>" if state else ""
    head = f"<p class='kind'>llava-fsdp · {escape(kind)}</p><h1>{escape(title)}{mark}</h1>"
    return f"<header>{head}{body}</header>\n"


def section(title: str, *body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(body)}</section>\n"


def table(names: Iterable[str], rows: Iterable[Iterable[object]], best: int | None = None) -> str:
    """Return an HTML table. Columns that are empty in every row are left out, and row number `best` is marked."""
    texts = [[cell_text(value) for value in row] for row in rows]
    columns = [column for column in zip(names, *texts, strict=True) if any(column[1:]) or not texts]
    if not columns:
        return ""
    # CSS classes of columns: "n" for numbers, "r" for others
    kinds = ["n" if all(NUMBER.fullmatch(text) for text in column[1:] if text) else "r" for column in columns]
    head, *rest = zip(*columns, strict=True)
    top = (f"<th class='{kind}'>{escape(shorten_middle(name))}</th>" for kind, name in zip(kinds, head, strict=True))
    body = (
        f"<tr{' class=best' if number == best else ''}>{''.join(map(cell, kinds, row))}</tr>\n"
        for number, row in enumerate(rest)
    )
    return f"<table><tr>{''.join(top)}</tr>\n{''.join(body)}</table>\n"


def cell_text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else shorten_middle(str(value))


def cell(kind: str, text: str) -> str:
    return f"<td class='{kind}{' long' if len(text) > LONG_CELL else ''}'>{escape(text)}</td>"


def shorten_middle(text: str, most: int = LONGEST_CELL) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def inline_json(value: Any) -> str:
    """Return a value as JSON for an HTML script element, escaped so that no text in it can end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
