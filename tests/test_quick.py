"""The list of slow tests names tests that there are, and is read as it was measured."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.quick import SLOW, function_and_case, lines_of, measured, slow_tests
from tests.test_layout import ROOT

LOG = """
5.00s setup    tests/a.py::test_prepared
0.40s call     tests/a.py::test_many[one]
2.00s call     tests/a.py::test_many[two [2]-x]
0.30s teardown tests/a.py::test_many[one]
1.20s call     tests/a.py::test_quick
9.00s call     tests/a.py::TestOf::test_long
3.00s call     tests/a.py::test_dear[a]
4.00s call     tests/a.py::test_dear[b]
"""


def test_a_slow_function_keeps_its_quickest_case() -> None:
    assert lines_of(measured(LOG)) == ["tests/a.py::TestOf::test_long", "tests/a.py::test_dear", "tests/a.py::test_many keep one"]
    assert function_and_case("tests/a.py::test_many[two [2]-x]") == ("tests/a.py::test_many", "two [2]-x")


def functions_that_are_gone(functions: Iterable[str]) -> list[str]:
    """Those that no file of their name has."""
    trees: dict[str, set[str | None]] = {}
    gone = []
    for function in functions:
        path, *names = function.split("::")
        if path not in trees and (ROOT / path).is_file():
            nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
            trees[path] = {getattr(node, "name", None) for node in nodes} | {node.id for node in nodes if isinstance(node, ast.Name)}
        known = {*trees.get(path, ()), "runTest"}  # state machines of Hypothesis: TestMachine = Machine.TestCase
        if path not in trees or not set(names) <= known:
            gone.append(function)
    return gone


def test_every_slow_test_is_there() -> None:
    assert functions_that_are_gone(slow_tests()) == [], f"{SLOW.name}: measure again"
