"""Which test modules `make overlap` runs again: those whose engines run as PAGED_ATTN_TEST_OVERLAP says.

That is tests.engine.models.OVERLAP and what is made with it. A module that imports none of it, and nothing of another module of tests that
does, and is under no conftest that does, runs the same tests both times. Of the slow functions (tests/quick.py) it runs those of
overlap.txt: all cases, or the one that is named there.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.quick import slow_tests

ROOT = Path(__file__).parent.parent
SOURCE = "tests.engine.models"
SET_BY_IT = ("OVERLAP", "make_engine", "make_llm")
SLOW_TOO = Path(__file__).with_name("overlap.txt")


def file_of(module: str) -> Path | None:
    """Of a module or a package of tests; None if there is none."""
    path = ROOT / module.replace(".", "/")
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


@cache
def imports(module: str) -> frozenset[tuple[str, str]]:
    """Pairs of a module of tests and a name of it that this one imports, anywhere in its code; "" for a module as a whole."""
    path = file_of(module)
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path else ():
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add((whole, "") if file_of(whole) else (node.module, alias.name))
    return frozenset(pair for pair in found if pair[0].split(".")[0] == "tests")


@cache
def runs_both_ways(module: str) -> bool:
    """Whether anything that this module of tests imports, or a conftest that it is under, depends on the variable."""
    packages = module.split(".")[:-1]
    seen, left = {SOURCE}, [module, *(".".join([*packages[: n + 1], "conftest"]) for n in range(len(packages)))]
    while left:
        current = left.pop()
        seen.add(current)
        for other, name in imports(current):
            if other == SOURCE and name in ("", *SET_BY_IT):
                return True
            if other not in seen:
                left.append(other)
    return False


def slow_in_overlap() -> dict[str, str | None]:
    """As `slow_tests`, with what overlap.txt names run after all."""
    runs = slow_tests(SLOW_TOO)
    return {function: runs.get(function, case) for function, case in slow_tests().items() if runs.get(function, "") is not None}
