"""Puts other values into a table for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_entries(table: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a table such as the attributes of an object, `vars(object)`, has these entries; afterwards each is as it was, if it was."""
    before = {name: table[name] for name in values if name in table}
    table.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                table[name] = before[name]  # where it was in the table's order
            else:
                table.pop(name, None)
