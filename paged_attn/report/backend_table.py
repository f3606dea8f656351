"""Tables of text: aligned and wrapped for a terminal, or Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

GAP = "  "


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Columns side by side in at most `width` characters where words allow it; long cells wrap."""
    columns = list(zip(headers, *rows, strict=True))
    longest_words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    widths = _fit([max(map(len, column)) for column in columns], longest_words, width)
    rule = ["-" * column for column in widths]
    lines = []
    for cells in (headers, rule, *rows):
        wrapped = [
            textwrap.wrap(cell, column, break_long_words=False, break_on_hyphens=False) or [""]
            for cell, column in zip(cells, widths, strict=True)
        ]
        for index in range(max(map(len, wrapped))):
            parts = [(cell[index] if index < len(cell) else "").ljust(column) for cell, column in zip(wrapped, widths, strict=True)]
            lines.append(GAP.join(parts).rstrip())
    return "\n".join(lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; pipes in cells are escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _fit(natural: list[int], minimum: list[int], width: int) -> list[int]:
    """Take from the widest column that can still shrink until all fit."""
    widths = list(natural)
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        shrinkable = [i for i, size in enumerate(widths) if size > minimum[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths
