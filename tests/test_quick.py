"""The list of slow tests names tests that there are, and is read as it was measured."""

from __future__ import annotations

import ast

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


def test_every_slow_test_is_there() -> None:
    trees: dict[str, set[str | None]] = {}
    for function in slow_tests():
        path, *names = function.split("::")
        assert (ROOT / path).is_file(), f"{SLOW.name}: {path} is gone; measure again"
        if path not in trees:
            nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
            trees[path] = {getattr(node, "name", None) for node in nodes} | {node.id for node in nodes if isinstance(node, ast.Name)}
        known = {*trees[path], "runTest"}  # state machines of Hypothesis: TestMachine = Machine.TestCase
        assert set(names) <= known, f"{SLOW.name}: {function} is gone; measure again"
