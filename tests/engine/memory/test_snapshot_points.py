"""After which tokens states are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_attn.engine.memory.state_snapshots import MIN_FORK, SHARE, SnapshotPoints


@pytest.mark.parametrize(("tokens", "last"), [(1, None), (4, None), (5, 4), (8, 4), (9, 8)])
def test_the_last_page_boundary_before_the_final_token(tokens: int, last: int | None) -> None:
    assert SnapshotPoints(4, 0, 100).of(tokens, 0, 0) == ([last] if last else [], set())


def test_forks_that_save_enough() -> None:
    points = SnapshotPoints(4, 0, 100)
    assert points.of(50, 8, 8 + MIN_FORK) == ([24, 48], set()) and points.of(50, 12, 8 + MIN_FORK) == ([48], set())
    assert points.of(49, 8, 48) == ([48], set()), "where it ends"


def test_regular_ones_lie_at_the_same_places_of_prompts_of_any_length() -> None:
    points = SnapshotPoints(4, 10, 4 * SHARE)
    assert points.of(41, 0, 0) == ([12, 24, 36, 40], {12, 24, 36}) and points.of(41, 12, 36) == ([24, 36, 40], {24})
    assert points.of(100, 0, 0) == ([24, 48, 72, 96], {24, 48, 72}), "the double, as 8 would be more than an eighth of the slots"
    assert SnapshotPoints(4, 10, SHARE - 1).of(100, 0, 0) == ([96], set()), "no slots to spare"


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 100), st.integers(1, 500), st.data())
def test_they_are_few_ascending_and_whole_pages(page_size: int, interval: int, slots: int, tokens: int, data: st.DataObject) -> None:
    start, fork = (data.draw(st.integers(0, (tokens - 1) // page_size)) * page_size for _ in range(2))
    found, regular = SnapshotPoints(page_size, interval, slots).of(tokens, start, max(start, fork))
    assert found == sorted(set(found)) and all(start < point < tokens and point % page_size == 0 for point in found)
    assert regular <= set(found) and len(regular) <= slots // SHARE and (not regular or interval)
    assert not found or found[-1] == (tokens - 1) // page_size * page_size
