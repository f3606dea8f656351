"""Tables of a page, each between its marks."""

from __future__ import annotations

from collections.abc import Mapping


def with_tables(text: str, tables: Mapping[str, str], page: str) -> str:
    """A page with each table between its marks, `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        ValueError: the marks of a table are not there, or not once.
    """
    for name, table in tables.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(first) != 1 or text.count(last) != 1:
            raise ValueError(f"{page} must hold {first.strip()} and {last} once each, on lines of their own, around its table")
        before, _, rest = text.partition(first)
        text = f"{before}{first}\n{table}\n\n{last}{rest.partition(last)[2]}"
    return text
