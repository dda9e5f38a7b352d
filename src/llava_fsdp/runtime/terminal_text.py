"""Text for terminals and logs, where what others wrote can move no cursor, set no title and forge no line.

Names of records and pictures, keys of files, answers of models may hold any character. Those that a terminal obeys,
that turn the direction of text, or that cannot be seen, are written as escapes: `\\u001b`, as JSON has them, so that a
line of JSON stays one. Imports nothing of ours.
"""

import re
import sys
from typing import Any, TextIO

OBEYED = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, C0 and C1, but tab, newline and carriage return
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    "\u2028\u2029"  # separators of lines and paragraphs
    "\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb"  # no width
    "\U000e0000-\U000e0fff"  # tags
    "\ud800-\udfff"  # half a character, which no encoding takes
)
IN_NAMES = re.compile(f"[{OBEYED}\t\n\r\u200c\u200d]")
IN_TEXTS = re.compile(rf"[{OBEYED}]|\r(?!\n)")  # joiners are spelling in Persian and Hindi, and make emoji
MOVES = re.compile(r"\r|\n*(?:\x1b\[A)+\Z")
"""What bars of tqdm's write first, or alone: to the beginning of the line, or up a line where there are several."""


def shown_name(name: object) -> str:
    """A name, id, key or value from outside, on one line."""
    return IN_NAMES.sub(escape, str(name))


def shown_text(text: str) -> str:
    """A whole text, of whose controls only newlines and tabs are kept."""
    return IN_TEXTS.sub(escape, text)


def escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Guarded:
    """A stream of text that writes `shown_text` of everything, and is else the stream that it stands for.

    A carriage return is let through where a write begins with it: so bars of progress are drawn.
    """

    def __init__(self, stream: TextIO):
        self.unguarded = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    def write(self, text: str) -> int:
        move = MOVES.match(text)
        begin = move.end() if move else 0
        self.unguarded.write(text[:begin] + shown_text(text[begin:]))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))


def guard_streams() -> None:
    """From here on, what this process and those that it forks print goes through a guard. Called by entries, before
    other libraries keep the streams for themselves; a second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))
