"""Writes the tables of docs/backends.md from the code, each between its marks: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from docs import marked_tables
from paged_attn.backends.needs import architecture_words
from paged_attn.backends.selection.ranking import ROWS, Row
from paged_attn.report.backend_matrix import experts_rows, markdown_table, matrix_markdown, rows_markdown, scans_rows

PAGE = Path(__file__).with_name("backends.md")


def orders_markdown() -> str:
    """The orders of "auto", but for ROCm, where no backend runs yet."""
    rows = [(_words(row), _orders(row.names, row.decode), _orders(row.latents, row.latents_decode)) for row in ROWS if row.device != "hip"]
    return markdown_table(("device", "order", "order for models that keep latents"), rows)


def _orders(names: tuple[str, ...], decode: tuple[str, ...]) -> str:
    orders = (names, decode) if decode else (names,)
    return "; decode: ".join(", ".join(names) for names in orders)


def with_tables(text: str) -> str:
    """The page with its tables as the code has them now; ValueError without their marks."""
    kinds = {"experts": rows_markdown(experts_rows()), "scans": rows_markdown(scans_rows())}
    tables = {"orders": orders_markdown(), "matrix": matrix_markdown(), **kinds}
    return marked_tables.with_tables(text, tables, "docs/backends.md")


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
