"""The console on which tables and progress bars are printed: a `Console` of the library rich that escapes control
characters. Imports no torch."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from llava_fsdp.runtime.text.terminal_text import Guarded, shown_text


class TextConsole(Console):
    """A `Console` of the library rich that prints texts literally: without markup, emoji codes or control
    characters."""

    def __init__(self, on_stderr: bool = False, **options: Any):
        """Open the console on standard output or, with `on_stderr`, on standard error.

        Args:
            options: further arguments for rich's `Console`.
        """
        stream = sys.stderr if on_stderr else sys.stdout
        stream = getattr(stream, "rich_proxied_file", stream)  # rich replaces the stream while a progress bar is shown
        plain = stream.unguarded if isinstance(stream, Guarded) else stream
        super().__init__(file=plain, markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich's `Text`. Control characters are escaped before the text's width is measured, so that
        no table cell is cut off.

        Args:
            options: further arguments for the method that this one overrides.
        """
        return super().render_str(shown_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown_text(segment.text))
