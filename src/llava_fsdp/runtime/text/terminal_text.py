"""Make text of unknown origin safe for terminals and logs: it cannot move the cursor, set the title or imitate a log
line.

Names of records and images, keys of files, and texts that models generate may contain any character. Control
characters, characters that change the direction of text, and invisible characters are written as JSON escapes
(`\\u001b`), so that a line of JSON stays valid.
"""

import re
import sys
from typing import Any, TextIO

OBEYED = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 and C1 controls, except tab, newline and carriage return
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    "\u2028\u2029"  # separators of lines and paragraphs
    "\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb"  # characters of no width
    "\U000e0000-\U000e0fff"  # tags
    "\ud800-\udfff"  # half a surrogate pair, which cannot be encoded
)
"""Characters that a terminal may obey or that are invisible, for a character class of a regular expression."""
MOST_NAME = 4096
"""Maximum number of characters of a name shown in full: the bytes that Linux allows for a path."""
IN_NAMES = re.compile(f"[{OBEYED}\t\n\r\u200c\u200d]")
IN_TEXTS = re.compile(rf"[{OBEYED}]|\r(?!\n)")  # the joiners are allowed: they are used in Persian, Hindi and emoji
MOVES = re.compile(r"\r|\n*(?:\x1b\[A)+\Z")
"""What tqdm writes before a line: a move of the cursor to the beginning of the line, or up several lines."""


def shown_name(name: object) -> str:
    """Escape control characters and line breaks in a name, id, key or value, so that it is one line. The middle of a
    name with more than `MOST_NAME` characters becomes `...`."""
    text = str(name)
    if len(text) > MOST_NAME:
        text = f"{text[:200]}...{text[-100:]}"
    return IN_NAMES.sub(escape, text)


def shown_text(text: str) -> str:
    """Escape control characters in a text, except newlines and tabs."""
    return IN_TEXTS.sub(escape, text)


def escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Guarded:
    """Wrapper of a text stream that escapes control characters in what is written to it, except a carriage return at
    the beginning of a write, which progress bars need."""

    def __init__(self, stream: TextIO):
        self.unguarded = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped, except those with which tqdm moves the cursor before it
        writes a line. Return the length of the text."""
        move = MOVES.match(text)
        begin = move.end() if move else 0
        self.unguarded.write(text[:begin] + shown_text(text[begin:]))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))


def guard_streams() -> None:
    """Make stdout and stderr escape control characters. To be called before libraries keep references to them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))
