"""One word for one thing, and that the field's: words that this code once had of its own do not come back. DESIGN.md has the glossary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layout import HOUSE, ROOT, sources

# Parts of names, as in early_rows or FewerRows: what they were called, and what the field says.
BANNED = {
    "drawing": "sampling", "drawn rows": "sampling tensors", "best tokens": "greedy_sample", "best token": "greedy_sample",
    "early rows": "early logits gather",
    "fewer rows": "gathered region", "cone": "backward slice", "history": "recompute", "intake": "output processor", "owed": "pending",
    "flight": "in-flight step", "chosen by": "produced_by", "vouched": "validated", "elsewhere": "unsupported",
    "rows apart": "independent rows",
    "capture model": "trace_model", "lay out": "build_step", "token feed": "FutureTokens", "ladder": "bucket sizes",
    "one row linears": "gemv", "early launches": "pdl", "emit rope": "(removed)", "rope and store": "(removed)",
    "write out flex": "decompose_flex", "kept graphs": "cached graphs", "describer": "stable hasher", "new requests": "input processor",
    "make steps": "build_runtime", "recipe": "capture spec", "lent": "shape-only", "road": "path",
    "places": "index, row or slot", "place of": "module_of", "has place": "has room",
}  # fmt: skip
ALLOWED = {"in flight", "in flight step"}  # the field's own
# Where an old name has to be said: settings that still work under it, and what is asked of other packages.
EXCEPT = {"paged_attn/engine/setting_names.py"}
PROSE = re.compile(
    r"\b(early.rows|one_row_linears|early_launches|rope_and_store|history attention|drawing a token|backward cone|TokenFeed|DrawnRows"
    r"|Describer|write_out_flex|capture_model|KeptGraphs|roads?)\b"
)


def parts(name: str) -> str:
    """`one row linears` for one_row_linears and OneRowLinears."""
    return " ".join(part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name))


def banned(name: str) -> str | None:
    words = f" {parts(name)} "
    for allowed in ALLOWED:
        words = words.replace(f" {allowed} ", "  ")
    return next((old for old in BANNED if f" {old} " in words), None)


def names(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield line, node.arg


@pytest.mark.parametrize(
    ("name", "old"),
    [("early_rows", "early rows"), ("FewerRowsHere", "fewer rows"), ("InFlightStep", None), ("_in_flight", None), ("flights", None),
     ("_flight_number", "flight"), ("excellent", None), ("in_house_recipe", "recipe"), ("broadcast", None)],
)  # fmt: skip
def test_a_word_is_found_in_a_name_and_not_in_another_word(name: str, old: str | None) -> None:
    assert banned(name) == old


def test_no_name_brings_back_a_word_of_our_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: say {BANNED[old]}"
        for path in sources(*HOUSE)
        if str(path.relative_to(ROOT)) not in EXCEPT
        for line, name in names(path)
        if (old := banned(name)) is not None
    ]
    assert not found, "\n".join(sorted(set(found)))


def test_no_page_does() -> None:
    pages = [ROOT / "README.md", ROOT / "DESIGN.md", *(p for p in ROOT.joinpath("docs").rglob("*.md") if "lab" not in p.parts)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in pages
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := PROSE.search(line))
    ]
    assert not found, "\n".join(found)
