"""The sizes to which steps are padded: nearly geometric, so that no step is padded by more than a fixed share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


def bucket_sizes(largest: int, count: int, smallest: int = 2) -> list[int]:
    """At most `count` sizes from `smallest` to `largest`, ascending, in nearly equal ratios.

    Above 8 they are multiples of 8, and above 256 of 64, because matrix products are faster then; `largest` is not rounded.
    """
    if largest <= smallest or count < 2:
        return [max(largest, smallest)]
    sizes: set[int] = {largest}
    ratio = (largest / smallest) ** (1 / (count - 1))
    exact = float(smallest)
    while len(sizes) < count and exact < largest:
        size = _rounded(exact)
        if size >= largest:
            break
        sizes.add(size)
        exact = max(exact * ratio, size + 1)  # small integer sizes are further apart than `ratio`
        if len(sizes) < count:
            ratio = max((largest / exact) ** (1 / (count - len(sizes))), 1.0)
    return sorted(sizes)


def _rounded(size: float) -> int:
    step = 1 if size <= 4 else 2 if size <= 8 else 8 if size <= 256 else 64
    return -(-int(size + 0.5) // step) * step


def coarse_to_fine(sizes: Sequence[int]) -> list[int]:
    """The largest first, then the smallest, then repeatedly the middles between neighbors, so that any prefix is spread evenly.

    The largest comes first because a memory pool that held it can hold all the others.
    """
    ascending = sorted(set(sizes))
    if len(ascending) < 3:
        return ascending[::-1]
    order, gaps = [ascending[-1], ascending[0]], [(0, len(ascending) - 1)]
    while gaps:
        narrower = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(ascending[middle])
                narrower += [(middle, high), (low, middle)]
        gaps = narrower
    return order


class BucketSizes:
    """The captured sizes; `fit(n)` is the smallest that is at least n, or None."""

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        self.sizes = sorted(set(sizes))

    def fit(self, size: int) -> int | None:
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None
