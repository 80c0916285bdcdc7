"""A table as cells of text, laid out for a terminal or for a page; no numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

REPORTED = "↳ reported"  # how a row of printed numbers begins, below ours
NOTHING = "-"


@dataclass(frozen=True)
class Layout:
    """A table's cells; the first column names the row."""

    head: list[str]
    body: list[list[str]]
    footnotes: list[str]


class Fitting:
    """A layout as one table where the terminal is wide enough, else as several, never cut."""

    def __init__(self, title: str, layout: Layout):
        self.title, self.layout = title, layout

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        columns: list[int] = []
        title = self.title
        for number in range(1, len(self.layout.head)):
            wider = self._table(title, [*columns, number])
            width = console.measure(wider, options=unbounded).maximum
            if columns and width > options.max_width:
                yield self._table(title, columns)
                columns, title = [], ""
            columns.append(number)
        yield self._table(title, columns)

    def _table(self, title: str, columns: Sequence[int]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        heading = Text(title, "bold") if title else None
        table = Table(
            title=heading,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for number in (0, *columns):
            head = Text(fill(self.layout.head[number], 12, break_long_words=False))
            table.add_column(head, justify="right" if number else "left")
        for row in self.layout.body:
            reported = row[0].startswith(REPORTED)
            if not reported or any(row[number] for number in columns):
                cells = (Text(row[number]) for number in (0, *columns))
                table.add_row(*cells, style="dim" if reported else "")
        return table


def markdown(title: str, layout: Layout) -> list[str]:
    """A heading with its table, and the footnotes as a list."""
    lines = [
        f"### {escaped(title)}",
        "",
        _line(layout.head),
        _line([":--", *["--:"] * (len(layout.head) - 1)]),
        *(_line(row) for row in layout.body),
    ]
    parts = ["\n".join(lines)]
    if layout.footnotes:
        parts.append("\n".join(f"- {escaped(line)}" for line in layout.footnotes))
    return parts


def escaped(text: str) -> str:
    """A text that Markdown leaves in one cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def with_network(name: str, network: str) -> str:
    """`MNIST (convnet)`, or the name alone where the network is not known."""
    return f"{name} ({network})" if network else name


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"
