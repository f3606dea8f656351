"""Entries of a table that are others for a while."""

from __future__ import annotations

import pytest

from paged_attn.attn_ops.replaced_entries import replaced_entries


@pytest.mark.parametrize("fails", [False, True])
def test_a_table_is_as_it_was_also_its_order_and_what_it_lacked(fails: bool) -> None:
    table = {"first": 1, "second": 2, "third": 3}
    try:
        with replaced_entries(table, {"first": 9, "new": 8}):
            assert table == {"first": 9, "second": 2, "third": 3, "new": 8}
            table["third"] = 4  # what others write stays
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert list(table.items()) == [("first", 1), ("second", 2), ("third", 4)]


def test_a_new_entry_that_is_taken_away_inside_is_not_missed() -> None:
    table = {"first": 1}
    with replaced_entries(table, {"first": 2, "new": 3}), replaced_entries(table, {"first": 4}):
        del table["new"]
    assert table == {"first": 1}
