"""Additive position biases that a spec can express: ALiBi slopes, a table over the distance (T5), a table over the key's position.

A constant added to a row does not change its softmax, so biases are compared after subtracting each row's diagonal entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from paged_attn.passes.prove.mask_family import BoolMatrix

FloatArray = npt.NDArray[np.float64]
BiasIndex = Literal["distance", "key"]
RELATIVE_TOLERANCE = 2e-6  # one or two roundings of a float32 bias


@dataclass(frozen=True)
class BiasFamily:
    """What is added to the score of head h, query i, key j.

    slopes: slope[h] * (j - i). Otherwise table [heads, N], read at i - j ("distance") or at j ("key").
    """

    slopes: tuple[float, ...] | None = None
    index: BiasIndex | None = None
    table: FloatArray | None = None

    def for_heads(self, count: int) -> BiasFamily:
        """The family for `count` heads, if so far it holds one head that all share."""
        if self.slopes is not None:
            return replace(self, slopes=self.slopes * count if len(self.slopes) == 1 else self.slopes)
        assert self.table is not None
        return replace(self, table=np.broadcast_to(self.table, (count, self.table.shape[1])).copy())

    @property
    def num_heads(self) -> int:
        if self.slopes is not None:
            return len(self.slopes)
        assert self.table is not None
        return len(self.table)

    def of_head(self, head: int, length: int) -> FloatArray:
        """[length, length] relative to the diagonal; zeros where the distance is negative."""
        if self.slopes is not None:
            ahead = np.arange(length, dtype=np.float64)
            matrix: FloatArray = self.slopes[head] * (ahead - ahead[:, None])
            return matrix
        assert self.table is not None
        table = self.table[head, :length]
        if self.index == "key":
            return table - table[:, None]
        by_offset = np.concatenate((table[::-1] - table[0], np.zeros(length - 1)))  # from the farthest past key to the farthest future key
        return sliding_window_view(by_offset, length)[::-1]

    def describe(self) -> str:
        if self.slopes is not None:
            return f"ALiBi with {len(self.slopes)} slopes"
        assert self.table is not None
        what = "distance" if self.index == "distance" else "key position"
        return f"a bias by {what} for up to {self.table.shape[1]} tokens"


def match_bias(bias: FloatArray, visible: BoolMatrix) -> BiasFamily | None:
    """The first family that equals `bias` [heads, T, T] where it is visible, up to a constant per row; None if there is none.

    Only for causal masks.
    """
    length = bias.shape[1]
    if np.triu(visible, 1).any() or length < 3:
        return None
    last = bias[:, -1, :]  # the bias that the last query sees
    if not visible[-1].all():
        return _match_windowed(bias, visible)
    nearest = bias[:, 1, 1] - bias[:, 1, 0]
    far = (last[:, -1] - last[:, 0]) / (length - 1)
    slopes = np.where(np.abs(nearest - far) <= 1e-5 * np.abs(far), nearest, far)
    for family in (
        BiasFamily(slopes=tuple(float(np.float32(s)) for s in slopes)),
        BiasFamily(index="distance", table=last[:, ::-1].copy()),
        BiasFamily(index="key", table=last.copy()),
    ):
        if equals_bias(family, bias, visible):
            return family
    return None


def _match_windowed(bias: FloatArray, visible: BoolMatrix) -> BiasFamily | None:
    """With a window or chunks, only slopes and a table over the distance (up to the window) can be found."""
    slopes = bias[:, 1, 1] - bias[:, 1, 0]
    family = BiasFamily(slopes=tuple(float(np.float32(s)) for s in slopes))
    if equals_bias(family, bias, visible):
        return family
    views = visible.sum(axis=1)
    widest = int(views.argmax())
    table = bias[:, widest, widest - views[widest] + 1 : widest + 1][:, ::-1].copy()
    family = BiasFamily(index="distance", table=np.pad(table, ((0, 0), (0, bias.shape[1] - table.shape[1])), mode="edge"))
    return family if equals_bias(family, bias, visible) else None


def equals_bias(family: BiasFamily, bias: FloatArray, visible: BoolMatrix) -> bool:
    """Whether a family equals `bias` [heads or 1, T, T] where it is visible, up to float32 rounding."""
    length = bias.shape[1]
    if family.table is not None and family.table.shape[1] < length:
        return False
    allowed = RELATIVE_TOLERANCE * max(1e-3, *(_largest(own, visible) for own in bias))
    for head in range(max(family.num_heads, len(bias))):  # one at a time: all together may take a gigabyte
        own = bias[min(head, len(bias) - 1)]
        expected = family.of_head(min(head, family.num_heads - 1), length)
        if not _largest(expected - (own - np.diagonal(own)[:, None]), visible) <= allowed:  # nor NaN
            return False
    return True


def _largest(values: FloatArray, visible: BoolMatrix) -> float:
    return float(np.abs(values).max(where=visible, initial=0.0))
