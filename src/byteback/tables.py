# SPDX-License-Identifier: Apache-2.0
"""Tables of text: with rich if it is installed, as plain aligned text if not, and as HTML for notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

Content = tuple[str, list[str], list[list[str]], int]  # title, columns, rows, and how many columns are words: `build` takes it


class Console(Protocol):
    """The part of rich.console.Console that commands use. The library itself does not need rich."""

    def print(self, *objects: Any) -> None: ...


class Table:
    """A report that prints as a table: as text, with rich, and in a notebook. A subclass gives the `_table`."""

    def _table(self) -> Content:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(*self._table())

    def __rich__(self) -> Any:
        return build(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table())


def build(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Any:
    """Returns a rich table. The first `left` columns are words, the others are numbers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a name such as conv[a-b] must not be taken for markup.
    table = Table(header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    # Above the table, not as its title: rich would fold a title to the width of a narrow table.
    return Group(Text(title, style="bold"), table)


def rate(value: float) -> str:
    """Formats a rate per second. Detectors on one core may have less than one image per second.

    >>> rate(1234.5), rate(7.25), rate(0.871)
    ('1,234', '7.2', '0.87')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def as_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns the table as text.

    >>> print(as_text("Layers", ["name", "n"], [["conv", "3"]]).replace(" ", "."))  # doctest: +ELLIPSIS
    Layers...
    name..n
    conv..3
    """
    try:
        from rich.console import Console
    except ImportError:
        return _plain(title, columns, rows, left)
    buffer = io.StringIO()
    Console(file=buffer, width=160, color_system=None).print(build(title, columns, rows, left))
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").split("\n"))


def as_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns the table as HTML. All text is escaped.

    >>> print(as_html("Layers", ["name", "n"], [["a<b", "3"]]))
    <table>
    <caption style="caption-side: top; text-align: left; font-weight: bold">Layers</caption>
    <thead><tr><th style="text-align: left">name</th><th style="text-align: right">n</th></tr></thead>
    <tbody>
    <tr><td style="text-align: left">a&lt;b</td><td style="text-align: right">3</td></tr>
    </tbody>
    </table>
    """

    def line(tag: str, texts: Sequence[str]) -> str:
        sides = ("left" if index < left else "right" for index in range(len(texts)))
        cells = (f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>' for text, side in zip(texts, sides, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head = [
        "<table>",
        f'<caption style="caption-side: top; text-align: left; font-weight: bold">{escape(title)}</caption>',
        f"<thead>{line('th', columns)}</thead>",
    ]
    return "\n".join([*head, "<tbody>", *(line("td", row) for row in rows), "</tbody>", "</table>"])


def _plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *text])
