"""rich's console for tables and bars: what it draws itself is not guarded, every text in it is. Imports no torch."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from llava_fsdp.runtime.terminal_text import Guarded, shown_text


class TextConsole(Console):
    """Takes no markup, emoji codes or control characters from the texts that it is given."""

    def __init__(self, on_stderr: bool = False, **options: Any):
        """
        Args:
            options: of rich's console.
        """
        stream = sys.stderr if on_stderr else sys.stdout
        stream = getattr(stream, "rich_proxied_file", stream)  # while a bar is shown
        plain = stream.unguarded if isinstance(stream, Guarded) else stream
        super().__init__(file=plain, markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Before it is measured, so that nothing of a table's cell is cut off."""
        return super().render_str(shown_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown_text(segment.text))
