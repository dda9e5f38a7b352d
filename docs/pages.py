"""What the writers of generated tables share: a page's text between two markers, and a Markdown table."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent
# A flag, KEY=VALUE, or a name with an underscore.
TYPED = re.compile(r"(?<![\w/`.])(?:--[\w-]+\w|[\w.]+=(?:\[[^\]]*\]|[^\s,;:)]*)|\w*[a-z0-9]_[\w.]*\w)")


def marks(name: str) -> tuple[str, str]:
    """The comments around a generated part of a page; a reader of the page sees neither."""
    return f"<!-- generated: {name} -->", f"<!-- /generated: {name} -->"


def replaced(text: str, name: str, block: str) -> str:
    """A page with another block between its markers.

    Raises:
        SystemExit: it has not exactly one pair of them.
    """
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"the page needs one {begin} and behind it one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A Markdown table.

    Args:
        align: a letter a column, `l` or `r`; columns beyond it are left-aligned.
    """
    columns = "|".join("---:" if align[place : place + 1] == "r" else "---" for place in range(len(head)))
    first, *others = (f"|{'|'.join(cells)}|" for cells in [head, *rows])
    return "\n".join([first, f"|{columns}|", *others])


def code(text: str) -> str:
    """A value in backticks, as one cell of a table; nothing at all for an empty text."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def cell(text: str) -> str:
    """Plain text as one cell, which nothing in it ends: keys, flags and values that can be typed stand in backticks."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    text = re.sub(TYPED, r"`\g<0>`", text)
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
