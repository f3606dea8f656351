"""Tolerances of whole rows: when two results of a model count as equal. A proof of one operation has its own beside it.

A row is compared as a whole: its error is the length of the difference, divided by the length of the row. What rounding alone does to
that row of that model is measured (`paged_attn.check.compare.noise`). A small multiple of it is allowed, and never less than a few
roundings of the row's type.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLE = 4  # times the measured noise: each of two results is off by about that much, and some rows by more
OTHERWISE = 16  # times what is allowed: more than products of another shape do to a row, where later tokens may change none
QUANTISED = 6e-2  # effect on a row of a quantiser whose scale depends on the whole batch
# One rounding of a number of this dtype, relative to it. More for float32 and float64: kernels differ in how they compute exp and
# rsqrt.
ROUNDING = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9, torch.float32: 2.0**-18, torch.float64: 2.0**-40}
COARSEST = 2.0**-5  # for any narrower float
# For the logits of a whole model: rounding adds up over its layers, and may change what routers choose in a few rows.
LOGITS = {torch.float32: 2e-4, torch.float64: 1e-6}
LOGITS_16_BIT = 6e-2
SHORT = 0.1  # a row shorter than this part of the usual one is the difference of larger numbers: it is measured by theirs


def rounding(*dtypes: torch.dtype) -> float:
    """One rounding of the coarsest floating type among these."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max((ROUNDING.get(dtype, COARSEST) for dtype in floating), default=ROUNDING[torch.float32])


def row_lengths(rows: Tensor) -> Tensor:
    """The Euclidean lengths [N] of rows [N, ...], float32 or float64; infinite elements do not count."""
    flat = _flat(rows)
    lengths: Tensor = torch.where(flat.isfinite(), flat, 0).norm(dim=1)
    return lengths


def row_errors(expected: Tensor, got: Tensor, usual: float | None = None) -> Tensor:
    """How far each row of `got` is off, relative to the length of the row of `expected`.

    Args:
        expected, got: [N, ...] of one shape; N may be 0. Whole numbers and truth values are equal or not: an error of 0 or infinity.
        usual: the usual length of such rows; by default the median of `expected`.

    Returns:
        [N] float32 or float64 on the device of `expected`; infinite where `got` is NaN or infinite and `expected` is not that.
    """
    if not expected.is_floating_point() and not expected.is_complex():
        wrong = (expected.flatten(1) != got.flatten(1)).any(1) if expected.dim() > 1 else expected != got
        return torch.where(wrong, torch.inf, 0.0)
    one, other = _flat(expected), _flat(got.to(expected.device))
    if one.dtype == other.dtype and torch.equal(one, other):  # as most are that a check compares
        return one.new_zeros(len(one))
    difference = torch.where((one == other) | (one.isnan() & other.isnan()), 0, other - one).norm(dim=1)
    lengths = row_lengths(expected)
    if usual is None:
        usual = float(lengths.median()) if len(lengths) else 0.0
    errors = difference / lengths.clamp_min(max(SHORT * usual, torch.finfo(lengths.dtype).tiny))
    return torch.where(difference.isnan(), torch.inf, errors)


def worst(errors: Tensor) -> float:
    """The largest of errors [N]; 0 of none."""
    return float(errors.max()) if len(errors) else 0.0


def typical(errors: Tensor) -> float:
    """The median of errors [N]: what most rows have, however far a few are off; 0 of none."""
    return float(errors.median()) if len(errors) else 0.0


def logits_apart(expected: Tensor, got: Tensor, narrow: torch.dtype) -> tuple[float, float]:
    """How far two runs of a whole model are apart, and what is allowed: the worst row in float32, what most rows are off in 16 bits.

    This tells another computation from the same one; a proof looks at each part of the model by itself (`self_check`).

    Args:
        expected, got: [N, vocabulary]
        narrow: the model's own floating type; logits may be in a wider one.
    """
    errors = row_errors(expected, got)
    exact = narrow in LOGITS
    return (worst(errors) if exact else typical(errors)), logits_limit(narrow)


def logits_limit(dtype: torch.dtype) -> float:
    """How far logits of a model of this type may be apart where nothing but rounding differs."""
    return LOGITS.get(dtype, LOGITS_16_BIT)


def _flat(rows: Tensor) -> Tensor:
    """[N, elements], real, in float32 or wider."""
    if rows.is_complex():
        rows = torch.view_as_real(rows)
    rows = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    return rows.flatten(1) if rows.dim() > 1 else rows[:, None]
