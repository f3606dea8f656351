"""Files that take long start first, by seconds that were measured; CI runs a half of what takes long."""

from __future__ import annotations

import pytest

from tests.order import SECONDS, known_seconds, longest_first, updated
from tests.share import in_share
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


def test_shares_have_every_test_once() -> None:
    nodes = [f"tests/a.py::test_long[{case}]" for case in range(100)]
    halves = [list(filter(in_share(share), nodes)) for share in ("1/2", "2/2")]
    assert sorted(halves[0] + halves[1]) == sorted(nodes) == sorted(filter(in_share(""), nodes))
    assert min(map(len, halves)) > 30


@pytest.mark.parametrize("share", ["0/2", "3/2", "half", "1/0", "1/2/3"])
def test_no_share_is_refused(share: str) -> None:
    with pytest.raises(ValueError, match=r"PAGED_ATTN_TEST_SHARE: got .*; allowed: k/n"):
        in_share(share)
