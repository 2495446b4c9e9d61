"""A rich console on which words of models, endpoints and files are text: no markup, no control characters.

A plain string, also in a table, is shown literally and on one line. A text with several lines is a `block`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trialogue.foreign import show_line, show_text
from trialogue.output import printing
from trialogue.secrets import redact

Row = Sequence[str]
NAME = 12
"""Narrowest column of names; longer ones go on in the next line."""


class Screen(Console):
    """The console of all commands. Use it and nothing else of rich's to print."""

    def __init__(
        self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None
    ) -> None:
        super().__init__(stderr=stderr, file=file, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """A plain string as text: no markup, one line."""
        known = {name: how[name] for name in ("style", "justify", "overflow") if name in how}
        return Text(show_line(redact(text)), **known)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what is left in texts that others than `one_line` and `block` made."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                text = show_text(segment.text, most=sys.maxsize)
                yield Segment(text, segment.style)

    def print(self, *objects: Any, **how: Any) -> None:
        with printing():
            super().print(*objects, **how)

    def print_table(self, title: str, headings: Row, rows: Iterable[Row | None]) -> None:
        """Print figures with their names in the first column; None draws a line. Where the terminal is too
        narrow for a table each figure gets a line."""
        known = list(rows)
        columns = zip_longest(headings, *filter(None, known), fillvalue="")
        widths = [max(cell_len(show_line(text)) for text in column) for column in columns]
        narrowest = min(widths[0], NAME)
        if narrowest + sum(widths[1:]) + 3 * len(widths) + 1 <= self.width:
            table = Table(title=title or None, title_justify="left")
            for number, heading in enumerate(headings):
                table.add_column(heading, justify="right" if number else "left", no_wrap=number > 0)
            table.columns[0].overflow, table.columns[0].min_width = "fold", narrowest
            for row in known:
                table.add_section() if row is None else table.add_row(*row)
            self.print(table)
            return
        for text in (title,) if title else ():
            self.print(text, soft_wrap=True)
        for name, *figures in filter(None, known):
            self.print(name, soft_wrap=True)
            for heading, figure in zip(headings[1:], figures, strict=False):
                self.print(f"  {heading} {figure}", soft_wrap=True)


def one_line(text: str, style: str = "") -> Text:
    """One line in a style."""
    return Text(show_line(redact(text)), style=style)


def block(mark: str, text: str, style: str = "") -> Text:
    """A text with its line breaks behind a mark. Its other lines are indented as far."""
    shown = Text().append(mark, style=f"bold {style}")
    return shown.append(show_text(redact(text), " " * len(mark)), style=style)
