"""The console for tables and progress bars. Imports no torch."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from llava_fsdp.runtime.text.terminal_text import Guarded, shown_text


class TextConsole(Console):
    """rich's `Console`, which prints texts literally: no markup, no emoji codes, control characters escaped."""

    def __init__(self, on_stderr: bool = False, **options: Any):
        """Create rich's console with `options` for standard output or standard error; it prints texts literally."""
        stream = sys.stderr if on_stderr else sys.stdout
        stream = getattr(stream, "rich_proxied_file", stream)  # rich replaces the stream while a progress bar is shown
        # `Guarded` would escape the control codes of rich itself; this class escapes those in texts
        plain = stream.unguarded if isinstance(stream, Guarded) else stream
        super().__init__(file=plain, markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape control characters before the text's width is measured, so that no table cell is cut off."""
        return super().render_str(shown_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown_text(segment.text))
