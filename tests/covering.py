"""Fewer cases than a full product: every two values of two settings occur together in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[int, Any, int, Any]


def pairs_of(case: Sequence[Any]) -> set[Pair]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def every_pair(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of the product of these values, in its order, that hold every pair of two settings' values; the same ones each time.

    Values occur about equally often. A bug that takes three settings at once may be in none of these cases.
    """
    cases = list(product(*settings))
    left = set().union(*map(pairs_of, cases))
    chosen: list[tuple[Any, ...]] = []
    used: Counter[tuple[int, Any]] = Counter()
    while left:
        best = max(cases, key=lambda case: (len(pairs_of(case) & left), -sum(used[value] for value in enumerate(case))))
        chosen.append(best)
        used.update(enumerate(best))
        left -= pairs_of(best)
    return sorted(chosen, key=cases.index)
