"""Renders tables and styled text for a terminal, without control characters from foreign names."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from bigfleet.cli.visible_text import visible


class TerminalConsole(Console):
    """A console that escapes unsafe characters in everything that it renders; its own styles are unaffected.

    Text is never read as markup or emoji codes, because names of others may hold brackets and colons.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of a renderable, their text made visible."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or (shown := visible(text)) == text:
                yield segment
            else:
                yield Segment(shown, segment.style)


def output_console(width: int) -> TerminalConsole:
    """Return a console for standard output, as wide as the terminal, or `width` columns where there is none."""
    console = TerminalConsole(highlight=False)
    return console if console.is_terminal else TerminalConsole(width=width, highlight=False)
