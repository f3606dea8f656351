"""Writes the two tables of docs/backends.md from the code, each between its marks: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from paged_attn.backends.capabilities import architecture_words
from paged_attn.backends.matrix import matrix_markdown
from paged_attn.backends.ranking import ROWS, Row
from paged_attn.backends.table import markdown_table

PAGE = Path(__file__).with_name("backends.md")


def orders_markdown() -> str:
    """The orders of "auto", but for ROCm, where no backend runs yet."""
    return markdown_table(("device", "order"), [(_words(row), ", ".join(row.names)) for row in ROWS if row.device != "hip"])


def with_tables(text: str) -> str:
    """The page with both tables as the code has them now.

    Raises:
        ValueError: the marks of a table are not there, or not once.
    """
    for name, table in (("orders", orders_markdown()), ("matrix", matrix_markdown())):
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(first) != 1 or text.count(last) != 1:
            raise ValueError(f"docs/backends.md must hold {first.strip()} and {last} once each, on lines of their own, around its table")
        before, _, rest = text.partition(first)
        text = f"{before}{first}\n{table}\n\n{last}{rest.partition(last)[2]}"
    return text


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _words(row: Row) -> str:
    """ "the order for Hopper" -> "Hopper (SM90)"."""
    if row.device == "cuda" and not row.architectures:
        return "other CUDA GPUs"
    words = re.sub(r"^the order for (a )?", "", row.why)
    return f"{words} ({architecture_words(row.architectures)})" if row.architectures else words


if __name__ == "__main__":
    main()
