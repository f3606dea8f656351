"""What `make overlap` leaves out cannot depend on its variable."""

from __future__ import annotations

import ast

import pytest

from tests.overlap import ROOT, SET_BY_IT, SLOW_TOO, file_of, runs_both_ways, slow_in_overlap
from tests.quick import slow_tests


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("tests.engine.test_llm", True),  # makes its engines with make_llm
        ("tests.server.test_adapters", True),  # takes OVERLAP
        ("tests.server.test_connections", True),  # its server is a helper's
        ("tests.engine.sampling.test_sampler", False),
        ("tests.engine.scheduling.test_scheduling_order", False),
    ],
)
def test_engines_are_followed_through_helpers(module: str, expected: bool) -> None:
    assert runs_both_ways(module) is expected


def test_nobody_else_reads_the_variable() -> None:
    readers = [path for path in (ROOT / "tests").rglob("*.py") if "PAGED_ATTN_TEST_OVERLAP" in path.read_text(encoding="utf-8")]
    known = {file_of(f"tests.{name}") for name in ("conftest", "overlap", "engine.models", "test_overlap")}
    assert set(readers) == known


def test_what_the_source_makes_with_it_is_listed() -> None:
    tree = ast.parse((ROOT / "tests/engine/models.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    uses = {
        function.name for function in functions if {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & set(SET_BY_IT)
    }
    assert {"OVERLAP", *uses} == set(SET_BY_IT)


def test_slow_functions_that_it_runs_too_are_slow_and_depend_on_it() -> None:
    functions = slow_tests(SLOW_TOO)
    assert functions.keys() <= slow_tests().keys()
    assert all(runs_both_ways(function.partition("::")[0].removesuffix(".py").replace("/", ".")) for function in functions)


def test_it_runs_the_cases_that_its_list_names() -> None:
    named, slow, left = slow_tests(SLOW_TOO), slow_tests(), slow_in_overlap()
    assert {function: left.get(function) for function in named} == named and None in named.values()
    assert all(left[function] == slow[function] for function in slow.keys() - named.keys())
