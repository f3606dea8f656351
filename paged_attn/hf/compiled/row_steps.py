"""Tokens of several rows as steps of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end - 1` of what a call gives a row; the last `num_logits` of them want logits."""

    row: int
    start: int
    end: int
    num_logits: int


def steps(counts: Sequence[int], wanted: int, most_tokens: int, most_rows: int) -> Iterator[list[Part]]:
    """All tokens of rows with so many each, in order, at most `most_tokens` of `most_rows` rows in a step.

    Args:
        wanted: how many of each row's last tokens want logits, at most all.
    """
    parts: list[Part] = []
    left = most_tokens
    for row, count in enumerate(counts):
        start = 0
        while start < count:
            end = min(start + left, count)
            parts.append(Part(row, start, end, max(min(end - max(count - wanted, 0), end - start), 0)))
            left -= end - start
            start = end
            if not left or len(parts) == most_rows:
                yield parts
                parts, left = [], most_tokens
    if parts:
        yield parts
