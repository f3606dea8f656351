"""Files that take long start first, by seconds that were measured."""

from __future__ import annotations

import pytest

from tests.order import SECONDS, known_seconds, longest_first, updated
from tests.test_quick import LOG, functions_that_are_gone


def test_files_are_ordered_by_what_their_selected_tests_take() -> None:
    seconds = {"tests/b.py::test_long": 3.0, "tests/c.py::TestOf::test_dear": 2.0}
    many = [f"tests/a.py::test_quick[{case}]" for case in range(10)]
    dear = [f"tests/c.py::TestOf::test_dear[{case}]" for case in range(2)]
    ordered = longest_first([*many, "tests/b.py::test_long", *dear], seconds)
    assert list(ordered) == ["tests/c.py", "tests/b.py", "tests/a.py"] and list(ordered.values()) == pytest.approx([4.0, 3.0, 1.0])


def test_a_log_replaces_what_it_measured_and_leaves_the_rest() -> None:
    known = {"tests/a.py::test_quick": 9.0, "tests/z.py::test_other": 2.0, "tests/a.py::test_dear": 1.0}
    assert list(updated(known, LOG).items()) == [
        ("tests/a.py::TestOf::test_long", 9.0),
        ("tests/a.py::test_dear", 3.5),
        ("tests/a.py::test_many", 1.4),
        ("tests/z.py::test_other", 2.0),
    ]


def test_every_function_of_the_table_is_there() -> None:
    assert functions_that_are_gone(known_seconds()) == [], f"{SECONDS.name}: measure again"
