"""The sampling settings of a step's rows and the counts of their tokens, on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

IN_PROMPT = 1 << 30  # in a count of a request's token
OF_OUTPUT = IN_PROMPT - 1  # the bits of a count that say how often the output has the token


class SamplingTensors(NamedTuple):
    """The settings for sampling N rows of some logits; a filter that no row uses is None.

    rows [N] int64: indices of the rows; temperature [N] float32, above 0; uniform [N] float64 in [0, 1); min_p [N] float32, 0 for none.
    For the rows from `first_limited` on, of which there is at least one if either is used: lowest [N] int64, the rank (0 for the least
    likely token) of the last token that top-k keeps; left_out [N] float64, the share of the probability that top-p leaves out, negative
    for none.
    """

    rows: Tensor
    temperature: Tensor
    uniform: Tensor
    min_p: Tensor | None
    lowest: Tensor | None
    left_out: Tensor | None
    first_limited: int
