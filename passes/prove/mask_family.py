"""The families of attention masks that a spec can express, matched exactly against evaluated masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BoolMatrix = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MaskFamily:
    """`j <= i` if causal, and `i - window < j`, `i // chunk == j // chunk`, `j < i + ahead`, each if not None; `ahead` is for
    bidirectional masks."""

    causal: bool
    window: int | None = None
    chunk: int | None = None
    ahead: int | None = None

    def matrix(self, length: int) -> BoolMatrix:
        """[length, length], True where query i (row) sees key j."""
        matrix: BoolMatrix = self.sees(np.arange(length)[:, None], np.arange(length)[None, :])
        return matrix

    def sees(self, i: Any, j: Any) -> Any:
        """Whether queries at positions i see keys at positions j: arrays or tensors that broadcast; the result is boolean."""
        seen = (j <= i) if self.causal else (j == j) & (i == i)
        if self.window is not None:
            seen = seen & (i - self.window < j)
        if self.chunk is not None:
            seen = seen & (i // self.chunk == j // self.chunk)
        if self.ahead is not None:
            seen = seen & (j < i + self.ahead)
        return seen

    @property
    def limits(self) -> list[int]:
        return [limit for limit in (self.window, self.chunk, self.ahead) if limit is not None]

    def describe(self) -> str:
        words = ["causal" if self.causal else "bidirectional"]
        limits = (("window", self.window), ("window ahead", self.ahead), ("chunk", self.chunk))
        words += [f"{name} {value}" for name, value in limits if value is not None]
        return " & ".join(words)


def match_family(mask: BoolMatrix) -> MaskFamily | None:
    """The family that equals a single sequence's mask [T, T] everywhere, or None."""
    length = mask.shape[0]
    if mask.all():
        return MaskFamily(causal=False)
    if not mask.diagonal().all():
        return None
    index = np.arange(length)
    first = mask.argmax(axis=1)
    longest_view = int((index - first).max()) + 1
    own_start = np.flatnonzero((first == index) & (index > 0))
    window = longest_view if longest_view < length else None
    ahead = int((length - mask[:, ::-1].argmax(axis=1) - index).max())  # 1 + distance to the last visible key
    chunk = int(own_start[0]) if len(own_start) else None
    for family in (
        MaskFamily(True),
        MaskFamily(True, window=window),
        MaskFamily(True, chunk=chunk),
        MaskFamily(True, window, chunk),
        *([MaskFamily(False, window, ahead=ahead)] if window is not None and ahead < length else []),
    ):
        if np.array_equal(family.matrix(length), mask):
            return family
    return None


def packed_variants(family: MaskFamily, lengths: Sequence[int]) -> dict[str, BoolMatrix]:
    """Possible masks of a family on a row of several packed sequences; for a single sequence all of them are its own mask.

    "packed" separates the sequences; "row" ignores positions and treats the row as one sequence; "positions" compares only positions,
    also across sequences; the others mix these.
    """
    total = sum(lengths)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    same = segment[:, None] == segment[None, :]
    longest = family.matrix(max(lengths))
    by_position = longest[position[:, None], position[None, :]]
    by_row = family.matrix(total)
    order = MaskFamily(family.causal).matrix(total)
    return {
        "packed": by_position & same, "row": by_row, "positions": by_position, "packed by row": by_row & same,
        "row order, limits by position": by_position & order,
    }  # fmt: skip


def draw(mask: BoolMatrix, limit: int = 16) -> str:
    """The top left corner of a mask as text, # where a query (line) sees a key (column)."""
    return "\n".join("".join("#" if seen else "." for seen in row[:limit]) for row in mask[:limit])
