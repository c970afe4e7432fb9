# SPDX-License-Identifier: Apache-2.0
"""Reads an HTML table as a browser would: for the tests of `_repr_html_` (tests/inspect)."""

from __future__ import annotations

from html.parser import HTMLParser


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.caption, self.lines = "", list[list[str]]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.lines.append([])
        elif tag in ("th", "td"):
            self.lines[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "caption":
            self.caption += data
        elif self.open and self.open[-1] in ("th", "td"):
            self.lines[-1][-1] += data
        else:
            assert not data.strip(), f"{data!r} is in no cell"


def read_html(text: str) -> tuple[str, list[str], list[list[str]]]:
    """The caption, the header and the rows of a table; an error if an element is not closed, or text stands between cells."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open, f"{reader.open} is not closed"
    header, *rows = reader.lines
    return reader.caption, header, rows
