"""`every_pair` leaves no pair out, and is shorter than the product."""

from __future__ import annotations

from itertools import product

from tests.covering import every_pair, pairs_of


def test_every_pair_of_two_settings_occurs() -> None:
    settings = ("a", "b"), (1, 3, 16, 2048), (1, 4, 16), (True, False)
    cases = every_pair(*settings)
    assert set().union(*map(pairs_of, cases)) == set().union(*map(pairs_of, product(*settings)))
    assert len(cases) < 16 < len(list(product(*settings)))
    assert cases == every_pair(*settings)


def test_of_two_settings_it_is_the_product() -> None:
    assert every_pair("ab", (1, 2, 3)) == list(product("ab", (1, 2, 3)))
