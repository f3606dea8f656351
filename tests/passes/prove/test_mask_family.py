"""Families match exactly their own masks and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_attn.passes.prove.mask_family import MaskFamily, draw, match_family, packed_variants

limits = st.none() | st.integers(1, 24)
causal_families = st.builds(MaskFamily, st.just(True), limits, limits)


def by_hand(length: int, sees: str) -> np.ndarray:
    return np.array([[bool(eval(sees, {"i": i, "j": j})) for j in range(length)] for i in range(length)])


@pytest.mark.parametrize(
    ("family", "sees", "words"),
    [
        (MaskFamily(True), "j <= i", "causal"),
        (MaskFamily(True, window=3), "i - 3 < j <= i", "causal & window 3"),
        (MaskFamily(True, window=1), "i == j", "causal & window 1"),
        (MaskFamily(True, chunk=4), "j <= i and i // 4 == j // 4", "causal & chunk 4"),
        (MaskFamily(True, 3, 4), "i - 3 < j <= i and i // 4 == j // 4", "causal & window 3 & chunk 4"),
        (MaskFamily(False), "True", "bidirectional"),
        (MaskFamily(False, 3, ahead=5), "i - 3 < j < i + 5", "bidirectional & window 3 & window ahead 5"),
    ],
)
def test_each_family(family: MaskFamily, sees: str, words: str) -> None:
    mask = by_hand(13, sees)
    assert np.array_equal(family.matrix(13), mask)
    assert match_family(mask) == family
    assert family.describe() == words


@given(causal_families, st.integers(2, 40))
def test_a_matched_family_has_the_same_mask(family: MaskFamily, length: int) -> None:
    found = match_family(family.matrix(length))
    assert found is not None
    assert np.array_equal(found.matrix(length), family.matrix(length))


@given(causal_families)
def test_a_limit_that_shows_is_found_exactly(family: MaskFamily) -> None:
    found = match_family(family.matrix(60))
    assert found is not None and found.causal
    if family.window is None or family.chunk is None or family.window < family.chunk:
        expected = family if family.window != 1 else MaskFamily(True, window=1)  # a window of 1 says all
        assert found == (expected if family.chunk != 1 else MaskFamily(True, window=1))
    else:
        assert found == (MaskFamily(True, chunk=family.chunk) if family.chunk > 1 else MaskFamily(True, window=1))


@given(causal_families, st.integers(9, 30), st.data())
def test_one_flipped_entry_is_another_mask(family: MaskFamily, length: int, data: st.DataObject) -> None:
    mask = family.matrix(length)
    i, j = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length - 1))
    mask[i, j] = not mask[i, j]
    found = match_family(mask)
    assert found is None or np.array_equal(found.matrix(length), mask)


@pytest.mark.parametrize(
    "sees",
    [
        "j < i", "j <= i or j < 3", "j <= i and (i - j) % 2 == 0", "abs(i - j) in (0, 2)", "i // 4 == j // 4", "j >= i", "False",
        "j <= i and j != 2", "j <= i and (i - j < 3 or j == 0)", "j <= i and (i // 4 == j // 4 or i == 11)", "j <= i and i - j < i % 4 + 2",
    ],
)  # fmt: skip
def test_no_family(sees: str) -> None:
    assert match_family(by_hand(13, sees)) is None


def test_packed_variants() -> None:
    variants = packed_variants(MaskFamily(True, window=2), (2, 3))
    assert draw(variants["packed"]).split() == ["#....", "##...", "..#..", "..##.", "...##"]
    assert draw(variants["row"]).split() == ["#....", "##...", ".##..", "..##.", "...##"]
    assert draw(variants["positions"]).split() == ["#.#..", "#####"[:2] + "##.", "#.#..", "####.", ".#.##"]
    assert draw(variants["packed by row"]).split() == ["#....", "##...", "..#..", "..##.", "...##"]
    assert draw(variants["row order, limits by position"]).split() == ["#....", "##...", "#.#..", "####.", ".#.##"]


@given(causal_families, st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_variant_leaves_a_sequence_alone_unchanged(family: MaskFamily, lengths: list[int]) -> None:
    alone = packed_variants(family, lengths[:1])
    assert all(np.array_equal(mask, family.matrix(lengths[0])) for mask in alone.values())
    start = 0
    for length in lengths:  # by position, each sequence of a packed row is the same as alone
        for name in ("packed", "positions", "row order, limits by position"):
            block = packed_variants(family, lengths)[name][start : start + length, start : start + length]
            assert np.array_equal(block, family.matrix(length)), name
        start += length


def test_drawing_is_cut_to_a_corner() -> None:
    assert draw(MaskFamily(True).matrix(3)) == "#..\n##.\n###"
    assert draw(MaskFamily(True).matrix(20), limit=2) == "#.\n##"
