# SPDX-License-Identifier: Apache-2.0
"""Tables for people: with rich where it is installed, as plain aligned text where it is not."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any


def build(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Any:
    """A rich table; the first `left` columns are words, the others numbers."""
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
    """So many per second; detectors on one core take less than one image.

    >>> rate(1234.5), rate(7.25), rate(0.871)
    ('1,234', '7.2', '0.87')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def as_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The same table as text.

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
