"""A table as cells of text, laid out for a terminal or for a page; no numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

REPORTED = "↳ reported"  # how a row of printed numbers begins, below ours
NOTHING = "-"


NARROWEST = 18  # characters that a column of sentences needs
WIDEST = 60  # of a column that is kept on one line


@dataclass(frozen=True)
class Layout:
    """A table's cells; the first column, or several, name the row."""

    head: list[str]
    body: list[list[str]]
    footnotes: list[str] = field(default_factory=list)
    numbers: Collection[int] | None = None  # columns set to the right; None: all but the first
    best: Collection[tuple[int, int]] = ()  # row and column of the best values
    sentences: bool = False  # the last column may be broken into lines, no other is
    names: int = 1  # columns that name a row, and begin each part of a table that was divided

    def is_number(self, column: int) -> bool:
        """Whether a column is set to the right."""
        return column > 0 if self.numbers is None else column in self.numbers


class Fitting:
    """A layout as one table where the terminal is wide enough, else as several, never cut."""

    def __init__(self, title: str, layout: Layout):
        self.title, self.layout = title, layout

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns: list[int] = []
        title = self.title
        for number in range(self.layout.names, len(self.layout.head)):
            wider = [*columns, number]
            if columns and self._width(console, options, title, wider) > options.max_width:
                yield self._table(title, columns)
                wider, title = [number], ""
            columns = wider
        yield self._table(title, columns)

    def _width(
        self, console: Console, options: ConsoleOptions, title: str, columns: Sequence[int]
    ) -> int:
        """What a table of these columns needs; of sentences no more than a narrow column."""
        last = len(self.layout.head) - 1
        others = [column for column in columns if not (self.layout.sentences and column == last)]
        table = self._table(title, others)
        needed = console.measure(table, options=options.update(max_width=10_000)).maximum
        if len(others) == len(columns):
            return needed
        longest = max(len(row[last]) for row in [self.layout.head, *self.layout.body])
        return needed + 2 + min(longest, NARROWEST)

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
        sentences = len(self.layout.head) - 1 if self.layout.sentences else None
        shown = (*range(self.layout.names), *columns)
        for number in shown:
            head = self.layout.head[number]
            if sentences is None:
                head = fill(head, 12, break_long_words=False)
            side: Literal["left", "right"] = "right" if self.layout.is_number(number) else "left"
            longest = max(len(row[number]) for row in [self.layout.head, *self.layout.body])
            fixed = sentences not in (None, number) and longest <= WIDEST
            table.add_column(Text(head), justify=side, no_wrap=fixed)
        for row in self.layout.body:
            reported = row[0].startswith(REPORTED)
            if not reported or any(row[number] for number in columns):
                cells = (Text(row[number]) for number in shown)
                table.add_row(*cells, style="dim" if reported else "")
        return table


def markdown_table(layout: Layout) -> str:
    """The cells as a Markdown table, numbers set to the right."""
    sides = ["--:" if layout.is_number(place) else ":--" for place in range(len(layout.head))]
    return "\n".join(map(_line, [layout.head, sides, *layout.body]))


def markdown(title: str, layout: Layout) -> list[str]:
    """A heading with its table, and the footnotes as a list."""
    parts = [f"### {escaped(title)}\n\n{markdown_table(layout)}"]
    if layout.footnotes:
        parts.append("\n".join(f"- {escaped(line)}" for line in layout.footnotes))
    return parts


def html(title: str, layout: Layout) -> str:
    """A heading with its table and footnotes, for a notebook."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in layout.head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in layout.body
    )
    notes = "".join(f"<p><small>{escape(line)}</small></p>" for line in layout.footnotes)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<h4>{escape(title)}</h4>{table}{notes}"


def escaped(text: str) -> str:
    """A text that Markdown leaves in one cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def with_network(name: str, network: str) -> str:
    """`MNIST (convnet)`, or the name alone where the network is not known."""
    return f"{name} ({network})" if network else name


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"
