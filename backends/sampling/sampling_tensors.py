"""The sampling settings of a step's rows, on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """N rows of some logits and the settings that tokens are drawn from them by; a filter that no row uses is None.

    rows [N] int64: which rows; temperature [N] float32, above 0; uniform [N] float64 in [0, 1); min_p [N] float32, 0 where a row has none.
    Of the rows from `first_limited` on, and there is one if any of the two is used: lowest [N] int64, the rank, from the least likely
    token's 0 on, of the last one that top-k keeps; left_out [N] float64, the share of the probability that top-p leaves out, negative for
    none.
    """

    rows: Tensor
    temperature: Tensor
    uniform: Tensor
    min_p: Tensor | None
    lowest: Tensor | None
    left_out: Tensor | None
    first_limited: int
